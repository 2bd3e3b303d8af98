"""Linear layers, low-rank adapters and embedding tables."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from somaspeed_jax.models.layers.param import Initialiser, Kind, Runtime, lecun, normal, param, zeros


@dataclasses.dataclass(frozen=True)
class LoraSpec:
    """A low-rank adapter: W + alpha / rank * A B.

    init_a, init_b: standard deviations (openpi: both 0.01; PEFT: B is zero).
    """

    rank: int
    alpha: float
    init_a: float = 0.02
    init_b: float = 0.0


class Lora(nnx.Module):
    """The adapter of one kernel [i, o].

    out_groups: the output axis in so many equal groups (heads), each with an A of its own (openpi's per-head einsums).
    summed: B in so many copies that are summed (openpi's output projection, whose einsum sums the head axis of A and
      of B separately).
    """

    def __init__(self, d_in: int, d_out: int, spec: LoraSpec, *, out_groups: int = 1, summed: int = 1):
        if d_out % out_groups:
            raise ValueError(f"{d_out} outputs do not divide into {out_groups} adapter groups")
        self.scale = spec.alpha / spec.rank
        self.a = param((out_groups, d_in, spec.rank), normal(spec.init_a))
        init_b = normal(spec.init_b) if spec.init_b else zeros
        self.b = param((out_groups * summed, spec.rank, d_out // out_groups), init_b)
        self.groups = out_groups

    def _b(self, dtype) -> jax.Array:
        b = self.b[...].astype(dtype)
        return b if b.shape[0] == self.groups else b.sum(axis=0, keepdims=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., i] -> [..., o] in x's type."""
        low = jnp.einsum("...i,gir->...gr", x, self.a[...].astype(x.dtype))
        out = jnp.einsum("...gr,gro->...go", low, self._b(x.dtype))
        return out.reshape(*x.shape[:-1], -1) * self.scale

    def delta(self) -> jax.Array:
        """What is added to the kernel, [i, o] float32."""
        delta = jnp.einsum("gir,gro->igo", self.a[...].astype(jnp.float32), self._b(jnp.float32))
        return delta.reshape(delta.shape[0], -1) * self.scale


class Linear(nnx.Module):
    """y = x W + b with W [i, o], computed in the runtime's compute type.

    exact: stored, gathered and computed in float32 whatever the compute type.
    lora: an adapter beside the kernel, or None.
    """

    def __init__(
        self,
        d_in: int,
        d_out: int,
        runtime: Runtime,
        *,
        bias: bool = True,
        exact: bool = False,
        init: Initialiser = lecun,
        lora: Lora | None = None,
    ):
        kind: Kind = "exact" if exact else "matrix"
        self.kernel = param((d_in, d_out), init, kind)
        self.bias = param((d_out,), zeros, "vector") if bias else None
        self.lora = lora
        self.compute = jnp.float32 if exact else runtime.compute

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., i] of any float type -> [..., o] in the compute type."""
        x = x.astype(self.compute)
        y = x @ self.kernel[...].astype(self.compute)
        if self.lora is not None:
            y = y + self.lora(x)
        if self.bias is not None:
            y = y + self.bias[...].astype(self.compute)
        return y


class Embedding(nnx.Module):
    """A table [v, d] that is looked up, never multiplied and never gathered whole."""

    def __init__(self, vocabulary: int, width: int, *, stddev: float = 0.02):
        self.table = param((vocabulary, width), normal(stddev), "table")

    def __call__(self, ids: jax.Array) -> jax.Array:
        """ids [...] int32 -> rows [..., d] float32."""
        return jnp.take(self.table[...], ids, axis=0, mode="clip").astype(jnp.float32)
