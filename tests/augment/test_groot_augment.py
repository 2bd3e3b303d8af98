"""GR00T's pictures: geometry bit for bit as LeRobot's (torch, OpenCV) gives it, and what is random about them."""

import colorsys
import json
import re
from pathlib import Path

import cv2
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from somaspeed_jax.augment.groot import ColourJitter, GrootAugmentation, _enlarge, crop, fit, jitter, prepare
from somaspeed_jax.data.transforms.groot_images import GrootPictures, Plan
from somaspeed_jax.models.groot import SIZES
from somaspeed_jax.models.vision.qwen3_vl import patchify

UPSTREAM = dict(np.load(Path(__file__).parents[1] / "fixtures" / "groot_processor.npz"))
CASES = json.loads(str(UPSTREAM["json"]))["cases"]
LEROBOT = GrootPictures("lerobot")
LIBERO = GrootPictures("aspect", edge=256, crop_fraction=0.95)
prepare_jit = jax.jit(prepare, static_argnums=2)
LETTERBOX = GrootPictures("lerobot", target=(96, 96), crop_fraction=87 / 96, letterbox=True)


def picture(camera: str) -> np.ndarray:
    return UPSTREAM[f"raw/image_{camera}"][0]


def cropped(pictures: GrootPictures, camera: str, position=None) -> np.ndarray:
    """Host and device step, as recorded: every third pixel, channels first."""
    prepared = pictures.prepare(picture(camera))
    position = None if position is None else jnp.asarray(position, jnp.float32)[None]
    out = crop(jnp.asarray(prepared, jnp.float32)[None], position, pictures)
    return np.asarray(out[0]).transpose(2, 0, 1)[:, ::3, ::3]


@pytest.mark.parametrize(
    ("case", "index", "pictures", "camera"),
    [
        ("default_train", 0, LEROBOT, "front"),
        ("default_train", 1, LEROBOT, "side"),
        ("one_camera", 0, LEROBOT, "wrist"),
        ("libero_eval", 0, LIBERO, "front"),
        ("libero_eval", 1, LIBERO, "side"),
        ("letterbox_noclip", 0, LETTERBOX, "side"),
        ("letterbox_noclip", 1, LETTERBOX, "front"),
    ],
)
def test_central_window(case, index, pictures, camera):
    np.testing.assert_array_equal(cropped(pictures, camera), UPSTREAM[f"case/{case}/out/resized/{index}"])


def test_given_windows():
    for i, position in enumerate(CASES["libero_fixed_crops"]["config"]["positions"]):
        expected = UPSTREAM[f"case/libero_fixed_crops/out/crop{i}"]
        np.testing.assert_array_equal(cropped(LIBERO, "front", position), expected)


def test_cameras_share_the_window_of_their_sample():
    position = UPSTREAM["case/libero_train/out/random_draws"][3:5]  # after one draw a sample for the state
    for index, camera in enumerate(("front", "side")):
        expected = UPSTREAM[f"case/libero_train/out/resized/{index}"]
        np.testing.assert_array_equal(cropped(LIBERO, camera, position), expected)


@pytest.mark.parametrize(
    ("case", "pictures", "camera"),
    [("default_train", LEROBOT, "front"), ("libero_eval", LIBERO, "front"), ("letterbox_noclip", LETTERBOX, "side")],
)
def test_patches_in_the_model_range(case, pictures, camera):
    """From a recorded picture to what the vision tower gets: sizes, order, range."""
    prepared = jnp.asarray(pictures.prepare(picture(camera)))[None]
    (image,) = prepare([prepared], None, GrootAugmentation(pictures))
    patches = np.asarray(patchify(image, SIZES["published"].vision))[0, ::9]
    levels = UPSTREAM["lut/half"][UPSTREAM[f"case/{case}/out/pixel_values__u8"]]
    np.testing.assert_allclose(patches, levels, atol=1e-6, rtol=0)


def test_sizes():
    assert LIBERO.plan(LIBERO.prepared_size((120, 160))) == Plan((256, 341), (243, 323), (256, 340), (256, 352))
    square = GrootPictures()
    assert square.plan(square.prepared_size((480, 640))) == Plan((256, 256), (230, 230), (256, 256), (256, 256))
    assert GrootPictures(target=(96, 96)).plan((96, 96)).final == (256, 256)  # the published processor's least
    assert GrootPictures(target=(48, 48), multiple=16, min_pixels=0).plan((48, 48)).final == (48, 48)
    assert GrootPictures(target=(8192, 4096)).plan((8192, 4096)).final == (5792, 2880)


@pytest.mark.parametrize("sizes", [((230, 230), (256, 256)), ((43, 61), (48, 97)), ((7, 7), (8, 8))])
def test_enlarging_equals_opencv(sizes):
    rng = np.random.default_rng(0)
    source, target = sizes
    image = rng.integers(0, 256, (*source, 3), np.uint8)
    expected = cv2.resize(image, target[::-1], interpolation=cv2.INTER_AREA)
    np.testing.assert_array_equal(_enlarge(jnp.asarray(image)[None], target)[0], expected)


