"""What a run says of itself: the arithmetic before the first step, the first batch as a picture, one line a step."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from somaspeed_jax import recipes
from somaspeed_jax.assemble import DTYPES, Data, Learner, Part
from somaspeed_jax.config import Config, to_json
from somaspeed_jax.data.mixture import camera_views
from somaspeed_jax.data.normalize import Normalizer
from somaspeed_jax.metrics import MetricsWriter, duration
from somaspeed_jax.models.layers.param import ParamSpec, Runtime
from somaspeed_jax.scaling.flops import count_flops
from somaspeed_jax.state import TrainState, abstract_state
from somaspeed_jax.step import Batch, Metrics, Prepare, make_train_step


def count(specs: Mapping[str, ParamSpec], paths: list[str]) -> int:
    return sum(math.prod(specs[path].shape) for path in paths)


def bytes_per_device(tree: Any) -> int:
    """Bytes that one device holds of a pytree of arrays."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(tree)
        if isinstance(x, jax.Array) and not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    )


def size(n: float) -> str:
    """1.23 GB and the like."""
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000 or unit == "GB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.2f} {unit}"
        n /= 1000
    return ""


def near_constant(transform: Any) -> list[str]:
    """A line for each dimension that hardly moves, from all normalisers that a transform holds."""
    held = [part for value in vars(transform).values() for part in (value if isinstance(value, tuple) else (value,))]
    return [line for part in held if isinstance(part, Normalizer) for line in part.report()]


def views_line(data: Data, part: Part) -> str:
    """Which camera of a dataset of a mixture fills which view of the model."""
    views = data.facts.cameras
    _, filled = camera_views([part.facts.cameras], views)
    own = dict(zip(filled[0], part.facts.cameras, strict=True))
    return "views: " + ", ".join(f"{view + 1} {own.get(view, 'absent')}" for view in range(len(views)))


def print_start(
    metrics: MetricsWriter,
    config: Config,
    learner: Learner,
    data: Data,
    transform: Any,
    prepare: Prepare,
    state: TrainState,
    changes: list[str],
) -> None:
    """Configuration, data, mesh, batch, parameters, bytes and FLOPs, before the first step."""
    say, mesh = metrics.say, learner.layout.mesh
    say(to_json(config))
    for line in changes:
        say(line)
    whole = sum(part.weight for part in data.parts)
    for part, part_transform in zip(data.parts, getattr(transform, "transforms", [transform]), strict=True):
        share = f" ({part.name}: {part.weight / whole:.1%} of the samples)" if part.name else ""
        say(f"data          {part.train.path}{share}")
        for line in part.train.report():
            say(f"              {line}")
        if part.name:
            say(f"              {views_line(data, part)}")
        if part.validation is not None:
            say(f"held out      {len(part.validation.episodes)} episodes, {len(part.validation)} records")
        for line in near_constant(part_transform):
            say(f"note          {line}")
    kind = jax.devices()[0].device_kind
    say(
        f"mesh          replica {mesh.shape['replica']} x fsdp {mesh.shape['fsdp']} = {mesh.size} x {kind}, "
        f"frozen parameters: {config.mesh.frozen}, compute {config.dtype.compute}"
    )
    say(
        f"batch         {config.batch.per_device} a device x {mesh.size} devices x {learner.accumulation} microbatches "
        f"= {learner.global_batch} samples a step, {config.flow.times} flow times each"
    )
    prompt, views = data.facts.prompt_length, len(data.facts.cameras)
    dims = " or ".join(dict.fromkeys(str(len(part.facts.action_names)) for part in data.parts))
    say(f"sample        {views} pictures ({', '.join(data.facts.cameras)}), {prompt} prompt tokens, "
        f"{learner.policy.horizon} actions of {dims} dimensions")  # fmt: skip
    trains, frozen = count(learner.specs, learner.trainable), count(learner.specs, learner.frozen)
    say(f"parameters    {trains:,} trainable in {len(learner.trainable)} arrays, {frozen:,} frozen")
    held = {
        "trainable": state.trainable,
        "frozen": state.frozen,
        "optimiser": state.opt_state,
        "average": state.ema,
    }
    held = {name: bytes_per_device(tree) for name, tree in held.items()}
    held["gradients"] = bytes_per_device(state.trainable)
    say(
        "bytes/device  "
        + ", ".join(f"{name} {size(n)}" for name, n in held.items())
        + f"; sum {size(sum(held.values()))}"
    )
    metrics.write(
        "run",
        model=config.model.name,
        devices=mesh.size,
        device_kind=kind,
        replica=mesh.shape["replica"],
        fsdp=mesh.shape["fsdp"],
        per_device_batch=config.batch.per_device,
        global_batch=learner.global_batch,
        trainable=trains,
        frozen=frozen,
        bytes_per_device=held,
        records=len(data.train),
    )


