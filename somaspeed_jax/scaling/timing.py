"""Throughput measured on the real trainer: a fresh process a trial and device count, read from its metrics.jsonl.

The trainer's step seconds end when the devices have finished and hold the wait for data. The first updates (the compile
among them) are left out; samples per second are samples over the sum of the rest. The trainer is stopped from here once
enough has been measured: no checkpoint is written, no validation is run.
"""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from somaspeed_jax.scaling import schema

DATA = {"decode": "decode", "cached": "frames", "synthetic": "synthetic"}
VIRTUAL = "Virtual devices of one CPU: not a scaling result."
POLL = 0.2  # seconds between looks at metrics.jsonl


class TrialError(RuntimeError):
    """A trial gave no measurement; the message says why."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """One measured run. `compile_seconds` is the first update with its compile; waiting is part of `seconds`."""

    samples: int
    seconds: float
    steps: int
    wait_seconds: float
    compile_seconds: float
    device_kind: str


@dataclasses.dataclass(frozen=True)
class Study:
    """What is measured: one model, one batch per device, several device counts.

    arguments: for the trainer: the configuration and its overrides.
    data: a key of DATA. seconds: to measure a trial. limit: seconds after which a trial that has not measured enough
    is given up. physical: GPUs of this machine, None for virtual CPU devices.
    """

    model: str
    per_device: int
    counts: tuple[int, ...]
    arguments: tuple[str, ...]
    data: str
    trials: int
    warmup: int
    seconds: float
    limit: float
    physical: tuple[str, ...] | None


def check(study: Study, output: Path) -> None:
    """Refuses what cannot give a record, before anything starts. Raises ValueError naming the option and the fix."""
    content = schema.open_ours(output)
    base = content.record(study.model, 1)
    if 1 not in study.counts and base is None:
        raise ValueError(
            f"--gpus {','.join(map(str, study.counts))}: lacks 1, against which efficiency is defined, and {output} "
            f"has no one-device record of {study.model} yet; add 1"
        )
    if base is not None and 1 not in study.counts and base.per_gpu_batch != study.per_device:
        raise ValueError(
            f"config.batch.per_device is {study.per_device}, but {output} holds {study.model} at {base.per_gpu_batch}: "
            "one batch per device in a file; name another --output"
        )
    if content.models and content.measurement != measurement(study):
        raise ValueError(
            f"{output} was measured otherwise ({content.measurement!r}) than this run ({measurement(study)!r}); name "
            "another --output"
        )
    if study.physical is not None and max(study.counts) > len(study.physical):
        raise ValueError(f"--gpus {max(study.counts)}: this machine has {len(study.physical)} GPU(s)")


def measurement(study: Study) -> str:
    """The file's sentence on how: where data came from, and whether the devices were real."""
    sentence = f"{schema.MEASUREMENT} Data: {study.data}."
    return sentence if study.physical is not None else f"{sentence} {VIRTUAL}"


def run(study: Study, output: Path, scratch: Path, say: Callable[[str], None] = print) -> schema.ScalingFile:
    """Measures every count, fewest devices first, and adds each record to `output` as soon as it is there.

    A failed trial makes an incomplete record; its reason is appended to `output` with the suffix `.log`.
    """
    check(study, output)
    if study.physical is None:
        say(VIRTUAL)
    content = schema.open_ours(output)
    content = dataclasses.replace(content, measurement=measurement(study))
    for count in sorted(study.counts):
        trials: list[Trial] = []
        record = None
        for number in range(1, study.trials + 1):
            try:
                trials.append(run_trial(study, count, scratch / f"{study.model}-{count}-{number}"))
            except TrialError as error:
                reason = f"{study.model} on {count} device(s), trial {number}: {error}"
                with output.with_suffix(".log").open("a", encoding="utf-8") as log:
                    log.write(reason + "\n\n")
                say(f"failed: {reason.splitlines()[0]} (see {output.with_suffix('.log')})")
                record = schema.failed(study.model, count, study.per_device, study.trials)
                break
            say(line(study, count, number, trials[-1]))
        measured = [(trial.samples, trial.seconds) for trial in trials]
        record = record or schema.measured(study.model, count, study.per_device, measured)
        content = schema.with_records(content, [record])
        schema.write(output, content)
    return content


def line(study: Study, count: int, number: int, trial: Trial) -> str:
    """One trial in words."""
    rate = trial.samples / trial.seconds
    return (
        f"{study.model}, {count} x {trial.device_kind}, trial {number}: {rate:.2f} samples/s ({rate / count:.2f} a "
        f"device), {trial.seconds / trial.steps:.4f} s a step over {trial.steps} steps in {trial.seconds:.1f} s, "
        f"waiting for data {trial.wait_seconds / trial.seconds:.1%}; first update with compile "
        f"{trial.compile_seconds:.1f} s"
    )


