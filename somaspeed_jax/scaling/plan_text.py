"""A plan as text for a terminal, and tables over meshes, batches and knobs."""

from collections.abc import Sequence

from somaspeed_jax.scaling.devices import named
from somaspeed_jax.scaling.plan import USABLE_MEMORY, Plan, Prediction

GIB = 2**30


def summary(plan: Plan, gpu: str) -> str:
    """The whole plan, with `gpu` first among the predictions."""
    lines = [
        f"{plan.model}, {plan.preset} fine-tuning, {plan.devices} x {gpu.upper()}: replica {plan.replica} x fsdp "
        f"{plan.fsdp}; compiled for {plan.compiler}",
        f"batch         {plan.per_device} a device x {plan.devices} devices x {plan.accumulation} microbatches = "
        f"{plan.global_batch} samples a step, {plan.flow_times} flow times each",
        f"parameters    {plan.parameters_trainable:,} trainable, {plan.parameters_frozen:,} frozen",
        "",
        *_memory(plan, gpu),
        "",
        *_flops(plan),
        "",
        *_collectives(plan),
        "",
        *predictions(plan),
        "",
        *(f"note: {note}" for note in plan.notes),
    ]
    return "\n".join(lines)


def _memory(plan: Plan, gpu: str) -> list[str]:
    memory, card = plan.memory, named(gpu).memory
    rows = [
        ("trainable parameters", memory.trainable),
        ("frozen parameters", memory.frozen),
        ("optimiser", memory.optimizer),
        ("moving average", memory.average),
        ("batch", memory.batch),
        ("gradients", memory.gradients),
        ("activations, workspace", memory.activations),
        ("peak", memory.peak),
    ]
    fits = plan.prediction(gpu).fits
    verdict = "fits" if fits else "DOES NOT FIT"
    return [
        "GiB on a device",
        *(f"  {name:<24}{size / GIB:9.3f}" for name, size in rows if size),
        f"  {verdict}: {memory.peak / card:.0%} of {card / GIB:.1f} GiB ({USABLE_MEMORY:.0%} usable)",
    ]


def _flops(plan: Plan) -> list[str]:
    lines = ["TFLOP a sample           forward  backward  recomputed"]
    for name, stage in plan.stages.items():
        cells = (stage.forward, stage.backward, stage.recomputation)
        lines.append(f"  {name:<20}" + "".join(f"{value / 1e12:10.3f}" for value in cells))
    ratio = plan.program_flops_per_sample / plan.model_flops_per_sample
    model, program = plan.model_flops_per_sample / 1e12, plan.program_flops_per_sample / 1e12
    lines.append(f"  model {model:.3f}, compiled program {program:.3f} ({ratio:.3f}x)")
    lines.append(f"  widest axis of a product {plan.largest_dimension}; {plan.launches} kernel launches a step")
    return lines


def _collectives(plan: Plan) -> list[str]:
    if not plan.collectives:
        return ["no collectives"]
    lines = ["collectives a step       type      group    runs        MB   MB sent"]
    for c in plan.collectives:
        types = ",".join(c.types)
        lines.append(f"  {c.kind:<22}{types:<12}{c.group:4}{c.runs:8}{c.bytes / 1e6:10.1f}{c.wire / 1e6:10.1f}")
    return lines


def predictions(plan: Plan) -> list[str]:
    """One line a GPU."""
    lines = ["prediction    step, s        samples/s      MFU, %     efficiency, %   memory   bound"]
    for p in plan.predictions:
        lines.append(
            f"  {p.gpu:<10}{_range(p.step_seconds, '.3f'):>14}{_range(p.samples_per_second, '.1f'):>16}"
            f"{_range(p.mfu, '.0f', 100):>10}{_range(p.efficiency, '.0f', 100):>14}{_share(p):>12}   "
            f"{p.bound}{f' ({p.note})' if p.note else ''}"
        )
    return lines


def table(plans: Sequence[Plan], gpu: str) -> str:
    """A line a plan: mesh, batch, peak, and what is predicted for `gpu`."""
    lines = ["mesh     batch a device  global   peak, GiB   samples/s      efficiency, %   bound"]
    for plan in plans:
        p = plan.prediction(gpu)
        mesh = f"{plan.replica}x{plan.fsdp}"
        lines.append(
            f"{mesh:<9}{plan.per_device:>14}{plan.global_batch:>8}{plan.memory.peak / GIB:>12.2f}"
            f"{_range(p.samples_per_second, '.1f'):>16}{_range(p.efficiency, '.0f', 100):>14}   {p.bound}"
            f"{'' if p.fits else '  DOES NOT FIT'}"
        )
    return "\n".join(lines)


def knob_table(before: Plan, turned: Sequence[tuple[str, Plan]], gpu: str) -> str:
    """A line a knob, added one after the other: what it saves, and whether the plan fits then."""
    lines = ["knob, in addition to those above it                       saves, GiB   peak, GiB   samples/s"]
    peak = before.memory.peak
    for fields, plan in turned:
        p = plan.prediction(gpu)
        saved, peak = peak - plan.memory.peak, plan.memory.peak
        lines.append(
            f"{fields:<58}{saved / GIB:>10.2f}{peak / GIB:>12.2f}{_range(p.samples_per_second, '.1f'):>14}"
            f"{'   fits' if p.fits else ''}"
        )
    return "\n".join(lines)


def _share(p: Prediction) -> str:
    return f"{p.memory_share:.0%}" + ("" if p.fits else " NO")


def _range(pair: tuple[float, float], form: str, scale: float = 1.0) -> str:
    """ "3.1 - 4.0", or one number where both print alike."""
    low, high = (format(value * scale, form) for value in sorted(pair))
    return low if low == high else f"{low} - {high}"
