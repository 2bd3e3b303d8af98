"""Gemma layers as π0.5 uses them: a bidirectional prefix (trunk) and adaRMS-modulated action layers (expert)."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from somaspeed_jax.models.layers.attention import attend, attend_split
from somaspeed_jax.models.layers.linear import Linear, Lora, LoraSpec
from somaspeed_jax.models.layers.mlp import GatedMlp, gelu_tanh
from somaspeed_jax.models.layers.norm import RMSNorm, rms_normalise
from somaspeed_jax.models.layers.param import Initialiser, Runtime, zeros
from somaspeed_jax.models.layers.rotary import rotate

ROPE_THETA = 10_000.0


@dataclasses.dataclass(frozen=True)
class GemmaConfig:
    width: int
    depth: int
    mlp: int
    heads: int = 8
    kv_heads: int = 1
    head_width: int = 256
    lora: LoraSpec | None = None


class KeyValue(NamedTuple):
    """Keys after rotation, and values: [b, p, k, e] each, or with a leading layer axis."""

    k: jax.Array
    v: jax.Array


def _heads(x: jax.Array, heads: int) -> jax.Array:
    return x.reshape(*x.shape[:-1], heads, -1)


class KeyValueProjection(nnx.Module):
    """Key and value projections, the key rotated: all that is read of the last trunk layer."""

    def __init__(self, config: GemmaConfig, runtime: Runtime):
        d, out = config.width, config.kv_heads * config.head_width

        def project():
            lora = config.lora and Lora(d, out, config.lora, out_groups=config.kv_heads)
            return Linear(d, out, runtime, bias=False, lora=lora)

        self.k, self.v = project(), project()
        self.kv_heads = config.kv_heads

    def keys_values(self, x: jax.Array, angles: jax.Array) -> KeyValue:
        """x [..., s, d], angles [..., s, e/2] -> keys and values [..., s, k, e]."""
        k, v = _heads(self.k(x), self.kv_heads), _heads(self.v(x), self.kv_heads)
        return KeyValue(rotate(k, angles), v)


class GemmaAttention(KeyValueProjection):
    """All four projections. openpi's adapters have an A per query head; its output adapter sums B over heads."""

    def __init__(self, config: GemmaConfig, runtime: Runtime):
        super().__init__(config, runtime)
        d, inner = config.width, config.heads * config.head_width
        lora_q = config.lora and Lora(d, inner, config.lora, out_groups=config.heads)
        lora_out = config.lora and Lora(inner, d, config.lora, summed=config.heads)
        self.q = Linear(d, inner, runtime, bias=False, lora=lora_q)
        self.out = Linear(inner, d, runtime, bias=False, lora=lora_out)
        self.heads = config.heads

    def queries(self, x: jax.Array, angles: jax.Array) -> jax.Array:
        """x [..., s, d] -> rotated queries [..., s, n, e]."""
        return rotate(_heads(self.q(x), self.heads), angles)

    def merge(self, heads: jax.Array) -> jax.Array:
        """[..., s, n, e] -> [..., s, d]."""
        return self.out(heads.reshape(*heads.shape[:-2], -1))


def gemma_mlp(config: GemmaConfig, runtime: Runtime) -> GatedMlp:
    """down(gelu_tanh(gate(x)) * up(x)), without biases."""

    def linear(d_in, d_out):
        return Linear(d_in, d_out, runtime, bias=False, lora=config.lora and Lora(d_in, d_out, config.lora))

    d, f = config.width, config.mlp
    return GatedMlp(linear(d, f), linear(d, f), linear(f, d), gelu_tanh)


class TrunkLayer(nnx.Module):
    """A prefix layer: every valid token sees every valid token. Returns its keys and values beside its output."""

    def __init__(self, config: GemmaConfig, runtime: Runtime):
        self.norm1, self.norm2 = RMSNorm(config.width, offset=1.0), RMSNorm(config.width, offset=1.0)
        self.attn = GemmaAttention(config, runtime)
        self.mlp = gemma_mlp(config, runtime)

    def __call__(self, x: jax.Array, angles: jax.Array, mask: jax.Array) -> tuple[jax.Array, KeyValue]:
        """x [b, p, d], angles [b, p, e/2], mask [b, p] bool."""
        y = self.norm1(x)
        kv = self.attn.keys_values(y, angles)
        x = x + self.attn.merge(attend(self.attn.queries(y, angles), kv.k, kv.v, mask[:, None]))
        return x + self.mlp(self.norm2(x)), kv


class LastTrunkLayer(nnx.Module):
    """The last prefix layer, of which the action expert reads keys and values alone."""

    def __init__(self, config: GemmaConfig, runtime: Runtime):
        self.norm1 = RMSNorm(config.width, offset=1.0)
        self.attn = KeyValueProjection(config, runtime)

    def __call__(self, x: jax.Array, angles: jax.Array) -> KeyValue:
        return self.attn.keys_values(self.norm1(x), angles)


class AdaRMSNorm(nnx.Module):
    """RMS normalisation whose scale, shift and residual gate come from the flow time's embedding.

    openpi, models/gemma.py: one dense layer to (scale, shift, gate); y = rms(x) (1 + scale) + shift.
    """

    def __init__(self, width: int, runtime: Runtime, init: Initialiser = zeros):
        self.dense = Linear(width, 3 * width, runtime, init=init)

    def __call__(self, x: jax.Array, condition: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x [..., t, d], condition [..., d] -> normalised [..., t, d] and gate [..., 1, d]."""
        scale, shift, gate = jnp.split(self.dense(condition)[..., None, :], 3, axis=-1)
        y = rms_normalise(x) * (1.0 + scale.astype(jnp.float32)) + shift.astype(jnp.float32)
        return y.astype(x.dtype), gate.astype(x.dtype)


class ExpertLayer(nnx.Module):
    """An action layer over the prefix keys and values of the same depth and the chunk's own."""

    def __init__(self, config: GemmaConfig, runtime: Runtime, modulation_init: Initialiser = zeros):
        self.norm1 = AdaRMSNorm(config.width, runtime, modulation_init)
        self.norm2 = AdaRMSNorm(config.width, runtime, modulation_init)
        self.attn = GemmaAttention(config, runtime)
        self.mlp = gemma_mlp(config, runtime)

    def __call__(
        self, x: jax.Array, prefix: KeyValue, prefix_mask: jax.Array, angles: jax.Array, condition: jax.Array
    ) -> jax.Array:
        """x [b, K, t, d]; prefix [b, p, k, e]; prefix_mask [b, p]; angles [b, 1, t, e/2]; condition [b, K, d]."""
        y, gate = self.norm1(x, condition)
        own = self.attn.keys_values(y, angles)
        heads = attend_split(self.attn.queries(y, angles), prefix.k, prefix.v, prefix_mask, own.k, own.v)
        x = x + self.attn.merge(heads) * gate
        y, gate = self.norm2(x, condition)
        return x + self.mlp(y) * gate
