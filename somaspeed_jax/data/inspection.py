"""What a dataset is, found by looking: for datasets that train and for those that are refused."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from somaspeed_jax.data import rows
from somaspeed_jax.data.errors import DataError
from somaspeed_jax.data.layout import Layout, read_layout
from somaspeed_jax.data.lerobot import LeRobotDataset
from somaspeed_jax.data.pictures import present
from somaspeed_jax.data.video import VideoInfo, probe_video

DEFAULT_COLUMNS = ("timestamp", "frame_index", "episode_index", "index", "task_index")


@dataclasses.dataclass(frozen=True)
class VectorSummary:
    """Range of each dimension over all rows, float32 [n] each; NaN where a dimension holds anything not finite."""

    name: str
    labels: tuple[str, ...]
    low: np.ndarray
    high: np.ndarray


@dataclasses.dataclass(frozen=True)
class CameraSummary:
    """One camera; what the files say is None for pictures in parquet and for a camera without files."""

    name: str
    stored_as: str
    declared_codec: str | None
    declared_shape: tuple[int, ...]
    files: int
    header: VideoInfo | None  # of the first file


@dataclasses.dataclass(frozen=True)
class Inspection:
    """Everything that was found. `refusal` is why training would refuse, or None."""

    layout: Layout
    episodes_on_disk: int
    rows_on_disk: int
    lengths: tuple[int, int]  # shortest and longest episode on disk
    recorded_fps: float | None  # by the timestamps
    cameras: tuple[CameraSummary, ...]
    vectors: tuple[VectorSummary, ...]
    tasks: tuple[str, ...]
    refusal: str | None
    problems: tuple[str, ...]


def inspect_dataset(path: str | Path) -> Inspection:
    """Looks at every file of a dataset without decoding pictures. Raises DataError only for unreadable metadata."""
    layout = read_layout(path)
    problems = list(layout.notes)

    def attempt(action: Callable[[], Any], otherwise: Any = None) -> Any:
        """The action's result; a refusal becomes a problem to report."""
        try:
            return action()
        except DataError as error:
            problems.append(str(error))
            return otherwise

    places = _places(layout, attempt, problems)
    stored = attempt(lambda: rows.stored_columns(places), set()) if places else set()
    recorded = None
    if places and "timestamp" in stored:
        times = attempt(lambda: rows.load(places, layout.features, {"timestamp": np.float64})["timestamp"][:, 0])
        if times is not None:
            recorded = attempt(lambda: rows.check_times(places, times, layout.fps, True, []))
    vectors = []
    for name in sorted(stored & set(layout.features)):
        feature = layout.features[name]
        if name not in DEFAULT_COLUMNS and not feature.is_camera and feature.dtype not in ("string", "language"):
            values = attempt(lambda name=name: rows.load(places, layout.features, {name: np.float32})[name])
            if values is not None:
                vectors.append(_summarise(name, values.reshape(len(values), -1), feature.names, places, attempt))

    refusal = None
    for trust_timestamps in (False, True):  # trust finds what else there is to notice behind a wrong rate
        try:
            dataset = LeRobotDataset(layout.root, horizon=1, trust_timestamps=trust_timestamps)
            problems += dataset.report()[2:]
            break
        except DataError as error:
            refusal = refusal or str(error)
    return Inspection(
        layout=layout,
        episodes_on_disk=len(places),
        rows_on_disk=sum(place.length for place in places),
        lengths=(min(place.length for place in places), max(place.length for place in places)) if places else (0, 0),
        recorded_fps=recorded,
        cameras=tuple(_camera(layout, name, [place.episode for place in places], attempt) for name in layout.cameras),
        vectors=tuple(vectors),
        tasks=tuple(layout.tasks.values())
        or tuple(dict.fromkeys(text for meta in layout.episodes.values() for text in meta.tasks)),
        refusal=refusal,
        problems=tuple(problem for problem in dict.fromkeys(problems) if problem != refusal),
    )


def _places(layout: Layout, attempt: Callable[..., Any], problems: list[str]) -> list[rows.Place]:
    there = [index for index, meta in layout.episodes.items() if present(layout, meta)]
    if len(there) < len(layout.episodes):
        problems.append(f"{len(layout.episodes) - len(there)} of {len(layout.episodes)} episodes have no files here.")
    try:
        return rows.locate(layout, there, problems)
    except DataError:  # one by one, to name every episode concerned
        found = [attempt(lambda index=index: rows.locate(layout, [index], problems), []) for index in there]
        return [place for places in found for place in places]


def _summarise(
    name: str, values: np.ndarray, labels: tuple[str, ...], places: list[rows.Place], attempt: Callable[..., Any]
) -> VectorSummary:
    labels = labels or tuple(str(dim) for dim in range(values.shape[1]))
    attempt(lambda: rows.check_finite(places, name, values, labels))
    values = np.where(np.isfinite(values).all(axis=0), values, np.nan)
    return VectorSummary(name, labels, values.min(axis=0), values.max(axis=0))


def _camera(layout: Layout, name: str, episodes: list[int], attempt: Callable[..., Any]) -> CameraSummary:
    feature = layout.features[name]
    spans = [layout.episodes[episode].videos[name] for episode in episodes if name in layout.episodes[episode].videos]
    paths = sorted({layout.root / span.path for span in spans})
    there = [path for path in paths if path.exists()]
    # Where none exists the camera as a whole is absent, which the reader reports in one line.
    headers = [attempt(lambda path=path: probe_video(path)) for path in paths] if there else []
    header = next((header for header in headers if header), None)
    return CameraSummary(name, feature.dtype, feature.codec, feature.shape, len(there), header)


def episode_pictures(
    path: str | Path, episode: int, count: int, vector: str
) -> tuple[np.ndarray, dict[str, list[np.ndarray]], list[str]]:
    """(frame numbers [count], {camera: pictures at them}, problems): evenly spaced looks at one episode.

    Cameras are opened one by one, so that a broken one does not hide the others; `vector` is any vector feature of the
    files, which stands in for state and action in datasets that lack them.
    """
    layout = read_layout(path)
    frames = np.unique(np.linspace(0, layout.episodes[episode].length - 1, count).round().astype(int))
    pictures, problems = {}, []
    for camera in layout.cameras:
        try:
            dataset = LeRobotDataset(
                path,
                horizon=1,
                cameras=[camera],
                episodes=[episode],
                state_key=vector,
                action_key=vector,
                trust_timestamps=True,
                default_task="",
            )
            pictures[camera] = [dataset.frame(int(frame), camera) for frame in frames]
        except DataError as error:
            problems.append(str(error))
    return frames, pictures, problems


def episode_vectors(path: str | Path, episode: int, names: list[str]) -> dict[str, np.ndarray]:
    """{name: float32 [frames, n]} of one episode."""
    layout = read_layout(path)
    loaded = rows.load(rows.locate(layout, [episode], []), layout.features, dict.fromkeys(names, np.float32))
    return {name: values.reshape(len(values), -1) for name, values in loaded.items()}
