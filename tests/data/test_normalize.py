"""Normalisation against what the upstream processors returned, and what happens to dimensions that do not move."""

from pathlib import Path

import numpy as np
import pytest

from somaspeed_jax.data.normalize import NormalizationError, Normalizer
from somaspeed_jax.data.stats import FIELDS, FeatureStatistics, StatisticsError, compute

NUMBERS = np.load(Path(__file__).parents[1] / "fixtures" / "normalize.npz")
NAMES = ("pan", "lift", "elbow", "flex", "roll", "fixed", "gripper", "tactile")
CONSTANT = 5  # q01 = q99 = 0.25 in the reference numbers


def reference(feature: str) -> FeatureStatistics:
    arrays = {f: NUMBERS[f"stats/{feature}/{f}"] for f in FIELDS}
    return FeatureStatistics(feature, NAMES[: len(arrays["min"])], 100, **arrays)


def moving(array: np.ndarray) -> np.ndarray:
    return np.delete(array, CONSTANT, -1)


@pytest.mark.parametrize(("case", "mode"), [("default", "quantiles"), ("min_max", "min_max"), ("mean_std", "mean_std")])
def test_lerobot_to_the_last_bit(case, mode):
    for feature, raw in (("observation.state", "state"), ("action", "action")):
        normalizer = Normalizer(reference(feature), mode, "lerobot")
        y = normalizer.normalise(NUMBERS[f"raw/{raw}"])
        np.testing.assert_array_equal(moving(y), moving(NUMBERS[f"pi05/{case}/{raw}"]))
        assert y.dtype == np.float32
        assert np.all(y[..., CONSTANT] == (0 if mode == "mean_std" else -1))
    np.testing.assert_array_equal(normalizer.unnormalise(NUMBERS["pi05/model_output"]), NUMBERS[f"pi05/{case}/post"])


@pytest.mark.parametrize(
    ("case", "mode"), [("default_train", "min_max"), ("libero_eval", "quantiles"), ("letterbox_noclip", "min_max")]
)
def test_groot_to_the_last_bit(case, mode):
    clip = case != "letterbox_noclip"
    state = Normalizer(reference("observation.state"), mode, "groot", clip=clip)
    np.testing.assert_array_equal(state.normalise(NUMBERS["raw/state"]), NUMBERS[f"groot/{case}/state"])
    action = Normalizer(reference("action"), mode, "groot", clip=clip)
    post = action.unnormalise(NUMBERS["groot/model_output"])
    if case == "libero_eval":  # upstream turns the gripper after un-normalising
        post[..., 6] = -np.sign(2 * post[..., 6] - 1)
        post = post[:, : NUMBERS[f"groot/{case}/post"].shape[1]]
    else:
        kept = ~NUMBERS["raw/action_is_pad"]
        got, expected = action.normalise(NUMBERS["raw/action"]), NUMBERS[f"groot/{case}/action"]
        np.testing.assert_array_equal(got[kept], expected[kept])
    np.testing.assert_array_equal(post, NUMBERS[f"groot/{case}/post"])


@pytest.mark.parametrize(("case", "gripper"), [("continuous", False), ("normalize_gripper", True)])
def test_molmoact2_to_the_last_bit(case, gripper):
    for feature, raw in (("observation.state", "state"), ("action", "action")):
        statistics = reference(feature)
        mask = np.array([gripper or name != "gripper" for name in statistics.names])
        normalizer = Normalizer(statistics, "quantiles", "molmoact2", mask=mask)
        np.testing.assert_array_equal(normalizer.normalise(NUMBERS[f"raw/{raw}"]), NUMBERS[f"molmoact2/{case}/{raw}"])
    np.testing.assert_array_equal(
        normalizer.unnormalise(NUMBERS["molmoact2/model_output"]), NUMBERS[f"molmoact2/{case}/post"]
    )


def test_molmoact2_refuses_an_unscaled_gripper_that_leaves_the_range():
    normalizer = Normalizer(reference("action"), "quantiles", "molmoact2", mask=np.array(NAMES[:7]) != "gripper")
    with pytest.raises(NormalizationError, match=r"action: dimension 6 \(gripper\).*found 1.5.*normalize_gripper"):
        normalizer.normalise(np.array([0, 0, 0, 0, 0, 0, 1.5], np.float32))


@pytest.mark.parametrize("mode", ["quantiles", "min_max", "mean_std"])
def test_openpi_formula_in_float64(mode):
    s = reference("observation.state")
    x = NUMBERS["raw/state"]
    y = Normalizer(s, mode, "openpi").normalise(x)
    if mode == "mean_std":
        expected = (x - s.mean) / (s.std + 1e-6)
        back = y * (s.std + 1e-6) + s.mean
    else:
        low, high = (s.q01, s.q99) if mode == "quantiles" else (s.min, s.max)
        expected = (x - low) / (high - low + 1e-6) * 2.0 - 1.0
        back = (y + 1.0) / 2.0 * (high - low + 1e-6) + low
    np.testing.assert_array_equal(moving(y), moving(expected.astype(np.float32)))
    got = Normalizer(s, mode, "openpi").unnormalise(y)
    np.testing.assert_array_equal(moving(got), moving(back.astype(np.float32)))


# A column that never moves, one that moves by six parts in ten thousand, one of numerical dust, an ordinary one.
LOW = np.array([0.5, 1.56864, 4e-16, -0.3])
HIGH = np.array([0.5, 1.56962, 4e-14, 0.4])
STILL = FeatureStatistics("action", ("wrist", "base", "rail", "tool"), 9, q01=LOW, q99=HIGH, min=LOW, max=HIGH)


