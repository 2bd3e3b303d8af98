"""Statistics of state and action dimensions: computed from rows, read from the files in use, written as strict JSON.

Quantiles are exact (numpy's linear interpolation over all rows). Files written by recording tools often hold
something else under that name (an average over episodes, an outer envelope), which is why training computes its own.
"""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

Space = Literal["absolute", "relative"]
FIELDS = ("min", "max", "mean", "std", "q01", "q99")
FORMAT = "somaspeed_jax.statistics.v1"


class StatisticsError(ValueError):
    """Statistics that are missing, malformed or do not belong to the data."""


@dataclasses.dataclass(frozen=True, eq=False)
class FeatureStatistics:
    """Statistics of one vector feature.

    Every array is float64 [n], or [t, n] for relative actions with one row per chunk step. A field that the source
    does not hold is None; `require` turns that into an error. `std` is the population's (ddof 0). `space` says
    whether actions were taken as recorded or relative to the state.
    """

    feature: str
    names: tuple[str, ...]
    count: int | None
    min: np.ndarray | None = None
    max: np.ndarray | None = None
    mean: np.ndarray | None = None
    std: np.ndarray | None = None
    q01: np.ndarray | None = None
    q99: np.ndarray | None = None
    space: Space = "absolute"

    def __post_init__(self):
        if self.space not in ("absolute", "relative"):
            raise StatisticsError(f"{self.feature}: space is {self.space!r}, expected 'absolute' or 'relative'")
        shapes = {}
        for field in FIELDS:
            value = getattr(self, field)
            if value is None:
                continue
            value = np.asarray(value, np.float64)
            object.__setattr__(self, field, value)
            shapes[field] = value.shape
            if not np.isfinite(value).all():
                where = np.argwhere(~np.isfinite(value))[0].tolist()
                raise StatisticsError(
                    f"{self.feature}: {field}{where} is {value[tuple(where)]}, expected a finite number"
                )
        if not shapes:
            raise StatisticsError(f"{self.feature}: no statistics at all, expected some of {', '.join(FIELDS)}")
        wrong = {f: s for f, s in shapes.items() if s != next(iter(shapes.values())) or len(s) not in (1, 2)}
        if wrong or next(iter(shapes.values()))[-1] != len(self.names):
            raise StatisticsError(
                f"{self.feature}: shapes {shapes} with {len(self.names)} dimension names; "
                "expected [n] or [t, n] throughout"
            )
        for low, high in (("min", "max"), ("q01", "q99")):
            a, b = getattr(self, low), getattr(self, high)
            if a is not None and b is not None and (a > b).any():
                where = tuple(np.argwhere(a > b)[0].tolist())
                raise StatisticsError(f"{self.feature}: {low}{list(where)} = {a[where]} is above {high} = {b[where]}")
        if self.std is not None and (self.std < 0).any():
            raise StatisticsError(f"{self.feature}: std has a negative entry: {self.std.tolist()}")

    @property
    def size(self) -> int:
        """Number of dimensions n."""
        return len(self.names)

    @property
    def steps(self) -> int | None:
        """t where each chunk step has its own statistics, else None."""
        shape = next(v.shape for f in FIELDS if (v := getattr(self, f)) is not None)
        return shape[0] if len(shape) == 2 else None

    def require(self, field: str) -> np.ndarray:
        """The field's array; StatisticsError naming feature, field and remedy when the source does not hold it."""
        value = getattr(self, field)
        if value is None:
            present = [f for f in FIELDS if getattr(self, f) is not None]
            raise StatisticsError(
                f"{self.feature}: no {field} in the statistics (present: {', '.join(present)}). Compute them from the "
                "data with `python tools/compute_stats.py DATASET`, or set stats.source to 'dataset'"
            )
        return value

    def require_space(self, space: Space) -> None:
        """StatisticsError unless the statistics were computed in `space`: the two must never be mixed."""
        if self.space != space:
            raise StatisticsError(
                f"{self.feature}: statistics of {self.space} actions used for {space} actions. Compute them again with "
                f"`python tools/compute_stats.py DATASET{' --relative' if space == 'relative' else ''}`"
            )


