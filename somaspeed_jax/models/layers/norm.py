"""Normalisation layers: statistics in float32 whatever the type of the activations."""

import jax
import jax.numpy as jnp
from flax import nnx

from somaspeed_jax.models.layers.param import ones, param, zeros


def rms_normalise(x: jax.Array, eps: float = 1e-6) -> jax.Array:
    """x / sqrt(mean(x²) + eps) over the last axis, float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)


def layer_normalise(x: jax.Array, eps: float) -> jax.Array:
    """(x - mean) / sqrt(var + eps) over the last axis, float32, without scale and bias."""
    x = x.astype(jnp.float32)
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + eps)


class RMSNorm(nnx.Module):
    """RMS normalisation with a weight.

    offset: the weight is `offset + scale` (Gemma: 1 with scale stored around 0; Qwen: 0 with scale around 1).
    cast_first: round to the activation type before the weight is applied (Qwen), or after (Gemma, MolmoAct2).
    """

    def __init__(self, width: int, *, eps: float = 1e-6, offset: float = 0.0, cast_first: bool = False):
        self.scale = param((width,), zeros if offset else ones, "vector")
        self.eps, self.offset, self.cast_first = eps, offset, cast_first

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., d] -> the same shape and type."""
        y = rms_normalise(x, self.eps)
        scale = self.offset + self.scale[...].astype(jnp.float32)
        if self.cast_first:
            return (y.astype(x.dtype) * scale).astype(x.dtype)
        return (y * scale).astype(x.dtype)


class LayerNorm(nnx.Module):
    """Layer normalisation with scale and bias, in float32, returned in the type of x."""

    def __init__(self, width: int, *, eps: float):
        self.scale = param((width,), ones, "vector")
        self.bias = param((width,), zeros, "vector")
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        y = layer_normalise(x, self.eps)
        return (y * self.scale[...].astype(jnp.float32) + self.bias[...].astype(jnp.float32)).astype(x.dtype)
