"""Layers that run alike, run by one scan: compile time does not grow with depth."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_policies as policies

from somaspeed_jax.models.layers.param import Runtime

Carry = TypeVar("Carry")

GATHERED = "gathered_weights"

# Name of a policy -> what a layer keeps for its backward pass. `none` keeps all but the gathered weights, which are
# gathered again (SomaSpeed's `ac: none, reshard: always`); `keep_gathered` keeps those too (`reshard: never`).
REMAT: dict[str, Any] = {
    "none": policies.save_anything_except_these_names(GATHERED),
    "keep_gathered": None,
    "dots": policies.dots_with_no_batch_dims_saveable,
    "full": policies.nothing_saveable,
}


def rematerialised(body: Callable, policy: str, gathers: bool) -> Callable:
    """`body` under a policy of `REMAT`. Without gathers `none` needs no checkpoint at all."""
    if policy not in REMAT:
        raise ValueError(f"unknown rematerialisation policy {policy!r}; known: {', '.join(REMAT)}")
    if policy == "keep_gathered" or (policy == "none" and not gathers):
        return body
    return jax.checkpoint(body, policy=REMAT[policy], prevent_cse=False)


def run_stack(
    layers: nnx.Module,
    body: Callable[[Any, Carry, Any], tuple[Carry, Any]],
    carry: Carry,
    xs: Any = None,
    *,
    runtime: Runtime,
    remat: str = "none",
) -> tuple[Carry, Any]:
    """Runs `carry, y = body(layer, carry, x)` over the layer axis of `layers` and of `xs`.

    layers: a module made by `stack`, bound to arrays with a leading layer axis.
    xs: a pytree whose leaves have the same leading axis, or None.
    remat: a name of `REMAT`.
    Returns the last carry and the stacked `y`s. The weights of one layer are gathered inside the rematerialised body.
    """
    graph, state = nnx.split(layers)

    def step(carry, layer_and_x):
        layer_state, x = layer_and_x
        layer = runtime.gathered(nnx.merge(graph, layer_state))
        carry, y = body(layer, carry, x)
        return jax.tree.map(runtime.pin, carry), y

    return jax.lax.scan(rematerialised(step, remat, runtime.gather is not None), carry, (state, xs))
