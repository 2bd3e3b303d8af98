"""Plots of an open-loop evaluation: predicted against recorded trajectories, and error by step ahead."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from somaspeed_jax.evaluate.open_loop import OpenLoop, Trajectory

_STYLE = {
    "policy": {"color": "tab:red"},
    "repeat_last_action": {"color": "tab:blue", "linestyle": "--"},
    "mean_action": {"color": "gray", "linestyle": ":"},
}


def write_plots(result: OpenLoop, folder: Path) -> list[Path]:
    """Writes `error_by_step.png` and one `episode_<n>.png` a kept trajectory into `folder`; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = {"error_by_step.png": _error_by_step(result)}
    figures |= {f"episode_{t.episode}.png": _trajectory(t, result) for t in result.trajectories}
    for name, figure in figures.items():
        figure.savefig(folder / name, dpi=110)
    return [folder / name for name in figures]


def _error_by_step(result: OpenLoop) -> Figure:
    figure, axes = _grid(len(result.names), 3.2)
    for a, (axis, name) in enumerate(zip(axes, result.names, strict=True)):
        for who, errors in result.errors.items():
            seconds = (np.arange(len(errors.mae)) + 1) / result.fps
            axis.plot(seconds, errors.mae[:, a], label=who.replace("_", " "), **_STYLE[who])
        axis.set_title(name, fontsize=9)
        axis.set_ylim(bottom=0)
        axis.set_xlabel("seconds ahead")
    axes[0].set_ylabel("mean absolute error, robot units")
    axes[0].legend(fontsize=8)
    figure.suptitle(f"Held-out error over {result.records} records of {len(result.episodes)} episodes")
    return figure


def _trajectory(trajectory: Trajectory, result: OpenLoop) -> Figure:
    """The recorded actions as a line, and a predicted chunk from every so many frames, so that none overlap."""
    horizon = trajectory.predicted.shape[1]
    starts = [0]
    for i, frame in enumerate(trajectory.frames):
        if frame >= trajectory.frames[starts[-1]] + horizon:
            starts.append(i)
    figure, axes = _grid(len(result.names), 3.2)
    time = np.arange(len(trajectory.recorded)) / result.fps
    for a, (axis, name) in enumerate(zip(axes, result.names, strict=True)):
        axis.plot(time, trajectory.recorded[:, a], color="black", label="recorded")
        for n, i in enumerate(starts):
            ahead = trajectory.frames[i] + np.arange(horizon)
            ahead = ahead[ahead < len(trajectory.recorded)]
            chunk = trajectory.predicted[i, : len(ahead), a]
            axis.plot(ahead / result.fps, chunk, color="tab:red", label=None if n else "predicted")
            axis.plot(ahead[0] / result.fps, chunk[0], "o", color="tab:red", markersize=3)
        axis.set_title(name, fontsize=9)
        axis.set_xlabel("seconds")
    axes[0].set_ylabel("action, robot units")
    axes[0].legend(fontsize=8)
    figure.suptitle(f"Episode {trajectory.episode}: {trajectory.task}", fontsize=10)
    return figure


def _grid(panels: int, size: float) -> tuple[Figure, list]:
    columns = min(panels, 4)
    rows = -(-panels // columns)
    figure = Figure(figsize=(size * columns, size * 0.8 * rows + 0.5), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis in axes[panels:]:
        axis.set_visible(False)
    return figure, list(axes[:panels])