@pytest.mark.parametrize("convention", ["lerobot", "openpi", "groot", "molmoact2"])
@pytest.mark.parametrize("mode", ["quantiles", "min_max"])
def test_U06_dimensions_that_hardly_move_are_named_bounded_and_come_back(convention, mode):
    normalizer = Normalizer(STILL, mode, convention)
    assert [(d.index, d.name) for d in normalizer.near_constant] == [(0, "wrist"), (1, "base"), (2, "rail")]
    inputs = np.array([[0, 0, 0, 0.1], [0.5, 1.569, 0, 0.1], [1e3, -1e3, 1, 0.1], [3e38, -3e38, 3e38, 0.1]], np.float32)
    y = normalizer.normalise(inputs)
    assert np.all(np.abs(y) <= 1)
    back = normalizer.unnormalise(y)
    np.testing.assert_allclose(back[:, :3], [[0.5, 1.56913, 2.02e-14]] * 4, rtol=4e-4, atol=1e-12)
    np.testing.assert_array_equal(back[:, 0], np.float32(0.5))
    np.testing.assert_allclose(back[:, 3], 0.1, atol=1e-6)
    # a policy's output for these dimensions is not near the value seen in training: still the constant
    wild = normalizer.unnormalise(np.array([7.0, -7.0, 7.0, 0.0], np.float32))
    np.testing.assert_allclose(wild[:3], [0.5, 1.56913, 2.02e-14], rtol=4e-4, atol=1e-12)


def test_U06_the_value_is_what_upstream_gives_the_constant_itself():
    for convention, value in (("lerobot", -1), ("openpi", -1), ("molmoact2", -1), ("groot", 0)):
        assert Normalizer(STILL, "quantiles", convention).normalise(LOW.astype(np.float32))[0] == value


@pytest.mark.parametrize("convention", ["lerobot", "openpi", "groot"])
def test_U06_by_mean_and_standard_deviation(convention):
    rows = np.random.default_rng(0).normal([0.5, 100, 0, 2], [0, 1e-3, 1e-9, 0.5], (500, 4)).astype(np.float32)
    normalizer = Normalizer(compute(rows, feature="action"), "mean_std", convention, clip=False)
    assert [d.index for d in normalizer.near_constant] == [0, 1, 2]
    y = normalizer.normalise(np.float32([9, 9, 9, 3]))
    assert np.all(y[:3] == 0) and 1.5 < y[3] < 2.5
    np.testing.assert_allclose(normalizer.unnormalise(y)[:3], [0.5, 100, 0], rtol=1e-5, atol=1e-7)


def test_U06_small_ordinary_movements_are_left_alone():
    # half a millimetre of end-effector motion per step, and an angle that moves by a percent of its value
    s = FeatureStatistics("action", ("dx", "angle"), 9, q01=np.array([-2.5e-4, 1.56]), q99=np.array([2.5e-4, 1.58]))
    normalizer = Normalizer(s, "quantiles", "lerobot")
    x = np.float32([1e-4, 1.565])
    low, high = s.q01.astype(np.float32), s.q99.astype(np.float32)
    np.testing.assert_array_equal(normalizer.normalise(x), np.float32(2) * (x - low) / (high - low) - np.float32(1))
    assert normalizer.near_constant == []


def test_statistics_per_step():
    low = np.array([[0.0, -1], [-1, -1], [-2, -1]])
    s = FeatureStatistics("action", ("x", "y"), 9, min=low, max=low + [[0, 2], [2, 2], [4, 2]], space="relative")
    normalizer = Normalizer(s, "min_max", "groot")
    x = np.zeros((5, 3, 2), np.float32) + np.float32([0, 0.5])
    y = normalizer.normalise(x)
    np.testing.assert_array_equal(y[0], np.float32([[0, 0.5], [0, 0.5], [0, 0.5]]))
    np.testing.assert_array_equal(normalizer.unnormalise(y), x)
    np.testing.assert_array_equal(normalizer.normalise(x[:, :2]), y[:, :2])
    assert normalizer.near_constant == []  # x stands still only in the first step
    with pytest.raises(NormalizationError, match=r"shape \(5, 4, 2\).*at most 3 steps"):
        normalizer.normalise(np.zeros((5, 4, 2), np.float32))


def test_identity_and_pickling():
    import pickle

    x = np.float32([[1, 2, 3, 4]])
    np.testing.assert_array_equal(Normalizer(STILL, "identity", "lerobot").normalise(x), x)
    copy = pickle.loads(pickle.dumps(Normalizer(STILL, "quantiles", "lerobot")))
    assert copy.normalise(x)[0, 0] == -1


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.zeros(4), "type float64, expected float32"),
        (np.zeros(3, np.float32), r"shape \(3,\), the statistics have 4 dimensions"),
        (np.float32([0, 0, np.nan, 0]), r"input\[2\] \(rail\) is nan"),
    ],
)
def test_bad_values_are_refused(x, message):
    with pytest.raises(NormalizationError, match="action: .*" + message):
        Normalizer(STILL, "quantiles", "lerobot").normalise(x)


def test_contradictions_are_refused():
    with pytest.raises(NormalizationError, match="mode 'quantile'"):
        Normalizer(STILL, "quantile", "lerobot")  # pyright: ignore[reportArgumentType]
    with pytest.raises(NormalizationError, match="mask of shape"):
        Normalizer(STILL, "quantiles", "molmoact2", mask=np.ones(3, bool))
    with pytest.raises(StatisticsError, match="action: no mean in the statistics"):
        Normalizer(STILL, "mean_std", "lerobot")
