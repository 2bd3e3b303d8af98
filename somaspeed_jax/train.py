"""The training loop."""

import dataclasses
import signal
import time
from collections import deque
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from rich.console import Console

from somaspeed_jax import recipes, report
from somaspeed_jax.assemble import DTYPES, Data, Learner, make_learner, make_transform, open_data, save_processor
from somaspeed_jax.batches import make_order, open_batches, samples_drawn
from somaspeed_jax.checkpoint import Checkpoints, check_resume
from somaspeed_jax.config import Config, profile_range, to_json
from somaspeed_jax.evaluate.demo import play
from somaspeed_jax.initial import check_frozen, initial_parameters
from somaspeed_jax.mesh import global_batch_arrays
from somaspeed_jax.metrics import MetricsWriter, StepClock
from somaspeed_jax.recipes import Recipe
from somaspeed_jax.scaling.devices import mfu
from somaspeed_jax.state import TrainState, abstract_state, create_state
from somaspeed_jax.step import Batch, Metrics, jit_train_step
from somaspeed_jax.validation import Validation

STOPPED = 75  # exit status after SIGTERM or SIGINT: saved, and worth starting again (EX_TEMPFAIL)


class UnhealthyRun(RuntimeError):
    """The loss or the gradient norm is not finite."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a call of `train` ended: the state, the step reached, and whether it was told to stop."""

    state: TrainState
    step: int
    stopped: bool
    final: dict[str, Any]


def train(config: Config, workdir: Path, console: Console | None = None) -> Outcome:
    """Trains to `config.steps`, resuming from the newest checkpoint of `workdir` if it has one."""
    console = console or Console()
    workdir.mkdir(parents=True, exist_ok=True)
    lead = jax.process_index() == 0
    recipe = recipes.get(config.model.name)
    data = open_data(config)
    learner = make_learner(config, data.facts)
    config = dataclasses.replace(config, batch=dataclasses.replace(config.batch, global_batch=learner.global_batch))

    with (
        Checkpoints(workdir, config.checkpoint.keep) as checkpoints,
        MetricsWriter(workdir, config, active=lead, console=console) as metrics,
        StopSignal() as stop,
    ):
        state, frozen, changes = start(config, recipe, learner, checkpoints)
        first = int(state.step)
        prepare = recipe.prepare(config, data.facts)
        transform = make_transform(config, recipe, data)
        if lead:
            save_processor(workdir, data)
            (workdir / "config.json").write_text(to_json(config))
        report.print_start(metrics, config, learner, data, transform, prepare, state, changes)

        step_fn = jit_train_step(config, learner, prepare)
        validation = Validation(config, learner, data, transform, prepare)
        order = make_order(config, data, learner.global_batch)
        batches = open_batches(config, data, transform, order, first)
        tracing, began = profile_range(config), time.monotonic()
        pending: deque[Pending] = deque()
        log = StepLog(config, learner, metrics, data, order)
        metrics.start(first, config.steps)

        with batches:
            step = first
            for step, rows in batches:
                if step == first:
                    log.flops = report.first_batch(metrics, config, learner, prepare, on_device(rows))
                    report.first_batch_sheet(workdir, rows, data, active=lead)
                batch = global_batch_arrays(on_device(rows), learner.layout, learner.accumulation)
                log.waited(batches.wait_seconds, pending)
                if step == tracing.start and tracing:
                    jax.profiler.start_trace(str(workdir / "profile"))
                with jax.transfer_guard("disallow"):
                    state, numbers = step_fn(state, batch)
                pending.append(Pending(step, rows["index"], numbers))
                # The device works on this step while the host reads the one before it.
                if len(pending) > 1:
                    log.read(pending.popleft())
                if tracing and step == tracing.stop - 1:
                    jax.block_until_ready(numbers)
                    jax.profiler.stop_trace()

                done = step + 1
                late = config.stop_after_seconds and time.monotonic() - began > config.stop_after_seconds
                last = done == config.steps or stop.asked or bool(late)
                if last or done % config.checkpoint.every == 0:
                    log.read_all(pending)  # a broken state is never saved
                    checkpoints.save(done, state, config, frozen, config.checkpoint.include_frozen)
                if config.evaluation.every and done % config.evaluation.every == 0 and not last:
                    log.read_all(pending)
                    log.validated(done, validation(state))
                checkpoints.check()
                if last:
                    break
        log.read_all(pending)
        reached = int(state.step)
        final = {} if stop.asked else validation(state)
        log.validated(reached, final)
        checkpoints.wait()
        if config.evaluation.closed_loop_starts and reached == config.steps and lead:
            for name, result in play(workdir, config.evaluation.closed_loop_starts).items():
                metrics.write("closed_loop", step=reached, policy=name, success=result.success, starts=result.n)
                metrics.say(f"tabletop      {name:<17} {result}")
        metrics.say(report.end_line(reached, config, stop.asked, workdir))
        return Outcome(state, reached, stop.asked, final)