def test_training_draws_by_sample():
    """The same key gives the same picture in any batch; other keys give others; evaluation gives the centre."""
    rng = np.random.default_rng(0)
    images = jnp.asarray(rng.integers(0, 256, (4, 64, 64, 3), np.uint8))
    config = GrootAugmentation(GrootPictures(target=(64, 64), min_pixels=0))
    keys = jax.random.split(jax.random.key(0), 4)
    (whole,) = prepare_jit([images], keys, config)
    np.testing.assert_array_equal(prepare_jit([images[2:3]], keys[2:3], config)[0], whole[2:3])
    (same,) = prepare_jit([jnp.broadcast_to(images[:1], images.shape)], keys, config)
    assert len({np.asarray(image).tobytes() for image in same}) == 4
    (central,) = prepare_jit([images], None, config)
    np.testing.assert_array_equal(central[:1], prepare_jit([images[:1]], None, config)[0])
    assert float(jnp.abs(whole).max()) <= 1.0


def test_windows_cover_the_slack():
    """Over many keys the window reaches both ends of its slack and nothing beyond."""
    ramp = jnp.broadcast_to(jnp.arange(64, dtype=jnp.uint8)[None, :, None, None], (256, 64, 64, 3))
    pictures = GrootPictures(target=(64, 64), crop_fraction=0.75, min_pixels=0)
    config = GrootAugmentation(pictures, jitter=None)
    out = prepare_jit([ramp], jax.random.split(jax.random.key(1), 256), config)[0]
    top = np.rint((np.asarray(out[:, 0, 0, 0]) + 1) * 127.5)
    assert set(top) == set(range(17))
    central = prepare_jit([ramp[:1]], None, config)[0]
    assert round((float(central[0, 0, 0, 0]) + 1) * 127.5) == 8
    unmoved = prepare_jit([ramp[:1]], jax.random.split(jax.random.key(1), 1), GrootAugmentation(pictures, False, None))[
        0
    ]
    np.testing.assert_array_equal(unmoved, central)


def test_cameras_share_the_jitter_of_their_sample():
    rng = np.random.default_rng(0)
    images = jnp.asarray(rng.integers(0, 256, (2, 32, 32, 3), np.uint8))
    config = GrootAugmentation(GrootPictures(target=(32, 32), min_pixels=0))
    first, second = prepare_jit([images, images], jax.random.split(jax.random.key(0), 2), config)
    np.testing.assert_array_equal(first, second)


ONLY = dict(brightness=0.0, contrast=0.0, saturation=0.0, hue=0.0)


def test_each_change_alone():
    """Against the definitions of torchvision and albumentations, with the factor read off the result."""
    rng = np.random.default_rng(0)
    image = rng.uniform(0.3, 0.6, (8, 8, 3)).astype(np.float32)
    key = jax.random.key(3)

    def changed(**bound) -> np.ndarray:
        return np.asarray(jitter(key, jnp.asarray(image), ColourJitter(**ONLY | bound)))

    np.testing.assert_allclose(changed(), image, atol=1e-6)
    bright = changed(brightness=0.3)
    factor = bright[0, 0, 0] / image[0, 0, 0]
    assert 0.7 <= factor <= 1.3 and abs(factor - 1) > 1e-3
    np.testing.assert_allclose(bright, image * factor, rtol=1e-5)
    grey = image @ np.array([0.299, 0.587, 0.114], np.float32)
    for name, centre in (("contrast", grey.mean()), ("saturation", grey[..., None])):
        out = changed(**{name: 0.4})
        factors = (out - centre) / (image - centre)
        np.testing.assert_allclose(factors, np.median(factors), rtol=1e-2)
        assert 0.6 <= np.median(factors) <= 1.4 and abs(np.median(factors) - 1) > 1e-3
    turned = changed(hue=0.08)
    before, after = (np.array([colorsys.rgb_to_hsv(*p) for p in x.reshape(-1, 3)]) for x in (image, turned))
    turns = (after[:, 0] - before[:, 0] + 0.5) % 1 - 0.5
    np.testing.assert_allclose(turns, turns[0], atol=1e-4)
    assert 1e-3 < abs(turns[0]) <= 0.08
    np.testing.assert_allclose(after[:, 1:], before[:, 1:], atol=1e-5)


def test_wrong_bounds_are_refused():
    with pytest.raises(ValueError, match="colour jitter bounds"):
        ColourJitter(hue=0.7)


def test_fit_keeps_a_picture_of_that_size():
    image = jnp.ones((1, 32, 32, 3))
    assert fit(image, (32, 32)) is image


def test_no_collectives_on_a_mesh():
    mesh = jax.make_mesh((8,), ("batch",), axis_types=(AxisType.Auto,))
    split = NamedSharding(mesh, PartitionSpec("batch"))
    keys = jax.device_put(jax.random.split(jax.random.key(0), 8), split)
    images = jax.device_put(np.zeros((8, 32, 32, 3), np.uint8), split)
    config = GrootAugmentation(GrootPictures(target=(32, 32), min_pixels=0))
    text = jax.jit(lambda i, k: prepare([i], k, config)).lower(images, keys).compile().as_text()
    assert not re.search(r"all-gather|all-reduce|all-to-all|collective-permute", text)
