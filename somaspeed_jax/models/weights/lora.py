"""Adapters as what they add to their kernels, so that a merged model can be exported in upstream's layout."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from somaspeed_jax.models.layers.linear import Lora
from somaspeed_jax.models.weights.export import Deltas


def deltas(policy: nnx.Module, params: Mapping[str, jax.Array | np.ndarray]) -> Deltas:
    """Kernel path -> function of the layer that gives what its adapter adds, float32 [i, o].

    policy: the abstract model; `params` holds the values of its adapters (others are not looked at).
    Raises KeyError where an adapter has no value.
    """
    found = {}
    for key, module in nnx.iter_graph(policy):
        if isinstance(module, Lora):
            path = ".".join(map(str, key))
            found[path.removesuffix("lora") + "kernel"] = _delta(module, params[f"{path}.a"], params[f"{path}.b"])
    return found


def _delta(lora: Lora, a: jax.Array | np.ndarray, b: jax.Array | np.ndarray) -> Callable[[int | None], np.ndarray]:
    graph, state = nnx.split(lora)

    def delta(layer: int | None) -> np.ndarray:
        factors = {"a": a, "b": b} if layer is None else {"a": a[layer], "b": b[layer]}
        values = {key: variable.replace(jnp.asarray(factors[str(key[-1])])) for key, variable in
                  nnx.to_flat_state(state)}  # fmt: skip
        with jax.default_matmul_precision("highest"):
            return np.asarray(nnx.merge(graph, nnx.from_flat_state(list(values.items()))).delta())

    return delta
