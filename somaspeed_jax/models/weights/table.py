"""The table between upstream tensor names and our parameter paths: one row a tensor pattern, read both ways."""

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

Slice = tuple[int, int, int]  # axis, start, stop


@dataclasses.dataclass(frozen=True)
class Row:
    """One upstream tensor, or one per layer, and where it lives in our parameters.

    name: upstream name; `{i}` stands for the layer number.
    shape: upstream shape.
    path: our path, or None for a tensor that the port does not read (streamed through on export).
    layers: upstream layer numbers, in the order of the stack axis of `path`; None where the row is a single tensor.
      An element i of `layers` fills index position-of-i of the stacked parameter, or the whole parameter when
      `stacked` is False (a segment of one layer).
    stacked: whether `path` has a layer axis.
    view: reshape applied to the upstream tensor first (a convolution kernel to a matrix), or None.
    transpose: axes applied after `view`, or None.
    take: section (axis, start, stop) of the upstream tensor, after `view` and before `transpose`, that we read.
    part: section (axis, start, stop) of our (unstacked) parameter that this tensor fills.
    optional: may be absent from the source.
    alias_of: upstream name of a tensor that must hold the same bytes (tied embeddings): either is enough to read,
      both are written.
    """

    name: str
    shape: tuple[int, ...]
    path: str | None
    layers: tuple[int, ...] | None = None
    stacked: bool = True
    view: tuple[int, ...] | None = None
    transpose: tuple[int, ...] | None = None
    take: Slice | None = None
    part: Slice | None = None
    optional: bool = False
    alias_of: str | None = None

    def names(self) -> Iterator[tuple[str, int | None]]:
        """(upstream name, index on the stack axis or None) of each tensor of the row."""
        if self.layers is None:
            yield self.name, None
            return
        for index, layer in enumerate(self.layers):
            yield self.name.format(i=layer), index if self.stacked else None

    def read(self, tensor: np.ndarray) -> np.ndarray:
        """Upstream tensor -> the section of our parameter that it fills. A view where numpy can make one."""
        if self.view is not None:
            tensor = tensor.reshape(self.view)
        if self.take is not None:
            axis, start, stop = self.take
            tensor = tensor[(slice(None),) * axis + (slice(start, stop),)]
        return tensor if self.transpose is None else tensor.transpose(self.transpose)

    def write(self, section: np.ndarray) -> np.ndarray:
        """Inverse of `read`, for a row without `take`."""
        if self.transpose is not None:
            section = section.transpose(np.argsort(self.transpose))
        return section if self.take is not None else section.reshape(self.shape)


Table = list[Row]
TableFor = Callable[..., Table]
