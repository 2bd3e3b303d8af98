"""π0.5's device-side pictures: openpi's augmentation draw for draw, and nothing that depends on the batch."""

import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from somaspeed_jax.augment.common import hsv_to_rgb, rgb_to_hsv, sample_bilinear
from somaspeed_jax.augment.pi05 import RECIPES, prepare

# `augment/*`: openpi's chain for a base and a wrist camera; fixtures/processor_pi05_openpi.py records it.
RECORDED = np.load(Path(__file__).parents[1] / "fixtures" / "processor_pi05_openpi.npz")
PICTURES = RECORDED["augment/pictures"]
CAMERAS = ("observation.images.base", "observation.images.wrist")
OPENPI = RECIPES["openpi"]
assert OPENPI is not None


@pytest.fixture(scope="module")
def keys():
    return jax.random.split(jax.random.key(3), len(PICTURES))


@pytest.fixture(scope="module")
def compiled():
    return jax.jit(lambda images, keys: prepare(images, CAMERAS, keys, OPENPI))


@pytest.fixture(scope="module")
def augmented(compiled, keys):
    return compiled((PICTURES, PICTURES), keys)


@pytest.mark.parametrize("camera,name", [(0, "base"), (1, "wrist")])
def test_equals_openpi_for_the_same_keys(augmented, camera, name):
    assert augmented[camera].dtype == jnp.float32
    np.testing.assert_allclose(augmented[camera], RECORDED[f"augment/{name}"], rtol=0, atol=5e-5)


def test_colours_change_for_some_samples_and_stay_for_others(augmented):
    moved = np.abs(np.asarray(augmented[1]) - (PICTURES / 127.5 - 1)).max(axis=(1, 2, 3))
    assert (moved < 1e-5).any() and (moved > 0.1).any()


def test_evaluation_and_lerobot_only_change_the_range(keys):
    for made in (
        prepare((PICTURES,), CAMERAS[:1], None, OPENPI),
        prepare((PICTURES,), CAMERAS[:1], keys, RECIPES["lerobot"]),
    ):
        np.testing.assert_allclose(made[0], PICTURES / 127.5 - 1, rtol=0, atol=1e-6)


def test_a_sample_does_not_depend_on_its_batch_or_mesh(augmented, compiled, keys):
    alone = compiled((PICTURES[2:3], PICTURES[2:3]), keys[2:3])
    mesh = Mesh(np.array(jax.devices()[:6]), ("replica",))
    split = NamedSharding(mesh, PartitionSpec("replica"))
    inputs = ((jax.device_put(PICTURES, split),) * 2, jax.device_put(keys, split))
    program = compiled.lower(*inputs).compile()
    spread = program(*inputs)
    for camera in range(2):
        np.testing.assert_allclose(alone[camera][0], augmented[camera][2], rtol=0, atol=1e-6)
        np.testing.assert_allclose(spread[camera], augmented[camera], rtol=0, atol=1e-6)
    # Each device works on its own samples: nothing is exchanged.
    assert not re.findall("all-gather|all-reduce|all-to-all|collective-permute", program.as_text())


def test_named_wrist_camera_is_spared_the_geometry(keys):
    config = dataclasses.replace(OPENPI, wrist_cameras=("image2",))
    made = prepare((PICTURES[:2], PICTURES[:2]), ("image", "image2"), keys[:2], config)
    for image, name in zip(made, ("base", "wrist"), strict=True):
        np.testing.assert_allclose(image, RECORDED[f"augment/{name}"][:2], rtol=0, atol=5e-5)


def test_unknown_wrist_camera_and_unequal_counts_are_refused(keys):
    with pytest.raises(ValueError, match=r"wrist_cameras names \['hand'\]; the cameras are \['image'\]"):
        prepare((PICTURES,), ("image",), keys, dataclasses.replace(OPENPI, wrist_cameras=("hand",)))
    with pytest.raises(ValueError, match="1 pictures for 2 cameras"):
        prepare((PICTURES,), CAMERAS, keys, OPENPI)


def test_red_stays_red_without_augmentation():
    red = np.zeros((1, 4, 4, 3), np.uint8)
    red[..., 0] = 255
    np.testing.assert_array_equal(prepare((red,), ("front",), None, None)[0][0, 0, 0], (1, -1, -1))


def test_hsv_round_trip():
    pixels = jnp.asarray(PICTURES[0], jnp.float32) / 255
    pixels = jnp.concatenate([pixels.reshape(-1, 3), jnp.array([[0, 0, 0], [1, 1, 1], [0.5, 0.5, 0.5], [1, 1, 0]])])
    np.testing.assert_allclose(hsv_to_rgb(*rgb_to_hsv(pixels)), pixels, rtol=0, atol=1e-6)


def test_sampling_fades_to_black_over_one_pixel():
    picture = jnp.ones((3, 3, 3))
    at = jnp.array([[-1.0, -0.5, 0.0, 1.5, 2.0, 2.5, 3.0]])
    made = sample_bilinear(picture, jnp.ones_like(at), at)
    np.testing.assert_allclose(made[0, :, 0], [0, 0.5, 1, 1, 1, 0.5, 0], atol=1e-6)
