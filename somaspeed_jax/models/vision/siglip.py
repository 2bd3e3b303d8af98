"""SigLIP vision tower (big_vision / PaliGemma): patches, learned positions, pre-norm encoder, final norm."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx

from somaspeed_jax.models.layers.attention import attend
from somaspeed_jax.models.layers.linear import Linear
from somaspeed_jax.models.layers.mlp import Mlp
from somaspeed_jax.models.layers.norm import LayerNorm
from somaspeed_jax.models.layers.param import Runtime, param, stack
from somaspeed_jax.models.layers.stack import run_stack


@dataclasses.dataclass(frozen=True)
class SiglipConfig:
    width: int = 1152
    depth: int = 27
    mlp: int = 4304
    heads: int = 16
    patch: int = 14
    image: tuple[int, int] = (224, 224)  # height, width

    @property
    def tokens(self) -> int:
        """Tokens a picture."""
        return (self.image[0] // self.patch) * (self.image[1] // self.patch)


class SiglipAttention(nnx.Module):
    """Bidirectional self-attention with biases."""

    def __init__(self, config: SiglipConfig, runtime: Runtime):
        d = config.width
        self.q, self.k = Linear(d, d, runtime), Linear(d, d, runtime)
        self.v, self.out = Linear(d, d, runtime), Linear(d, d, runtime)
        self.heads = config.heads

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [b, p, d] -> [b, p, d]."""

        def heads(y):
            return y.reshape(*y.shape[:-1], self.heads, -1)

        out = attend(heads(self.q(x)), heads(self.k(x)), heads(self.v(x)))
        return self.out(out.reshape(x.shape))


class SiglipBlock(nnx.Module):
    """x += attention(norm1(x)); x += mlp(norm2(x))."""

    def __init__(self, config: SiglipConfig, runtime: Runtime):
        self.norm1, self.norm2 = LayerNorm(config.width, eps=1e-6), LayerNorm(config.width, eps=1e-6)
        self.attn = SiglipAttention(config, runtime)
        self.mlp = Mlp(config.width, config.mlp, runtime)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def patchify(images: jax.Array, patch: int) -> jax.Array:
    """images [b, h, w, 3] -> [b, p, patch * patch * 3], patches row-major, a patch in (y, x, channel) order."""
    b, h, w, channels = images.shape
    x = images.reshape(b, h // patch, patch, w // patch, patch, channels)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(b, (h // patch) * (w // patch), patch * patch * channels)


def sincos_positions(key: jax.Array, shape: tuple[int, ...], dtype) -> jax.Array:
    """Positions [p, d] of a square grid as sines and cosines of its two coordinates (MoCo v3; big_vision's sincos2d).

    What a new tower starts from: a small model learns where things are several times sooner than from noise.
    """
    tokens, width = shape
    side = math.isqrt(tokens)
    if side * side != tokens or width % 4:
        return jax.random.normal(key, shape, dtype) * width**-0.5
    frequencies = 100.0 ** -(jnp.arange(width // 4) / max(width // 4 - 1, 1))
    y, x = jnp.meshgrid(jnp.arange(side), jnp.arange(side), indexing="ij")
    angles = [axis.reshape(-1, 1) * frequencies for axis in (x, y)]
    return jnp.concatenate([wave(a) for a in angles for wave in (jnp.sin, jnp.cos)], axis=1).astype(dtype)


class Siglip(nnx.Module):
    """Pictures to one feature a patch. Patch product and positions are float32, the encoder in the compute type."""

    def __init__(self, config: SiglipConfig, runtime: Runtime):
        self.patch = Linear(3 * config.patch**2, config.width, runtime, exact=True)
        self.position = param((config.tokens, config.width), sincos_positions, "vector")
        self.layers = stack(config.depth, SiglipBlock(config, runtime))
        self.norm = LayerNorm(config.width, eps=1e-6)
        self.config, self.runtime = config, runtime

    def __call__(self, images: jax.Array) -> jax.Array:
        """images [b, h, w, 3] float in [-1, 1] -> [b, p, d] in the compute type."""
        if images.shape[1:3] != self.config.image:
            raise ValueError(f"pictures are {images.shape[1:3]}, the vision tower takes {self.config.image}")
        x = self.patch(patchify(images, self.config.patch)) + self.position[...]
        x = x.astype(self.runtime.compute)
        x, _ = run_stack(
            self.layers,
            lambda layer, x, _: (layer(x), None),
            x,
            runtime=self.runtime,
            remat=self.runtime.remat_context,
        )
        return self.norm(x)
