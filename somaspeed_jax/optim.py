"""Learning-rate schedules, parameter groups, clipping, AdamW and the parameter average.

AdamW is optax's. Clipping divides by (norm + 1e-6), as torch.nn.utils.clip_grad_norm_ does.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

Schedule = Callable[[jax.Array | int], jax.Array | float]
SCHEDULES = ("lerobot", "openpi", "groot", "molmoact2", "constant")


def schedule(kind: str, *, peak: float, floor: float, warmup: int, decay: int, steps: int) -> Schedule:
    """Learning rate of update s = 0, 1, ... as each upstream has it.

    lerobot: warm-up from peak/(warmup+1); cosine over the absolute step to `floor` at `decay`; when the run is shorter
      than `decay`, warm-up and decay shrink with it (LeRobot, optim/schedulers.py).
    openpi: the same warm-up; cosine from the end of warm-up to `decay` (optax.warmup_cosine_decay_schedule).
    groot: warm-up from 0; cosine from the end of warm-up to `floor` at the last step (transformers' cosine).
    molmoact2: update s + 1 of warm-up is (s + 1)/warmup; cosine from the end of warm-up to `decay`, then `floor`.
    constant: `peak` after a warm-up from peak/(warmup+1).
    """
    if kind == "lerobot" and steps < decay:
        warmup, decay = int(warmup * steps / decay), steps
    if kind == "groot":
        decay = steps

    def cosine(progress):
        return 0.5 * (1.0 + jnp.cos(math.pi * jnp.clip(progress, 0.0, 1.0)))

    def rate(step):
        s = jnp.asarray(step, jnp.float32)
        warm = peak * (s + 1) / (warmup + 1)
        after_warmup = floor + (peak - floor) * cosine((s - warmup) / max(decay - warmup, 1))
        if kind == "constant":
            return jnp.where(s < warmup, warm, peak)
        if kind == "lerobot":
            return jnp.where(s < warmup, warm, floor + (peak - floor) * cosine(s / decay))
        if kind == "openpi":
            return jnp.where(s < warmup, warm, after_warmup)
        if kind == "groot":
            return jnp.where(s < warmup, peak * s / max(warmup, 1), after_warmup)
        if kind == "molmoact2":
            after = floor + (peak - floor) * cosine((s + 1 - warmup) / max(decay - warmup, 1))
            return jnp.where(s + 1 < warmup, peak * (s + 1) / max(warmup, 1), after)
        raise ValueError(f"unknown schedule {kind!r}; known: {', '.join(SCHEDULES)}")

    return rate


@dataclasses.dataclass(frozen=True)
class Group:
    """Parameters that share a learning rate, a weight decay and a clip group.

    patterns: full-match regular expressions of paths; a parameter belongs to the first group that matches.
    lr_scale: factor on the schedule. clip_group: groups of the same name share one norm.
    """

    name: str
    patterns: tuple[str, ...]
    lr_scale: float = 1.0
    weight_decay: float = 0.0
    clip_group: str = "all"


def matches(patterns: Sequence[str], path: str) -> bool:
    return any(re.fullmatch(pattern, path) for pattern in patterns)


def assign_groups(groups: Sequence[Group], paths: Sequence[str]) -> dict[str, Group]:
    """The group of every path. Raises ValueError naming paths without a group and patterns without a path."""
    assigned = {}
    for path in paths:
        group = next((g for g in groups if matches(g.patterns, path)), None)
        if group is None:
            raise ValueError(f"parameter {path} belongs to no optimiser group ({', '.join(g.name for g in groups)})")
        assigned[path] = group
    return assigned


def global_norms(grads: Mapping[str, jax.Array], assigned: Mapping[str, Group]) -> dict[str, jax.Array]:
    """L2 norm of the gradients of each clip group, float32."""
    squares: dict[str, jax.Array] = {}
    for path, grad in grads.items():
        name = assigned[path].clip_group
        square = jnp.sum(jnp.square(grad.astype(jnp.float32)))
        squares[name] = squares[name] + square if name in squares else square
    return {name: jnp.sqrt(value) for name, value in squares.items()}


def clip_by_group(max_norm: float, assigned: Mapping[str, Group]) -> optax.GradientTransformation:
    """Scales each clip group's gradients to at most `max_norm`."""

    def update(updates: Any, state, params=None):
        norms = global_norms(updates, assigned)
        scale = {name: jnp.minimum(1.0, max_norm / (norm + 1e-6)) for name, norm in norms.items()}
        return {path: grad * scale[assigned[path].clip_group] for path, grad in updates.items()}, state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def adamw(
    rate: Schedule,
    assigned: Mapping[str, Group],
    *,
    betas: tuple[float, float],
    eps: float,
    clip_norm: float,
    moments_dtype=jnp.float32,
) -> optax.GradientTransformation:
    """Clip, Adam moments, decoupled decay, learning rate: over a flat dictionary of float32 parameters."""

    def finish(updates: Any, state: Any, params: Any = None):
        lr = rate(state.count)
        scaled = {
            path: -lr * assigned[path].lr_scale * (u + assigned[path].weight_decay * params[path])
            for path, u in updates.items()
        }
        return scaled, optax.ScaleByScheduleState(optax.safe_increment(state.count))

    step = optax.GradientTransformation(lambda params: optax.ScaleByScheduleState(jnp.zeros([], jnp.int32)), finish)
    moments = optax.scale_by_adam(*betas, eps=eps, mu_dtype=moments_dtype)
    parts = [moments, step] if clip_norm <= 0 else [clip_by_group(clip_norm, assigned), moments, step]
    return optax.chain(*parts)


def average(ema: Mapping[str, jax.Array], params: Mapping[str, jax.Array], decay: float) -> dict[str, jax.Array]:
    """The moving average after an update: decay * ema + (1 - decay) * params, float32, no bias correction."""
    return {path: decay * ema[path] + (1.0 - decay) * params[path] for path in ema}
