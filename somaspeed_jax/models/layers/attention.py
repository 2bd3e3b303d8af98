"""Attention: scores and softmax in float32, probabilities and output in the type of the values.

A fully masked row gives zero, never NaN and never a uniform average.
"""

import functools

import jax
import jax.numpy as jnp

MASKED = -1e30  # finite: a fully masked row must not become NaN


@jax.custom_jvp
def split_softmax(*parts: jax.Array) -> tuple[jax.Array, ...]:
    """One softmax over the last axes of several float32 arrays together, MASKED entries zero.

    Its derivative needs nothing but the result: y (dx - sum(y dx)), the sum over all parts. Left to autodiff, scores,
    exponentials and sums would all be kept for the backward pass.
    """
    top = functools.reduce(jnp.maximum, (jnp.max(part, axis=-1, keepdims=True) for part in parts))
    weights = [jnp.where(part > MASKED / 2, jnp.exp(part - top), 0.0) for part in parts]
    total = sum(jnp.sum(weight, axis=-1, keepdims=True) for weight in weights)
    scale = 1.0 / jnp.where(total > 0, total, 1.0)
    return tuple(weight * scale for weight in weights)


@split_softmax.defjvp
def _split_softmax_jvp(parts, tangents):
    weights = split_softmax(*parts)
    moved = [weight * tangent for weight, tangent in zip(weights, tangents, strict=True)]
    total = sum(jnp.sum(m, axis=-1, keepdims=True) for m in moved)
    return weights, tuple(m - weight * total for m, weight in zip(moved, weights, strict=True))


def masked_softmax(scores: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Softmax over the last axis of float32 `scores` where `mask` (broadcastable, bool) is true; zero elsewhere."""
    if mask is None:
        return jax.nn.softmax(scores, axis=-1)
    return split_softmax(jnp.where(mask, scores, MASKED))[0]


def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """Scaled dot-product attention with grouped queries.

    q [b, t, n, e]; k, v [b, s, k, e] with n a multiple of k; query head i reads key head i // (n / k).
    mask: bool, broadcastable to [b, t, s], or None. Returns [b, t, n, e] in v's type.
    """
    b, t, n, e = q.shape
    kv_heads = k.shape[2]
    q = q.reshape(b, t, kv_heads, n // kv_heads, e)
    scores = jnp.einsum("btkge,bske->bkgts", q, k, preferred_element_type=jnp.float32) * e**-0.5
    weights = masked_softmax(scores, None if mask is None else mask[:, None, None])
    out = jnp.einsum("bkgts,bske->btkge", weights.astype(v.dtype), v)
    return out.reshape(b, t, n, e)


def attend_split(
    q: jax.Array,
    k_prefix: jax.Array,
    v_prefix: jax.Array,
    prefix_mask: jax.Array,
    k_own: jax.Array,
    v_own: jax.Array,
) -> jax.Array:
    """One softmax over a shared prefix and each chunk's own keys, without concatenating them.

    q [b, K, t, n, e]; k_prefix, v_prefix [b, p, k, e]; prefix_mask [b, p] bool; k_own, v_own [b, K, t, k, e].
    Every query of a chunk sees the valid prefix and its whole chunk. The prefix is shared by the K chunks: its scores
    are one product with K in the query axis. Returns [b, K, t, n, e] in v_own's type.
    """
    b, chunks, t, n, e = q.shape
    kv_heads = k_own.shape[3]
    q = q.reshape(b, chunks, t, kv_heads, n // kv_heads, e)
    scale = e**-0.5
    prefix = jnp.einsum("bftkge,bpke->bfkgtp", q, k_prefix, preferred_element_type=jnp.float32) * scale
    own = jnp.einsum("bftkge,bfuke->bfkgtu", q, k_own, preferred_element_type=jnp.float32) * scale
    prefix = jnp.where(prefix_mask[:, None, None, None, None], prefix, MASKED)
    prefix, own = split_softmax(prefix, own)
    out = jnp.einsum("bfkgtp,bpke->bftkge", prefix.astype(v_prefix.dtype), v_prefix)
    out = out + jnp.einsum("bfkgtu,bfuke->bftkge", own.astype(v_own.dtype), v_own)
    return out.reshape(b, chunks, t, n, e)
