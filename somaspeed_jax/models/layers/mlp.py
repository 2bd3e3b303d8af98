"""Feed-forward layers and activations."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from somaspeed_jax.models.layers.linear import Linear
from somaspeed_jax.models.layers.param import Runtime

Activation = Callable[[jax.Array], jax.Array]


def _with_derivative(value_and_slope: Callable[[jax.Array], tuple[jax.Array, jax.Array]]) -> Activation:
    """An activation that keeps its derivative for the backward pass in place of its input: the same memory.

    A pre-activation's gradient feeds two products, one of which reads it transposed. Left to autodiff, XLA evaluates
    the derivative's transcendentals again inside that transposed copy, element by element (measured: a third of a
    small model's training step on a CPU). Computed in float32, returned in the type of x.
    """

    @jax.custom_jvp
    def activation(x: jax.Array) -> jax.Array:
        return value_and_slope(x.astype(jnp.float32))[0].astype(x.dtype)

    @activation.defjvp
    def _(primals, tangents):
        (x,), (dx,) = primals, tangents
        value, slope = value_and_slope(x.astype(jnp.float32))
        return value.astype(x.dtype), slope.astype(x.dtype) * dx

    return activation


def _gelu_tanh(x):
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    tanh = jnp.tanh(inner)
    inner_slope = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x**2)
    return 0.5 * x * (1 + tanh), 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh**2) * inner_slope


def _gelu_exact(x):
    normal = 0.5 * (1 + jax.lax.erf(x / math.sqrt(2)))
    return x * normal, normal + x * jnp.exp(-0.5 * x**2) / math.sqrt(2 * math.pi)


def _silu(x):
    gate = jax.nn.sigmoid(x)
    return x * gate, gate * (1 + x * (1 - gate))


gelu_tanh = _with_derivative(_gelu_tanh)
gelu_exact = _with_derivative(_gelu_exact)
silu = _with_derivative(_silu)


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
