"""Qwen3-VL's vision tower, and how its pictures enter the text: placeholders, features, positions.

Formulas: Hugging Face transformers, models/qwen3_vl/modeling_qwen3_vl.py and the Qwen2-VL image processor. Patches
are kept in merge-block order throughout: (block row, block column, row in block, column in block), so that the
merge² patches of one text token are neighbours.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from somaspeed_jax.models.layers.attention import attend
from somaspeed_jax.models.layers.linear import Embedding, Linear
from somaspeed_jax.models.layers.mlp import Mlp, gelu_exact
from somaspeed_jax.models.layers.norm import LayerNorm
from somaspeed_jax.models.layers.param import Runtime, stack
from somaspeed_jax.models.layers.rotary import rotary_angles, rotate
from somaspeed_jax.models.layers.stack import run_stack

Grid = tuple[int, int]  # patches down and across one picture

_EPS = 1e-6
_ROPE_THETA = 10_000.0
_TEMPORAL = 2  # frames a patch spans; a still picture fills both with itself


@dataclasses.dataclass(frozen=True)
class VisionSizes:
    """Sizes of the tower.

    width d, hidden f, heads n, depth: blocks. patch: pixels a side. positions: rows of the learned position table, a
    square. taps: blocks (from 0) after which features leave for the text's first layers. out: the text's width.
    merge: patches a side that become one text token.
    """

    width: int
    hidden: int
    heads: int
    depth: int
    patch: int
    positions: int
    taps: tuple[int, ...]
    out: int
    merge: int = 2

    def __post_init__(self):
        if self.width % (4 * self.heads):
            raise ValueError(f"vision width {self.width} over {self.heads} heads: the head width must divide by 4")
        if round(self.positions**0.5) ** 2 != self.positions:
            raise ValueError(f"vision position table of {self.positions} rows: must be a square")
        if list(self.taps) != sorted(set(self.taps)) or not all(0 <= tap < self.depth for tap in self.taps):
            raise ValueError(f"vision taps {self.taps} must rise and name blocks below {self.depth}")

    @property
    def segments(self) -> tuple[tuple[int, int], ...]:
        """(first, end) of the runs of blocks between taps."""
        ends = [tap + 1 for tap in self.taps]
        if not ends or ends[-1] < self.depth:
            ends.append(self.depth)
        return tuple(zip([0, *ends[:-1]], ends, strict=True))

    def grid(self, height: int, width: int) -> Grid:
        """Patches of a picture in pixels. Raises ValueError where it does not divide."""
        side = self.patch * self.merge
        if height % side or width % side:
            raise ValueError(f"picture of {height}x{width} pixels: both sides must be multiples of {side}")
        return height // self.patch, width // self.patch

    def tokens(self, grid: Grid) -> int:
        """Text tokens of one picture."""
        return grid[0] * grid[1] // self.merge**2


def patchify(images: jax.Array, sizes: VisionSizes) -> jax.Array:
    """images [b, h, w, 3] -> [b, patches, 3 * 2 * patch²], each patch ordered (channel, frame, row, column)."""
    b, height, width, channels = images.shape
    rows, columns = sizes.grid(height, width)
    m, p = sizes.merge, sizes.patch
    x = images.reshape(b, rows // m, m, p, columns // m, m, p, channels)
    x = x.transpose(0, 1, 4, 2, 5, 7, 3, 6)[:, :, :, :, :, :, None]
    x = jnp.broadcast_to(x, (*x.shape[:6], _TEMPORAL, p, p))
    return x.reshape(b, rows * columns, channels * _TEMPORAL * p * p)


def _block_order(x: np.ndarray, merge: int) -> np.ndarray:
    """[rows, columns, ...] -> [patches, ...] in merge-block order."""
    rows, columns, *rest = x.shape
    x = x.reshape(rows // merge, merge, columns // merge, merge, *rest)
    return x.swapaxes(1, 2).reshape(rows * columns, *rest)


def _coordinates(grid: Grid, merge: int) -> tuple[np.ndarray, np.ndarray]:
    rows, columns = np.meshgrid(np.arange(grid[0]), np.arange(grid[1]), indexing="ij")
    return _block_order(rows, merge), _block_order(columns, merge)


def position_blend(grid: Grid, sizes: VisionSizes) -> tuple[np.ndarray, np.ndarray]:
    """Rows of the position table and their bilinear weights, [4, patches] each, corners of both aligned."""
    side = round(sizes.positions**0.5)

    def axis(index: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        place = index.astype(np.float32) * np.float32((side - 1) / max(count - 1, 1))
        low = place.astype(np.int32)
        return low, np.minimum(low + 1, side - 1), place - low

    rows, columns = _coordinates(grid, sizes.merge)
    r0, r1, dr = axis(rows, grid[0])
    c0, c1, dc = axis(columns, grid[1])
    ids = np.stack([r0 * side + c0, r0 * side + c1, r1 * side + c0, r1 * side + c1])
    weights = np.stack([(1 - dr) * (1 - dc), (1 - dr) * dc, dr * (1 - dc), dr * dc])
    return ids, weights.astype(np.float32)


def patch_angles(grid: Grid, sizes: VisionSizes) -> jax.Array:
    """Rotation of each patch, [patches, e / 2] float32: half of the frequencies turn by its row, half by its column."""
    half = sizes.width // sizes.heads // 2
    axes = [rotary_angles(jnp.asarray(axis), half, _ROPE_THETA) for axis in _coordinates(grid, sizes.merge)]
    return jnp.concatenate(axes, axis=-1)


class VisionBlock(nnx.Module):
    """Pre-norm block; `qkv` orders its outputs (query | key | value, head, channel)."""

    def __init__(self, sizes: VisionSizes, runtime: Runtime):
        self.norm1 = LayerNorm(sizes.width, eps=_EPS)
        self.qkv = Linear(sizes.width, 3 * sizes.width, runtime)
        self.proj = Linear(sizes.width, sizes.width, runtime)
        self.norm2 = LayerNorm(sizes.width, eps=_EPS)
        self.mlp = Mlp(sizes.width, sizes.hidden, runtime)
        self.heads = sizes.heads

    def __call__(self, x: jax.Array, angles: jax.Array) -> jax.Array:
        """x [b, patches, d], angles [patches, e / 2] -> x."""
        qkv = self.qkv(self.norm1(x))
        q, k, v = jnp.moveaxis(qkv.reshape(*x.shape[:2], 3, self.heads, -1), 2, 0)
        out = attend(rotate(q, angles), rotate(k, angles), v)
        x = x + self.proj(out.reshape(x.shape))
        return x + self.mlp(self.norm2(x))


class Merger(nnx.Module):
    """merge² neighbouring patches -> one text token. Taps normalise the joined patches, the last one each patch."""

    def __init__(self, sizes: VisionSizes, runtime: Runtime, *, tap: bool):
        joined = sizes.width * sizes.merge**2
        self.norm = LayerNorm(joined if tap else sizes.width, eps=_EPS)
        self.fc1 = Linear(joined, joined, runtime)
        self.fc2 = Linear(joined, sizes.out, runtime)
        self.joined, self.tap = joined, tap

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [b, patches, d] -> [b, tokens, out]."""
        if not self.tap:
            x = self.norm(x)
        x = x.reshape(x.shape[0], -1, self.joined)
        if self.tap:
            x = self.norm(x)
        return self.fc2(gelu_exact(self.fc1(x)))


