"""One .safetensors file: a strict reader over a memory map, and a writer that streams.

The layout (https://github.com/huggingface/safetensors, "Format"): eight bytes with the header's length (little endian),
a JSON header {tensor: {dtype, shape, data_offsets}}, then the bytes of the tensors without holes. The header is read
here rather than by the library so that each fault of a damaged or hostile file has its own words, so that nothing is
read before it is asked for, and so that bfloat16 needs no torch.
"""

import dataclasses
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

MAX_HEADER = 16 << 20  # bytes; 1,295 tensors of MolmoAct2 take 0.2 MB
MAX_RANK = 16
CHUNK = 32 << 20  # bytes written at a time

DTYPES: dict[str, np.dtype] = {
    code: np.dtype(scalar)
    for code, scalar in {
        "F64": np.float64,
        "F32": np.float32,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "I64": np.int64,
        "I32": np.int32,
        "I16": np.int16,
        "I8": np.int8,
        "U64": np.uint64,
        "U32": np.uint32,
        "U16": np.uint16,
        "U8": np.uint8,
        "BOOL": np.bool_,
    }.items()
}
CODES = {dtype: code for code, dtype in DTYPES.items()}

# What people have in place of the file -> what to do.
_IMPOSTORS = {
    b"version https://git-lfs": "it is a Git LFS pointer, not the file: run `git lfs pull` in its repository",
    b"PK\x03\x04": "it is a zip archive (a PyTorch pickle?); pickles are never read: convert it to safetensors",
    b"<!DOCTYP": "it is a web page: the download went wrong",
    b"<html": "it is a web page: the download went wrong",
}


class WeightsError(ValueError):
    """Weights that are damaged, or that do not fit the model."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One tensor of a file: `start` and `stop` are byte offsets from the beginning of the file."""

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


class SafetensorsFile:
    """The tensors of one file. Opening reads the header and checks it whole; a tensor's bytes are mapped, not read.

    Raises WeightsError, naming the file and the fault, for anything but a sound file.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self.entries, self.metadata = _read_header(self.path)
        self._bytes: np.ndarray | None = None

    def tensor(self, name: str) -> np.ndarray:
        """A read-only view of the file: touching it reads it. bfloat16 is `ml_dtypes.bfloat16`."""
        entry = self.entries[name]
        return self.raw(name).view(entry.dtype).reshape(entry.shape)

    def raw(self, name: str) -> np.ndarray:
        """The stored bytes of a tensor, uint8 [nbytes], as a read-only view of the file."""
        if self._bytes is None:
            self._bytes = np.asarray(np.memmap(self.path, np.uint8, mode="r"))
        entry = self.entries[name]
        return self._bytes[entry.start : entry.stop]


def _read_header(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(64)
            length = int.from_bytes(head[:8], "little")
            for magic, advice in _IMPOSTORS.items():
                if head.startswith(magic):
                    raise WeightsError(f"{path}: {advice}")
            if size < 8 + 2:
                raise WeightsError(f"{path}: {size} bytes are too few for a safetensors file; fetch it again")
            if length > min(MAX_HEADER, size - 8):
                raise WeightsError(
                    f"{path}: the first 8 bytes announce a header of {length:,} bytes; the file has {size:,}"
                    f" and a header may take {MAX_HEADER:,}: it is cut short or not a safetensors file"
                )
            file.seek(8)
            text = file.read(length)
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read: {error.strerror}") from error
    header = parse_json(text, f"{path}: header")
    if not isinstance(header, dict):
        raise WeightsError(f"{path}: the header is a {type(header).__name__}, expected an object of tensors")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise WeightsError(f"{path}: __metadata__ must map names to strings")
    start = 8 + length
    entries = {name: _entry(value, start, f"{path}: tensor {name!r}") for name, value in header.items()}
    _check_cover(entries, start, size, path)
    return entries, metadata


def parse_json(text: bytes | str, where: str) -> Any:
    """JSON in which no object has a name twice. Raises WeightsError that begins with `where`."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            names = [name for name, _ in pairs]
            twice = sorted({name for name in names if names.count(name) > 1}) if len(names) < 10_000 else ["(many)"]
            raise WeightsError(f"{where}: named twice: {', '.join(map(repr, twice))}")
        return values

    try:
        return json.loads(text if isinstance(text, str) else text.decode(), object_pairs_hook=unique)
    except WeightsError:
        raise
    except (ValueError, RecursionError) as error:  # ValueError: broken JSON, broken UTF-8, numbers without end
        raise WeightsError(f"{where} is not JSON: {error}") from error


