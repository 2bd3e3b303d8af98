"""A training run planned before a machine is rented: the true step, at full size, compiled from shapes alone.

Memory, FLOPs and collectives are read from the compiled program. Times are a roofline over its kernels: each takes the
longer of its products at SUSTAINED_PRODUCTS of the peak and its bytes at SUSTAINED_MEMORY of the bandwidth; collectives
run at SUSTAINED_LINK of the link, from wholly hidden to not at all. What is not in it: library workspaces and buffers
of NCCL, launch gaps, waiting for data, links between nodes.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax

from somaspeed_jax import recipes
from somaspeed_jax.assemble import Learner, make_learner
from somaspeed_jax.config import Config
from somaspeed_jax.scaling import flops, hlo, targets
from somaspeed_jax.scaling.devices import Device, named
from somaspeed_jax.scaling.workload import (
    Robot,
    Stage,
    abstract_batch,
    by_stage,
    gradient_products,
    learner_state,
    robot_facts,
    sample_shapes,
)
from somaspeed_jax.step import jit_train_step
from somaspeed_jax.xla_flags import OPTIONS

# Shares of the data sheet that long-running programs reach; assumptions, printed with every plan.
SUSTAINED_PRODUCTS = 0.6
SUSTAINED_MEMORY = 0.8
SUSTAINED_LINK = 0.7
USABLE_MEMORY = float(OPTIONS["memory_fraction"].value or 1.0)
PREDICTED = ("a40", "a100", "h100", "h200", "b200")


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    trainable, frozen, optimizer, average, batch: what a step is given; exact.
    gradients: float32 gradients of what trains, in its shards.
    activations: the rest of the peak: what the backward pass keeps, gathered layers, workspaces.
    peak: of the compiled program.
    """

    trainable: int
    frozen: int
    optimizer: int
    average: int
    batch: int
    gradients: int
    activations: int
    peak: int


@dataclasses.dataclass(frozen=True)
class CollectiveSum:
    """All collectives of one kind, element type and group size: runs a step, result bytes and bytes sent a device."""

    kind: str
    types: tuple[str, ...]
    group: int
    runs: int
    bytes: int
    wire: int