def start(
    config: Config, recipe: Recipe, learner: Learner, checkpoints: Checkpoints
) -> tuple[TrainState, dict[str, Any], list[str]]:
    """(state, what the frozen parameters are, lines about what changed): the newest checkpoint's, or step 0."""
    trainable, frozen, facts = initial_parameters(config, recipe, learner)
    latest = checkpoints.latest
    if latest is None:
        return create_state(trainable, frozen, learner.optimizer, learner.shardings), facts, []
    changes = check_resume(checkpoints.config(latest), config)
    check_frozen(checkpoints.frozen(latest), facts)
    del trainable
    like = abstract_state(learner.specs, learner.shardings, learner.optimizer, DTYPES[config.dtype.frozen])
    state = checkpoints.restore(latest, dataclasses.replace(like, frozen=frozen), config.checkpoint.include_frozen)
    return state, facts, [f"resumed from step {latest} of {checkpoints.directory}", *changes]


def on_device(rows: dict[str, Any]) -> Batch:
    """The part of a host batch that travels to the devices."""
    weight = rows.get("weight", np.ones(len(rows["index"]), np.float32))
    return Batch(**{name: rows[name] for name in Batch._fields if name != "weight"}, weight=weight)


@dataclasses.dataclass(frozen=True)
class Pending:
    """A dispatched step whose numbers have not been read."""

    step: int
    records: np.ndarray
    numbers: Metrics

    @property
    def ready(self) -> bool:
        """Whether the device has finished the step."""
        return cast(Any, self.numbers.loss).is_ready()


class StepLog:
    """Reads steps' numbers, at most two late, and stops the run at the first that is not finite."""

    def __init__(self, config: Config, learner: Learner, metrics: MetricsWriter, data: Data, order: Any):
        self.config, self.learner, self.metrics, self.data, self.order = config, learner, metrics, data, order
        self.clock = StepClock()
        self.flops = 0
        self._wait_before = self._wait = 0.0
        self._compiled = False

    def waited(self, total: float, pending: deque[Pending]) -> None:
        """Counts the time spent waiting for the batch that just came, if the device had run out of work by then."""
        if not pending or pending[-1].ready:
            self._wait += total - self._wait_before
        self._wait_before = total

    def read(self, entry: Pending) -> None:
        numbers = jax.device_get(entry.numbers)
        seconds = self.clock.lap()
        wait, self._wait = min(self._wait, seconds), 0.0
        if not bool(numbers.healthy):
            self.metrics.write(
                "unhealthy", step=entry.step, loss=float(numbers.loss), grad_norm=float(numbers.grad_norm),
                records=entry.records.tolist(),
            )  # fmt: skip
            raise UnhealthyRun(report.unhealthy(entry.step, numbers, entry.records))
        first, self._compiled = not self._compiled, True
        values = {
            "step": entry.step,
            "loss": float(numbers.loss),
            "lr": float(numbers.lr),
            "grad_norm": float(numbers.grad_norm),
            "seconds": seconds,
            "samples": self.learner.global_batch,
            "wait_seconds": wait,
            "compile": first,
            "mfu": mfu(self.flops, seconds, self.learner.layout.mesh.size, jax.devices()[0].device_kind),
            **samples_drawn(self.config, self.data, self.order, entry.step + 1),
        }
        self.metrics.write("step", **values)
        self.metrics.advance(entry.step + 1)
        if entry.step % self.config.log.every == 0 or entry.step == self.config.steps - 1:
            self.metrics.say(report.step_line(self.config, self.learner, values))

    def read_all(self, pending: deque[Pending]) -> None:
        while pending:
            self.read(pending.popleft())

    def validated(self, step: int, values: dict[str, Any]) -> None:
        if values:
            self.metrics.write("validation", step=step, **values)
            self.metrics.say("validation  " + "  ".join(f"{key} {value:.5g}" for key, value in values.items()))
            self.clock.lap()  # validation is no part of the next step's time


class StopSignal:
    """SIGTERM and SIGINT ask the loop to save at the next step boundary; a second one leaves at once."""

    def __init__(self):
        self.asked = False

    def __enter__(self) -> "StopSignal":
        self._previous = {}
        for number in (signal.SIGTERM, signal.SIGINT):
            try:
                self._previous[number] = signal.signal(number, self._ask)
            except ValueError:  # not the main thread: a notebook or a test keeps its own handling
                break
        return self

    def _ask(self, number, frame) -> None:
        if self.asked:
            raise SystemExit(STOPPED)
        self.asked = True

    def __exit__(self, *_) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
