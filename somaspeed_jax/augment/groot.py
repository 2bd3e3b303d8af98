"""GR00T's pictures on the device: window, scaling back, colour jitter, range; uint8 in, float in [-1, 1] out.

The window is random in training and central otherwise. One draw a sample serves all its cameras, as upstream: the
window at the same fractions of each picture's slack (lerobot policies/groot/processor_groot.py), the jitter with the
same factors in the same order (albumentations ColorJitter). Without jitter the result equals upstream's within one grey
level, given the window.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from somaspeed_jax.augment import common
from somaspeed_jax.data.images import Size
from somaspeed_jax.data.transforms.groot_images import GrootPictures, Plan, bicubic_matrix, enlarging_area_taps

_WINDOW, _JITTER = range(2)
_GREY = np.array([0.299, 0.587, 0.114], np.float32)


@dataclasses.dataclass(frozen=True)
class ColourJitter:
    """Bounds of the random factors: 1 ± bound for brightness, contrast and saturation, ± hue of a turn."""

    brightness: float = 0.3
    contrast: float = 0.4
    saturation: float = 0.5
    hue: float = 0.08

    def __post_init__(self):
        bounds = (self.brightness, self.contrast, self.saturation, self.hue)
        if min(bounds) < 0 or max(bounds[:3]) > 1 or self.hue > 0.5:
            raise ValueError(f"colour jitter bounds {bounds}: expected 0 to 1, and 0 to 0.5 for the hue")


@dataclasses.dataclass(frozen=True)
class GrootAugmentation:
    """pictures: the geometry. random_window: false keeps the central window in training (LeRobot without a
    checkpoint's processor files). jitter: None for none."""

    pictures: GrootPictures = GrootPictures()
    random_window: bool = True
    jitter: ColourJitter | None = ColourJitter()


def prepare(images: Sequence[jax.Array], keys: jax.Array | None, config: GrootAugmentation) -> tuple[jax.Array, ...]:
    """uint8 [b, h, w, 3] prepared pictures of each camera -> float32 [b, H, W, 3] in [-1, 1], ready for patches.

    keys: [b], one a sample, or None (evaluation).
    """
    if keys is None:
        position = None
    else:
        fold = jax.vmap(jax.random.fold_in, (0, None))
        window_keys, jitter_keys = fold(keys, _WINDOW), fold(keys, _JITTER)
        position = jax.vmap(lambda key: jax.random.uniform(key, (2,)))(window_keys) if config.random_window else None
    out = []
    for image in images:
        picture = crop(image.astype(jnp.float32), position, config.pictures)
        if keys is not None and config.jitter is not None:
            picture = jax.vmap(functools.partial(jitter, config=config.jitter))(jitter_keys, picture / 255.0) * 255.0
        picture = fit(picture, _plan(image, config.pictures).final)
        out.append(common.signed_range(picture / 255.0))
    return tuple(out)


def _plan(images: jax.Array, pictures: GrootPictures) -> Plan:
    return pictures.plan((images.shape[1], images.shape[2]))


def crop(images: jax.Array, position: jax.Array | None, pictures: GrootPictures) -> jax.Array:
    """float32 [b, h, w, 3] in grey levels -> the window, scaled back, [b, H, W, 3] in whole grey levels.

    position: [b, 2], where in its slack the window lies (down, right), 0 to 1; None: in the middle, rounded down.
    """
    plan = _plan(images, pictures)
    slack = np.subtract(plan.prepared, plan.window)
    if not slack.any():
        return images
    if position is None:
        top, left = (slack // 2).tolist()
        window = images[:, top : top + plan.window[0], left : left + plan.window[1]]
    else:
        offset = jnp.rint(slack * position).astype(jnp.int32)
        window = jax.vmap(lambda image, at: jax.lax.dynamic_slice(image, (at[0], at[1], 0), (*plan.window, 3)))(
            images, offset
        )
    if pictures.geometry == "lerobot":
        return fit(window, plan.scaled)
    return _enlarge(window, plan.scaled)


def _enlarge(images: jax.Array, size: Size) -> jax.Array:
    """INTER_AREA to a larger size, in OpenCV's integer arithmetic: every grey level is its own."""
    rows, columns = (enlarging_area_taps(a, b) for a, b in zip(images.shape[1:3], size, strict=True))
    x = images.astype(jnp.int32)
    weights = [w[:, None] for w in (columns.first_weight, columns.second_weight)]
    x = (x[:, :, columns.first] * weights[0] + x[:, :, columns.second] * weights[1]) >> 4
    weights = [w[:, None, None] for w in (rows.first_weight, rows.second_weight)]
    x = ((x[:, rows.first] * weights[0]) >> 16) + ((x[:, rows.second] * weights[1]) >> 16)
    return jnp.clip((x + 2) >> 2, 0, 255).astype(jnp.float32)


def fit(images: jax.Array, size: Size) -> jax.Array:
    """Bicubic to `size` in whole grey levels, columns first and rounded between, as torch does."""
    if images.shape[1:3] == size:
        return images
    rows, columns = (bicubic_matrix(a, b) for a, b in zip(images.shape[1:3], size, strict=True))
    exact = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    return _whole(exact("Hh,bhwc->bHwc", rows, _whole(exact("Ww,bhwc->bhWc", columns, images))))


def _whole(images: jax.Array) -> jax.Array:
    return jnp.clip(jnp.floor(images + 0.5), 0.0, 255.0)


def jitter(key: jax.Array, picture: jax.Array, config: ColourJitter) -> jax.Array:
    """One picture, float32 [h, w, 3] in [0, 1], with the four changes in random order -> the same shape and range."""
    factor_key, order_key = jax.random.split(key)
    bounds = jnp.array([config.brightness, config.contrast, config.saturation, config.hue])
    factors = bounds * jax.random.uniform(factor_key, (4,), minval=-1.0, maxval=1.0)
    changes = [_brighten, _contrast, _saturate, _turn_hue]
    order = jax.random.permutation(order_key, len(changes))

    def step(picture: jax.Array, change: jax.Array) -> tuple[jax.Array, None]:
        return jax.lax.switch(change, changes, picture, factors[change]), None

    return jax.lax.scan(step, picture, order)[0]


def _blend(picture: jax.Array, other: jax.Array | float, amount: jax.Array) -> jax.Array:
    """The picture moved away from `other` by a factor of 1 + amount."""
    return jnp.clip(other + (picture - other) * (1.0 + amount), 0.0, 1.0)


def _brighten(picture: jax.Array, amount: jax.Array) -> jax.Array:
    return _blend(picture, 0.0, amount)


def _contrast(picture: jax.Array, amount: jax.Array) -> jax.Array:
    return _blend(picture, jnp.mean(picture @ _GREY), amount)


def _saturate(picture: jax.Array, amount: jax.Array) -> jax.Array:
    return _blend(picture, (picture @ _GREY)[..., None], amount)


def _turn_hue(picture: jax.Array, amount: jax.Array) -> jax.Array:
    hue, saturation, value = common.rgb_to_hsv(picture)
    return common.hsv_to_rgb(hue + amount, saturation, value)