@dataclasses.dataclass(frozen=True)
class Prediction:
    """One kind of GPU under the program.

    step_seconds, samples_per_second, mfu, efficiency: (collectives not hidden at all, wholly hidden). MFU counts no
      recomputation. Efficiency is against the same kernels without collectives.
    products, memory_bound, link: seconds of kernels with products, of other kernels, and of collectives.
    bound: what the step waits for most.
    """

    gpu: str
    step_seconds: tuple[float, float]
    samples_per_second: tuple[float, float]
    mfu: tuple[float, float]
    efficiency: tuple[float, float]
    products: float
    memory_bound: float
    link: float
    bound: str
    fits: bool
    memory_share: float
    note: str


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything about one configuration on one mesh. FLOPs are of products; a sample counts all its flow times."""

    model: str
    preset: str
    replica: int
    fsdp: int
    per_device: int
    accumulation: int
    global_batch: int
    flow_times: int
    compiler: str
    parameters_trainable: int
    parameters_frozen: int
    memory: Memory
    stages: dict[str, Stage]
    model_flops_per_sample: float
    program_flops_per_sample: float
    largest_dimension: int
    launches: int
    collectives: tuple[CollectiveSum, ...]
    predictions: tuple[Prediction, ...]
    notes: tuple[str, ...]

    @property
    def devices(self) -> int:
        return self.replica * self.fsdp

    def prediction(self, gpu: str) -> Prediction:
        return next(p for p in self.predictions if p.gpu == gpu)


def make_plan(config: Config, robot: Robot, gpu: str, devices: Sequence[Any], compiler: str) -> Plan:
    """Compiles the step of `config` for `devices` and reads it.

    gpu: a name of devices.DEVICES, whose memory and rates are checked first.
    devices: `targets.devices(...)` for compiler "cuda", jax's own CPU devices for "cpu".
    Raises ValueError or ConfigError for a configuration that the trainer would refuse too.
    """
    facts = robot_facts(config, robot)
    recipe = recipes.get(config.model.name)
    learner = make_learner(config, facts, list(devices))
    prepare = recipe.prepare(config, facts)
    sample = sample_shapes(config, facts, robot.picture)
    work = gradient_products(config, learner, prepare, sample)
    stages = by_stage(work, len(devices))
    batch = abstract_batch(
        sample,
        learner.global_batch,
        accumulation=learner.accumulation,
        sharding=learner.layout.batch(learner.accumulation > 1),
    )
    compiled = compile_step(jit_train_step(config, learner, prepare), (learner_state(config, learner), batch), compiler)
    program = hlo.read(compiled.as_text())
    memory = read_memory(config, learner, batch, compiled.memory_analysis(), compiler)
    count = len(devices)
    model_flops = sum(stage.forward + stage.backward for stage in stages.values())
    samples = learner.global_batch
    predicted = [named(name) for name in dict.fromkeys((gpu, *PREDICTED))]
    return Plan(
        model=config.model.name,
        preset=config.tune.preset,
        replica=learner.layout.mesh.shape["replica"],
        fsdp=learner.layout.fsdp,
        per_device=config.batch.per_device,
        accumulation=learner.accumulation,
        global_batch=samples,
        flow_times=config.flow.times,
        compiler=f"cuda for {gpu}" if compiler == "cuda" else "cpu",
        parameters_trainable=_size(learner, learner.trainable),
        parameters_frozen=_size(learner, learner.frozen),
        memory=memory,
        stages=stages,
        model_flops_per_sample=model_flops,
        program_flops_per_sample=program.flops * count / samples,
        largest_dimension=flops.largest_dimension(work),
        launches=sum(kernel.count for kernel in program.kernels),
        collectives=sum_collectives(program),
        predictions=tuple(
            predict(device, program, memory, model_flops, samples, count, compiler, compiled_for=gpu)
            for device in predicted
        ),
        notes=_notes(config, compiler, count),
    )


def compile_step(step: Any, arguments: tuple[Any, ...], compiler: str) -> Any:
    """The jitted `step` compiled from shapes. Nothing is allocated."""
    if compiler == "cpu":
        return step.lower(*arguments).compile()
    lowered = step.trace(*arguments).lower(lowering_platforms=("cuda",))
    # Without a device nothing can be tuned, and untuned Triton products fail on odd shapes.
    return lowered.compile(compiler_options={"xla_gpu_enable_triton_gemm": False})


def read_memory(config: Config, learner: Learner, batch: Any, analysis: Any, compiler: str) -> Memory:
    """Memory by kind: what a step is given from its shardings, the peak from the compiler."""
    state = learner_state(config, learner)
    kept = {
        "trainable": _bytes(state.trainable),
        "frozen": _bytes(state.frozen),
        "optimizer": _bytes(state.opt_state),
        "average": _bytes(state.ema),
        "batch": _bytes(batch),
    }
    if compiler == "cuda":
        peak = analysis.peak_memory_in_bytes
    else:  # the CPU compiler reports no peak: all temporaries at once bound it from above
        peak = analysis.argument_size_in_bytes + analysis.temp_size_in_bytes
    gradients = kept["trainable"]
    return Memory(**kept, gradients=gradients, activations=max(peak - sum(kept.values()) - gradients, 0), peak=peak)


def sum_collectives(program: hlo.Program) -> tuple[CollectiveSum, ...]:
    """The program's collectives by kind, type and group, most bytes first."""
    table: dict[tuple[str, tuple[str, ...], int], list[float]] = {}
    for c in program.collectives:
        row = table.setdefault((c.kind, c.types, c.group), [0, 0, 0.0])
        row[0] += c.count
        row[1] += c.total
        row[2] += c.wire
    rows = [CollectiveSum(*key, int(runs), int(size), round(wire)) for key, (runs, size, wire) in table.items()]
    return tuple(sorted(rows, key=lambda row: -row.bytes))