class VisionTower(nnx.Module):
    """Patches -> features for the placeholders, and one set of features per tap for the text's first layers."""

    def __init__(self, sizes: VisionSizes, runtime: Runtime):
        self.patch = Linear(3 * _TEMPORAL * sizes.patch**2, sizes.width, runtime)
        self.positions = Embedding(sizes.positions, sizes.width)
        self.segments = nnx.List([stack(end - start, VisionBlock(sizes, runtime)) for start, end in sizes.segments])
        self.taps = nnx.List([Merger(sizes, runtime, tap=True) for _ in sizes.taps])
        self.merger = Merger(sizes, runtime, tap=False)
        self.sizes, self.runtime = sizes, runtime

    def __call__(self, patches: jax.Array, grid: Grid) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """One size of picture at a time; a picture sees only itself.

        patches: [b, rows * columns, 3 * 2 * patch²] as `patchify` orders them. grid: (rows, columns).
        Returns features [b, tokens, out] and, per tap, features of the same shape, in the compute type.
        """
        runtime = self.runtime
        x = runtime.gathered(self.patch)(patches)
        x = runtime.pin(x + self.positions_of(grid).astype(x.dtype))
        angles = patch_angles(grid, self.sizes)
        tapped = []
        for index, segment in enumerate(self.segments):
            x, _ = run_stack(
                segment, lambda block, x, _: (block(x, angles), None), x, runtime=runtime, remat=runtime.remat_context
            )
            if index < len(self.taps):
                tapped.append(runtime.gathered(self.taps[index])(x))
        return runtime.gathered(self.merger)(x), tuple(tapped)

    def positions_of(self, grid: Grid) -> jax.Array:
        """The learned positions of one picture, [patches, d] float32."""
        ids, weights = position_blend(grid, self.sizes)
        return jnp.einsum("cpd,cp->pd", self.positions(jnp.asarray(ids)), weights)


