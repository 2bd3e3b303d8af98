"""The table between upstream tensor names and our parameter paths: one row a tensor pattern, read both ways.

`place` turns a table into the boxes of our parameters that each upstream tensor fills; reading (`load.py`) and writing
(`export.py`) both follow it.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from somaspeed_jax.models.layers.param import ParamSpec

Slice = tuple[int, int, int]  # axis, start, stop
Box = tuple[slice, ...]  # a section of a parameter, one slice an axis


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
    reshape: reshape applied last (a convolution kernel whose axes were put in order, to a matrix), or None.
    take: section (axis, start, stop) of the upstream tensor, after `view` and before `transpose`, that we read.
      Rows may share a name; what none of them takes is left as the source has it.
    part: section (axis, start, stop) of our (unstacked) parameter that this tensor fills.
    optional: may be absent from the source.
    alias_of: upstream name of a tensor that must hold the same bytes (tied embeddings): either is enough to read. It
      is written where the source has it under this name.
    untied: an alias that upstream holds as a parameter of its own: it is counted, always written, and may hold other
      bytes when the file has both (upstream trained one of them); `alias_of` is then what is read.
    buffer: upstream stores it but does not count it as a parameter.
    zeros: an unread tensor that upstream's strict loading asks for: written as zeros where the source has none.
    """

    name: str
    shape: tuple[int, ...]
    path: str | None
    layers: tuple[int, ...] | None = None
    stacked: bool = True
    view: tuple[int, ...] | None = None
    transpose: tuple[int, ...] | None = None
    reshape: tuple[int, ...] | None = None
    take: Slice | None = None
    part: Slice | None = None
    optional: bool = False
    alias_of: str | None = None
    untied: bool = False
    buffer: bool = False
    zeros: bool = False

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
            tensor = tensor[self._taken()]
        if self.transpose is not None:
            tensor = tensor.transpose(self.transpose)
        return tensor if self.reshape is None else tensor.reshape(self.reshape)

    def write(self, section: np.ndarray, tensor: np.ndarray) -> None:
        """Inverse of `read`: puts a section of our parameter into `tensor` (upstream's shape, contiguous)."""
        if self.reshape is not None:
            section = section.reshape(self._moved_shape())
        if self.transpose is not None:
            section = section.transpose(np.argsort(self.transpose))
        target = tensor if self.view is None else tensor.reshape(self.view)
        target[... if self.take is None else self._taken()] = section

    def section_shape(self) -> tuple[int, ...]:
        """The shape that `read` returns."""
        return self._moved_shape() if self.reshape is None else self.reshape

    def _moved_shape(self) -> tuple[int, ...]:
        shape = list(self.shape if self.view is None else self.view)
        if self.take is not None:
            axis, start, stop = self.take
            shape[axis] = stop - start
        return tuple(shape if self.transpose is None else (shape[axis] for axis in self.transpose))

    def _taken(self) -> tuple[slice, ...]:
        axis, start, stop = self.take or (0, 0, 0)
        return (slice(None),) * axis + (slice(start, stop),)


Table = list[Row]
TableFor = Callable[..., Table]


@dataclasses.dataclass(frozen=True)
class Piece:
    """One upstream tensor (or a section of it) and the box of our parameter that it fills."""

    name: str
    row: Row
    box: Box

    def section(self, tensor: np.ndarray) -> np.ndarray:
        """Upstream tensor -> an array of the box's shape. A view where numpy can make one."""
        section = self.row.read(tensor)
        return section[None] if len(self.box) > section.ndim else section

    def write(self, parameter: np.ndarray, tensor: np.ndarray) -> None:
        """Puts the box of the whole `parameter` into `tensor`, of upstream's shape."""
        section = parameter[self.box]
        self.row.write(section[0] if section.ndim > len(self.row.section_shape()) else section, tensor)


def place(table: Table, specs: Mapping[str, ParamSpec]) -> dict[str, list[Piece]]:
    """Our path -> the pieces that fill it, for every path of `specs` that the table knows.

    An alias is no piece of its own: `load.py` finds it when the tensor that it stands for is absent. Raises ValueError
    where the table itself is wrong: a path that is not in `specs`, a section outside its parameter, or a parameter
    that its pieces do not fill exactly once.
    """
    pieces: dict[str, list[Piece]] = {}
    for row in table:
        if row.path is None or row.alias_of is not None:
            continue
        if row.path not in specs:
            raise ValueError(f"weight table: {row.name} goes to {row.path}, which is not a parameter of this model")
        for name, index in row.names():
            pieces.setdefault(row.path, []).append(Piece(name, row, _box(row, index, specs[row.path].shape)))
    for path, parts in pieces.items():
        filled = sum(math.prod(side.stop - side.start for side in piece.box) for piece in parts)
        repeated = Counter(str(piece.box) for piece in parts).most_common(1)[0][1] > 1
        if filled != math.prod(specs[path].shape) or repeated:
            names = ", ".join(piece.name for piece in parts)
            raise ValueError(f"weight table: {path} {specs[path].shape} is not filled exactly once by {names}")
    return pieces


def _box(row: Row, index: int | None, shape: tuple[int, ...]) -> Box:
    inner = shape if index is None else shape[1:]
    sides = [slice(0, size) for size in inner]
    if row.part is not None:
        axis, start, stop = row.part
        sides[axis] = slice(start, stop)
    box = (*sides,) if index is None else (slice(index, index + 1), *sides)
    section = row.section_shape()
    if section != tuple(side.stop - side.start for side in sides) or any(
        side.stop > size for side, size in zip(box, shape, strict=True)
    ):
        raise ValueError(f"weight table: {row.name} gives {section}, which does not fit {row.path} {shape} at {box}")
    return box


def prefixed(table: Table, prefix: str) -> Table:
    """The table of a file in which every name begins with `prefix`."""
    return [
        dataclasses.replace(
            row, name=prefix + row.name, alias_of=None if row.alias_of is None else prefix + row.alias_of
        )
        for row in table
    ]


def choose_prefix(names: Sequence[str], table: Table, prefixes: Sequence[str]) -> str:
    """The one of `prefixes` under which most of a file's names are in the table; the first where they are equal."""
    found = set(names)
    known = [name for row in table for name, _ in row.names()]
    return max(prefixes, key=lambda prefix: sum(prefix + name in found for name in known))


def shapes(table: Table) -> dict[str, tuple[int, ...]]:
    """Upstream name -> shape of every tensor of the table."""
    return {name: row.shape for row in table for name, _ in row.names()}


def parameter_counts(table: Table) -> dict[str, int]:
    """Upstream name -> elements, of the tensors that upstream counts as parameters: tied ones once, no buffers."""
    counted = [row for row in table if not row.buffer and (row.alias_of is None or row.untied)]
    return {name: math.prod(shape) for name, shape in shapes(counted).items()}
