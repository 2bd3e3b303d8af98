"""Columns of a dataset's parquet files as numpy arrays, whatever way the vectors are stored."""

import io
import json
import math
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from PIL import Image

from somaspeed_jax.data.errors import DataError

PICTURE_CACHE_BYTES = 256 << 20  # compressed pictures kept a process, at least one row group


def read_columns(file: pq.ParquetFile, path: Path, names: list[str]) -> pa.Table:
    """The columns `names` of the file at `path`; raises DataError for one that is missing or cannot be read."""
    missing = sorted(set(names) - set(file.schema_arrow.names))
    if missing:
        raise DataError(f"{path}: has no column {', '.join(map(repr, missing))}; found {file.schema_arrow.names}.")
    try:
        return file.read(columns=names, use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: cannot be read ({error}); the file is damaged. Fetch it again.") from error


def numbers(column: pa.ChunkedArray | pa.Array, shape: tuple[int, ...], where: str, first_row: int = 0) -> np.ndarray:
    """A column as float64 [rows, *shape]; `where` (file and feature) and `first_row` name the place in errors.

    Reads scalars, lists (fixed size, variable, large, nested to any depth, extension types) and JSON text.
    Raises DataError for null entries and for rows whose number of values is not that of `shape`.
    """
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks)
    if isinstance(array.type, pa.BaseExtensionType):
        array = array.storage
    if array.null_count:
        raise DataError(f"{where}: row {first_row + np.flatnonzero(array.is_null())[0]} of the file is empty.")
    rows, per_row = len(array), math.prod(shape)
    if pa.types.is_string(array.type) or pa.types.is_large_string(array.type) or pa.types.is_binary(array.type):
        return _json_numbers(array, shape, where, first_row)
    while pa.types.is_nested(array.type):
        if pa.types.is_struct(array.type):
            raise DataError(f"{where}: is stored as {array.type}; expected numbers.")
        lengths = np.unique(pc.call_function("list_value_length", [array]))
        if len(lengths) > 1:
            raise DataError(f"{where}: rows have {lengths.tolist()} values; expected the same number in each.")
        array = array.flatten()
    if len(array) != rows * per_row:
        raise DataError(
            f"{where}: a row has {len(array) / max(rows, 1):g} values; its declared shape {list(shape)} has {per_row}."
        )
    try:
        values = array.to_numpy(zero_copy_only=False).astype(np.float64)
    except (ValueError, TypeError) as error:
        raise DataError(f"{where}: is stored as {array.type}; expected numbers.") from error
    return values.reshape(rows, *shape)


def _json_numbers(array: pa.Array, shape: tuple[int, ...], where: str, first_row: int) -> np.ndarray:
    values = np.empty((len(array), *shape), np.float64)
    for row, text in enumerate(array.to_pylist()):
        try:
            value = np.asarray(json.loads(text), np.float64)
        except (ValueError, TypeError) as error:
            raise DataError(
                f"{where}: row {first_row + row} of the file is text that is not a JSON list of numbers."
            ) from error
        if value.size != math.prod(shape):
            raise DataError(
                f"{where}: row {first_row + row} of the file has {value.size} values; its declared shape {list(shape)} "
                f"has {math.prod(shape)}."
            )
        values[row] = value.reshape(shape)
    return values


def decode_picture(entry: Any, where: str) -> np.ndarray:
    """uint8 [h, w, 3] RGB from an entry of an image column: PNG or JPEG bytes, bare or in a struct with a path."""
    data = entry.get("bytes") if isinstance(entry, dict) else entry
    if not isinstance(data, bytes):
        held = f"only the path {entry.get('path')!r}" if isinstance(entry, dict) else f"a {type(entry).__name__}"
        raise DataError(f"{where}: holds {held}; expected the bytes of a picture.")
    try:
        picture = Image.open(io.BytesIO(data))
        picture.load()
    except (OSError, SyntaxError) as error:
        raise DataError(f"{where}: cannot be decoded as a picture ({error}).") from error
    if picture.mode != "RGB":
        raise DataError(f"{where}: is a picture of mode {picture.mode!r}; expected RGB with 8 bits a channel.")
    return np.asarray(picture)


class PictureColumns:
    """Pictures stored in parquet, by row. Keeps the row groups last used (compressed). Pickles without them."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._groups: OrderedDict[tuple[Path, str, int], pa.ChunkedArray] = OrderedDict()
        self._starts: dict[Path, np.ndarray] = {}  # first row of each row group
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._reset()

    def picture(self, path: Path, column: str, row: int) -> np.ndarray:
        """uint8 [h, w, 3]: row `row` of the file's column."""
        with self._lock:
            group, first = self._locate(path, row)
            entry = self._group(path, column, group)[row - first].as_py()
        return decode_picture(entry, f"{path}: {column}, row {row} of the file")

    def _locate(self, path: Path, row: int) -> tuple[int, int]:
        """The row group with `row`, and its first row."""
        if path not in self._starts:
            meta = pq.read_metadata(path)
            sizes = [meta.row_group(group).num_rows for group in range(meta.num_row_groups)]
            self._starts[path] = np.cumsum([0, *sizes])
        starts = self._starts[path]
        group = int(np.searchsorted(starts, row, side="right")) - 1
        return group, int(starts[group])

    def _group(self, path: Path, column: str, group: int) -> pa.ChunkedArray:
        key = (path, column, group)
        if key not in self._groups:
            self._groups[key] = pq.ParquetFile(path).read_row_group(group, columns=[column], use_threads=False)[column]
            while len(self._groups) > 1 and sum(a.nbytes for a in self._groups.values()) > PICTURE_CACHE_BYTES:
                self._groups.popitem(last=False)
        self._groups.move_to_end(key)
        return self._groups[key]
