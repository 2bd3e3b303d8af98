"""Rotary position embedding, half-split layout: channel i pairs with channel i + e/2."""

import jax
import jax.numpy as jnp


def rotary_angles(positions: jax.Array, width: int, theta: float) -> jax.Array:
    """Angles position * theta^(-2i/width), i = 0 .. width/2 - 1.

    positions: [...] of any number type. Returns [..., width / 2] float32.
    """
    frequencies = theta ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    return positions.astype(jnp.float32)[..., None] * frequencies


def rotate(x: jax.Array, angles: jax.Array) -> jax.Array:
    """Rotates heads by their positions' angles, in float32.

    x: [..., s, n, e]; angles: [..., s, e / 2], broadcast over heads. Returns x's shape and type.
    """
    cos, sin = jnp.cos(angles)[..., None, :], jnp.sin(angles)[..., None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
