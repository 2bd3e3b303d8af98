"""Picture geometry against what lerobot 0.6.1 and openpi make of the same pictures."""

from pathlib import Path

import numpy as np
import pytest

from somaspeed_jax.data.images import fitted_size, resize_with_pad, resize_with_pad_antialias

FIXTURES = Path(__file__).parents[1] / "fixtures"
LEROBOT = np.load(FIXTURES / "processor_pi05.npz")
OPENPI = np.load(FIXTURES / "processor_pi05_openpi.npz")
SIZES = {"images_56": (56, 56), "images_42x70": (42, 70), "images_224": (224, 224)}


@pytest.mark.parametrize("key", [key for key in LEROBOT.files if key.startswith("case/images_")])
def test_bilinear_equals_lerobot(key):
    _, case, camera = key.split("/")
    recorded, size = LEROBOT[key].astype(np.float64) / 256, SIZES[case]  # grey levels, not rounded
    made = resize_with_pad(LEROBOT[f"raw/image_{camera}"], size)
    assert made.shape == (*size, 3) and made.dtype == np.uint8
    # Half a level from rounding, and 1/512 from how the recording is stored.
    assert np.abs(made[: len(recorded)] - recorded).max() <= 0.51


@pytest.mark.parametrize("key", [key for key in OPENPI.files if key.startswith("resize/")])
def test_antialias_equals_openpi(key):
    _, camera, size = key.split("/")
    target = tuple(map(int, size.split("x")))
    picture = LEROBOT[f"raw/image_{camera}"]
    if target == (200, 180):
        picture = picture[:50, :60]  # this one is enlarged
    np.testing.assert_array_equal(resize_with_pad_antialias(picture, target), OPENPI[key])


@pytest.mark.parametrize("resize", [resize_with_pad, resize_with_pad_antialias])
def test_picture_of_the_right_size_is_untouched(resize):
    picture = LEROBOT["raw/image_wrist"]
    assert resize(picture, (96, 96)) is picture


@pytest.mark.parametrize("resize", [resize_with_pad, resize_with_pad_antialias])
def test_odd_bar_is_at_the_bottom_or_right(resize):
    white = np.full((40, 80, 3), 255, np.uint8)
    assert fitted_size((40, 80), (33, 36)) == (18, 36)
    rows = resize(white, (33, 36))[:, 0, 0]
    np.testing.assert_array_equal(np.flatnonzero(rows), np.arange(7, 25))  # 7 above, 8 below


@pytest.mark.parametrize(
    "picture",
    [np.zeros((3, 8, 8), np.uint8), np.zeros((8, 8, 3), np.float32), np.zeros((8, 8, 4), np.uint8), [[0]]],
    ids=["channels first", "float", "alpha", "list"],
)
def test_other_pictures_are_refused(picture):
    with pytest.raises(ValueError, match=r"camera image: expected a uint8 picture \[height, width, 3\] in RGB, found"):
        resize_with_pad(picture, (8, 8))
