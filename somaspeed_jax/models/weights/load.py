"""Upstream tensors into our parameters: every name accounted for, read straight into shards."""

import math
import os
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor

import jax
import ml_dtypes
import numpy as np
from jax.typing import DTypeLike

from somaspeed_jax.models.layers.param import Params, ParamSpec
from somaspeed_jax.models.weights.safetensors_file import WeightsError
from somaspeed_jax.models.weights.source import Source
from somaspeed_jax.models.weights.table import Piece, Row, Table, place, shapes

READABLE = {np.dtype(dtype) for dtype in (np.float32, np.float16, ml_dtypes.bfloat16)}
BLOCK = 128  # side of the squares in which a transposed matrix is copied: three to four times faster than in one go


def load_params(
    source: Source,
    table: Table,
    specs: Mapping[str, ParamSpec],
    *,
    new: Collection[str] = (),
    sharding_for: Callable[[str], jax.sharding.Sharding] | None = None,
    dtype_for: Callable[[str], DTypeLike] | None = None,
) -> Params:
    """Reads every parameter of `specs` from `source`, as `table` says. No parameter is left to chance.

    new: paths that the configuration says are not in the file (adapters) or are to start afresh; the result does not
      have them, and tensors that the file has for them are passed over.
    sharding_for: path -> where the parameter lives; the first local device by default. Each device's shard is read
      on its own: host memory holds the shards of one parameter at a time.
    dtype_for: path -> stored type; float32 by default. bfloat16 and float16 widen exactly; float32 is rounded to
      bfloat16 (to nearest, ties to even) only where asked here.
    The names in `table` must be those of the file: see `table.choose_prefix` and `table.prefixed`.
    Raises WeightsError that lists every fault: tensors missing, unexpected, of another shape or type, or tied ones
    that differ; ValueError where the table itself does not describe `specs`.
    """
    pieces = place(table, specs)
    unfilled = [path for path in specs if path not in pieces and path not in new]
    if unfilled:
        raise ValueError(f"weight table: no row for {', '.join(unfilled)}")
    check_names(source, table, new)
    stored = stored_names(source, table)
    default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return {
        path: _load_one(
            source,
            [(stored[piece.name], piece) for piece in pieces[path]],
            spec.shape,
            np.dtype(np.float32 if dtype_for is None else dtype_for(path)),
            default if sharding_for is None else sharding_for(path),
        )
        for path, spec in specs.items()
        if path not in new
    }


def check_names(source: Source, table: Table, new: Collection[str] = ()) -> None:
    """Raises WeightsError with every fault of a source under a table: see `load_params`.

    new: our paths that are not read; their tensors may be absent, or of any shape and type.
    """
    available, expected = set(source.names()), shapes(table)
    faults = [
        f"unexpected: {name} {list(source.shape(name))} in {source.where(name)}"
        for name in sorted(available - expected.keys())
    ]
    aliases = _aliases(table)
    for row in table:
        if row.path in new:
            continue
        for name, _ in row.names():
            other = aliases.get(name)
            if name in available:
                faults += _form_faults(source, name, row)
            elif other is not None and other.name in available:
                faults += _form_faults(source, other.name, row)
            elif other is not None:
                faults.append(f"missing: {name} {list(row.shape)}, and {other.name}, which may stand for it")
            elif row.alias_of is None and not row.optional:
                faults.append(f"missing: {name} {list(row.shape)}")
    for first, row in aliases.items():
        if not row.untied and {first, row.name} <= available:
            faults += _tie_faults(source, first, row.name)
    if faults:
        faults = list(dict.fromkeys(faults))  # rows that share a tensor find the same fault
        count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        raise WeightsError(
            f"{source.directory}: the weights do not fit this model ({count}):\n  " + "\n  ".join(faults)
        )


