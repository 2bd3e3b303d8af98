"""Open-loop evaluation: what a policy would have done at each frame of recordings it was not trained on.

Errors are in robot units, by dimension and by step ahead, beside two predictors that any policy should beat: repeating
the last action, and the mean action of the training episodes. A low open-loop error does not promise success on the
robot; a high one, or one no better than the baselines, promises failure.

Shapes: t steps of a chunk, a action dimensions.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from somaspeed_jax.data.lerobot import LeRobotDataset

ActBatch = Callable[[list[dict]], np.ndarray]
"""Observations `{"images": {camera: uint8 [h, w, 3]}, "state": float32 [s], "task": str}`, one a row -> [n, t, a]."""


@dataclasses.dataclass(frozen=True)
class Errors:
    """Of one predictor, in robot units, over the recorded (not padded) steps: `mae` and `rmse` [t, a] by step ahead,
    `mae_by_dimension` and `rmse_by_dimension` [a] over all steps. NaN at a step that no record reaches."""

    mae: np.ndarray
    rmse: np.ndarray
    mae_by_dimension: np.ndarray
    rmse_by_dimension: np.ndarray


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """A held-out episode: `recorded` [frames, a]; `predicted` [m, t, a] are the chunks that start at `frames` [m]."""

    episode: int
    task: str
    recorded: np.ndarray
    frames: np.ndarray
    predicted: np.ndarray


@dataclasses.dataclass(frozen=True)
class OpenLoop:
    """`errors` holds "policy", "repeat_last_action" and "mean_action" over the same `records` records."""

    names: tuple[str, ...]
    fps: float
    episodes: tuple[int, ...]
    records: int
    errors: dict[str, Errors]
    trajectories: tuple[Trajectory, ...]

    def beats_baselines(self) -> np.ndarray:
        """bool [a]: whether the policy's error of a dimension is below that of both baselines."""
        policy, *baselines = (e.rmse_by_dimension for e in self.errors.values())
        return policy < np.minimum.reduce(baselines)

    def summary(self) -> dict:
        """For a report: strict JSON has no NaN, so a step without records is null."""
        return {
            "episodes": list(self.episodes),
            "records": self.records,
            "frames_per_second": self.fps,
            "dimensions": list(self.names),
            "errors": {
                who: {field.name: _plain(getattr(errors, field.name)) for field in dataclasses.fields(errors)}
                for who, errors in self.errors.items()
            },
            "beats_baselines": dict(zip(self.names, self.beats_baselines().tolist(), strict=True)),
        }


def evaluate_open_loop(
    act_batch: ActBatch,
    dataset: LeRobotDataset,
    mean_action: np.ndarray,
    *,
    batch: int = 32,
    stride: int = 1,
    trajectories: int = 3,
) -> OpenLoop:
    """Compares the policy's chunk with the recorded one at every `stride`-th record of `dataset`.

    Args:
      act_batch: the policy. It is always asked for `batch` observations (the last ones repeated), so that a compiled
        policy sees one shape.
      dataset: held-out episodes with the policy's cameras and horizon.
      mean_action: [a], of the training episodes, in robot units.
      trajectories: episodes whose predictions are kept for plots.

    The first frame of an episode has no last action to repeat; it is left out for every predictor alike.
    Raises ValueError when the policy's chunk is not [batch, t, a] of the dataset or holds values that are not finite,
    and when no record is left.
    """
    rows = [i for i in range(len(dataset)) if dataset.record(i, images=False)["frame_index"] > 0][::stride]
    if not rows:
        raise ValueError(f"{dataset.path}: no record after the first frame of an episode; nothing to evaluate")
    actions = dataset.numeric(dataset.action_key)
    shape = (dataset.horizon, dataset.action_dim)
    sums = {who: _Sums(shape) for who in ("policy", "repeat_last_action", "mean_action")}
    kept: dict[int, list[tuple[int, np.ndarray]]] = {e.index: [] for e in dataset.episodes[:trajectories]}
    for start in range(0, len(rows), batch):
        records = [dataset.record(i) for i in rows[start : start + batch]]
        predicted = _predict(act_batch, records, batch, shape)
        recorded = np.stack([r["actions"] for r in records])
        real = ~np.stack([r["action_is_pad"] for r in records])
        last = np.stack([actions[dataset.row(r["index"]) - 1] for r in records])
        sums["policy"].add(predicted - recorded, real)
        sums["repeat_last_action"].add(last[:, None] - recorded, real)
        sums["mean_action"].add(mean_action - recorded, real)
        for record, chunk in zip(records, predicted, strict=True):
            if record["episode_index"] in kept:
                kept[record["episode_index"]].append((record["frame_index"], chunk))
    return OpenLoop(
        names=tuple(dataset.action_names),
        fps=dataset.fps,
        episodes=tuple(e.index for e in dataset.episodes),
        records=len(rows),
        errors={who: s.errors() for who, s in sums.items()},
        trajectories=tuple(_trajectory(dataset, e, chunks) for e, chunks in kept.items() if chunks),
    )


def _predict(act_batch: ActBatch, records: list[dict], batch: int, shape: tuple[int, int]) -> np.ndarray:
    observations = [{k: r[k] for k in ("images", "state", "task")} for r in records]
    chunk = np.asarray(act_batch(observations + [observations[-1]] * (batch - len(records))))
    if chunk.shape != (batch, *shape):
        raise ValueError(
            f"the policy gave actions of shape {chunk.shape}, expected {(batch, *shape)}: [batch, horizon, dimensions] "
            "of the dataset; open the dataset with the policy's horizon and action feature"
        )
    if not np.isfinite(chunk).all():
        raise ValueError(f"the policy gave {int((~np.isfinite(chunk)).sum())} values that are not finite")
    return chunk[: len(records)]


class _Sums:
    """Running sums of |error| and error² over recorded steps."""

    def __init__(self, shape: tuple[int, int]):
        self.absolute, self.square, self.count = np.zeros(shape), np.zeros(shape), np.zeros((shape[0], 1))

    def add(self, error: np.ndarray, real: np.ndarray) -> None:
        """error [n, t, a], real bool [n, t]."""
        error = np.where(real[..., None], error, 0).astype(np.float64)
        self.absolute += np.abs(error).sum(0)
        self.square += (error**2).sum(0)
        self.count += real.sum(0)[:, None]

    def errors(self) -> Errors:
        count = np.where(self.count > 0, self.count, np.nan)
        return Errors(
            mae=self.absolute / count,
            rmse=np.sqrt(self.square / count),
            mae_by_dimension=self.absolute.sum(0) / self.count.sum(),
            rmse_by_dimension=np.sqrt(self.square.sum(0) / self.count.sum()),
        )


def _trajectory(dataset: LeRobotDataset, episode: int, chunks: list[tuple[int, np.ndarray]]) -> Trajectory:
    rows = dataset.episode_rows[episode]
    first = next(i for i in range(len(dataset)) if dataset.row(i) == rows.start)
    return Trajectory(
        episode=episode,
        task=dataset.record(first, images=False)["task"],
        recorded=dataset.numeric(dataset.action_key)[rows],
        frames=np.array([frame for frame, _ in chunks]),
        predicted=np.stack([chunk for _, chunk in chunks]),
    )


def _plain(values: np.ndarray) -> list:
    return [_plain(v) if isinstance(v, np.ndarray) else float(v) if np.isfinite(v) else None for v in values]
