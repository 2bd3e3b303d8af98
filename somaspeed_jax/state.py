"""The training state: what learns, what does not, the optimiser's memory; made already sharded."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from somaspeed_jax.mesh import Layout
from somaspeed_jax.models.layers.param import Params, ParamSpec, initial_value
from somaspeed_jax.optim import matches


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a step reads and writes. Its leaves are arrays; in trees of the same form, shapes or shardings.

    step: int32, updates done. trainable: float32. frozen: as stored. opt_state: optax's, over `trainable`.
    ema: moving average of `trainable`, or {} when off. healthy: false after the first non-finite loss or gradient norm;
    from then on every update is the identity.
    """

    step: Any
    trainable: dict[str, Any]
    frozen: dict[str, Any]
    opt_state: Any
    ema: dict[str, Any]
    healthy: Any


def split_trainable(specs: Mapping[str, ParamSpec], patterns: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Paths that train and paths that do not. A pattern that matches nothing is refused."""
    for pattern in patterns:
        if not any(matches((pattern,), path) for path in specs):
            raise ValueError(f"tune: the pattern {pattern!r} matches no parameter of this model")
    trainable = [path for path in specs if matches(patterns, path)]
    chosen = set(trainable)
    return trainable, [path for path in specs if path not in chosen]


def storage_type(spec: ParamSpec, trainable: bool, frozen_dtype: Any) -> Any:
    """Trainable: float32. Frozen: matrices and embedding tables in `frozen_dtype`, everything else float32."""
    if trainable or spec.kind in ("vector", "exact"):
        return jnp.float32
    return frozen_dtype


def random_params(
    specs: Mapping[str, ParamSpec], paths: list[str], seed: int, layout: Layout, *, trainable: bool, frozen_dtype: Any
) -> Params:
    """Initial values drawn straight into their shards: a function of (seed, path), not of the mesh."""
    shardings = {path: layout.param(specs[path], trainable) for path in paths}

    def draw():
        return {
            path: initial_value(specs[path], path, seed).astype(storage_type(specs[path], trainable, frozen_dtype))
            for path in paths
        }

    return jax.jit(draw, out_shardings=shardings)()


def opt_state_shardings(
    optimizer: optax.GradientTransformation, params: Any, shardings: Mapping[str, Any], replicated: Any
) -> Any:
    """Where the optimiser's state lives: moments beside their parameters, counters everywhere."""
    shapes = jax.eval_shape(optimizer.init, params)

    def place(path, _):
        keys = [entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey)]
        return shardings[keys[-1]] if keys else replicated

    return jax.tree_util.tree_map_with_path(place, shapes)


def state_shardings(
    specs: Mapping[str, ParamSpec],
    trainable: list[str],
    frozen: list[str],
    optimizer: optax.GradientTransformation,
    layout: Layout,
    ema: bool,
) -> TrainState:
    """The sharding of every leaf of a TrainState."""
    learns = {path: layout.param(specs[path], True) for path in trainable}
    shapes = {path: jax.ShapeDtypeStruct(specs[path].shape, jnp.float32) for path in trainable}
    return TrainState(
        step=layout.replicated,
        trainable=learns,
        frozen={path: layout.param(specs[path], False) for path in frozen},
        opt_state=opt_state_shardings(optimizer, shapes, learns, layout.replicated),
        ema=dict(learns) if ema else {},
        healthy=layout.replicated,
    )


def abstract_state(
    specs: Mapping[str, ParamSpec],
    shardings: TrainState,
    optimizer: optax.GradientTransformation,
    frozen_dtype: Any,
) -> TrainState:
    """Shapes, types and shardings of a TrainState, without values: to restore into, to plan and to compile."""

    def struct(path, trainable, sharding):
        spec = specs[path]
        dtype = storage_type(spec, trainable, frozen_dtype)
        return jax.ShapeDtypeStruct(spec.shape, dtype, sharding=sharding)

    trainable = {path: struct(path, True, s) for path, s in shardings.trainable.items()}
    opt_state = jax.tree.map(
        lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding),
        jax.eval_shape(optimizer.init, trainable),
        shardings.opt_state,
    )
    return TrainState(
        step=jax.ShapeDtypeStruct((), jnp.int32, sharding=shardings.step),
        trainable=trainable,
        frozen={path: struct(path, False, s) for path, s in shardings.frozen.items()},
        opt_state=opt_state,
        ema={path: struct(path, True, s) for path, s in shardings.ema.items()},
        healthy=jax.ShapeDtypeStruct((), jnp.bool_, sharding=shardings.healthy),
    )


def create_state(
    trainable: Params, frozen: Params, optimizer: optax.GradientTransformation, shardings: TrainState
) -> TrainState:
    """Step 0 from parameters that already live in their shards."""
    ema = jax.tree.map(jnp.copy, trainable) if shardings.ema else {}
    return TrainState(
        step=jax.device_put(jnp.int32(0), shardings.step),
        trainable=trainable,
        frozen=frozen,
        opt_state=jax.jit(optimizer.init, out_shardings=shardings.opt_state)(trainable),
        ema=ema,
        healthy=jax.device_put(jnp.bool_(True), shardings.healthy),
    )