def step_line(config: Config, learner: Learner, values: dict[str, Any]) -> str:
    """One line: step, share, loss, rate, norm, seconds, samples/s, waiting, time left."""
    step, seconds = values["step"] + 1, values["seconds"]
    rate = values["samples"] / seconds
    devices = learner.layout.mesh.size
    parts = [
        f"step {step}/{config.steps} ({100 * step / config.steps:.0f} %)",
        f"loss {values['loss']:.4f}",
        f"lr {values['lr']:.2e}",
        f"grad {values['grad_norm']:.3f}",
    ]
    if values["compile"]:
        parts.append(f"first step {seconds:.1f} s with compile")
    else:
        parts += [
            f"{seconds:.3f} s",
            f"{rate:.1f} samples/s",
            *([f"{rate / devices:.1f}/device"] if devices > 1 else []),
            *([f"MFU {100 * values['mfu']:.1f} %"] if values.get("mfu") else []),
            f"waiting {100 * values['wait_seconds'] / seconds:.0f} %",
            f"ETA {duration((config.steps - step) * seconds)}",
        ]
    return "  ".join(parts)


def end_line(step: int, config: Config, stopped: bool, workdir: Path) -> str:
    how = "stopped as asked" if stopped else "finished" if step == config.steps else "out of time"
    return f"{how} at step {step} of {config.steps}; the checkpoint is whole: {workdir / 'checkpoints' / str(step)}"


def unhealthy(step: int, numbers: Metrics, records: np.ndarray) -> str:
    """Why the run stops at a non-finite loss or gradient."""
    worst = [name for name, norm in numbers.group_norms.items() if not np.isfinite(norm)]
    groups = f" (groups: {', '.join(worst)})" if worst else ""
    return (
        f"step {step}: loss {float(numbers.loss)}, gradient norm {float(numbers.grad_norm)}{groups}. "
        f"The update was not made and nothing was saved after it. Records of this batch: {records.tolist()}"
    )


def step_flops(config: Config, learner: Learner, prepare: Prepare, rows: Batch) -> int:
    """FLOPs of the products of one training step on the whole global batch, recomputation not counted."""
    plain = recipes.get(config.model.name).build(learner.model_config, Runtime(learner.layout.compute))
    step = make_train_step(
        plain,
        prepare,
        learner.optimizer,
        learner.rate,
        learner.groups,
        learner.layout,
        seed=config.seed,
        times=config.flow.times,
        accumulation=1,
        ema_decay=config.ema.decay,
    )

    def struct(x):
        return jax.ShapeDtypeStruct((learner.global_batch, *x.shape[1:]), x.dtype)

    like = abstract_state(learner.specs, learner.shardings, learner.optimizer, DTYPES[config.dtype.frozen])
    return count_flops(step, like, jax.tree.map(struct, rows))


def first_batch(metrics: MetricsWriter, config: Config, learner: Learner, prepare: Prepare, rows: Batch) -> int:
    """Prints and returns the FLOPs of a step."""
    flops = step_flops(config, learner, prepare, rows)
    per_sample = flops / learner.global_batch
    metrics.say(f"FLOPs         {per_sample:.3e} a sample, {flops:.3e} a step (products; recomputation not counted)")
    return flops


def first_batch_sheet(workdir: Path, rows: dict[str, Any], data: Data, *, active: bool) -> None:
    """first_batch.png: pictures as the host sends them, prompt, state and actions of the first samples."""
    if not active:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    shown, views = min(4, len(rows["index"])), len(rows["images"])
    figure, axes = plt.subplots(shown, views + 1, figsize=(3 * (views + 1.4), 2.9 * shown), squeeze=False)
    for i in range(shown):
        record = data.train.record(int(rows["index"][i]), images=False)
        names = data.parts[record.get("dataset", 0)].facts.action_names
        for c in range(views):
            axes[i, c].imshow(rows["images"][c][i])
            axes[i, c].set_axis_off()
            axes[i, c].set_title(data.facts.cameras[c].split(".")[-1], fontsize=8)
        state = np.array2string(np.asarray(record["state"]), precision=2, threshold=8)
        axes[i, 0].text(
            0, -0.02, f"{record['task'][:70]}\nstate {state}", transform=axes[i, 0].transAxes, fontsize=7, va="top"
        )
        for d, name in enumerate(names):
            axes[i, views].plot(rows["actions"][i][:, d], label=name, linewidth=1)
        axes[i, views].set_title(f"record {int(rows['index'][i])}: normalised actions", fontsize=8)
        axes[i, views].tick_params(labelsize=6)
        if len(names) <= 8:
            axes[i, views].legend(fontsize=5)
    figure.tight_layout()
    figure.savefig(workdir / "first_batch.png", dpi=110)
    plt.close(figure)
