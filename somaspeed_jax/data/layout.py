"""Where the parts of a LeRobot dataset are: versions v2.0, v2.1 and v3.0, and GR00T's flavour of v2.

`read_layout` reads the files under meta/ and nothing else. The three versions become one table of episodes, in which
each episode names its parquet file and, for each camera, a video file and the time at which the episode starts in it.
"""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from somaspeed_jax.data.errors import DataError
from somaspeed_jax.data.modality import Modality, read_modality

VERSIONS = ("v2.0", "v2.1", "v3.0")
LFS_POINTER = b"version https://git-lfs"


@dataclasses.dataclass(frozen=True)
class Feature:
    """One entry of `features` in info.json, as declared (pictures may be stored otherwise: look at the frame)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    names: tuple[str, ...]  # one label a dimension; empty where the declared labels do not fit the shape
    codec: str | None = None  # what info.json claims; only the file knows
    depth: bool = False

    @property
    def is_camera(self) -> bool:
        return self.dtype in ("video", "image")


@dataclasses.dataclass(frozen=True)
class VideoSpan:
    """An episode's place in a video file: path below the dataset's root, and seconds from the file's first frame."""

    path: str
    from_timestamp: float


@dataclasses.dataclass(frozen=True)
class EpisodeMeta:
    """What the metadata says of one episode; `length` counts rows."""

    index: int
    length: int
    data_path: str
    videos: dict[str, VideoSpan]
    tasks: tuple[str, ...]  # the texts only; some writers put numbers there


@dataclasses.dataclass(frozen=True)
class Layout:
    """A dataset's metadata in one form for all versions."""

    root: Path
    version: str
    fps: float
    features: dict[str, Feature]
    episodes: dict[int, EpisodeMeta]
    tasks: dict[int, str]  # task_index -> text; empty where the dataset has no list of tasks
    modality: Modality | None
    notes: tuple[str, ...]  # what is odd but harmless

    @property
    def shared_files(self) -> bool:
        """Whether a file may hold several episodes (v3.0)."""
        return self.version == "v3.0"

    @property
    def cameras(self) -> tuple[str, ...]:
        """Declared camera features, sorted by name."""
        return tuple(sorted(name for name, feature in self.features.items() if feature.is_camera))


def check_file(path: Path) -> Path:
    """Returns `path` if it is a file with content; raises DataError for a missing, empty or LFS pointer file."""
    if not path.is_file():
        broken = " (a symbolic link whose target does not exist)" if path.is_symlink() else ""
        raise DataError(f"{path}: the file does not exist{broken}. Fetch it, or leave its episode out (data.episodes).")
    size = path.stat().st_size
    if size == 0:
        raise DataError(f"{path}: the file is empty. Fetch it again.")
    if size < 1024 and path.read_bytes().startswith(LFS_POINTER):
        raise DataError(
            f"{path}: this is a Git LFS pointer ({size} bytes of text); the real content was never fetched. "
            f"Run `git lfs pull` in the dataset, or download it again."
        )
    return path