class Placement(NamedTuple):
    """Where pictures are in a prompt.

    is_image: [b, p] bool, the valid placeholders. source: [b, p] int32, the feature that a placeholder takes, counted
    over all cameras in order; meaningless elsewhere. positions: [3, b, p] int32: time, row, column of M-RoPE.
    """

    is_image: jax.Array
    source: jax.Array
    positions: jax.Array


def place_images(
    tokens: jax.Array,
    token_mask: jax.Array,
    image_mask: jax.Array,
    grids: Sequence[Grid],
    *,
    image_token: int,
    merge: int,
) -> Placement:
    """Matches placeholders with features, in order, and numbers the tokens.

    tokens, token_mask: [b, p], padded on either side. image_mask: [b, c]; the prompt of a row has no placeholders for
    its absent cameras. grids: one a camera, static.

    A text token advances the counter by one. The tokens of a picture share the time at which it starts, carry their
    row and column on top, and together advance the counter by the picture's longer side in tokens.
    """
    sides = [(rows // merge, columns // merge) for rows, columns in grids]
    camera = np.repeat(np.arange(len(sides)), [r * c for r, c in sides])
    row = np.concatenate([np.repeat(np.arange(r), c) for r, c in sides])
    column = np.concatenate([np.tile(np.arange(c), r) for r, c in sides])
    # Only the last token of a picture moves the counter: until then all of them see where the picture starts.
    advance = np.concatenate([[0] * (r * c - 1) + [max(r, c)] for r, c in sides])

    is_image = (tokens == image_token) & token_mask
    present_first = jnp.argsort(~image_mask[:, camera], axis=1, stable=True)
    rank = jnp.clip(jnp.cumsum(is_image, axis=1) - 1, 0, len(camera) - 1)
    source = jnp.take_along_axis(present_first, rank, axis=1)

    step = jnp.where(is_image, jnp.asarray(advance)[source], 1) * token_mask
    start = jnp.cumsum(step, axis=1) - step
    down = start + is_image * jnp.asarray(row)[source]
    across = start + is_image * jnp.asarray(column)[source]
    return Placement(is_image, source, jnp.stack([start, down, across]).astype(jnp.int32))


def interleaved_angles(positions: jax.Array, width: int, theta: float, section: tuple[int, int, int]) -> jax.Array:
    """M-RoPE angles [b, p, width / 2] float32 of positions [3, b, p] (time, row, column).

    Frequency i follows the row where i % 3 == 1 and i < 3 * section[1], the column where i % 3 == 2 and
    i < 3 * section[2], and time elsewhere. Raises ValueError where the sections do not add up to width / 2.
    """
    if sum(section) != width // 2:
        raise ValueError(f"M-RoPE sections {section} must add up to {width // 2}, half the head width")
    index = np.arange(width // 2)
    of_row = (index % 3 == 1) & (index < 3 * section[1])
    of_column = (index % 3 == 2) & (index < 3 * section[2])
    time, row, column = rotary_angles(positions, width, theta)
    return jnp.where(of_row, row, jnp.where(of_column, column, time))
