"""How good is a trained policy? `python -m somaspeed_jax.evaluate runs/my-robot`

Open loop: the action chunks it would have sent on episodes that it was not trained on, against the recorded ones, in
robot units, beside repeating the last action and the mean action. Closed loop, for a policy of the demo: trials in the
tabletop. Writes `report.json`, plots and a video into the run's `evaluation` folder (or `--out`).
"""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from somaspeed_jax.data.lerobot import LeRobotDataset
from somaspeed_jax.evaluate.closed_loop import Result
from somaspeed_jax.evaluate.open_loop import OpenLoop, evaluate_open_loop
from somaspeed_jax.evaluate.plots import write_plots


def main(arguments: list[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    from somaspeed_jax.assemble import DEMO  # these start jax
    from somaspeed_jax.evaluate.demo import play
    from somaspeed_jax.policy import load_policy

    out = options.out or options.run / "evaluation"
    report: dict[str, Any] = {"run": str(options.run)}
    policy = load_policy(options.run, dataset=options.dataset)
    dataset, mean = held_out(policy.config, options.data, options.episodes)
    if dataset is not None:
        result = evaluate_open_loop(policy.act_batch, dataset, mean, batch=options.batch, stride=options.stride)
        print(open_loop_table(result))
        report["open_loop"] = result.summary()
        for path in write_plots(result, out):
            print(f"wrote {path}")
    if options.starts and policy.config.data.path == DEMO and not policy.config.data.mixture:
        results = play(options.run, options.starts, out / "closed_loop.mp4")
        for name, trials in results.items():
            print(f"closed loop, {name}: {trials}")
        report["closed_loop"] = {name: closed_loop_summary(trials) for name, trials in results.items()}
    if len(report) == 1:
        raise SystemExit(
            f"{options.run}: nothing to evaluate on: the run held no episodes out (config.data.holdout is 0) and it is "
            "not a demo; name episodes that it was not trained on with --data, or train with --config.data.holdout=0.1"
        )
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.json").write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
    print(f"wrote {out / 'report.json'}")


def held_out(config: Any, data: str, episodes: tuple[int, ...]) -> tuple[LeRobotDataset | None, Any]:
    """The episodes to evaluate on, opened as the run's own were, and the mean action to compare with.

    By default the run's held-out episodes and the mean of its training episodes (None without a held-out share). With
    `data` or `episodes`, those, and their own mean: a harder baseline than it looks.
    """
    from somaspeed_jax.assemble import open_data

    if data or episodes:
        changed = dataclasses.replace(config.data, path=data or config.data.path, episodes=episodes, holdout=0.0)
        dataset = open_data(dataclasses.replace(config, data=changed)).parts[0].train
        return dataset, dataset.numeric(dataset.action_key).mean(0)
    if not config.data.holdout:
        return None, None
    opened = open_data(config).parts[0]  # a policy acts for one dataset, whose path its configuration has
    return opened.validation, opened.train.numeric(opened.train.action_key).mean(0)


def open_loop_table(result: OpenLoop) -> str:
    """Mean absolute error by dimension, one row a dimension, one column a predictor; a star where the policy wins."""
    width = max(len(name) for name in ("dimension", *result.names))
    lines = [
        f"open loop: mean absolute error over {result.records} records of {len(result.episodes)} episodes, robot units",
        f"{'dimension':<{width}}" + "".join(f"{who.replace('_', ' '):>20}" for who in result.errors),
    ]
    for a, (name, wins) in enumerate(zip(result.names, result.beats_baselines(), strict=True)):
        errors = "".join(f"{e.mae_by_dimension[a]:>20.5g}" for e in result.errors.values())
        lines.append(f"{name:<{width}}{errors}{' *' if wins else ''}")
    won = int(result.beats_baselines().sum())
    return "\n".join([*lines, f"* better than both baselines by root mean square: {won} of {len(result.names)}"])


def closed_loop_summary(result: Result) -> dict[str, Any]:
    return {
        "success": result.success,
        "interval_95": list(result.interval),
        "trials": result.n,
        "mean_final_distance_m": result.distance,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("somaspeed_jax.evaluate", description="Open-loop and closed-loop evaluation.")
    parser.add_argument("run", type=Path, help="the workdir of a run that has saved")
    parser.add_argument(
        "--data", default="", help="another dataset, all of it unseen (default: the run's held-out part)"
    )
    parser.add_argument("--dataset", default="", help="which dataset of a mixture the policy acts for")
    parser.add_argument("--episodes", type=_numbers, default=(), help="episodes of the dataset, such as 3,8,12")
    parser.add_argument("--stride", type=int, default=1, help="open loop: every so many records")
    parser.add_argument("--batch", type=int, default=32, help="open loop: observations at a time")
    parser.add_argument("--starts", type=int, default=200, help="closed loop: trials; 0 for none")
    parser.add_argument("--out", type=Path, default=None, help="folder of the report (default: RUN/evaluation)")
    return parser


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}, expected numbers such as 3,8,12") from None


if __name__ == "__main__":
    main()
