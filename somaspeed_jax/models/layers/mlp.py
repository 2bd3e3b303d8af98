"""Feed-forward layers and activations."""

from collections.abc import Callable

import jax
from flax import nnx

from somaspeed_jax.models.layers.linear import Linear
from somaspeed_jax.models.layers.param import Runtime

Activation = Callable[[jax.Array], jax.Array]


def gelu_tanh(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=True)


def gelu_exact(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=False)


class Mlp(nnx.Module):
    """out(activation(in(x))), with biases."""

    def __init__(self, width: int, hidden: int, runtime: Runtime, activation: Activation = gelu_tanh):
        self.fc1 = Linear(width, hidden, runtime)
        self.fc2 = Linear(hidden, width, runtime)
        self.activation = activation

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., d] -> [..., d]."""
        return self.fc2(self.activation(self.fc1(x)))


class GatedMlp(nnx.Module):
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, gate: Linear, up: Linear, down: Linear, activation: Activation):
        self.gate, self.up, self.down = gate, up, down
        self.activation = activation

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., d] -> [..., d]."""
        return self.down(self.activation(self.gate(x)) * self.up(x))
