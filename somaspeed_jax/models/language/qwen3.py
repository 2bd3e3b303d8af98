"""Qwen3's decoder block, the language trunk of GR00T N1.7 and of MolmoAct2.

Pre-norm, grouped-query attention with an RMS norm on each query and key head before the rotation, SwiGLU, no biases.
Formulas: Hugging Face transformers, models/qwen3_vl/modeling_qwen3_vl.py (Qwen3VLTextDecoderLayer).

Both wide products are fused: queries, keys and values are one kernel, and so are the two halves of SwiGLU.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from somaspeed_jax.models.layers.attention import attend
from somaspeed_jax.models.layers.linear import Linear, Lora, LoraSpec
from somaspeed_jax.models.layers.norm import RMSNorm
from somaspeed_jax.models.layers.param import Runtime
from somaspeed_jax.models.layers.rotary import rotate


@dataclasses.dataclass(frozen=True)
class Qwen3Sizes:
    """Sizes of one block.

    width d, hidden f, heads n (queries), kv_heads k, head_width e; eps of every RMS norm.
    cast_first: round the normalised activation to its type before the norm's weight is applied (transformers' Qwen3)
      or after (MolmoAct2).
    """

    width: int
    hidden: int
    heads: int
    kv_heads: int
    head_width: int
    eps: float = 1e-6
    cast_first: bool = True

    def __post_init__(self):
        if self.heads % self.kv_heads or self.head_width % 2:
            raise ValueError(
                f"{self.heads} query heads over {self.kv_heads} key heads of width {self.head_width}: need a "
                "multiple of the second and an even width"
            )


def _linear(d_in: int, d_out: int, runtime: Runtime, lora: LoraSpec | None) -> Linear:
    return Linear(d_in, d_out, runtime, bias=False, lora=None if lora is None else Lora(d_in, d_out, lora))


class Qwen3KeyValue(nnx.Module):
    """What is read of a last layer of which only keys and values are needed."""

    def __init__(self, sizes: Qwen3Sizes, runtime: Runtime, *, lora: LoraSpec | None = None):
        self.norm = RMSNorm(sizes.width, eps=sizes.eps, cast_first=sizes.cast_first)
        self.kv = _linear(sizes.width, 2 * sizes.kv_heads * sizes.head_width, runtime, lora)
        self.k_norm = RMSNorm(sizes.head_width, eps=sizes.eps, cast_first=sizes.cast_first)
        self.head_width = sizes.head_width

    def __call__(self, x: jax.Array, angles: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x [b, p, d], angles [b, p, e / 2] -> rotated keys, and values, [b, p, k, e] in the compute type."""
        kv = self.kv(self.norm(x))
        k, v = jnp.split(kv.reshape(*kv.shape[:-1], -1, self.head_width), 2, axis=-2)
        return rotate(self.k_norm(k.astype(jnp.float32)), angles).astype(v.dtype), v


class Qwen3Block(nnx.Module):
    """One whole decoder block.

    Kernels: `qkv` [d, (n + 2k) e], outputs ordered queries, keys, values; `up_gate` [d, 2f], the linear half before
    the half that passes through SiLU.
    """

    def __init__(self, sizes: Qwen3Sizes, runtime: Runtime, *, lora: LoraSpec | None = None):
        inner = sizes.heads * sizes.head_width
        self.norm1 = RMSNorm(sizes.width, eps=sizes.eps, cast_first=sizes.cast_first)
        self.qkv = _linear(sizes.width, inner + 2 * sizes.kv_heads * sizes.head_width, runtime, lora)
        self.q_norm = RMSNorm(sizes.head_width, eps=sizes.eps, cast_first=sizes.cast_first)
        self.k_norm = RMSNorm(sizes.head_width, eps=sizes.eps, cast_first=sizes.cast_first)
        self.out = _linear(inner, sizes.width, runtime, lora)
        self.norm2 = RMSNorm(sizes.width, eps=sizes.eps, cast_first=sizes.cast_first)
        self.up_gate = _linear(sizes.width, 2 * sizes.hidden, runtime, lora)
        self.down = _linear(sizes.hidden, sizes.width, runtime, lora)
        self.sizes = sizes

    def __call__(
        self, x: jax.Array, angles: jax.Array, mask: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """One layer over a sequence.

        x: [b, p, d], the residual stream. angles: [b, p, e / 2] float32, the rotation of each token.
        mask: [b, p, p] bool, true where a query (axis 1) may see a key (axis 2); a row without any gives zero.
        Returns x of the same shape and type, and (keys, values) [b, p, k, e]: keys normed and rotated.
        """
        attended, k, v = self._attention(self.norm1(x), angles, mask)
        x = x + attended.astype(x.dtype)
        up, gate = jnp.split(self.up_gate(self.norm2(x)), 2, axis=-1)
        return x + self.down(jax.nn.silu(gate) * up).astype(x.dtype), (k, v)

    def _attention(self, x, angles, mask):
        n, k_heads, e = self.sizes.heads, self.sizes.kv_heads, self.sizes.head_width
        qkv = self.qkv(x)
        qkv = qkv.reshape(*qkv.shape[:-1], n + 2 * k_heads, e)
        q, k, v = jnp.split(qkv, [n, n + k_heads], axis=-2)
        # The head norms and the rotation stay in float32, as upstream's do under autocast.
        q = rotate(self.q_norm(q.astype(jnp.float32)), angles).astype(v.dtype)
        k = rotate(self.k_norm(k.astype(jnp.float32)), angles).astype(v.dtype)
        out = attend(q, k, v, mask)
        return self.out(out.reshape(*out.shape[:-2], n * e)), k, v


def causal_mask(token_mask: jax.Array) -> jax.Array:
    """token_mask [b, p] bool -> [b, p, p]: a valid query sees valid keys at or before its place; a padded one, none."""
    p = token_mask.shape[1]
    order = jnp.arange(p)
    return (order[:, None] >= order) & token_mask[:, None, :] & token_mask[:, :, None]