def predict(
    device: Device,
    program: hlo.Program,
    memory: Memory,
    model_flops: float,
    samples: int,
    count: int,
    compiler: str,
    *,
    compiled_for: str,
) -> Prediction:
    """The roofline of one kind of GPU under a program of `count` devices that learns from `samples` a step."""
    peak, bandwidth = device.peak * SUSTAINED_PRODUCTS, device.bandwidth * SUSTAINED_MEMORY
    products = other = 0.0
    for kernel in program.kernels:
        # The CPU compiler fuses otherwise and computes in float32: its bytes say nothing of a GPU.
        moved = kernel.bytes / bandwidth if compiler == "cuda" else 0.0
        if kernel.flops:
            products += kernel.count * max(kernel.flops / peak, moved)
        else:
            other += kernel.count * moved
    link = sum(c.wire for c in program.collectives) / (device.link * SUSTAINED_LINK)
    kernels = products + other
    seconds = kernels + link, max(kernels, link)
    terms = {"products": products, "memory bandwidth": other, f"link ({device.link_name})": link}
    share = memory.peak / device.memory
    ideal = count * device.peak
    return Prediction(
        gpu=device.name,
        step_seconds=seconds,
        samples_per_second=_pair(samples / s for s in seconds),
        mfu=_pair(model_flops * samples / (s * ideal) for s in seconds),
        efficiency=_pair(kernels / s for s in seconds),
        products=products,
        memory_bound=other,
        link=link,
        bound=max(terms, key=lambda name: terms[name]),
        fits=share <= USABLE_MEMORY,
        memory_share=share,
        note=_prediction_note(device, compiler, compiled_for),
    )


def knobs(config: Config, plan: Plan) -> list[tuple[str, dict[str, Any]]]:
    """(section, fields) of the configuration that lower the peak where they apply, the cheapest in speed first."""
    keeps = ("none", "keep_gathered")
    candidates = [
        (plan.replica > 1, "mesh", {"replica": 1, "fsdp": plan.devices}),
        (config.remat.expert in keeps, "remat", {"expert": "full"}),
        (config.remat.context in keeps and plan.stages["context"].backward > 0, "remat", {"context": "full"}),
        (config.mesh.frozen == "replicate" and plan.devices > 1, "mesh", {"frozen": "shard"}),
        (config.optim.moments == "float32", "optim", {"moments": "bfloat16"}),
        (config.ema.decay > 0, "ema", {"decay": 0.0}),
        (
            config.batch.per_device % 2 == 0,
            "batch",
            {"per_device": config.batch.per_device // 2, "global_batch": plan.global_batch},
        ),
    ]
    return [(section, fields) for applies, section, fields in candidates if applies]


def changed(config: Config, section: str, fields: dict[str, Any]) -> Config:
    """`config` with some fields of one section replaced."""
    return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **fields)})


def meshes(devices: int) -> list[tuple[int, int]]:
    """Every (replica, fsdp) whose product is `devices`, most sharded first."""
    return [(n, devices // n) for n in range(1, devices + 1) if devices % n == 0]


def _notes(config: Config, compiler: str, count: int) -> tuple[str, ...]:
    notes = [
        f"assumed: products at {SUSTAINED_PRODUCTS:.0%} of the peak, memory at {SUSTAINED_MEMORY:.0%}, links at "
        f"{SUSTAINED_LINK:.0%} of the data sheet; ranges are collectives not hidden at all to wholly hidden",
        "the peak leaves out library workspaces, NCCL's buffers and the allocator's slack; "
        f"a plan fits where it stays under {USABLE_MEMORY:.0%} of the memory",
    ]
    if compiler == "cpu":
        notes.append(
            "compiled for the CPU: weights are gathered in float32 (twice the bytes), gradients are summed without "
            "scattering, temporaries are 1.6 to 2.6 times a GPU's, and times count products and links alone; "
            "pip install 'somaspeed-jax[plan]' for the CUDA compiler, which needs no GPU"
        )
    else:
        notes.append("the compiler's descriptions of GPUs other than the H100 come from data sheets, not from a device")
    if config.dtype.compute != "bfloat16":
        notes.append(f"products are in {config.dtype.compute}, but times and MFU are against the bfloat16 peak")
    if count > 8:
        notes.append("more than 8 devices span nodes: the links between nodes are not modelled")
    return tuple(notes)


def _prediction_note(device: Device, compiler: str, compiled_for: str) -> str:
    if device.name not in targets.TARGETS:
        return "roofline only: no compiler description of this GPU"
    if compiler == "cpu" or device.name == compiled_for:
        return ""
    return f"from the program compiled for {compiled_for}"


def _pair(values: Any) -> tuple[float, float]:
    first, second = values
    return first, second


def _size(learner: Learner, paths: list[str]) -> int:
    return sum(math.prod(learner.specs[path].shape) for path in paths)


def _bytes(tree: Any) -> int:
    """Bytes of a pytree of abstract arrays on one device."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))
