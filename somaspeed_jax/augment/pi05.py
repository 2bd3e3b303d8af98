"""π0.5's pictures on the device: uint8 to [-1, 1], with openpi's random crop, turn and colour jitter in training."""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from somaspeed_jax.augment import common


@dataclasses.dataclass(frozen=True)
class Pi05Augmentation:
    """What openpi does to a training picture (`models/model.py: preprocess_observation`, with augmax 0.4.1).

    crop: side of a random window as a part of the picture, scaled back to full size; with `degrees`, the largest turn
      either way, it is one bilinear resampling with black beyond the border. Wrist cameras are spared both.
    jitter_probability: how often a picture's colours change; then brightness and contrast act on the value of HSV and
      `hue` (a fraction of a turn) on its hue, each drawn from ± the bound. openpi also asks for a saturation jitter of
      0.5, which augmax computes and drops: there is none.
    wrist_cameras: the cameras that move with the hand; None: those with "wrist" in their name, which is openpi's rule.
    """

    crop: float = 0.95
    degrees: float = 5.0
    brightness: float = 0.3
    contrast: float = 0.4
    hue: float = 0.1
    jitter_probability: float = 0.5
    wrist_cameras: tuple[str, ...] | None = None


RECIPES: dict[str, Pi05Augmentation | None] = {"none": None, "lerobot": None, "openpi": Pi05Augmentation()}


def prepare(
    images: Sequence[jax.Array],
    camera_names: Sequence[str],
    keys: jax.Array | None,
    config: Pi05Augmentation | None,
) -> tuple[jax.Array, ...]:
    """uint8 [b, h, w, 3] for each camera -> float32 [b, h, w, 3] in [-1, 1].

    `keys` [b] is one key a sample; None (evaluation), or a `config` of None (LeRobot's recipe), changes only the range.
    As upstream, all cameras of a sample draw from its one key, and the draws are augmax's: the same key gives the
    same picture. Raises ValueError when names and pictures do not match.
    """
    if len(images) != len(camera_names):
        raise ValueError(f"{len(images)} pictures for {len(camera_names)} cameras {list(camera_names)}")
    scaled = [common.unit_range(image) for image in images]
    if keys is not None and config is not None:
        wrist = _wrist_cameras(camera_names, config)
        scaled = [
            jax.vmap(functools.partial(augment, wrist=name in wrist, config=config))(keys, image)
            for name, image in zip(camera_names, scaled, strict=True)
        ]
    return tuple(common.signed_range(image) for image in scaled)


def augment(key: jax.Array, picture: jax.Array, wrist: bool, config: Pi05Augmentation) -> jax.Array:
    """One training picture, float32 [h, w, 3] in [0, 1] -> the same shape and range.

    The splits of `key` follow augmax's nesting of chains, so that upstream's pictures come out for upstream's keys.
    """
    if wrist:
        colour_key = jax.random.split(key, 1)[0]
    else:
        geometry_key, colour_key = jax.random.split(key, 2)
        picture = _crop_and_turn(geometry_key, picture, config)
    return _jitter(jax.random.split(colour_key, 1)[0], picture, config)


def _crop_and_turn(key: jax.Array, picture: jax.Array, config: Pi05Augmentation) -> jax.Array:
    """Where each output pixel comes from: turn about the centre, shrink to the window's size, move to the window."""
    crop_key, _, turn_key = jax.random.split(key, 3)
    height, width = picture.shape[:2]
    window = jnp.array([int(height * config.crop), int(width * config.crop)])
    size = jnp.array([height, width])
    slack = (size - window) / 2
    down, right = jax.random.uniform(crop_key, (2,), minval=-slack, maxval=slack)
    most = math.radians(config.degrees)
    angle = jax.random.uniform(turn_key, minval=-most, maxval=most)

    middle = (size - 1) / 2
    y, x = jnp.meshgrid(jnp.arange(height) - middle[0], jnp.arange(width) - middle[1], indexing="ij")
    rows = (jnp.cos(angle) * y + jnp.sin(angle) * x) * (window[0] / height) + down + middle[0]
    columns = (jnp.cos(angle) * x - jnp.sin(angle) * y) * (window[1] / width) + right + middle[1]
    return common.sample_bilinear(picture, rows, columns)


def _jitter(key: jax.Array, picture: jax.Array, config: Pi05Augmentation) -> jax.Array:
    """Brightness, contrast and hue together, or nothing."""
    brightness_key, contrast_key, hue_key, *_ = jax.random.split(key, 5)
    brightness = jax.random.uniform(brightness_key, minval=-config.brightness, maxval=config.brightness)
    contrast = jax.random.uniform(contrast_key, minval=-config.contrast, maxval=config.contrast)
    turn = jax.random.uniform(hue_key, minval=-config.hue, maxval=config.hue)

    hue, saturation, value = common.rgb_to_hsv(picture)
    value = value * (1 - jnp.abs(brightness)) + jnp.maximum(brightness, 0.0)
    changed = common.hsv_to_rgb(hue + turn, saturation, _contrast(value, contrast))
    return jnp.where(jax.random.bernoulli(key, config.jitter_probability), changed, picture)


def _contrast(value: jax.Array, amount: jax.Array) -> jax.Array:
    """A line of slope s = tan((1 + amount) π/4) through the middle that bends to slope 1 / s so as to keep 0 and 1."""
    slope = jnp.tan((amount + 1.0) * (math.pi / 4))
    bend = slope / (2 * (1 + slope))
    middle = slope * (value - 0.5) + 0.5
    return jnp.where(value < bend, value / slope, jnp.where(value > 1 - bend, 1 + (value - 1) / slope, middle))


def _wrist_cameras(camera_names: Sequence[str], config: Pi05Augmentation) -> set[str]:
    if config.wrist_cameras is None:
        return {name for name in camera_names if "wrist" in name}
    unknown = sorted(set(config.wrist_cameras) - set(camera_names))
    if unknown:
        raise ValueError(f"augmentation.wrist_cameras names {unknown}; the cameras are {list(camera_names)}")
    return set(config.wrist_cameras)
