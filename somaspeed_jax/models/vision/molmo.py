"""MolmoAct2's vision side: a SigLIP 2 tower read at two depths, attention pooling of 2 x 2 patches, a gated projector.

Formulas: LeRobot 0.6.1, policies/molmoact2/molmoact2_hf_model/modeling_molmoact2.py (MolmoAct2VisionBackbone).
"""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from somaspeed_jax.models.layers.attention import attend
from somaspeed_jax.models.layers.linear import Linear, Lora, LoraSpec
from somaspeed_jax.models.layers.mlp import GatedMlp, gelu_tanh
from somaspeed_jax.models.layers.norm import LayerNorm
from somaspeed_jax.models.layers.param import Runtime, normal, param, stack
from somaspeed_jax.models.layers.stack import run_stack


@dataclasses.dataclass(frozen=True)
class MolmoVisionSizes:
    """Sizes of tower, pooling and projector.

    image: picture (height, width) in pixels; patch: side of a patch; positions: rows of the position table, a square
      grid that must be the picture's.
    width, hidden, heads, head_width: of a tower block; eps: of its layer norms.
    taps: block numbers whose outputs are read, in the order in which they are joined. The tower ends at the last.
    pool: side of a pooling window in patches. pool_width, pool_heads, pool_head_width: of the pooling attention.
    masked_pooling: partial windows average and attend over their real patches only; false: over zeros as well.
    projector: inner width of the projector; out: width of the language model.
    """

    image: tuple[int, int] = (378, 378)
    patch: int = 14
    positions: int = 729
    width: int = 1152
    hidden: int = 4304
    heads: int = 16
    head_width: int = 72
    eps: float = 1e-6
    taps: tuple[int, ...] = (24, 18)
    pool: int = 2
    pool_width: int = 1152
    pool_heads: int = 16
    pool_head_width: int = 72
    masked_pooling: bool = True
    projector: int = 9728
    out: int = 2560

    def __post_init__(self):
        if any(side % self.patch for side in self.image):
            raise ValueError(f"picture size {self.image} is not a multiple of the patch size {self.patch}")
        if math.prod(self.grid) != self.positions:
            raise ValueError(
                f"{self.positions} positions do not fit a picture of {self.grid} patches; resizing the position table "
                "is not supported: use the checkpoint's own image size"
            )

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        height, width = (side // self.patch for side in self.image)
        return height, width

    @property
    def windows(self) -> int:
        """Vectors that one picture becomes."""
        return math.prod(-(-side // self.pool) for side in self.grid)

    @property
    def segments(self) -> tuple[tuple[int, ...], ...]:
        """Block numbers in the runs that end at a tap."""
        ends = [-1, *sorted(self.taps)]
        return tuple(tuple(range(a + 1, b + 1)) for a, b in itertools.pairwise(ends))


def patches(images: jax.Array, size: int) -> jax.Array:
    """images [b, h, w, 3] -> [b, s, size * size * 3]: row by row, (row, column, channel) inside a patch."""
    b, h, w, c = images.shape
    grid = images.reshape(b, h // size, size, w // size, size, c).transpose(0, 1, 3, 2, 4, 5)
    return grid.reshape(b, (h // size) * (w // size), size * size * c)


def pooling_windows(grid: tuple[int, int], pool: int) -> np.ndarray:
    """Patch numbers of each window, [windows, pool * pool] int32; -1 where a window reaches past the picture.

    Windows start at the top left, so what is missing is missing at the bottom and at the right.
    """
    rows, columns = (-(-side // pool) for side in grid)
    padded = np.full((rows * pool, columns * pool), -1, np.int32)
    padded[: grid[0], : grid[1]] = np.arange(math.prod(grid)).reshape(grid)
    return padded.reshape(rows, pool, columns, pool).transpose(0, 2, 1, 3).reshape(-1, pool * pool)


def _linear(d_in: int, d_out: int, runtime: Runtime, lora: LoraSpec | None, *, bias: bool = True) -> Linear:
    return Linear(d_in, d_out, runtime, bias=bias, lora=None if lora is None else Lora(d_in, d_out, lora))


class MolmoVisionAttention(nnx.Module):
    """Multi-head attention with biases; queries and keys may come from different places."""

    def __init__(self, d_in: int, width: int, heads: int, head_width: int, runtime: Runtime, lora: LoraSpec | None):
        inner = heads * head_width
        self.q = _linear(d_in, inner, runtime, lora)
        self.k = _linear(d_in, inner, runtime, lora)
        self.v = _linear(d_in, inner, runtime, lora)
        self.o = _linear(inner, width, runtime, lora)
        self.heads = heads

    def __call__(self, x: jax.Array, context: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """x [b, t, d], context [b, s, d], mask broadcastable to [b, t, s] bool or None -> [b, t, width]."""

        def split(y: jax.Array) -> jax.Array:
            return y.reshape(*y.shape[:-1], self.heads, -1)

        out = attend(split(self.q(x)), split(self.k(context)), split(self.v(context)), mask)
        return self.o(out.reshape(*out.shape[:-2], -1))


class MolmoVisionBlock(nnx.Module):
    """Pre-norm attention and tanh-GELU feed-forward with plain residuals."""

    def __init__(self, sizes: MolmoVisionSizes, runtime: Runtime, lora: LoraSpec | None):
        self.norm1 = LayerNorm(sizes.width, eps=sizes.eps)
        self.attn = MolmoVisionAttention(sizes.width, sizes.width, sizes.heads, sizes.head_width, runtime, lora)
        self.norm2 = LayerNorm(sizes.width, eps=sizes.eps)
        self.fc1 = _linear(sizes.width, sizes.hidden, runtime, lora)
        self.fc2 = _linear(sizes.hidden, sizes.width, runtime, lora)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [b, s, d] -> [b, s, d]."""
        y = self.norm1(x)
        x = x + self.attn(y, y)
        return x + self.fc2(gelu_tanh(self.fc1(self.norm2(x))))


class MolmoVision(nnx.Module):
    """Pictures to vectors of the language model's width.

    Parameters: `patch`, `position` [729, d], `segments.0` (blocks 0 … 18), `segments.1` (19 … 24), `pooling`,
    `projector`.
    """

    def __init__(self, sizes: MolmoVisionSizes, runtime: Runtime, *, lora: LoraSpec | None = None):
        self.sizes, self.runtime = sizes, runtime
        self.patch = _linear(sizes.patch**2 * 3, sizes.width, runtime, lora)
        self.position = param((sizes.positions, sizes.width), normal(0.02), "vector")
        self.segments = nnx.List(
            stack(len(blocks), MolmoVisionBlock(sizes, runtime, lora)) for blocks in sizes.segments
        )
        joined = sizes.width * len(sizes.taps)
        self.pooling = MolmoVisionAttention(
            joined, sizes.pool_width, sizes.pool_heads, sizes.pool_head_width, runtime, lora
        )
        self.projector = GatedMlp(
            gate=_linear(sizes.pool_width, sizes.projector, runtime, lora, bias=False),
            up=_linear(sizes.pool_width, sizes.projector, runtime, lora, bias=False),
            down=_linear(sizes.projector, sizes.out, runtime, lora, bias=False),
            activation=jax.nn.silu,
        )

    def tower(self, images: jax.Array) -> list[jax.Array]:
        """images [b, h, w, 3] in [-1, 1] -> outputs of the tapped blocks, shallowest first, each [b, s, d]."""
        patch, gather = self.runtime.gathered(self.patch), self.runtime.gather
        position = self.position[...] if gather is None else gather(self.position)
        x = patch(patches(images, self.sizes.patch)) + position.astype(self.runtime.compute)
        taps = []
        for segment in self.segments:
            x, _ = run_stack(
                segment,
                lambda block, x, _: (block(x), None),
                x,
                runtime=self.runtime,
                remat=self.runtime.remat_context,
            )
            taps.append(x)
        return taps

    def pool(self, taps: list[jax.Array]) -> jax.Array:
        """Tapped outputs [b, s, d], shallowest first -> [b, windows, pool_width]."""
        order = sorted(self.sizes.taps)
        features = jnp.concatenate([taps[order.index(tap)] for tap in self.sizes.taps], axis=-1)
        b, _, d = features.shape
        windows = pooling_windows(self.sizes.grid, self.sizes.pool)
        valid = windows >= 0
        members = jnp.take(features, np.maximum(windows, 0).reshape(-1), axis=1).reshape(b, *windows.shape, d)
        members = jnp.where(valid[None, :, :, None], members, 0)
        counts = valid.sum(1) if self.sizes.masked_pooling else np.full(len(windows), windows.shape[1])
        query = members.sum(2, keepdims=True) / counts[None, :, None, None].astype(members.dtype)
        mask = jnp.asarray(np.tile(valid, (b, 1))[:, None]) if self.sizes.masked_pooling else None
        flat = members.reshape(b * len(windows), -1, d)
        pooled = self.runtime.gathered(self.pooling)(query.reshape(b * len(windows), 1, d), flat, mask)
        return pooled.reshape(b, len(windows), -1)

    def __call__(self, images: jax.Array) -> jax.Array:
        """images [b, h, w, 3] float in [-1, 1] -> [b, windows, out] in the compute type."""
        return self.runtime.gathered(self.projector)(self.pool(self.tower(images.astype(self.runtime.compute))))
