"""Statistics of a LeRobot dataset's state and actions, over every row; pictures are not touched.

    python tools/compute_stats.py path/to/dataset
    python tools/compute_stats.py path/to/dataset --relative --horizon 50 --output relative.json

Writes strict JSON for `--config.stats.source=file --config.stats.file=...`, prints a table, and names the dimensions
that hardly move.
"""

import argparse
import sys
import time
from pathlib import Path

import numpy as np

from somaspeed_jax.data import stats
from somaspeed_jax.data.lerobot import LeRobotDataset
from somaspeed_jax.data.normalize import Normalizer


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="folder of the dataset")
    parser.add_argument("--output", type=Path, help="default: <dataset>.stats.json in the current folder")
    parser.add_argument("--episodes", type=int, nargs="+", help="default: all")
    parser.add_argument("--state-key", default="observation.state")
    parser.add_argument("--action-key", default="action")
    parser.add_argument("--trust-timestamps", action="store_true", help="rows say another rate than info.json: take it")
    parser.add_argument("--relative", action="store_true", help="actions minus the state at the start of their chunk")
    parser.add_argument("--horizon", type=int, help="with --relative: actions in a chunk")
    parser.add_argument(
        "--exclude", nargs="*", default=["gripper"], help="with --relative: parts of names that stay absolute"
    )
    parser.add_argument("--per-step", action="store_true", help="with --relative: one row a chunk step (GR00T)")
    parsed = parser.parse_args(arguments)
    if parsed.relative != (parsed.horizon is not None):
        parser.error("--relative and --horizon go together: relative actions depend on the length of the chunk")
    if parsed.per_step and not parsed.relative:
        parser.error("--per-step needs --relative")
    return parsed


def relative_mask(names: tuple[str, ...], exclude: list[str]) -> np.ndarray:
    """[a] bool: dimensions whose name contains none of `exclude` (in any case). A part that no name has is refused."""
    unknown = [part for part in exclude if not any(part.lower() in name.lower() for name in names)]
    if unknown:
        raise ValueError(f"--exclude {unknown}: no action dimension is called so; they are {list(names)}")
    return np.array([not any(part.lower() in name.lower() for part in exclude) for name in names])


def table(statistics: stats.FeatureStatistics) -> str:
    rows: list[tuple[str, ...]] = [("", "min", "q01", "mean", "q99", "max", "std")]
    for i, name in enumerate(statistics.names):
        fields = (np.atleast_2d(statistics.require(f))[:, i] for f in ("min", "q01", "mean", "q99", "max", "std"))
        rows.append((name, *(f"{v.mean():.5g}" for v in fields)))
    widths = [max(len(row[c]) for row in rows) for c in range(7)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    start = time.perf_counter()
    try:
        dataset = LeRobotDataset(
            args.path,
            horizon=args.horizon or 1,
            cameras=(),
            episodes=args.episodes,
            state_key=args.state_key,
            action_key=args.action_key,
            trust_timestamps=args.trust_timestamps,
        )
        mask = relative_mask(dataset.action_names, args.exclude) if args.relative else None
        statistics = stats.of_dataset(dataset, relative=mask, per_step=args.per_step)
        output = args.output or Path(f"{dataset.path.name}.stats.json")
        stats.save(output, statistics)
    except (ValueError, OSError) as error:
        print(f"compute_stats: {error}", file=sys.stderr)
        return 1
    still = []
    for feature in statistics.values():
        steps = f", mean over {feature.steps} steps" if feature.steps else ""
        print(f"\n{feature.feature}: {feature.space}, {feature.count} rows{steps}\n{table(feature)}")
        still += Normalizer(feature, "quantiles", "lerobot").report()
    print("\n" + "\n".join(still or ["every dimension moves"]))
    print(f"wrote {output} after {time.perf_counter() - start:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