def command(study: Study, count: int, workdir: Path) -> list[str]:
    """The trainer's command line: the user's configuration on `count` devices, endless, no saving, no validation."""
    fields = {
        "mesh.devices": count,
        "batch.per_device": study.per_device,
        "batch.global_batch": 0,
        "data.cache": DATA[study.data],
        "data.holdout": 0.0,
        "steps": 1_000_000_000,
        "stop_after_seconds": 0.0,
        "checkpoint.every": 1_000_000_000,
        "evaluation.every": 0,
        "evaluation.closed_loop_starts": 0,
        "log.every": 1,
        "log.tensorboard": "false",
    }
    overrides = [f"--config.{name}={value}" for name, value in fields.items()]
    return [sys.executable, "-m", "somaspeed_jax.main", *study.arguments, *overrides, "--workdir", str(workdir)]


def environment(study: Study, count: int, base: Mapping[str, str]) -> dict[str, str]:
    """`base` in which jax sees exactly `count` devices."""
    result = dict(base)
    if study.physical is not None:
        result["CUDA_VISIBLE_DEVICES"] = ",".join(study.physical[:count])
    else:
        flags = [f for f in base.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in f]
        result["XLA_FLAGS"] = " ".join([*flags, f"--xla_force_host_platform_device_count={count}"])
        result["JAX_PLATFORMS"] = "cpu"
    return result


def run_trial(study: Study, count: int, workdir: Path) -> Trial:
    """One fresh trainer on `count` devices, stopped when enough is measured. Raises TrialError otherwise."""
    workdir.mkdir(parents=True)
    metrics, log = workdir / "metrics.jsonl", workdir / "trainer.log"
    deadline = time.monotonic() + study.limit
    with log.open("w") as output:
        process = subprocess.Popen(
            command(study, count, workdir),
            env=environment(study, count, os.environ),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # its loader workers end with it
        )
        try:
            while True:
                ended = process.poll() is not None
                start, steps = read_metrics(metrics)
                trial = measure(start, steps, study.warmup)
                if trial is not None and trial.seconds >= study.seconds:
                    return _checked(trial, start, study, count)
                if ended:
                    raise TrialError(f"the trainer ended with status {process.returncode}: {_tail(log)}")
                if time.monotonic() > deadline:
                    seconds = trial.seconds if trial else 0.0
                    text = (
                        f"{seconds:.1f} of {study.seconds:g} s measured after {study.limit:g} s (--limit): {_tail(log)}"
                    )
                    raise TrialError(text)
                time.sleep(POLL)
        finally:
            _end(process)


def read_metrics(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(the `run` line, the `step` lines) written so far; a last line that is still being written is left out."""
    if not path.exists():
        return {}, []
    whole = path.read_text("utf-8").split("\n")[:-1]
    lines = [json.loads(text) for text in whole]
    start = next((entry for entry in lines if entry["kind"] == "run"), {})
    return start, [entry for entry in lines if entry["kind"] == "step"]


def measure(start: dict[str, Any], steps: Sequence[dict[str, Any]], warmup: int) -> Trial | None:
    """The steps after `warmup` updates as a Trial; None before there is one."""
    counted = steps[warmup:]
    if not start or not counted:
        return None
    return Trial(
        samples=sum(step["samples"] for step in counted),
        seconds=sum(step["seconds"] for step in counted),
        steps=len(counted),
        wait_seconds=sum(step["wait_seconds"] for step in counted),
        compile_seconds=steps[0]["seconds"],
        device_kind=start["device_kind"],
    )


def _checked(trial: Trial, start: dict[str, Any], study: Study, count: int) -> Trial:
    """The trial, if it ran what it was asked to run."""
    wanted = {"devices": count, "per_device_batch": study.per_device, "global_batch": count * study.per_device}
    for name, want in wanted.items():
        if start[name] != want:
            raise TrialError(f"the trainer ran with {name} {start[name]}, asked for {want}")
    if trial.samples != trial.steps * count * study.per_device:
        raise TrialError(f"{trial.samples} samples in {trial.steps} steps of {count * study.per_device}")
    return trial


def _tail(log: Path, lines: int = 30) -> str:
    return "\n".join(log.read_text("utf-8", errors="replace").splitlines()[-lines:])


def _end(process: subprocess.Popen) -> None:
    """Ends the trainer and its workers at once: there is nothing of it to keep."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
