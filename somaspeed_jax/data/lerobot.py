"""A LeRobot dataset (v2.0, v2.1, v3.0, GR00T's flavour) as a random-access source of records.

Everything that can be known before the first sample is checked when the dataset is opened: the files, the rows, the
rates, the numbers and the headers of the videos. After that a record is cheap: numeric columns are in memory, frames
are decoded when asked for.
"""

import collections
import copy
import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from somaspeed_jax.data import rows
from somaspeed_jax.data.columns import PictureColumns
from somaspeed_jax.data.errors import DataError
from somaspeed_jax.data.layout import Feature, Layout, read_layout
from somaspeed_jax.data.pictures import choose_cameras, place_pictures, present
from somaspeed_jax.data.split import split_episodes as split_episodes
from somaspeed_jax.data.video import VideoPool

SAMPLED_BYTES = 1 << 16  # read at the start, middle and end of a file for the fingerprint


@dataclasses.dataclass(frozen=True)
class Episode:
    """A chosen episode: `length` rows from `start` in `numeric(key)`, of which the first `usable` begin a record."""

    index: int
    length: int
    start: int
    usable: int

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + self.length)


@dataclasses.dataclass(frozen=True)
class Coverage:
    """frames_on_disk = used + left_out, over the chosen episodes; `empty_episodes` give no sample at all."""

    frames_on_disk: int
    used: int
    left_out: int
    reason: str
    empty_episodes: tuple[int, ...]

    def __str__(self) -> str:
        text = f"frames on disk {self.frames_on_disk} = used {self.used} + left out {self.left_out} ({self.reason})"
        if self.empty_episodes:
            text += f"; episodes without a sample: {', '.join(map(str, self.empty_episodes))}"
        return text


