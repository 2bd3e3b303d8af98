"""Where a run's numbers go: terminal, metrics.jsonl, TensorBoard, Weights & Biases.

metrics.jsonl is strict JSON, one object a line: first `{"kind": "run", ...}`, then `{"kind": "step", ...}` and
`{"kind": "validation", ...}`. A number that is not finite is written as null.
"""

import json
import math
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from somaspeed_jax.config import Config, ConfigError, to_json


def strict(value: Any) -> Any:
    """`value` with what JSON cannot hold replaced by null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: strict(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(v) for v in value]
    return value


def duration(seconds: float) -> str:
    """12 s, 3:20, 1:02:03."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class MetricsWriter:
    """Writes for process 0; silent elsewhere."""

    def __init__(self, workdir: Path, config: Config, *, active: bool, console: Console):
        self.console, self.active = console, active
        self._sinks: list[Any] = []
        self._file = None
        self._progress: Progress | None = None
        if not active:
            return
        self._file = (workdir / "metrics.jsonl").open("a")
        if config.log.tensorboard:
            from tensorboardX import SummaryWriter

            self._sinks.append(_TensorBoard(SummaryWriter(str(workdir / "tensorboard"))))
        if config.log.wandb:
            self._sinks.append(_WandB(config, workdir))

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *_) -> None:
        if self._progress is not None:
            self._progress.stop()
        if self._file is not None:
            self._file.close()
        for sink in self._sinks:
            sink.close()

    def start(self, first: int, steps: int) -> None:
        """Shows a progress bar where the terminal can draw one."""
        if self.active and self.console.is_terminal:
            columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._progress = Progress(*columns, console=self.console)
            self._task = self._progress.add_task("steps", total=steps, completed=first)
            self._progress.start()

    def advance(self, step: int) -> None:
        if self._progress is not None:
            self._progress.update(self._task, completed=step)

    def write(self, kind: str, **values: Any) -> None:
        """One line of metrics.jsonl and one point in each sink."""
        if not self.active or self._file is None:
            return
        self._file.write(json.dumps(strict({"kind": kind, **values}), allow_nan=False) + "\n")
        self._file.flush()
        if "step" in values:
            numbers = {k: v for k, v in values.items() if isinstance(v, (int, float)) and k != "step"}
            for sink in self._sinks:
                sink.write({f"{kind}/{key}": value for key, value in numbers.items()}, values["step"])

    def say(self, text: str) -> None:
        if self.active:
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)


class _TensorBoard:
    def __init__(self, writer):
        self._writer = writer

    def write(self, values: dict[str, float], step: int) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        self._writer.close()


class _WandB:
    def __init__(self, config: Config, workdir: Path):
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ConfigError(
                f"config.log.wandb is {config.log.wandb!r}, but wandb is not installed; "
                "pip install 'somaspeed-jax[wandb]'"
            ) from error
        self._run = wandb.init(
            project=config.log.wandb, dir=str(workdir), config=json.loads(to_json(config)), resume="allow"
        )

    def write(self, values: dict[str, float], step: int) -> None:
        self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()


class StepClock:
    """Seconds of each step, from the moment the device finished the one before it.

    The first step of a process holds the compile and is reported apart.
    """

    def __init__(self):
        self._last = time.perf_counter()

    def lap(self) -> float:
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        return seconds
