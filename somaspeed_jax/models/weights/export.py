"""Our parameters back into upstream's files: what was trained from the checkpoint, everything else byte for byte."""

import dataclasses
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from somaspeed_jax.models.layers.param import ParamSpec
from somaspeed_jax.models.weights.load import check_names, stored_names
from somaspeed_jax.models.weights.safetensors_file import TensorToWrite, WeightsError, write_sharded
from somaspeed_jax.models.weights.source import Source
from somaspeed_jax.models.weights.table import Piece, Row, Table, place, prefixed

# path -> function of the layer (None where there is no layer axis) that gives what its adapter adds, float32.
Deltas = Mapping[str, Callable[[int | None], np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Exported:
    """What an export wrote: file names, and tensors by origin."""

    files: list[str]
    trained: int
    copied: int
    zeros: int


def export_weights(
    directory: str | os.PathLike,
    source: Source | None,
    table: Table,
    specs: Mapping[str, ParamSpec],
    trained: Mapping[str, Any],
    *,
    source_prefix: str = "",
    export_prefix: str = "",
    deltas: Deltas | None = None,
    stored: Literal["float32", "source"] = "float32",
    shard_bytes: int | None = None,
    files: Mapping[str, bytes] | None = None,
) -> Exported:
    """Writes a directory in upstream's layout. It appears whole, under its name, or not at all.

    source: where the weights came from. Tensors that were not trained, or that the port does not read, are copied
      from it byte for byte; one that it lacks and that upstream asks for (`Row.zeros`) is written as zeros. None for
      a model that was trained from nothing: `trained` then has every parameter, and what is not read is zeros.
    table: bare names; `source_prefix` and `export_prefix` go before them.
    trained: path -> value, for the parameters that were trained: arrays of jax or numpy, or anything with a shape that
      numpy turns into one (still on disk). Held on the host one at a time.
    deltas: adapters to merge into the tensors of their paths, in float32: see `lora.deltas`.
    stored: type of trained tensors. "float32" keeps every bit of what was trained; "source" rounds each to the type
      that the source stores it in.
    shard_bytes: size from which to write several files and an index; None for one file.
    files: further files of the directory by name, in one level of folders at most ("config.json", "processor/a.json").
    Raises WeightsError where the source does not fit the table, a parameter has no value, or the directory exists
    and is not empty.
    """
    directory = Path(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise WeightsError(f"{directory}: exists and is not empty; export writes a new directory")
    for name in files or {}:
        if not re.fullmatch(r"(\w[\w.-]*/)?\w[\w.-]*", name, re.ASCII):
            raise WeightsError(f"{name!r}: further files of an export have plain names, in one folder at most")
    plan = _Plan(source, source_prefix, table, specs, trained, deltas or {}, stored)
    tensors = plan.tensors(export_prefix)

    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", suffix=".partial", dir=directory.parent))
    try:
        written = write_sharded(temporary, tensors, {"format": "pt"}, shard_bytes)
        for name, content in (files or {}).items():
            (temporary / name).parent.mkdir(exist_ok=True)
            (temporary / name).write_bytes(content)
        temporary.chmod(0o755)
        if directory.exists():
            directory.rmdir()
        temporary.rename(directory)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return Exported([*written, *(files or {})], **plan.origins)


class _Plan:
    """Which bytes each tensor of the export is made of."""

    def __init__(
        self,
        source: Source | None,
        source_prefix: str,
        table: Table,
        specs: Mapping[str, ParamSpec],
        trained: Mapping[str, Any],
        deltas: Deltas,
        stored: str,
    ):
        unknown = sorted((trained.keys() | deltas.keys()) - specs.keys())
        if unknown:
            raise WeightsError(f"not parameters of this model: {', '.join(unknown)}")
        for path, value in trained.items():
            if value.shape != specs[path].shape:
                raise WeightsError(f"{path} is {list(value.shape)}, expected {list(specs[path].shape)}")
        self.source, self.table, self.trained, self.deltas, self.stored = source, table, trained, deltas, stored
        self.origin: dict[str, str] = {}  # bare upstream name -> the name under which the source holds it
        if source is not None:
            read_in_part = {row.path for row in table if row.take is not None}
            names = prefixed(table, source_prefix)
            check_names(source, names, new=trained.keys() - read_in_part)
            stored_as = stored_names(source, names)
            self.origin = {name.removeprefix(source_prefix): held for name, held in stored_as.items()}
        # Adapters are parameters that no tensor of upstream's layout holds: they come in through `deltas`.
        in_table = {row.path for row in table}
        self.pieces: dict[str, list[Piece]] = {}  # bare upstream name -> all pieces that it holds
        for pieces in place(table, {path: spec for path, spec in specs.items() if path in in_table}).values():
            for piece in pieces:
                self.pieces.setdefault(piece.name, []).append(piece)
        if source is None:
            unset = sorted(path for path in in_table if path is not None and path not in trained)
            if unset:
                raise WeightsError(f"no source, and no value for {', '.join(unset)}")
        self.origins = {"trained": 0, "copied": 0, "zeros": 0}
        self._held: tuple[str, np.ndarray] | None = None

    def tensors(self, prefix: str) -> list[TensorToWrite]:
        """Every tensor of the table that the source has, that was trained, or that upstream asks for."""
        tensors: dict[str, TensorToWrite] = {}
        for row in self.table:
            for name, _ in row.names():
                tensor = None if name in tensors else self._tensor(row, name)
                if tensor is not None:
                    tensors[name] = dataclasses.replace(tensor, name=prefix + name)
        return list(tensors.values())

    def _tensor(self, row: Row, name: str) -> TensorToWrite | None:
        source, dtype = self.source, np.dtype(np.float32)
        if row.alias_of is not None and not row.untied and name not in self.origin:
            return None
        main = row.alias_of or name  # an alias is written as the tensor that it stands for
        held = self.origin.get(main)
        if any(piece.row.path in self.trained or piece.row.path in self.deltas for piece in self.pieces.get(main, [])):
            self.origins["trained"] += 1
            if self.stored == "source" and source is not None and held is not None:
                dtype = np.dtype(source.dtype(held))
            return TensorToWrite(name, dtype, row.shape, lambda: self._assembled(main, row.shape, dtype))
        held = self.origin.get(name, held)
        if source is not None and held is not None:
            self.origins["copied"] += 1
            return TensorToWrite(name, source.dtype(held), row.shape, lambda: source.tensor(held))
        if row.zeros or (source is None and not row.buffer and not row.optional):
            self.origins["zeros"] += 1
            return TensorToWrite(name, dtype, row.shape, lambda: np.broadcast_to(np.zeros((), dtype), row.shape))
        return None

    def _assembled(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """The upstream tensor `name` with the sections that were trained put in, float32, then `dtype`."""
        held = self.origin.get(name)
        if self.source is not None and held is not None and self.source.shape(held) == shape:
            tensor = np.array(self.source.tensor(held), np.float32)
        else:
            tensor = np.zeros(shape, np.float32)
        for piece in self.pieces[name]:
            path = str(piece.row.path)
            if path in self.trained:
                piece.write(self._on_host(path), tensor)
            if path in self.deltas:
                self._add_delta(piece, path, tensor)
        return tensor.astype(dtype, copy=False)

    def _add_delta(self, piece: Piece, path: str, tensor: np.ndarray) -> None:
        stacked = piece.row.layers is not None and piece.row.stacked
        delta = self.deltas[path](piece.box[0].start if stacked else None)
        box = piece.box[1:] if stacked else piece.box
        piece.row.write(piece.row.read(tensor) + delta[box], tensor)

    def _on_host(self, path: str) -> np.ndarray:
        """The whole parameter; the last one is kept, since the tensors of a row come one after the other."""
        if self._held is None or self._held[0] != path:
            self._held = (path, np.asarray(self.trained[path]))
        return self._held[1]