def read_layout(root: str | Path) -> Layout:
    """Reads the metadata of the dataset in folder `root`; raises DataError where it cannot be relied on."""
    root = Path(root)
    if not root.is_dir():
        raise DataError(f"{root}: no such folder. data.path takes a LeRobot dataset's folder or a Hugging Face id.")
    for path in sorted(p for p in (root / "meta").rglob("*") if p.suffix in (".json", ".jsonl", ".parquet")):
        check_file(path)
    info_path = root / "meta" / "info.json"
    info = read_json(info_path)
    for field in ("codebase_version", "fps", "features", "data_path"):
        if field not in info:
            raise DataError(f"{info_path}: has no field {field!r}; found {sorted(info)}. Is this a LeRobot dataset?")
    version, fps = info["codebase_version"], info["fps"]
    if version not in VERSIONS:
        raise DataError(f"{info_path}: codebase_version is {version!r}; this program reads {', '.join(VERSIONS)}.")
    if not isinstance(fps, int | float) or isinstance(fps, bool) or not 0 < fps < 1e5:
        raise DataError(f"{info_path}: fps is {fps!r}; expected a positive number of frames a second.")
    chunks_size = info.get("chunks_size", 1000)
    if not isinstance(chunks_size, int) or chunks_size < 1:
        raise DataError(f"{info_path}: chunks_size is {chunks_size!r}; expected a positive whole number.")
    if not isinstance(info["features"], dict):
        raise DataError(f"{info_path}: features is {info['features']!r}; expected an object.")
    features = {name: _feature(name, spec, info_path) for name, spec in info["features"].items()}
    _check_version(root, version)
    _check_templates(info_path, info, features)

    notes: list[str] = []
    read_table = _episodes_v3 if version == "v3.0" else _episodes_v2
    episodes = read_table(root, info, features)
    if not episodes:
        raise DataError(f"{root / 'meta'}: the table of episodes is empty.")
    tasks = _tasks(root, version, notes)
    for field, actual in (
        ("total_episodes", len(episodes)),
        ("total_frames", sum(e.length for e in episodes.values())),
    ):
        if info.get(field, actual) != actual:
            notes.append(
                f"{info_path}: {field} says {info[field]}, the table of episodes holds {actual}; the table is used."
            )
    modality = read_modality(root / "meta" / "modality.json", {n: f.shape for n, f in features.items()}, notes)
    return Layout(root, version, float(fps), features, episodes, tasks, modality, tuple(notes))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; raises DataError naming the file."""
    try:
        value = json.loads(check_file(path).read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: is not JSON ({error}).") from error
    if not isinstance(value, dict):
        raise DataError(f"{path}: holds a {type(value).__name__}; expected an object.")
    return value


def _read_jsonl(path: Path) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(check_file(path).read_text().splitlines(), 1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise DataError(f"{path}: line {number} is not JSON ({error}).") from error
    return rows


def open_parquet(path: Path) -> pq.ParquetFile:
    """An open parquet file; raises DataError for one that is missing, a pointer, cut short or something else."""
    try:
        return pq.ParquetFile(check_file(path))
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: cannot be read as parquet ({error}); it may be cut short. Fetch it again.") from error


def _feature(name: str, spec: dict[str, Any], where: Path) -> Feature:
    shape = spec.get("shape")
    if "dtype" not in spec or not isinstance(shape, list | tuple | None):
        raise DataError(f"{where}: feature {name!r} needs a dtype and a list as its shape; found {spec!r}.")
    shape = tuple(int(n) for n in shape or ())
    labels = tuple(_flatten(spec.get("names")))
    if len(shape) != 1 or len(labels) != shape[0]:
        labels = ()
    details = spec.get("info") or spec.get("video_info") or {}
    depth = bool(details.get("is_depth_map") or details.get("video.is_depth_map"))
    return Feature(name, spec["dtype"], shape, labels, details.get("video.codec"), depth)


def _flatten(names: Any) -> Iterable[str]:
    """Labels out of a list, a list in a list, or a dictionary of lists."""
    if isinstance(names, dict):
        names = list(names.values())
    if not isinstance(names, list | tuple):
        return [str(names)] if names is not None else []
    return [label for entry in names for label in _flatten(entry)]


def _check_version(root: Path, version: str) -> None:
    """The files under meta/ must be the declared version's."""
    pairs = [("episodes", "episodes.jsonl"), ("tasks.parquet", "tasks.jsonl")]
    for wanted, other in pairs if version == "v3.0" else [(v2, v3) for v3, v2 in pairs]:
        if not (root / "meta" / wanted).exists() and (root / "meta" / other).exists():
            raise DataError(
                f"{root / 'meta' / wanted}: not found, but meta/info.json declares {version}, which keeps it there. "
                f"meta/{other} exists, which belongs to another version: convert the dataset again, or correct "
                f"codebase_version."
            )


def _check_templates(path: Path, info: dict[str, Any], features: dict[str, Feature]) -> None:
    """The path templates must be the declared version's: {episode_index} in v2.x, {file_index} in v3.0."""
    wanted = "{file_index" if info["codebase_version"] == "v3.0" else "{episode_index"
    templates = ["data_path"]
    if any(feature.dtype == "video" for feature in features.values()):
        templates.append("video_path")
    for field in templates:
        if not isinstance(info.get(field), str) or wanted not in info[field]:
            raise DataError(
                f"{path}: declares {info['codebase_version']}, whose {field} contains {wanted}...}}, but {field} is "
                f"{info.get(field)!r}. The metadata is of one version and the paths of another: convert the dataset "
                f"again, or correct codebase_version."
            )


def _fill(template: str, **fields: Any) -> str:
    try:
        return template.format(**fields)
    except (KeyError, IndexError, ValueError, TypeError) as error:
        raise DataError(f"meta/info.json: the path template {template!r} cannot be filled in: {error!r}.") from error