class LeRobotDataset:
    """Records of chosen episodes and cameras, in order of episode and frame.

    Args:
      path: the dataset's folder.
      horizon: t, actions in a chunk.
      cameras: full names of camera features; None takes all that have pictures, () none.
      episodes: episode numbers; None takes all that are on disk.
      state_key, action_key: the features that hold state and actions (flattened if they have several axes).
      trust_timestamps: take the frame rate from the rows where info.json declares another one.
      tail: "repeat" starts a chunk at every frame and repeats the last action past the end of the episode;
        "drop" starts chunks only where the whole chunk is inside the episode.
      task_key: a column of task indices (an annotation of modality.json, by its name or its column); None: task_index.
      default_task: the prompt of a dataset that has no tasks.

    Raises DataError, when opened, for anything that would make a record wrong.

    Attributes: `fps`, `features` {name: Feature}, `cameras`, `episodes` (tuple of Episode), `state_names`,
    `action_names`, `state_dim`, `action_dim`, `tasks` (the prompts that occur, sorted), `task_episodes` {prompt: the
    first episode with it}, `modality` (or None), `coverage`, `fingerprint`.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        horizon: int,
        cameras: Sequence[str] | None = None,
        episodes: Sequence[int] | None = None,
        state_key: str = "observation.state",
        action_key: str = "action",
        trust_timestamps: bool = False,
        tail: str = "repeat",
        task_key: str | None = None,
        default_task: str | None = None,
    ):
        if horizon < 1 or tail not in ("repeat", "drop"):
            raise ValueError(f"horizon is {horizon} and tail {tail!r}; expected 1 or more, and 'repeat' or 'drop'")
        layout = read_layout(path)
        notes = list(layout.notes)
        chosen = _choose_episodes(layout, episodes, notes)
        places = rows.locate(layout, chosen, notes)
        stored = rows.stored_columns(places)

        self.path = layout.root
        self.version = layout.version
        self.horizon, self.tail = horizon, tail
        self.features = layout.features
        self.modality = layout.modality
        self.cameras = choose_cameras(layout, cameras, stored, chosen, notes)
        self._places = places

        self.state_key = _require_vector(layout, state_key, "data.state_key", stored)
        self.action_key = _require_vector(layout, action_key, "data.action_key", stored)
        task_column = _task_column(layout, task_key, stored)
        wanted = [name for name in ("frame_index", "timestamp", task_column) if name in stored]
        dtypes = dict.fromkeys(wanted, np.float64) | dict.fromkeys((state_key, action_key), np.float32)
        columns = {k: v.reshape(len(v), -1) for k, v in rows.load(places, layout.features, dtypes).items()}
        self._values = {key: columns[key] for key in (state_key, action_key)}
        self.state_dim, self.action_dim = self._values[state_key].shape[1], self._values[action_key].shape[1]
        self.state_names = _labels(layout.features[state_key], self.state_dim, notes)
        self.action_names = _labels(layout.features[action_key], self.action_dim, notes)
        rows.check_finite(places, state_key, self._values[state_key], self.state_names)
        rows.check_finite(places, action_key, self._values[action_key], self.action_names)

        self.fps, first_times = _check_order(layout, places, columns, trust_timestamps, notes)
        self._spans = place_pictures(layout, self.cameras, places, first_times, self.fps, trust_timestamps, notes)
        for camera in self.cameras:
            if layout.features[camera].dtype == "image":  # that the column holds pictures, not just their paths
                PictureColumns().picture(places[0].path, camera, places[0].row)
        self._prompts, self._prompt_of_row = _prompts(layout, places, columns, task_column, default_task, notes)
        self._list_records()
        self._notes = tuple(notes)
        self._videos, self._pictures = VideoPool(), PictureColumns()

    def _list_records(self) -> None:
        """What follows from the episodes held: their records, and the prompts that occur."""
        self._place_of = {place.episode: place for place in self._places}
        of_row = np.repeat([place.episode for place in self._places], [place.length for place in self._places])
        prompts, first = np.unique(self._prompt_of_row, return_index=True)
        found = ((self._prompts[prompt], int(of_row[row])) for prompt, row in zip(prompts, first, strict=True))
        self.task_episodes = dict(sorted(found))
        self.tasks = tuple(self.task_episodes)
        self.episodes, self.coverage = _cover(self._places, self.horizon, self.tail)
        self._record_ends = np.cumsum([episode.usable for episode in self.episodes])

    def subset(self, episodes: Sequence[int]) -> "LeRobotDataset":
        """What opening these episodes alone would give, without reading anything again; DataError if there is none."""
        chosen, held = set(episodes), list(self._place_of)
        if not chosen or not chosen <= set(held):
            raise DataError(f"{self.path}: asked for episodes {list(episodes)} of those opened, {held}.")
        part = copy.copy(self)
        part.__dict__.pop("fingerprint", None)  # of these episodes: computed when asked for
        part._places = [place for place in self._places if place.episode in chosen]
        kept = np.concatenate([np.arange(e.start, e.start + e.length) for e in self.episodes if e.index in chosen])
        part._values = {key: values[kept] for key, values in self._values.items()}
        part._prompt_of_row = self._prompt_of_row[kept]
        part._spans = {key: span for key, span in self._spans.items() if key[1] in chosen}
        part._list_records()
        return part

    def __len__(self) -> int:
        """Number of records: (episode, frame) pairs at which a chunk may start."""
        return self.coverage.used

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.record(index)

    def __repr__(self) -> str:
        return (
            f"LeRobotDataset({self.path.name!r}, {self.fingerprint[:16]}, horizon={self.horizon}, records={len(self)})"
        )

    def record(self, index: int, images: bool = True) -> dict[str, Any]:
        """Record `index`: see docs/design.md. Without `images` nothing is decoded and `images` is empty.

        `index`, `episode_index`, `frame_index` (int), `task` (str), `state` float32 [s], `actions` float32 [t, a],
        `action_is_pad` bool [t], `images` {camera: uint8 [h, w, 3]}. Raises DataError for a frame that does not decode.
        """
        episode, frame = self._find(index)
        steps = frame + np.arange(self.horizon)
        row = episode.start + frame
        return {
            "index": int(index),
            "episode_index": episode.index,
            "frame_index": frame,
            "task": self._prompts[self._prompt_of_row[row]],
            "images": {camera: self._picture(camera, episode, frame) for camera in self.cameras} if images else {},
            "state": self._values[self.state_key][row].copy(),
            "actions": self._values[self.action_key][episode.start + np.minimum(steps, episode.length - 1)],
            "action_is_pad": steps >= episode.length,
        }

    def frame(self, index: int, camera: str) -> np.ndarray:
        """uint8 [h, w, 3]: what `camera` saw at record `index`. The array may be shared; do not write to it."""
        return self._picture(camera, *self._find(index))

    def row(self, index: int) -> int:
        """The row of `numeric(key)` at which record `index` starts."""
        episode, frame = self._find(index)
        return episode.start + frame

    def numeric(self, key: str) -> np.ndarray:
        """float32 [rows, *shape] ([rows, 1] for scalars): all rows of the chosen episodes; pictures are not touched.

        State and action are held in memory and always [rows, n]; other features are read at each call.
        """
        if key in self._values:
            return self._values[key]
        return rows.load(self._places, self.features, {key: np.float32})[key]

    @property
    def episode_rows(self) -> dict[int, slice]:
        """{episode number: its rows in `numeric(key)`}."""
        return {episode.index: episode.rows for episode in self.episodes}

    def report(self) -> list[str]:
        """Lines to print before training: what is used, and everything odd that was noticed."""
        return [
            f"{self.path.name}: {self.version}, {self.fps:g} frames a second, {len(self.episodes)} episodes, "
            f"cameras {', '.join(self.cameras) or 'none'}",
            str(self.coverage),
            *self._notes,
        ]

    @functools.cached_property
    def fingerprint(self) -> str:
        """Digest of what the records come from: names, sizes and sampled bytes of the metadata and of the files of the
        chosen episodes and cameras, with the choice itself. The same on every machine; times of files do not count."""
        digest = hashlib.sha256(repr((1, self.fps, self.cameras, [p.episode for p in self._places])).encode())
        meta = [p for p in sorted((self.path / "meta").rglob("*")) if p.suffix in (".json", ".jsonl", ".parquet")]
        # Statistics may be added later, and records do not depend on them.
        used = [p for p in meta if "stats" not in p.name]
        files = used + [place.path for place in self._places] + [span.path for span in self._spans.values()]
        for path in sorted(set(files)):
            size = path.stat().st_size
            digest.update(f"{path.relative_to(self.path).as_posix()} {size}".encode())
            with path.open("rb") as file:
                for position in (0, size // 2, max(0, size - SAMPLED_BYTES)):
                    file.seek(position)
                    digest.update(file.read(SAMPLED_BYTES))
        return digest.hexdigest()

    def _find(self, index: int) -> tuple[Episode, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of {len(self)} in {self.path}")
        position = int(np.searchsorted(self._record_ends, index, side="right"))
        episode = self.episodes[position]
        return episode, int(index) - int(self._record_ends[position]) + episode.usable

    def _picture(self, camera: str, episode: Episode, frame: int) -> np.ndarray:
        if camera not in self.cameras:
            raise DataError(f"{self.path}: camera {camera!r} is not among those opened, {list(self.cameras)}.")
        span = self._spans.get((camera, episode.index))
        if span is None:  # pictures in parquet
            place = self._place_of[episode.index]
            return self._pictures.picture(place.path, camera, place.row + frame)
        file = self._videos.open(span.path)
        if abs(file.seconds(span.start) - span.from_timestamp) * self.fps > 0.5:
            raise DataError(
                f"{span.path}: episode {episode.index}, camera {camera!r}: frame {span.start} is at "
                f"{file.seconds(span.start):.4f} s, but meta/episodes starts the episode at {span.from_timestamp:.4f} "
                f"s. The file does not run at {self.fps:g} frames a second throughout; convert the dataset again."
            )
        return file.frame(span.first + frame)


def _choose_episodes(layout: Layout, asked: Sequence[int] | None, notes: list[str]) -> list[int]:
    """The episodes to use, sorted; those asked for must all exist, and each once."""
    if asked is None:
        found = [index for index, meta in layout.episodes.items() if present(layout, meta)]
        absent = len(layout.episodes) - len(found)
        if not found:
            first = next(iter(layout.episodes.values()))
            raise DataError(f"{layout.root / first.data_path}: not found, nor the files of any other episode.")
        if absent:
            notes.append(f"{absent} of {len(layout.episodes)} episodes have no files here and are left out.")
        return found
    numbers = [int(index) for index in asked]
    twice = sorted(index for index, times in collections.Counter(numbers).items() if times > 1)
    unknown = sorted(set(numbers) - set(layout.episodes))
    if twice or unknown or not numbers:
        known = list(layout.episodes)
        problem = (
            f"{unknown} do not exist" if unknown else f"{twice} are given more than once" if twice else "none is given"
        )
        raise DataError(
            f"{layout.root}: data.episodes is {numbers}: {problem}; the dataset has {len(known)} episodes, "
            f"{known[0]} to {known[-1]}."
        )
    return sorted(numbers)


def _require_vector(layout: Layout, key: str, field: str, stored: set[str]) -> str:
    vectors = [n for n in sorted(stored) if n in layout.features and layout.features[n].shape not in ((), (1,))]
    feature = layout.features.get(key)
    if feature is None or key not in stored or feature.is_camera or feature.dtype in ("string", "language"):
        state = "is not a feature of this dataset"
        if feature:
            state = f"holds {feature.dtype}, not numbers" if key in stored else "is declared, but not in the files"
        raise DataError(
            f"{layout.root}: {key!r} {state}; training needs state and actions. Vectors in the files: {vectors}. "
            f"Name the right one in {field}."
        )
    return key


def _labels(feature: Feature, dims: int, notes: list[str]) -> tuple[str, ...]:
    if feature.names:
        return feature.names
    notes.append(f"feature {feature.name!r}: has no {dims} dimension names; they are numbered.")
    return tuple(f"dim_{i}" for i in range(dims))


def _check_order(
    layout: Layout, places: list[rows.Place], columns: dict[str, np.ndarray], trust_timestamps: bool, notes: list[str]
) -> tuple[float, list[float]]:
    """(frames a second, first timestamp of each episode) after checking frame numbers and times."""
    if "frame_index" in columns:
        rows.check_frame_index(places, columns["frame_index"][:, 0])
    else:
        notes.append("frame_index: the files have no such column; rows are taken in the order of the file.")
    if "timestamp" not in columns:
        if trust_timestamps:
            raise DataError(f"{layout.root}: data.trust_timestamps is set, but the files have no column 'timestamp'.")
        notes.append("timestamp: the files have no such column; the declared rate cannot be checked.")
        return layout.fps, [0.0] * len(places)
    times = columns["timestamp"][:, 0]
    fps = rows.check_times(places, times, layout.fps, trust_timestamps, notes)
    starts = np.cumsum([0] + [place.length for place in places[:-1]])
    return fps, [float(times[start]) for start in starts]


def _task_column(layout: Layout, task_key: str | None, stored: set[str]) -> str:
    """The column whose numbers choose the prompt; `task_key` is its name or an annotation's in modality.json."""
    annotations = layout.modality.annotation if layout.modality else {}
    column = annotations.get(task_key, task_key) if task_key else "task_index"
    if task_key and (column not in stored or not layout.tasks):
        known = sorted(name for name in stored if name.startswith("annotation.") or name == "task_index")
        raise DataError(
            f"{layout.root}: data.task_key is {task_key!r}; the files have {known} and {len(layout.tasks)} tasks."
        )
    return column


