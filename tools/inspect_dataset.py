"""Shows what a LeRobot dataset holds, and every problem found, also for datasets that training refuses.

    python tools/inspect_dataset.py PATH [--output sheet.png] [--episode 3]

Prints version, episodes, frames, cameras with their true codecs, declared and recorded rates, dimensions with ranges,
tasks and problems. `--output` draws one episode: frames in a row for each camera, over plots of state and action.
Exit status: 0 if the dataset trains as it is, 1 if not.
"""

import argparse
import sys
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from somaspeed_jax.data.errors import DataError
from somaspeed_jax.data.inspection import Inspection, episode_pictures, episode_vectors, inspect_dataset

LOOKS = 8  # frames of a contact sheet
LABELLED_LINES = 16  # a legend with more lines than this helps nobody


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Show what a LeRobot dataset holds, and every problem found.")
    parser.add_argument("path", type=Path, help="the dataset's folder")
    parser.add_argument("--output", type=Path, help="write a picture of one episode here (PNG)")
    parser.add_argument("--episode", type=int, help="the episode to draw; the first one by default")
    args = parser.parse_args(argv)
    console = Console()
    try:
        found = inspect_dataset(args.path)
        print_tables(console, found)
        if args.output:
            draw(found, args.output, args.episode)
            console.print(f"wrote {escape(str(args.output))}")
    except DataError as error:
        console.print(f"[red]{escape(str(error))}[/red]")
        return 1
    return int(found.refusal is not None)


def print_tables(console: Console, found: Inspection) -> None:
    layout = found.layout
    summary = Table(title=escape(str(layout.root)), show_header=False, title_justify="left")
    shortest, longest = found.lengths
    recorded = "not recorded" if found.recorded_fps is None else f"{found.recorded_fps:g}"
    for name, value in (
        ("version", layout.version + (" with modality.json" if layout.modality else "")),
        ("episodes", f"{found.episodes_on_disk} here of {len(layout.episodes)} listed, {shortest} to {longest} frames"),
        ("frames", f"{found.rows_on_disk} rows here"),
        ("frames a second", f"{layout.fps:g} declared, {recorded} by timestamps"),
        ("tasks", "\n".join(found.tasks) or "none"),
    ):
        summary.add_row(name, escape(value))
    console.print(summary)

    cameras = Table("camera", "stored as", "size", "codec", "frames a second", "files", title="Cameras")
    for camera in found.cameras:
        header = camera.header
        size = f"{header.height} x {header.width}" if header else f"declared {list(camera.declared_shape)}"
        codec = header.codec if header else "-"
        if header and camera.declared_codec not in (None, header.codec):
            codec += f" (declared {camera.declared_codec})"
        rate = f"{header.rate:g}" if header else "-"
        files = "in parquet" if camera.stored_as == "image" else str(camera.files)
        cells = (camera.name, camera.stored_as, size, codec, rate, files)
        cameras.add_row(*map(escape, cells))
    if found.cameras:
        console.print(cameras)

    ranges = Table("feature", "dim", "name", "lowest", "highest", title="Dimensions")
    for vector in found.vectors:
        for dim, label in enumerate(vector.labels):
            low, high = vector.low[dim], vector.high[dim]
            ranges.add_row(escape(vector.name), str(dim), escape(label), f"{low:.5g}", f"{high:.5g}")
        ranges.add_section()
    console.print(ranges)

    for problem in found.problems:
        console.print(f"[yellow]noticed:[/yellow] {escape(problem)}")
    if found.refusal:
        console.print(f"[red]training refuses it:[/red] {escape(found.refusal)}")
    else:
        console.print("[green]it trains as it is[/green]")


def draw(found: Inspection, output: Path, episode: int | None) -> None:
    """A contact sheet of one episode: a row of frames for each camera, then a plot for each vector, over seconds."""
    layout = found.layout
    episode = next(iter(layout.episodes)) if episode is None else episode
    if episode not in layout.episodes:
        raise DataError(f"--episode {episode}: the dataset has episodes {list(layout.episodes)}.")
    names = [vector.name for vector in found.vectors]
    plotted = [name for name in names if name in ("observation.state", "action")] or names[:2]
    if not plotted:
        raise DataError(f"{layout.root}: no column of numbers can be read, so there is nothing to draw.")
    vectors = episode_vectors(layout.root, episode, plotted)
    frames, pictures, problems = episode_pictures(layout.root, episode, LOOKS, plotted[0])
    fps = found.recorded_fps or layout.fps

    matplotlib.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    heights = [1.6] * len(pictures) + [2.2] * len(vectors)
    figure = Figure(figsize=(13, sum(heights) + 1), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(
        f"{layout.root.name}, episode {episode}, {layout.episodes[episode].length} frames at {fps:g} a second"
    )
    grid = figure.add_gridspec(len(heights), len(frames), height_ratios=heights)
    for row, (camera, images) in enumerate(pictures.items()):
        for column, (frame, image) in enumerate(zip(frames, images, strict=True)):
            axes = figure.add_subplot(grid[row, column])
            axes.imshow(image)
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
            if row == 0:
                axes.set_title(f"{frame / fps:.2f} s", fontsize=9)
            if column == 0:
                axes.set_ylabel(camera.removeprefix("observation.images."))
    labels = {vector.name: vector.labels for vector in found.vectors}
    for row, (name, values) in enumerate(vectors.items(), len(pictures)):
        axes = figure.add_subplot(grid[row, :])
        plot_vector(axes, name, values, labels[name], fps)
        for frame in frames:
            axes.axvline(frame / fps, color="0.85", linewidth=0.8, zorder=0)
    axes.set_xlabel("seconds; grey lines mark the frames shown")
    if problems:
        figure.text(0.01, 0.0, "\n".join(problems), fontsize=7, color="firebrick", va="top")
    figure.savefig(output, dpi=110)


def plot_vector(axes, name: str, values: np.ndarray, labels: tuple[str, ...], fps: float) -> None:
    """Lines of `values` [frames, n] over seconds, one colour a dimension."""
    colours = matplotlib.colormaps["tab10" if values.shape[1] <= 10 else "turbo"]
    seconds = np.arange(len(values)) / fps
    for dim in range(values.shape[1]):
        colour = colours(dim) if values.shape[1] <= 10 else colours(dim / (values.shape[1] - 1))
        axes.plot(seconds, values[:, dim], color=colour, linewidth=1, label=labels[dim])
    axes.set_ylabel(name)
    axes.margins(x=0)
    if values.shape[1] <= LABELLED_LINES:
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8)


if __name__ == "__main__":
    sys.exit(main())