def _episodes_v2(root: Path, info: dict[str, Any], features: dict[str, Feature]) -> dict[int, EpisodeMeta]:
    path = root / "meta" / "episodes.jsonl"
    videos = [name for name, feature in features.items() if feature.dtype == "video"]
    chunk_size = int(info.get("chunks_size", 1000))
    episodes = {}
    for row in _read_jsonl(path):
        if "episode_index" not in row or "length" not in row:
            raise DataError(f"{path}: expected episode_index and length in each line; found {row!r}.")
        index = int(row["episode_index"])
        place = {"episode_chunk": index // chunk_size, "episode_index": index}
        spans = {key: VideoSpan(_fill(info["video_path"], video_key=key, **place), 0.0) for key in videos}
        texts = tuple(task for task in row.get("tasks") or () if isinstance(task, str))
        if index in episodes:
            raise DataError(f"{path}: episode {index} is listed twice.")
        episodes[index] = EpisodeMeta(index, int(row["length"]), _fill(info["data_path"], **place), spans, texts)
    return dict(sorted(episodes.items()))


def _episodes_v3(root: Path, info: dict[str, Any], features: dict[str, Feature]) -> dict[int, EpisodeMeta]:
    folder = root / "meta" / "episodes"
    files = sorted(folder.glob("*/*.parquet"))
    if not files:
        raise DataError(f"{folder}: holds no parquet file (chunk-000/file-000.parquet); v3.0 keeps its episodes there.")
    videos = [name for name, feature in features.items() if feature.dtype == "video"]
    episodes = {}
    for path in files:
        file = open_parquet(path)
        # Statistics are most of such a file and not needed here.
        columns = [name for name in file.schema_arrow.names if not name.startswith("stats/")]
        for field in ("episode_index", "length", "data/chunk_index", "data/file_index"):
            if field not in columns:
                raise DataError(f"{path}: has no column {field!r}; found {columns}.")
        for row in file.read(columns=columns).to_pylist():
            index = int(row["episode_index"])
            if index in episodes:
                raise DataError(f"{path}: episode {index} is listed twice.")
            data = _fill(info["data_path"], chunk_index=row["data/chunk_index"], file_index=row["data/file_index"])
            spans = {}
            for key in videos:
                start = row.get(f"videos/{key}/from_timestamp")
                if start is not None:
                    place = {name: row[f"videos/{key}/{name}"] for name in ("chunk_index", "file_index")}
                    spans[key] = VideoSpan(_fill(info["video_path"], video_key=key, **place), float(start))
            texts = tuple(task for task in row.get("tasks") or () if isinstance(task, str))
            episodes[index] = EpisodeMeta(index, int(row["length"]), data, spans, texts)
    return dict(sorted(episodes.items()))


def _tasks(root: Path, version: str, notes: list[str]) -> dict[int, str]:
    path = root / "meta" / ("tasks.parquet" if version == "v3.0" else "tasks.jsonl")
    if not path.exists():
        notes.append(f"{path}: not found; prompts come from the table of episodes.")
        return {}
    pairs = _task_table(path) if version == "v3.0" else _task_lines(path, notes)
    tasks: dict[int, str] = {}
    for index, text in pairs:
        if tasks.setdefault(index, text) != text:
            raise DataError(f"{path}: task_index {index} stands for two texts, {tasks[index]!r} and {text!r}.")
    if version == "v3.0" and [index for index, _ in pairs] != list(range(len(pairs))):
        notes.append(
            f"{path}: rows are not in the order of task_index; texts are matched by task_index, not by position."
        )
    return tasks


def _task_table(path: Path) -> list[tuple[int, str]]:
    """The texts are the pandas index, whose column is called `task` or `__index_level_0__`, or a plain column."""
    table = open_parquet(path).read()
    texts = [f.name for f in table.schema if pa.types.is_string(f.type) or pa.types.is_large_string(f.type)]
    named = [name for name in ("task", "__index_level_0__") if name in texts] or texts
    if "task_index" not in table.column_names or not named:
        raise DataError(f"{path}: expected task_index and one column of texts; found {table.column_names}.")
    return list(zip(table["task_index"].to_pylist(), table[named[0]].to_pylist(), strict=True))


def _task_lines(path: Path, notes: list[str]) -> list[tuple[int, str]]:
    pairs = []
    for row in _read_jsonl(path):
        texts = [key for key, value in row.items() if isinstance(value, str)]
        key = "task" if "task" in texts else texts[0] if len(texts) == 1 else None
        if "task_index" not in row or key is None:
            raise DataError(f"{path}: expected task_index and task in each line; found {row!r}.")
        if key != "task" and not pairs:
            notes.append(f"{path}: texts are under {key!r} instead of 'task'.")
        pairs.append((int(row["task_index"]), row[key]))
    return pairs
