"""Parameters of a model: shapes and initialisers in Flax NNX modules, values in one flat dictionary.

A module is a description: its `nnx.Param`s hold `jax.ShapeDtypeStruct`s. `param_specs` lists them by dotted path,
`initialise` draws values as a function of (seed, path) alone, and `bind` puts a dictionary of arrays into the
description, inside or outside jit.
"""

import dataclasses
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

Kind = Literal["matrix", "exact", "vector", "table"]
Initialiser = Callable[..., jax.Array]
Params = dict[str, jax.Array]
M = TypeVar("M", bound=nnx.Module)

zeros = jax.nn.initializers.zeros
ones = jax.nn.initializers.ones
lecun = jax.nn.initializers.lecun_normal()


def normal(stddev: float) -> Initialiser:
    return jax.nn.initializers.normal(stddev)


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """What is known of a parameter without its value.

    kind: `matrix` (stored in the frozen type when frozen, cast to the compute type on its shard), `exact` (a matrix
      stored and used in float32 whatever the compute type), `vector` (norms, scales, biases: float32) or `table`
      (embedding tables, looked up and never gathered whole; stored in the frozen type when frozen).
    stacked: axis 0 counts layers and is never sharded.
    """

    shape: tuple[int, ...]
    kind: Kind
    init: Initialiser
    stacked: bool


def param(shape: tuple[int, ...], init: Initialiser, kind: Kind = "matrix") -> nnx.Param:
    """A parameter without a value."""
    return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.float32), init=init, kind=kind, stacked=False)


def stack(length: int, block: M) -> M:
    """The description of `length` layers like `block`: each parameter gains a leading layer axis."""
    for _, variable in nnx.to_flat_state(nnx.state(block)):
        if variable.get_metadata("stacked"):
            raise ValueError("a stack of stacks is not supported: flatten the layers into one axis")
    graph, state = nnx.split(block)

    def widen(variable):
        shape = (length, *variable.get_value().shape)
        wide = variable.replace(jax.ShapeDtypeStruct(shape, jnp.float32))
        wide.set_metadata("stacked", True)
        return wide

    wide = jax.tree.map(widen, state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    return nnx.merge(graph, wide)


def _path(key: tuple[Any, ...]) -> str:
    return ".".join(map(str, key))


def param_specs(module: nnx.Module) -> dict[str, ParamSpec]:
    """Every parameter by dotted path, in a fixed order."""
    specs = {}
    for key, variable in sorted(nnx.to_flat_state(nnx.state(module, nnx.Param)), key=lambda kv: _path(kv[0])):
        meta = variable.get_metadata()
        specs[_path(key)] = ParamSpec(tuple(variable.get_value().shape), meta["kind"], meta["init"], meta["stacked"])
    return specs


def bind(module: M, params: Mapping[str, Any]) -> M:
    """The module with `params` in place of its shapes. Raises KeyError for a path without a value."""
    graph, state = nnx.split(module)
    flat = [(key, variable.replace(params[_path(key)])) for key, variable in nnx.to_flat_state(state)]
    return nnx.merge(graph, nnx.from_flat_state(flat))


def initial_value(spec: ParamSpec, path: str, seed: int) -> jax.Array:
    """float32 initial value of one parameter: a function of (seed, path), not of mesh, order or other parameters.

    A stacked parameter draws each layer from its own key, so that fan-in is the layer's.
    """
    key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(path.encode()) & 0x7FFFFFFF)
    if not spec.stacked:
        return spec.init(key, spec.shape, jnp.float32)
    return jax.vmap(lambda k: spec.init(k, spec.shape[1:], jnp.float32))(jax.random.split(key, spec.shape[0]))


def initialise(module: nnx.Module, seed: int) -> Params:
    """float32 initial values of every parameter, on the default device. For small models and tests."""
    specs = param_specs(module)
    return jax.jit(lambda: {path: initial_value(spec, path, seed) for path, spec in specs.items()})()


def _identity(x):
    return x


@dataclasses.dataclass(frozen=True)
class Runtime:
    """What a model needs of the machine, without knowing of meshes.

    compute: type of activations and products (float32 or bfloat16).
    gather: `nnx.Variable -> array`: one parameter made whole in the compute type (matrices) or as stored.
    pin: keeps an activation split over its leading batch axis.
    remat_context, remat_expert: rematerialisation policies of `run_stack`, by name.
    """

    compute: Any = jnp.float32
    gather: Callable[[nnx.Variable], Any] | None = None
    pin: Callable[[jax.Array], jax.Array] = _identity
    remat_context: str = "none"
    remat_expert: str = "none"

    def gathered(self, module: M) -> M:
        """`module` with each parameter gathered; the module itself where there is nothing to gather."""
        if self.gather is None:
            return module
        graph, state = nnx.split(module)
        gather = self.gather
        state = jax.tree.map(lambda v: v.replace(gather(v)), state, is_leaf=lambda x: isinstance(x, nnx.Variable))
        return nnx.merge(graph, state)