def _names(feature: str, names: Sequence[str] | None, n: int) -> tuple[str, ...]:
    if names is None:
        return tuple(str(i) for i in range(n))
    if len(names) != n:
        raise StatisticsError(f"{feature}: {len(names)} dimension names for {n} dimensions")
    return tuple(map(str, names))


def _columns(feature: str, rows: np.ndarray, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Exact statistics of rows [N, n], one column at a time so that float64 copies stay small."""
    if rows.shape[0] == 0:
        raise StatisticsError(f"{feature}: no rows to compute statistics from")
    out = {field: np.empty(rows.shape[1], np.float64) for field in FIELDS}
    for i in range(rows.shape[1]):
        column = rows[:, i].astype(np.float64)
        if not np.isfinite(column).all():
            row = int(np.flatnonzero(~np.isfinite(column))[0])
            raise StatisticsError(
                f"{feature}: row {row}, dimension {i} ({names[i]}) is {column[row]}, expected a finite number"
            )
        out["min"][i], out["max"][i] = column.min(), column.max()
        out["mean"][i], out["std"][i] = column.mean(), column.std()
        out["q01"][i], out["q99"][i] = np.quantile(column, (0.01, 0.99))
    return out


def compute(
    rows: np.ndarray, names: Sequence[str] | None = None, *, feature: str, space: Space = "absolute"
) -> FeatureStatistics:
    """Statistics of rows [N, n] (any real type). Raises StatisticsError for an empty table, NaN or infinity."""
    rows = np.asarray(rows)
    if rows.ndim != 2:
        raise StatisticsError(f"{feature}: rows of shape {rows.shape}, expected [rows, dimensions]")
    names = _names(feature, names, rows.shape[1])
    return FeatureStatistics(feature, names, rows.shape[0], space=space, **_columns(feature, rows, names))


def compute_relative(
    actions: np.ndarray,
    reference: np.ndarray,
    episode_index: np.ndarray,
    horizon: int,
    names: Sequence[str] | None = None,
    *,
    mask: np.ndarray | None = None,
    per_step: bool = False,
    feature: str = "action",
) -> FeatureStatistics:
    """Statistics of action chunks minus the state at the chunk's first frame.

    Args:
      actions: [N, a], frames in recording order, one episode after the other.
      reference: [N, a], what is subtracted from each dimension of a chunk that starts at that frame (the state
        dimensions in the order of the actions).
      episode_index: [N] int; a chunk repeats the last action of its episode rather than enter the next one.
      horizon: chunk length t.
      mask: [a] bool; false dimensions stay absolute. Default: all are relative.
      per_step: false: [a], over all chunks and steps, repeated tails included (openpi computes its statistics over
        the transformed chunks as the model gets them). True: [t, a], complete chunks only (Isaac-GR00T
        relative_stats.json).
    """
    actions, reference = np.asarray(actions), np.asarray(reference)
    if actions.ndim != 2 or reference.shape != actions.shape:
        raise StatisticsError(
            f"{feature}: actions {actions.shape} and reference state {reference.shape}, expected [N, a] both"
        )
    n, dims = actions.shape
    names = _names(feature, names, dims)
    mask = np.ones(dims, bool) if mask is None else np.asarray(mask, bool)
    if mask.shape != (dims,):
        raise StatisticsError(f"{feature}: mask of shape {mask.shape}, expected ({dims},)")
    episode_index = np.asarray(episode_index)
    if episode_index.shape != (n,) or horizon < 1:
        raise StatisticsError(f"{feature}: episode_index {episode_index.shape} for {n} rows, horizon {horizon}")
    last = np.flatnonzero(np.append(np.diff(episode_index) != 0, True))
    last = last[np.searchsorted(last, np.arange(n))]  # [N] last row of each row's episode
    offset = np.where(mask, reference.astype(np.float64), 0.0)

    if per_step:
        start = np.flatnonzero(np.arange(n) + horizon - 1 <= last)
        if not len(start):
            raise StatisticsError(f"{feature}: no episode has the {horizon} frames of a complete chunk")
        steps = [_columns(feature, actions[start + h] - offset[start], names) for h in range(horizon)]
        stacked = {field: np.stack([s[field] for s in steps]) for field in FIELDS}
        return FeatureStatistics(feature, names, len(start), space="relative", **stacked)

    rows = np.minimum(np.arange(n)[:, None] + np.arange(horizon), last[:, None]).reshape(-1)
    columns = [  # one dimension at a time: the whole [N * t, a] table of a long recording would not fit
        _columns(feature, (actions[rows, i] - np.repeat(offset[:, i], horizon))[:, None], names[i : i + 1])
        for i in range(dims)
    ]
    joined = {field: np.concatenate([c[field] for c in columns]) for field in FIELDS}
    return FeatureStatistics(feature, names, n * horizon, space="relative", **joined)


def of_dataset(
    dataset: Any, *, relative: np.ndarray | None = None, per_step: bool = False
) -> dict[str, FeatureStatistics]:
    """Statistics of state and actions over the rows of a dataset's chosen episodes (lerobot.py); no picture is read.

    Args:
      relative: [a] bool, action dimensions taken relative to the state dimension of the same number, over chunks of
        `dataset.horizon`. None: actions as recorded.
      per_step: see `compute_relative`.

    Returns {dataset.state_key: ..., dataset.action_key: ...}.
    """
    states, actions = dataset.numeric(dataset.state_key), dataset.numeric(dataset.action_key)
    state = compute(states, dataset.state_names, feature=dataset.state_key)
    key, names = dataset.action_key, dataset.action_names
    if relative is None:
        return {dataset.state_key: state, key: compute(actions, names, feature=key)}
    shared = min(states.shape[1], actions.shape[1])
    if np.any(relative[shared:]):
        alone = [name for name, is_relative in zip(names[shared:], relative[shared:], strict=True) if is_relative]
        raise StatisticsError(f"{key}: dimensions {alone} are relative, but {dataset.state_key} has only {shared}")
    reference = np.zeros_like(actions)
    reference[:, :shared] = states[:, :shared]
    episode_index = np.zeros(len(actions), np.int64)
    for episode, rows in dataset.episode_rows.items():
        episode_index[rows] = episode
    action = compute_relative(
        actions, reference, episode_index, dataset.horizon, names, mask=relative, per_step=per_step, feature=key
    )
    return {dataset.state_key: state, key: action}


def concatenate(parts: Sequence[FeatureStatistics], feature: str) -> FeatureStatistics:
    """One vector feature out of parts that follow each other (GR00T's groups), with the fields that all parts have."""
    if len({(p.space, p.steps) for p in parts}) != 1:
        raise StatisticsError(
            f"{feature}: parts differ: " + ", ".join(f"{p.feature} is {p.space} with {p.steps} steps" for p in parts)
        )
    fields = {
        f: np.concatenate([p.require(f) for p in parts], -1)
        for f in FIELDS
        if all(getattr(p, f) is not None for p in parts)
    }
    counts = [p.count for p in parts if p.count is not None]
    return FeatureStatistics(
        feature,
        tuple(name for p in parts for name in p.names),
        min(counts) if len(counts) == len(parts) else None,
        space=parts[0].space,
        **fields,
    )


def save(path: str | Path, statistics: Mapping[str, FeatureStatistics]) -> None:
    """Writes a strict JSON file that `load` reads, first under a temporary name, then renamed."""
    features = {}
    for key, s in statistics.items():
        arrays = {f: v.tolist() for f in FIELDS if (v := getattr(s, f)) is not None}
        features[key] = {"space": s.space, "names": list(s.names), "count": s.count, **arrays}
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "w", encoding="utf-8") as f:
        json.dump({"format": FORMAT, "features": features}, f, indent=1, allow_nan=False)
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, path)


