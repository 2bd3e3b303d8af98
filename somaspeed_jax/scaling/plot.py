"""Throughput and efficiency against device count, any number of scaling files overlaid: figure and Markdown table."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from somaspeed_jax.scaling.schema import MODEL_ORDER, Record, ScalingFile

TITLES = {"pi05": "π0.5", "groot": "GR00T N1.7", "molmoact2": "MolmoAct2"}
# Okabe and Ito's colours: told apart in every kind of colour vision. Marker and dash repeat the difference in grey.
STYLES = (
    ("#0072B2", "o", "-"),
    ("#D55E00", "s", "--"),
    ("#009E73", "^", "-."),
    ("#CC79A7", "D", ":"),
    ("#56B4E9", "v", "-"),
    ("#E69F00", "P", "--"),
)
IDEAL: dict[str, Any] = {"linewidth": 0.7, "linestyle": (0, (1, 2))}
PAPER: Any = {
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.labelsize": 8,
    "legend.fontsize": 7.5,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.linewidth": 0.4,
    "grid.alpha": 0.4,
    "lines.linewidth": 1.2,
    "lines.markersize": 4,
    "svg.fonttype": "none",
    "svg.hashsalt": "scaling",
}


def labels(files: Sequence[ScalingFile], names: Sequence[str]) -> list[str]:
    """What each file is called in the figure: its system, and its name too where two files are of one system."""
    systems = [content.system for content in files]
    return [s if systems.count(s) == 1 else f"{s} ({name})" for s, name in zip(systems, names, strict=True)]


def models(files: Sequence[ScalingFile]) -> list[str]:
    """Every model of the files, ours in their fixed order, then others by name."""
    found = {model for content in files for model in content.models}
    return [m for m in MODEL_ORDER if m in found] + sorted(found - set(MODEL_ORDER))


def figure(files: Sequence[ScalingFile], names: Sequence[str]) -> Figure:
    """One column a model, throughput above efficiency. Incomplete records are left out (the table shows them).

    Raises ValueError where the files hold no complete record.
    """
    shown = [m for m in models(files) if any(_complete(content, m) for content in files)]
    if not shown:
        raise ValueError("the scaling files hold no complete record: nothing to plot")
    with matplotlib.rc_context(PAPER):
        width = max(2.3 * len(shown), 3.5)
        drawing = Figure(figsize=(width, 3.9))
        axes = drawing.subplots(2, len(shown), sharex="col", squeeze=False)
        for column, model in enumerate(shown):
            _column(axes[0, column], axes[1, column], model, files, labels(files, names))
        axes[0, 0].set_ylabel("samples / s")
        axes[1, 0].set_ylabel("efficiency, %")
        handles, texts = _legend(axes[0])
        across = min(len(texts), 1 + len(shown))
        drawing.legend(handles, texts, loc="lower center", ncols=across, frameon=False)
        drawing.tight_layout(rect=(0, 0.02 + 0.045 * -(-len(texts) // across), 1, 1))
    return drawing


def save(drawing: Figure, stem: Path) -> tuple[Path, Path]:
    """Writes `stem`.png (300 dpi) and `stem`.svg (text as text). Returns both paths."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = stem.with_name(stem.name + ".png"), stem.with_name(stem.name + ".svg")
    with matplotlib.rc_context(PAPER):
        drawing.savefig(paths[0], dpi=300)
        drawing.savefig(paths[1], metadata={"Date": None})
    return paths


def table(files: Sequence[ScalingFile], names: Sequence[str]) -> str:
    """A Markdown table of every record; an incomplete one says so."""
    lines = [
        "| model | system | devices | batch per device | samples/s | min – max | efficiency | trials |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for model in models(files):
        for content, label in zip(files, labels(files, names), strict=True):
            lines += [_row(record, label) for record in content.models.get(model, ())]
    return "\n".join(lines) + "\n"


def _row(record: Record, label: str) -> str:
    cells = [TITLES.get(record.model, record.model), label, str(record.gpus), str(record.per_gpu_batch)]
    if record.complete:
        spread = f"{record.minimum_samples_per_second:.2f} – {record.maximum_samples_per_second:.2f}"
        efficiency = f"{record.efficiency_percent:.1f} %" if record.efficiency_percent else "no one-device run"
        cells += [f"{record.samples_per_second:.2f}", spread, efficiency]
    else:
        cells += ["did not finish", "", ""]
    return "| " + " | ".join([*cells, str(record.trials)]) + " |"


def _complete(content: ScalingFile, model: str) -> list[Record]:
    return [record for record in content.models.get(model, ()) if record.complete]


def _column(top: Axes, bottom: Axes, model: str, files: Sequence[ScalingFile], names: Sequence[str]) -> None:
    counts: set[int] = set()
    for content, label, style in zip(files, names, _styles(len(files)), strict=True):
        records = _complete(content, model)
        if not records:
            continue
        colour, marker, dash = style
        gpus = [r.gpus for r in records]
        counts.update(gpus)
        rates = [r.samples_per_second for r in records]
        spread = (
            [r.samples_per_second - r.minimum_samples_per_second for r in records],
            [r.maximum_samples_per_second - r.samples_per_second for r in records],
        )
        look: dict[str, Any] = {"color": colour, "marker": marker, "linestyle": dash}
        top.errorbar(gpus, rates, yerr=spread, capsize=2, label=label, **look)
        scaled = [r for r in records if r.efficiency_percent > 0]
        bottom.plot([r.gpus for r in scaled], [r.efficiency_percent for r in scaled], **look)
        if gpus[0] == 1:
            ideal = [rates[0] * n for n in (1, gpus[-1])]
            top.plot((1, gpus[-1]), ideal, color=colour, **IDEAL)
    top.set_title(TITLES.get(model, model))
    for axes in (top, bottom):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted(counts), [str(n) for n in sorted(counts)])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.grid(True)
    # Throughput is read against the straight line of perfect scaling: straight needs both axes alike.
    top.set_yscale("log", base=2)
    top.yaxis.set_major_formatter("{x:g}")
    bottom.axhline(100, color="0.4", **IDEAL)
    bottom.set_ylim(0, max(110, bottom.get_ylim()[1]))
    bottom.set_xlabel("devices")


def _styles(count: int) -> list[tuple[str, str, str]]:
    """A style a file; past the palette the colours repeat with the next marker and dash."""
    n = len(STYLES)
    return [(STYLES[i % n][0], STYLES[(i + i // n) % n][1], STYLES[(i + i // n) % n][2]) for i in range(count)]


def _legend(axes: Sequence[Axes]) -> tuple[list, list[str]]:
    found = {}
    for one in axes:
        found |= dict(zip(*reversed(one.get_legend_handles_labels()), strict=True))
    found["perfect scaling"] = Line2D([], [], color="0.4", **IDEAL)
    return list(found.values()), list(found)
