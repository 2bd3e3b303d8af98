"""Picture operations on the device that several models' augmentations share: one picture [h, w, 3], float32.

Each works on a single picture so that it can be mapped over per-sample keys: what a sample gets never depends on its
batch, its device or its neighbours.
"""

import jax
import jax.numpy as jnp


def unit_range(pictures: jax.Array) -> jax.Array:
    """uint8 [..., 3] -> float32 in [0, 1]."""
    return pictures.astype(jnp.float32) / 255.0


def signed_range(pictures: jax.Array) -> jax.Array:
    """float32 in [0, 1] -> float32 in [-1, 1]."""
    return pictures * 2.0 - 1.0


def sample_bilinear(picture: jax.Array, rows: jax.Array, columns: jax.Array) -> jax.Array:
    """The picture [h, w, 3] at fractional pixel positions [H, W] -> [H, W, 3]; pixel centres are whole numbers.

    Outside lies black: a corner beyond the border adds nothing, so an edge fades over one pixel (scipy's and jax's
    `map_coordinates`, order 1, mode "constant").
    """
    height, width = picture.shape[:2]
    top, left = jnp.floor(rows), jnp.floor(columns)
    total = jnp.zeros((*rows.shape, picture.shape[2]), picture.dtype)
    for row, row_weight in ((top, 1 - (rows - top)), (top + 1, rows - top)):
        for column, column_weight in ((left, 1 - (columns - left)), (left + 1, columns - left)):
            inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
            weight = jnp.where(inside, row_weight * column_weight, 0.0)
            total += weight[..., None] * picture.at[row.astype(jnp.int32), column.astype(jnp.int32)].get(mode="clip")
    return total


def rgb_to_hsv(picture: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """RGB in [0, 1], [..., 3] -> hue as a fraction of a turn, saturation and value, each [...].

    Hue is not wrapped: it lies in [-1/6, 5/6]. Grey has hue 0, black saturation 0.
    """
    red, green, blue = picture[..., 0], picture[..., 1], picture[..., 2]
    value = picture.max(-1)
    spread = value - picture.min(-1)
    largest = picture.argmax(-1)
    lean = jnp.choose(largest, [green - blue, blue - red, red - green], mode="clip")
    grey, black = spread == 0.0, value == 0.0
    hue = jnp.where(grey, 0.0, (2 * largest + lean / jnp.where(grey, 1.0, spread)) / 6)
    return hue, jnp.where(black, 0.0, spread / jnp.where(black, 1.0, value)), value


def hsv_to_rgb(hue: jax.Array, saturation: jax.Array, value: jax.Array) -> jax.Array:
    """The inverse of `rgb_to_hsv`, for hue of any number of turns: three [...] -> [..., 3]."""
    sector = jnp.mod(jnp.array([5.0, 3.0, 1.0]) + hue[..., None] * 6, 6)
    missing = jnp.clip(jnp.minimum(sector, 4 - sector), 0.0, 1.0)
    return value[..., None] * (1 - saturation[..., None] * missing)
