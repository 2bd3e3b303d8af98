"""The rows of chosen episodes: where they are, their columns, and whether they are what the metadata says."""

import dataclasses
from pathlib import Path

import numpy as np

from somaspeed_jax.data.columns import numbers, read_columns
from somaspeed_jax.data.errors import DataError
from somaspeed_jax.data.layout import Feature, Layout, check_file, open_parquet

RATE_TOLERANCE = 0.01  # relative difference of two frame rates that counts as the same
STEP_TOLERANCE = 1e-4  # seconds, the tolerance LeRobot uses


@dataclasses.dataclass(frozen=True)
class Place:
    """Rows `row : row + length` of a parquet file are episode `episode`."""

    episode: int
    path: Path
    row: int
    length: int


def locate(layout: Layout, episodes: list[int], notes: list[str]) -> list[Place]:
    """Finds each episode's rows by its number, not by the metadata's arithmetic.

    Raises DataError for a file that cannot be read and for an episode whose rows are missing, scattered or of another
    number than the metadata says. A file named wrongly by the metadata (LeRobot 0.4.0 did so for the first episode of
    each file but the first) is noted and its neighbours are searched.
    """
    found: dict[Path, dict[int, np.ndarray] | int] = {}

    def rows_of(path: Path, episode: int) -> np.ndarray:
        if path not in found:
            found[path] = _episodes_in(path)
        rows = found[path]
        return np.arange(rows) if isinstance(rows, int) else rows.get(episode, np.arange(0))

    files = sorted({layout.root / meta.data_path for meta in layout.episodes.values()}) if layout.shared_files else []
    places = []
    for episode in episodes:
        meta = layout.episodes[episode]
        path = check_file(layout.root / meta.data_path)
        rows = rows_of(path, episode)
        if not len(rows) and layout.shared_files:
            position = files.index(path)
            for other in files[position + 1 :] + files[:position][::-1]:
                if other.exists() and len(rows := rows_of(other, episode)):
                    notes.append(f"{path}: does not hold episode {episode}, as meta/episodes says; found in {other}.")
                    path = other
                    break
        if len(rows) != meta.length or not len(rows):
            raise DataError(
                f"{path}: has {len(rows)} rows of episode {episode}; the table of episodes says {meta.length}. "
                f"Fetch or convert the dataset again, or correct the table."
            )
        if rows[-1] - rows[0] + 1 != len(rows):
            raise DataError(f"{path}: the rows of episode {episode} do not follow each other.")
        places.append(Place(episode, path, int(rows[0]), len(rows)))
    return places


def _episodes_in(path: Path) -> dict[int, np.ndarray] | int:
    """{episode: its row numbers}, or the number of rows of a file that does not number its episodes."""
    file = open_parquet(path)
    if "episode_index" not in file.schema_arrow.names:
        return file.metadata.num_rows
    column = numbers(read_columns(file, path, ["episode_index"])["episode_index"], (), f"{path}: episode_index")
    order = np.argsort(column, kind="stable")
    episodes, starts = np.unique(column[order], return_index=True)
    return dict(zip(episodes.astype(int).tolist(), np.split(order, starts[1:]), strict=True))


def stored_columns(places: list[Place]) -> set[str]:
    """The columns that every file has."""
    names = [set(open_parquet(path).schema_arrow.names) for path in dict.fromkeys(place.path for place in places)]
    return set.intersection(*names)


def load(places: list[Place], features: dict[str, Feature], dtypes: dict[str, type]) -> dict[str, np.ndarray]:
    """Columns of all episodes, one after the other: {name: dtype [rows, *shape]} for the names in `dtypes`.

    A feature of shape [1], and a column that is not declared, gives [rows, 1]. Raises DataError naming file and
    feature for a column that is missing or not numbers of the declared shape.
    """
    parts: dict[str, list[np.ndarray]] = {name: [] for name in dtypes}
    current, table = None, None
    for path, row, length in _runs(places):
        if path != current or table is None:
            current, table = path, read_columns(open_parquet(path), path, list(dtypes))
        for name, dtype in dtypes.items():
            shape = features[name].shape if name in features else (1,)
            values = numbers(table[name].slice(row, length), shape, f"{path}: {name}", row)
            parts[name].append(values.astype(dtype))
    return {name: np.concatenate(arrays) for name, arrays in parts.items()}


def _runs(places: list[Place]) -> list[tuple[Path, int, int]]:
    """(file, first row, rows) of stretches that follow each other, which are read as one."""
    runs: list[tuple[Path, int, int]] = []
    for place in places:
        path, row, length = runs[-1] if runs else (None, 0, 0)
        if place.path == path and place.row == row + length:
            runs[-1] = (place.path, row, length + place.length)
        else:
            runs.append((place.path, place.row, place.length))
    return runs