def _entry(value: Any, start: int, where: str) -> Entry:
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        found = sorted(value) if isinstance(value, dict) else type(value).__name__
        raise WeightsError(f"{where}: expected dtype, shape and data_offsets, found {found}")
    dtype = DTYPES.get(value["dtype"]) if isinstance(value["dtype"], str) else None
    if dtype is None:
        raise WeightsError(f"{where}: unknown dtype {value['dtype']!r}; known: {', '.join(DTYPES)}")
    shape, offsets = value["shape"], value["data_offsets"]
    if not _counts(shape) or len(shape) > MAX_RANK:
        raise WeightsError(f"{where}: shape must be a list of at most {MAX_RANK} whole numbers, found {_brief(shape)}")
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise WeightsError(f"{where}: data_offsets must be [begin, end], found {_brief(offsets)}")
    # numpy refuses shapes whose size without the zeros is beyond an address, even when they hold nothing.
    if math.prod(size for size in shape if size) >= 2**56:
        raise WeightsError(f"{where}: shape {_brief(shape)} is too large")
    expected = math.prod(shape) * dtype.itemsize
    if offsets[1] - offsets[0] != expected:
        raise WeightsError(
            f"{where}: {value['dtype']} {shape} takes {expected:,} bytes, data_offsets hold {offsets[1] - offsets[0]:,}"
        )
    return Entry(dtype, tuple(shape), start + offsets[0], start + offsets[1])


def _counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 100 else text[:100] + "…"


def _check_cover(entries: Mapping[str, Entry], start: int, size: int, path: Path) -> None:
    """The tensors follow each other without hole or overlap and end where the file ends."""
    position, before = start, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != position:
            what = "overlaps" if entry.start < position else f"is {entry.start - position:,} bytes after the end of"
            raise WeightsError(f"{path}: tensor {name!r} {what} {before}")
        position, before = entry.stop, f"tensor {name!r}"
    if position > size:
        missing = [name for name, entry in entries.items() if entry.stop > size]
        raise WeightsError(
            f"{path}: cut short: {size:,} bytes, the header asks for {position:,}; not whole: {', '.join(missing)};"
            " fetch it again"
        )
    if position < size:
        raise WeightsError(f"{path}: {size - position:,} bytes after the last tensor belong to none")


@dataclasses.dataclass(frozen=True)
class TensorToWrite:
    """A tensor of a file to be: `read` is called once, in its turn, and gives an array of `dtype` and `shape`."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_safetensors(path: str | os.PathLike, tensors: Iterable[TensorToWrite], metadata: Mapping[str, str]) -> None:
    """Writes one file, whole or not at all: under a temporary name in the same folder, then renamed.

    Holds one tensor at a time, read in the given order. In the file they lie as the safetensors library lays them:
    wider types first, so that each is aligned to its type, then by name. (LeRobot's π0.5 depends on it: of an embedding
    that is stored under two names it keeps the one that comes last.)
    """
    path, tensors = Path(path), list(tensors)
    head, starts = _layout(tensors, metadata)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(head)
            for tensor in tensors:
                file.seek(starts[tensor.name])
                for chunk in _chunks(tensor):
                    file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def safetensors_bytes(tensors: Iterable[TensorToWrite]) -> bytes:
    """The content of a small file."""
    tensors = sorted(tensors, key=_place)
    head, _ = _layout(tensors, {})
    return b"".join([head, *(chunk for tensor in tensors for chunk in _chunks(tensor))])


def _place(tensor: TensorToWrite) -> tuple[int, str]:
    return -tensor.dtype.itemsize, tensor.name


def _layout(tensors: Iterable[TensorToWrite], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """The file up to the first tensor, and at which byte of the file each tensor starts."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for tensor in sorted(tensors, key=_place):
        if tensor.name in header:
            raise WeightsError(f"tensor {tensor.name!r} would be written twice")
        end = position + tensor.nbytes
        header[tensor.name] = {
            "dtype": CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    starts = {tensor.name: start + header[tensor.name]["data_offsets"][0] for tensor in tensors}
    return len(text).to_bytes(8, "little") + text, starts


def _chunks(tensor: TensorToWrite) -> Iterator[memoryview]:
    array = tensor.read()
    if array.shape != tensor.shape or array.dtype != tensor.dtype:
        raise WeightsError(
            f"tensor {tensor.name!r}: {array.dtype} {array.shape} was given for {tensor.dtype} {tensor.shape}"
        )
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    for start in range(0, len(data), CHUNK):
        yield data[start : start + CHUNK]


def write_sharded(
    directory: str | os.PathLike, tensors: Iterable[TensorToWrite], metadata: Mapping[str, str], shard_bytes: int | None
) -> list[str]:
    """Writes `model.safetensors`, or shards of about `shard_bytes` and their index where the tensors take more.

    shard_bytes: None for one file of any size. Returns the names of the files written; the index comes last, so that
    an interrupted write leaves no index.
    """
    directory, tensors = Path(directory), list(tensors)
    shards: list[list[TensorToWrite]] = [[]]
    for tensor in tensors:
        filled = sum(other.nbytes for other in shards[-1])
        if shard_bytes is not None and shards[-1] and filled + tensor.nbytes > shard_bytes:
            shards.append([])
        shards[-1].append(tensor)
    if len(shards) == 1:
        write_safetensors(directory / "model.safetensors", tensors, metadata)
        return ["model.safetensors"]
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(directory / file, shard, metadata)
        weight_map.update({tensor.name: file for tensor in shard})
    index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in tensors)}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return [*dict.fromkeys(weight_map.values()), INDEX]


INDEX = "model.safetensors.index.json"
