"""A run small enough for a test: π0.5's real classes at demo size on a dozen demonstrations."""

import dataclasses
import io
from pathlib import Path
from typing import Any

from rich.console import Console

from somaspeed_jax.config import Config
from somaspeed_jax.train import Outcome, train


def small_config(dataset: Path, **sections: dict[str, Any]) -> Config:
    """Float32, one CPU device, no workers; sections replace fields, as in `batch=dict(per_device=4)`."""
    config = Config(steps=4)
    defaults: dict[str, dict[str, Any]] = dict(
        model=dict(name="pi05", size="demo"),
        tune=dict(preset="full"),
        data=dict(path=str(dataset), tokenizer="demo", workers=0),
        batch=dict(per_device=4),
        optim=dict(schedule="openpi", lr=1e-3, floor=1e-4, warmup=2, decay_steps=100),
        dtype=dict(compute="float32", frozen="float32"),
        mesh=dict(devices=1),
        checkpoint=dict(every=100),
        log=dict(tensorboard=False),
    )
    for name in {*defaults, *(k for k, v in sections.items() if isinstance(v, dict))}:
        fields = {**defaults.get(name, {}), **sections.get(name, {})}
        config = dataclasses.replace(config, **{name: dataclasses.replace(getattr(config, name), **fields)})
    return dataclasses.replace(config, **{k: v for k, v in sections.items() if not isinstance(v, dict)})


def run(config: Config, workdir: Path) -> tuple[Outcome, str]:
    """Trains; returns the outcome and what was printed."""
    out = io.StringIO()
    outcome = train(config, workdir, Console(file=out, width=200))
    return outcome, out.getvalue()


def steps(workdir: Path) -> list[dict[str, Any]]:
    """The step lines of metrics.jsonl, strictly parsed, in the order written."""
    import json

    def refuse(constant):
        raise ValueError(constant)

    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    parsed = [json.loads(line, parse_constant=refuse) for line in lines]
    return [line for line in parsed if line["kind"] == "step"]
