"""What a directory of weights holds, and whether a model can read it."""

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from somaspeed_jax.models.weights.load import check_names
from somaspeed_jax.models.weights.safetensors_file import CODES, WeightsError
from somaspeed_jax.models.weights.source import Source, read_config
from somaspeed_jax.models.weights.table import Table, choose_prefix, prefixed, shapes


@dataclasses.dataclass(frozen=True)
class Contents:
    """Sums over the tensors of a source. kind: what its config.json calls itself, or ""."""

    directory: str
    kind: str
    files: list[str]
    tensors: int
    elements: int
    bytes: int
    types: dict[str, int]  # type code -> elements


def contents(source: Source) -> Contents:
    """Reads headers only."""
    types: Counter[str] = Counter()
    size = 0
    names = list(source.names())
    for name in names:
        elements, dtype = math.prod(source.shape(name)), np.dtype(source.dtype(name))
        types[CODES[dtype]] += elements
        size += elements * dtype.itemsize
    return Contents(
        directory=str(source.directory),
        kind=_kind(source.directory),
        files=sorted({source.where(name) for name in names}),
        tensors=len(names),
        elements=sum(types.values()),
        bytes=size,
        types=dict(types.most_common()),
    )


def _kind(directory: Path) -> str:
    """LeRobot's `type` or transformers' `model_type` of a config.json."""
    if not (directory / "config.json").is_file():
        return ""
    config = read_config(directory)
    return str(config.get("type") or config.get("model_type") or "")


@dataclasses.dataclass(frozen=True)
class Fit:
    """How a source meets a table. fault: all that is wrong, or "" where every tensor is accounted for."""

    prefix: str
    known: int  # tensors of the source that the table knows by name
    read: int  # of those, how many a model reads; the rest is kept for export
    fault: str


def fit(source: Source, table: Table, prefixes: Sequence[str]) -> Fit:
    """Names, shapes, types and ties of every tensor. Reads the bytes of tied tensors alone."""
    names = list(source.names())
    prefix = choose_prefix(names, table, prefixes)
    table = prefixed(table, prefix)
    expected = shapes(table)
    read = {name for row in table if row.path is not None for name, _ in row.names()}
    try:
        check_names(source, table)
        fault = ""
    except WeightsError as error:
        fault = str(error)
    return Fit(prefix, sum(name in expected for name in names), sum(name in read for name in names), fault)