def _prompts(
    layout: Layout,
    places: list[rows.Place],
    columns: dict[str, np.ndarray],
    task_column: str,
    default_task: str | None,
    notes: list[str],
) -> tuple[list[str], np.ndarray]:
    """(texts, int32 [rows] into them). By the column of task indices, else by episode, else `default_task`."""
    if layout.tasks and task_column in columns:
        indices = columns[task_column].reshape(-1)
        unknown = sorted(set(np.unique(indices).astype(int).tolist()) - set(layout.tasks))
        if unknown:
            raise DataError(
                f"{layout.root}: {task_column} holds {unknown}, but meta/ lists the tasks {sorted(layout.tasks)}."
            )
        texts = list(layout.tasks.values())
        position = {index: i for i, index in enumerate(layout.tasks)}
        return texts, np.array([position[int(index)] for index in indices], np.int32)
    found: dict[str, int] = {}
    of_row = []
    for place in places:
        own = layout.episodes[place.episode].tasks
        text = own[0] if len(own) == 1 else default_task
        if text is None:
            raise DataError(
                f"{layout.root}: episode {place.episode} has no single task ({list(own)}), and meta/ lists no tasks "
                f"that its rows point to. Give a prompt in data.default_task."
            )
        of_row.append(np.full(place.length, found.setdefault(text, len(found)), np.int32))
    notes.append("prompts: one an episode, from the table of episodes or data.default_task; rows name no task.")
    return list(found), np.concatenate(of_row)


def _cover(places: list[rows.Place], horizon: int, tail: str) -> tuple[tuple[Episode, ...], Coverage]:
    episodes, start = [], 0
    for place in places:
        usable = place.length if tail == "repeat" else max(0, place.length - horizon + 1)
        episodes.append(Episode(place.episode, place.length, start, usable))
        start += place.length
    used = sum(episode.usable for episode in episodes)
    reason = (
        "tail: the last action is repeated past the end"
        if tail == "repeat"
        else f"tail: chunks of {horizon} that reach past the end are dropped"
    )
    coverage = Coverage(start, used, start - used, reason, tuple(e.index for e in episodes if not e.usable))
    if not used:
        longest = max(episode.length for episode in episodes)
        raise DataError(
            f"no sample can be made: the longest of {len(episodes)} episodes has {longest} frames, and data.tail = "
            f"{tail!r} needs {horizon} (model.horizon). Use data.tail=repeat or a shorter horizon."
        )
    return tuple(episodes), coverage