def check_finite(places: list[Place], name: str, values: np.ndarray, labels: tuple[str, ...]) -> None:
    """Raises DataError naming the first entry of `values` [rows, n] that is not a finite float32."""
    bad = np.argwhere(~np.isfinite(values))
    if not len(bad):
        return
    row, dim = int(bad[0, 0]), int(bad[0, 1])
    starts = np.cumsum([0] + [place.length for place in places])
    position = int(np.searchsorted(starts, row, side="right")) - 1
    place = places[position]
    raise DataError(
        f"{place.path}: episode {place.episode}, frame {row - starts[position]}: {name}[{dim}] ({labels[dim]}) is "
        f"{values[row, dim]}; expected a finite number ({len(bad)} such entries in {name}). Repair the file or leave "
        f"the episode out (data.episodes)."
    )


def check_frame_index(places: list[Place], frame_index: np.ndarray) -> None:
    """Raises DataError unless each episode's frame_index [rows] counts 0, 1, 2 …"""
    start = 0
    for place in places:
        values = frame_index[start : start + place.length]
        wrong = np.flatnonzero(values != np.arange(place.length))
        if len(wrong):
            raise DataError(
                f"{place.path}: episode {place.episode}: frame_index is {values[wrong[0]]:g} in row {wrong[0]} of the "
                f"episode; expected {wrong[0]}. Rows are missing or out of order."
            )
        start += place.length


def check_times(
    places: list[Place], timestamps: np.ndarray, fps: float, trust_timestamps: bool, notes: list[str]
) -> float:
    """The rate in frames a second: the declared `fps`, or the recorded one if `trust_timestamps`.

    `timestamps` [rows] seconds. Raises DataError if an episode's recorded rate is not the declared one, if recorded
    rates differ among episodes, or if time does not run forward. Steps that are uneven without changing the rate are
    noted. float32 timestamps of an hour are 0.24 ms apart, so the tolerance of a step grows with its time.
    """
    start, uneven, recorded = 0, 0, []
    for place in places:
        times = timestamps[start : start + place.length]
        start += place.length
        steps = np.diff(times)
        if not np.isfinite(times).all() or (steps <= 0).any():
            raise DataError(f"{place.path}: episode {place.episode}: timestamp does not increase from row to row.")
        if place.length < 2:
            continue
        # One pause moves the mean of the steps, float32 rounding moves their median: the rate is wrong if both are.
        rates = (1 / float(np.mean(steps)), 1 / float(np.median(steps)))
        rate = rates[0] if _same(*rates) else rates[1]
        if not trust_timestamps and not _same(rate, fps) and not _same(rates[0], fps):
            raise DataError(
                f"{place.path}: episode {place.episode} is recorded at {rate:.4g} frames a second (timestamps are "
                f"{1 / rate:.4g} s apart), but meta/info.json declares fps = {fps:g}. Correct meta/info.json, or set "
                f"data.trust_timestamps=true to use the recorded rate."
            )
        recorded.append((rate, place))
        expected = 1 / (rate if trust_timestamps else fps)
        uneven += int((np.abs(steps - expected) > STEP_TOLERANCE + np.spacing(np.float32(times[-1]))).sum())
    if uneven:
        notes.append(f"timestamp: {uneven} steps are not 1/fps; pictures and rows are matched by number.")
    if trust_timestamps and recorded:
        return _recorded_rate(recorded, fps, notes)
    return fps


def _same(rate: float, other: float) -> bool:
    return abs(rate / other - 1) <= RATE_TOLERANCE


def _recorded_rate(recorded: list[tuple[float, Place]], declared: float, notes: list[str]) -> float:
    slow, fast = min(recorded, key=lambda r: r[0]), max(recorded, key=lambda r: r[0])
    if not _same(slow[0], fast[0]):
        raise DataError(
            f"{slow[1].path}: episode {slow[1].episode} is recorded at {slow[0]:.4g} frames a second, episode "
            f"{fast[1].episode} at {fast[0]:.4g}; expected one rate. Choose episodes of one rate (data.episodes)."
        )
    rate = float(np.median([rate for rate, _ in recorded]))
    if abs(rate / round(rate or 1) - 1) <= RATE_TOLERANCE / 2:
        rate = float(round(rate))  # timestamps rounded to float32
    if not _same(rate, declared):
        notes.append(f"meta/info.json declares fps = {declared:g}; the recorded rate of {rate:g} is used, as asked.")
    return rate