def load(path: str | Path, *, tag: str | None = None) -> dict[str, FeatureStatistics]:
    """Vector features of a statistics file, by feature name.

    Reads files written by `save`, LeRobot's meta/stats.json, openpi's norm_stats.json (`state`, `actions`), GR00T's
    statistics.json (`state.<group>`, `action.<group>`, `relative_action.<group>`) and MolmoAct2's norm_stats.json
    (under the tag's own state and action keys). The last two hold one entry per robot, chosen by `tag`. Picture
    statistics ([3, 1, 1]) are left out: pictures are normalised by fixed constants.
    """
    path = Path(path)
    content = _read(path)
    if content.get("format") == FORMAT:
        entries = content["features"]
    elif "norm_stats" in content:
        entries = content["norm_stats"]
    elif "metadata_by_tag" in content:
        entry = _choose(path, content["metadata_by_tag"], tag)
        state = entry.get("state_key") or (entry.get("state_keys") or ["observation.state"])[0]
        keys = {state: "state_stats", entry.get("action_key", "action"): "action_stats"}
        entries = {feature: entry[field] for feature, field in keys.items() if entry.get(field)}
    elif any(isinstance(v, dict) and isinstance(v.get("state"), dict) for v in content.values()):
        entry = _choose(path, content, tag)
        entries = {
            f"{kind}.{group}": {"space": "relative" if kind == "relative_action" else "absolute", **values}
            for kind, groups in entry.items()
            for group, values in groups.items()
        }
    else:
        entries = content
    out = {}
    for feature, values in entries.items():
        if isinstance(values, dict) and (parsed := _parse(path, feature, values)):
            out[feature] = parsed
    if not out:
        raise StatisticsError(
            f"{path}: no feature with any of {', '.join(FIELDS)}; top-level keys: {sorted(content)[:20]}"
        )
    return out


