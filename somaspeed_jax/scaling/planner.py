"""What tools/plan.py does: one plan, the knobs that make it fit, and a table over meshes and batches."""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from somaspeed_jax.config import Config
from somaspeed_jax.scaling import plan_text, targets
from somaspeed_jax.scaling.devices import named
from somaspeed_jax.scaling.plan import Plan, changed, knobs, make_plan, meshes
from somaspeed_jax.scaling.workload import Robot


@dataclasses.dataclass(frozen=True)
class Planner:
    """What to plan for. `devices` are the compiler's; `compiler` is cuda or cpu."""

    config: Config
    robot: Robot
    gpu: str
    devices: Sequence[Any]
    compiler: str
    meshes: tuple[tuple[int, int], ...]
    batches: tuple[int, ...]

    @staticmethod
    def create(config: Config, arguments: argparse.Namespace) -> "Planner":
        """From the command line's arguments. Raises ValueError for one that cannot be used, RuntimeError without a
        compiler that was asked for."""
        gpu, count = named(arguments.gpu).name, arguments.gpus
        if count < 1:
            raise ValueError(f"--gpus is {count}, expected at least 1")
        compiler = arguments.compiler
        if compiler == "auto":
            compiler = "cuda" if targets.available() and gpu in targets.TARGETS else "cpu"
        if compiler == "cuda":
            devices = targets.devices(gpu, count)
        else:
            import jax

            devices = jax.devices("cpu")[:count]
        height, width = _numbers("--picture", arguments.picture, "x", 2)
        robot = Robot(
            cameras=arguments.cameras,
            picture=(height, width),
            prompt=arguments.prompt,
            state=arguments.state,
            actions=arguments.actions,
        )
        chosen = meshes(count) if arguments.meshes == "all" else _meshes(arguments.meshes, count)
        batches = tuple(_numbers("--batches", part, "x", 1)[0] for part in arguments.batches.split(",") if part)
        config = changed(config, "mesh", {"devices": 0})
        return Planner(config, robot, gpu, devices, compiler, tuple(chosen), batches)

    def plan(self, config: Config | None = None) -> Plan:
        """The plan of the configuration, or of a changed one."""
        return make_plan(config or self.config, self.robot, self.gpu, self.devices, self.compiler)

    def turn_knobs(self, before: Plan) -> list[tuple[str, Plan]]:
        """(fields, plan) for each knob, one added to the other, until the plan fits; all where it fits already."""
        turned, config = [], self.config
        for section, fields in knobs(self.config, before):
            config = changed(config, section, fields)
            shown = " ".join(f"--config.{section}.{name}={value}" for name, value in fields.items())
            turned.append((shown, self.plan(config)))
            if turned[-1][1].prediction(self.gpu).fits and not before.prediction(self.gpu).fits:
                break
        return turned

    def table(self, first: Plan) -> list[Plan]:
        """A plan for every mesh and batch asked for; `first` stands for itself."""
        plans = []
        for replica, fsdp in self.meshes or ((first.replica, first.fsdp),):
            for per_device in self.batches or (first.per_device,):
                same = (replica, fsdp, per_device) == (first.replica, first.fsdp, first.per_device)
                config = changed(self.config, "mesh", {"replica": replica, "fsdp": fsdp})
                config = changed(config, "batch", {"per_device": per_device, "global_batch": 0})
                plans.append(first if same else self.plan(config))
        return plans

    def text(self, plan: Plan, turned: Sequence[tuple[str, Plan]], others: Sequence[Plan]) -> str:
        """Everything for a terminal."""
        parts = [plan_text.summary(plan, self.gpu)]
        if turned:
            parts.append(plan_text.knob_table(plan, turned, self.gpu))
        if len(others) > 1:
            parts.append(plan_text.table(others, self.gpu))
        return "\n\n".join(parts)


def strict_json(plan: Plan, turned: Sequence[tuple[str, Plan]], others: Sequence[Plan]) -> str:
    """The plan, its knobs and its table for a program: bytes, seconds, FLOPs."""
    document = {
        "plan": dataclasses.asdict(plan),
        "knobs": [{"fields": fields, "plan": dataclasses.asdict(turned_plan)} for fields, turned_plan in turned],
        "table": [dataclasses.asdict(other) for other in others],
    }
    return json.dumps(document, indent=2, allow_nan=False)


def _meshes(text: str, count: int) -> list[tuple[int, int]]:
    found = []
    for part in filter(None, text.split(",")):
        replica, fsdp = _numbers("--meshes", part, "x", 2)
        if replica * fsdp != count:
            raise ValueError(f"--meshes {part}: {replica} x {fsdp} = {replica * fsdp}, but --gpus is {count}")
        found.append((replica, fsdp))
    return found


def _numbers(option: str, text: str, separator: str, count: int) -> tuple[int, ...]:
    parts = text.split(separator)
    if len(parts) != count or not all(part.isdigit() and int(part) > 0 for part in parts):
        shape = separator.join(["N"] * count)
        raise ValueError(f"{option}: {text!r} is not of the form {shape}")
    return tuple(int(part) for part in parts)
