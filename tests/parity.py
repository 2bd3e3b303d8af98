"""Comparing our numbers with recorded ones of an upstream implementation, tensor by tensor, by upstream's names."""

import functools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from somaspeed_jax.models.layers.param import ParamSpec
from somaspeed_jax.models.weights.table import Table, place, shapes

ACTIVATION, GRADIENT, ZERO = 1e-5, 1e-4, 1e-7  # relative, relative, absolute

# Half of the compile time of jax.jit, for programs that run a few times on tiny arrays.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def error(found: Any, expected: Any) -> float:
    """Largest difference as a share of the largest expected magnitude."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert found.shape == expected.shape, (found.shape, expected.shape)
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def above(errors: Mapping[str, float], bound: float) -> dict[str, float]:
    """Those that are not within `bound`; NaN is not."""
    return {name: value for name, value in errors.items() if not value <= bound}


class Recorded:
    """Upstream tensors as a source of weights. Those of `table` that we never read are zeros where they are absent."""

    directory = Path("recorded")

    def __init__(self, tensors: Mapping[str, np.ndarray], table: Table):
        unread = {name for row in table if row.path is None for name, _ in row.names()}
        blank = {name: np.zeros(shape, np.float32) for name, shape in shapes(table).items() if name in unread}
        self._tensors = {**blank, **tensors}

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def dtype(self, name: str) -> np.dtype:
        return self._tensors[name].dtype

    def tensor(self, name: str) -> np.ndarray:
        return self._tensors[name]

    def where(self, name: str) -> str:
        return "the recording"


class Pair(NamedTuple):
    """One upstream tensor: its name, our numbers and the recorded ones, both in the layout of our parameter."""

    name: str
    found: np.ndarray
    expected: np.ndarray


def pairs(
    table: Table, specs: Mapping[str, ParamSpec], ours: Mapping[str, Any], recorded: Mapping[str, np.ndarray]
) -> Iterator[Pair]:
    """Our parameters (or gradients, or updates) beside the recorded ones, a pair for each upstream tensor.

    table: with the names of the recording. ours: path -> array; paths of `specs` may be absent. recorded: upstream name
    -> array; every tensor that fills one of our paths must be there (KeyError). A tensor that fills several of our
    parameters comes several times.
    """
    for path, parts in place(table, specs).items():
        if path in ours:
            array = np.asarray(ours[path])
            for piece in parts:
                yield Pair(piece.name, array[piece.box], piece.section(recorded[piece.name]))
