"""How many parameters a model has, trains as its upstream counts, and really trains here."""

import dataclasses
import importlib
import math
import re
from collections.abc import Collection, Mapping
from types import ModuleType
from typing import Any

from somaspeed_jax.models.layers.param import ParamSpec
from somaspeed_jax.models.weights import openpi
from somaspeed_jax.models.weights.table import Table, parameter_counts, shapes

NOT_READ = "not read"


@dataclasses.dataclass(frozen=True)
class Group:
    """Parameters of one part of a model.

    upstream, upstream_trained: as upstream counts them; the latter None where its adapters have no tensors in the
      table. held: in this program's memory. learns: get a gradient and an update.
    """

    name: str
    upstream: int
    upstream_trained: int | None
    held: int
    learns: int


def count_groups(
    table: Table, specs: Mapping[str, ParamSpec], learns: Collection[str], upstream_patterns: tuple[str, ...] | None
) -> list[Group]:
    """Counts by the first part of our paths; tensors that are not read make a group of their own, adapters another.

    upstream_patterns: full-match patterns of the upstream names that carry a gradient flag.
    """
    counts = parameter_counts(table)
    group_of = {name: _group(row.path) for row in table for name, _ in row.names()}
    # A tensor that is read in part belongs to the part that reads it.
    group_of |= {name: _group(row.path) for row in table if row.path is not None for name, _ in row.names()}

    def flagged(name: str) -> bool:
        return any(re.fullmatch(pattern, name) for pattern in upstream_patterns or ())

    groups = []
    for group in dict.fromkeys([*(_group(path) for path in specs), *group_of.values()]):
        names = [name for name in counts if group_of[name] == group]
        held = {path: math.prod(spec.shape) for path, spec in specs.items() if _group(path) == group}
        groups.append(
            Group(
                name=group,
                upstream=sum(counts[name] for name in names),
                upstream_trained=None if upstream_patterns is None else sum(counts[n] for n in names if flagged(n)),
                held=sum(held.values()),
                learns=sum(size for path, size in held.items() if path in learns),
            )
        )
    return groups


def _group(path: str | None) -> str:
    if path is None:
        return NOT_READ
    return "adapters" if ".lora." in path else path.split(".")[0]


def upstream_trainable(model: str, model_config: Any, preset: str) -> tuple[tuple[str, ...] | None, int | None]:
    """What upstream trains under a preset: patterns over its names, and how many parameters that is.

    (None, count) for adapters, which are no tensors of the table; (None, None) where upstream has no such preset.
    """
    weights = importlib.import_module(f"somaspeed_jax.models.weights.{model}")
    counts = parameter_counts(weights.table(model_config))
    patterns = weights.UPSTREAM_TRAINABLE.get(preset)
    if patterns is not None:
        matched = [n for name, n in counts.items() if any(re.fullmatch(pattern, name) for pattern in patterns)]
        return patterns, sum(matched)
    if preset == "lora" and model == "pi05":
        return None, openpi.trainable_count(model_config)
    if preset == "lora" and hasattr(weights, "UPSTREAM_LORA"):
        return None, _peft_count(weights, model_config)
    return None, None


def _peft_count(weights: ModuleType, model_config: Any) -> int:
    """PEFT's adapters, A [rank, in] and B [out, rank] on each chosen linear, and the whole action expert."""
    table = weights.table(model_config)
    adapted = {
        name: shape
        for name, shape in shapes(table).items()
        if name.endswith(".weight") and re.fullmatch(weights.UPSTREAM_LORA, name.removesuffix(".weight"))
    }
    expert = sum(
        n
        for name, n in parameter_counts(table).items()
        if any(re.fullmatch(pattern, name) for pattern in weights.UPSTREAM_TRAINABLE["expert"])
    )
    return expert + sum(model_config.lora.rank * sum(shape) for shape in adapted.values())
