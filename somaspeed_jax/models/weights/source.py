"""Where weights come from: a directory or a Hugging Face repository, with one .safetensors file or with shards."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from somaspeed_jax.models.weights.safetensors_file import INDEX, SafetensorsFile, WeightsError, parse_json

MAX_JSON = 64 << 20  # bytes
SINGLE = "model.safetensors"
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# What is fetched of a repository: never code, never pickles.
_WANTED = ["*.safetensors", "*.json", "*.model", "*.jinja", "*.txt"]


class Source(Protocol):
    """Named tensors that can be read one at a time."""

    directory: Path

    def names(self) -> Iterable[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> np.dtype: ...

    def tensor(self, name: str) -> np.ndarray:
        """The tensor; a view of the file where the layout allows it."""
        ...

    def where(self, name: str) -> str:
        """The file that holds it, for messages."""
        ...


class SafetensorsSource:
    """The tensors of one or several .safetensors files of a directory."""

    def __init__(self, directory: Path, files: Sequence[SafetensorsFile]):
        self.directory = directory
        self._file = {name: file for file in files for name in file.entries}

    def names(self) -> Iterable[str]:
        return self._file.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file[name].entries[name].shape

    def dtype(self, name: str) -> np.dtype:
        return self._file[name].entries[name].dtype

    def tensor(self, name: str) -> np.ndarray:
        return self._file[name].tensor(name)

    def where(self, name: str) -> str:
        return self._file[name].path.name


def open_source(path_or_repository: str | Path) -> SafetensorsSource:
    """Opens the weights of a directory, of one .safetensors file, or of a Hugging Face repository ("owner/name").

    Reads headers only and checks them whole: see `SafetensorsFile`. Raises WeightsError, with all faults of the index
    at once, where there is no such place or where it is not sound.
    """
    return open_directory(find_directory(path_or_repository), Path(path_or_repository).name)


def find_directory(path_or_repository: str | Path) -> Path:
    """The local directory of a path, or of a repository fetched from the Hub. What exists locally is never fetched.

    A file stands for its directory. Raises WeightsError where there is neither.
    """
    path = Path(path_or_repository).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        return path.parent
    name = str(path_or_repository)
    if not _REPOSITORY.fullmatch(name):
        raise WeightsError(f"{name}: no such directory or file, and not the name of a repository (owner/name)")
    from huggingface_hub import snapshot_download  # slow to import, and not needed for what is local

    try:
        return Path(snapshot_download(name, allow_patterns=_WANTED))
    except Exception as error:  # the Hub's client raises many unrelated types: all mean that it is not to be had
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise WeightsError(
            f"{name}: no such directory here, and the repository of that name could not be fetched: {reason}"
        ) from error


def open_directory(directory: Path, file_name: str = "") -> SafetensorsSource:
    """`open_source` of a directory that exists; `file_name` names one of several .safetensors files of it."""
    if file_name.endswith(".safetensors") and (directory / file_name).is_file():
        return SafetensorsSource(directory, [SafetensorsFile(directory / file_name)])
    single, index = directory / SINGLE, directory / INDEX
    if index.is_file():
        weight_map = _read_index(index)
        if single.is_file() and set(weight_map.values()) != {SINGLE}:
            raise WeightsError(f"{directory}: holds both {SINGLE} and {INDEX}: remove the one that is not meant")
        return SafetensorsSource(directory, _open_shards(directory, weight_map))
    if single.is_file():
        return SafetensorsSource(directory, [SafetensorsFile(single)])
    found = sorted(path.name for path in directory.iterdir())
    listed = ", ".join(found[:20]) + (f" and {len(found) - 20} more" if len(found) > 20 else "") if found else "nothing"
    raise WeightsError(f"{directory}: no {SINGLE} and no {INDEX} (found {listed}); pickles are never read")


def read_json(path: Path) -> Any:
    """A small JSON file. Raises WeightsError naming it where it is absent, too large or broken."""
    try:
        if path.stat().st_size > MAX_JSON:
            raise WeightsError(f"{path}: {path.stat().st_size:,} bytes; expected at most {MAX_JSON:,}")
        return parse_json(path.read_bytes(), str(path))
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read: {error.strerror}") from error


def read_config(directory: Path) -> dict[str, Any]:
    """The `config.json` of a checkpoint directory."""
    config = read_json(directory / "config.json")
    if not isinstance(config, dict):
        raise WeightsError(f"{directory / 'config.json'}: a {type(config).__name__}, expected an object")
    return config


def _read_index(index: Path) -> dict[str, str]:
    content = read_json(index)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"{index}: expected an object with a weight_map from tensor to file")
    for name, file in weight_map.items():
        # The file is opened by this name: it must not lead out of the directory.
        if not isinstance(file, str) or not re.fullmatch(r"\w[\w.-]*\.safetensors", file, re.ASCII):
            raise WeightsError(
                f"{index}: tensor {name!r} is in {file!r}; expected the plain name of a .safetensors file"
            )
    return weight_map


def _open_shards(directory: Path, weight_map: dict[str, str]) -> list[SafetensorsFile]:
    """The shards of an index, which must hold what it says and nothing else. All faults in one WeightsError."""
    faults, files = [], []
    for file in sorted(set(weight_map.values())):
        listed = {name for name, other in weight_map.items() if other == file}
        if not (directory / file).is_file():
            faults.append(f"{file}: not there; it should hold {', '.join(sorted(listed))}")
            continue
        try:
            shard = SafetensorsFile(directory / file)
        except WeightsError as error:
            faults.append(str(error))
            continue
        files.append(shard)
        faults += [f"{file}: has no tensor {name!r}" for name in sorted(listed - shard.entries.keys())]
        for name in sorted(shard.entries.keys() - listed):
            elsewhere = weight_map.get(name)
            faults.append(f"{file}: tensor {name!r} is {f'listed in {elsewhere}' if elsewhere else 'not in the index'}")
    if faults:
        raise WeightsError(f"{directory / INDEX} does not agree with its files:\n  " + "\n  ".join(faults))
    return files