def _refuse_constant(word: str):
    raise ValueError(f"the bare word {word}")


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise StatisticsError(f"{path}: no such file. `python tools/compute_stats.py DATASET` writes one")
    text = path.read_text(encoding="utf-8")
    if text.startswith("version https://git-lfs"):
        raise StatisticsError(f"{path}: a Git-LFS pointer, the content was never fetched. Run `git lfs pull`")
    try:
        content = json.loads(text, parse_constant=_refuse_constant)
    except ValueError as e:
        raise StatisticsError(f"{path}: not strict JSON ({e or 'empty'})") from e
    if not isinstance(content, dict):
        raise StatisticsError(f"{path}: holds a {type(content).__name__}, expected an object by feature name")
    return content


def _choose(path: Path, entries: Mapping[str, Any], tag: str | None) -> Mapping[str, Any]:
    if tag is None and len(entries) == 1:
        return next(iter(entries.values()))
    if tag is None or tag not in entries:
        raise StatisticsError(f"{path}: statistics by robot for {sorted(entries)}; asked for {tag!r}")
    return entries[tag]


def _parse(path: Path, feature: str, values: Mapping[str, Any]) -> FeatureStatistics | None:
    try:
        arrays = {f: np.asarray(values[f], np.float64) for f in FIELDS if values.get(f) is not None}
    except (TypeError, ValueError) as e:
        raise StatisticsError(f"{path}: {feature}: {e}, expected lists of numbers") from e
    if not arrays or any(a.ndim > 2 for a in arrays.values()):
        return None
    arrays = {f: np.atleast_1d(a) for f, a in arrays.items()}
    count = values.get("count")
    size = next(iter(arrays.values())).shape[-1]
    try:
        return FeatureStatistics(
            feature,
            _names(feature, values.get("names"), size),
            None if count is None else int(np.min(count)),
            space=values.get("space", "absolute"),
            **arrays,
        )
    except StatisticsError as e:
        raise StatisticsError(f"{path}: {e}") from e