def stored_names(source: Source, table: Table) -> dict[str, str]:
    """Table name -> the name under which the source holds it: itself, or its alias. Without those that it lacks."""
    available, aliases = set(source.names()), _aliases(table)
    stored = {}
    for name in shapes(table):
        if name in available:
            stored[name] = name
        elif name in aliases and aliases[name].name in available:
            stored[name] = aliases[name].name
    return stored


def _aliases(table: Table) -> dict[str, Row]:
    return {row.alias_of: row for row in table if row.alias_of is not None}


def _form_faults(source: Source, name: str, row: Row) -> list[str]:
    faults, found, where = [], source.shape(name), source.where(name)
    if found != row.shape:
        transposed = len(found) > 1 and found == row.shape[::-1]
        hint = " (looks transposed)" if transposed else ""
        faults.append(f"wrong shape: {name} is {list(found)}{hint} in {where}, expected {list(row.shape)}")
    if row.path is not None and source.dtype(name) not in READABLE:
        readable = ", ".join(sorted(map(str, READABLE)))
        faults.append(f"wrong type: {name} is {source.dtype(name)} in {where}; can read {readable}")
    return faults


def _tie_faults(source: Source, first: str, second: str) -> list[str]:
    a, b = source.tensor(first), source.tensor(second)
    rows = range(0, len(a), 4096)
    same_form = a.dtype == b.dtype and a.shape == b.shape
    if same_form and all(np.array_equal(_bits(a[i : i + 4096]), _bits(b[i : i + 4096])) for i in rows):
        return []
    return [
        f"tied but different: {first} in {source.where(first)} and {second} in {source.where(second)} must hold the"
        " same bytes; remove the one that is stale"
    ]


def _bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8)


def _load_one(
    source: Source,
    pieces: list[tuple[str, Piece]],
    shape: tuple[int, ...],
    dtype: np.dtype,
    sharding: jax.sharding.Sharding,
) -> jax.Array:
    shards: dict[tuple[tuple[int, int], ...], np.ndarray] = {}  # replicas ask for the same section

    def read(index: tuple[slice, ...] | None) -> np.ndarray:
        bounds = tuple(side.indices(size)[:2] for side, size in zip(index or (), shape, strict=True))
        if bounds not in shards:
            shards[bounds] = read_section(source, pieces, bounds, dtype)
        return shards[bounds]

    return jax.make_array_from_callback(shape, sharding, read, dtype=dtype)


def read_section(
    source: Source, pieces: list[tuple[str, Piece]], bounds: tuple[tuple[int, int], ...], dtype: np.dtype
) -> np.ndarray:
    """The section `bounds` ((start, stop) an axis) of a parameter, reading no more of the source than it covers.

    pieces: (name in the source, piece) of all tensors that fill the parameter.
    """
    out = np.empty([stop - start for start, stop in bounds], dtype)

    def fill(named: tuple[str, Piece]) -> None:
        name, piece = named
        inside, within = [], []
        for (start, stop), side in zip(bounds, piece.box, strict=True):
            low, high = max(start, side.start), min(stop, side.stop)
            if low >= high:
                return
            inside.append(slice(low - start, high - start))
            within.append(slice(low - side.start, high - side.start))
        # The trailing `...` keeps a view where there are no axes at all.
        copy_cast(out[(*inside, ...)], piece.section(source.tensor(name))[(*within, ...)])

    if len(pieces) == 1:
        fill(pieces[0])
    else:
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # numpy's copies run outside the interpreter lock
            for _ in pool.map(fill, pieces):
                pass
    return out


def copy_cast(out: np.ndarray, array: np.ndarray) -> None:
    """`out[...] = array`, in squares where the array is transposed with respect to `out`."""
    if array.ndim >= 2 and abs(array.strides[-1]) > abs(array.strides[-2]) and math.prod(array.shape) > BLOCK * BLOCK:
        for i in range(0, array.shape[-2], BLOCK):
            for j in range(0, array.shape[-1], BLOCK):
                square = (..., slice(i, i + BLOCK), slice(j, j + BLOCK))
                out[square] = array[square]
    else:
        out[...] = array
