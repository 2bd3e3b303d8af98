"""Statistics: exact, strict, and never one thing under another's name."""

import json
from pathlib import Path

import numpy as np
import pytest

from somaspeed_jax.data import stats
from somaspeed_jax.data.normalize import Normalizer
from somaspeed_jax.data.stats import FIELDS, FeatureStatistics, StatisticsError

NUMBERS = np.load(Path(__file__).parents[1] / "fixtures" / "normalize.npz")
NO_QUANTILES = {"action": {k: [1.0, 2.0] for k in ("min", "max", "mean")} | {"std": [0.1, 0.2], "count": [40]}}


def write(path: Path, content) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_exact_over_all_rows():
    rows = np.random.default_rng(0).normal(size=(1000, 3)).astype(np.float32)
    s = stats.compute(rows, ("x", "y", "z"), feature="observation.state")
    wide = rows.astype(np.float64)
    for field, expected in (
        ("min", wide.min(0)), ("max", wide.max(0)), ("mean", wide.mean(0)), ("std", wide.std(0)),
        ("q01", np.quantile(wide, 0.01, axis=0)), ("q99", np.quantile(wide, 0.99, axis=0)),
    ):  # fmt: skip
        np.testing.assert_allclose(getattr(s, field), expected, rtol=1e-14)
        assert getattr(s, field).dtype == np.float64
    assert (s.count, s.names, s.size, s.space) == (1000, ("x", "y", "z"), 3, "absolute")


def test_not_finite_is_refused_by_place():
    rows = np.zeros((50, 6), np.float32)
    rows[17, 5] = np.nan
    with pytest.raises(StatisticsError, match=r"action: row 17, dimension 5 \(grip\) is nan"):
        stats.compute(rows, [*"abcde", "grip"], feature="action")
    with pytest.raises(StatisticsError, match="no rows"):
        stats.compute(rows[:0], feature="action")


def test_U05_missing_quantiles_are_refused_with_the_command(tmp_path):
    loaded = stats.load(write(tmp_path / "stats.json", NO_QUANTILES))["action"]
    assert loaded.q01 is None and loaded.count == 40
    with pytest.raises(StatisticsError, match=r"action: no q01 .*tools/compute_stats.py"):
        Normalizer(loaded, "quantiles", "lerobot")
    Normalizer(loaded, "mean_std", "lerobot")
    with pytest.raises(StatisticsError, match=r"stats.json: no such file.*tools/compute_stats.py"):
        stats.load(tmp_path / "absent" / "stats.json")


def test_relative_statistics_equal_upstream():
    """Per step, complete chunks only; the gripper (last dimension) stays absolute."""
    actions, states, pads = (NUMBERS[f"relative/{k}"] for k in ("actions", "states", "action_is_pad"))
    n, t, a = actions.shape
    complete = ~pads.any(1)
    # lay every chunk out as an episode of its own: an incomplete one is shorter
    rows, reference, episode = [], [], []
    for i in range(n):
        length = int((~pads[i]).sum())
        rows.append(actions[i, :length])
        reference.append(np.repeat(states[i : i + 1, :a], length, 0))
        episode += [i] * length
    mask = np.arange(a) != a - 1
    s = stats.compute_relative(
        np.concatenate(rows), np.concatenate(reference), np.array(episode), t, mask=mask, per_step=True
    )
    assert s.steps == t and s.count == complete.sum() and s.space == "relative"
    for field in FIELDS:
        np.testing.assert_allclose(getattr(s, field), NUMBERS[f"relative/{field}"], atol=1e-6)


def test_relative_over_all_steps_repeats_the_tail_and_stays_in_the_episode():
    actions = np.array([[0.0, 5], [1, 6], [2, 7], [100, 8]])
    reference = np.array([[0.0, 0], [1, 0], [1, 0], [90, 0]])
    s = stats.compute_relative(actions, reference, np.array([3, 3, 3, 9]), 2, mask=np.array([True, False]))
    chunks = np.array([[0, 5], [1, 6], [0, 6], [1, 7], [1, 7], [1, 7], [10, 8], [10, 8]], np.float64)
    expected = stats.compute(chunks, feature="action")
    for field in FIELDS:
        np.testing.assert_allclose(getattr(s, field), getattr(expected, field), rtol=1e-14)
    with pytest.raises(StatisticsError, match="no episode has the 4 frames"):
        stats.compute_relative(actions, reference, np.array([3, 3, 3, 9]), 4, per_step=True)


def test_U30_absolute_statistics_are_refused_for_relative_actions():
    absolute = stats.compute(np.eye(3), feature="action")
    with pytest.raises(StatisticsError, match=r"action: statistics of absolute actions used for relative.*--relative"):
        absolute.require_space("relative")
    absolute.require_space("absolute")


def test_written_and_read_back(tmp_path):
    rows = np.random.default_rng(0).normal(size=(20, 2))
    relative = stats.compute_relative(rows, rows, np.zeros(20), 3, per_step=True)
    partial = FeatureStatistics("observation.state", ("0",), None, mean=np.array([0.1]), std=np.array([0.3]))
    stats.save(tmp_path / "meta" / "s.json", {"action": relative, "observation.state": partial})
    assert [p.name for p in (tmp_path / "meta").iterdir()] == ["s.json"]
    read = stats.load(tmp_path / "meta" / "s.json")
    assert read["action"].space == "relative" and read["action"].steps == 3 and read["action"].count == 18
    for field in FIELDS:
        np.testing.assert_array_equal(getattr(read["action"], field), getattr(relative, field))
    assert read["observation.state"].q01 is None and read["observation.state"].count is None


ONE = {"min": [0, 0], "max": [1, 1], "mean": [0.5, 0.5], "std": [0.1, 0.1], "q01": [0, 0], "q99": [1, 1]}


def test_reads_lerobot_openpi_groot_and_molmoact2_files(tmp_path):
    picture = {k: [[[0.5]], [[0.5]], [[0.5]]] for k in ("min", "max", "mean", "std")}
    lerobot = stats.load(
        write(tmp_path / "l.json", {"action": {**ONE, "count": [7]}, "observation.images.top": picture})
    )
    assert set(lerobot) == {"action"} and lerobot["action"].count == 7

    openpi = {"norm_stats": {k: {f: ONE[f] for f in ("mean", "std", "q01", "q99")} for k in ("state", "actions")}}
    read = stats.load(write(tmp_path / "o.json", openpi))
    assert set(read) == {"state", "actions"} and read["state"].min is None

    step = {k: [v] * 4 for k, v in ONE.items()}
    groot = {
        "libero_sim": {"state": {"arm": ONE, "grip": ONE}, "action": {"arm": ONE}, "relative_action": {"arm": step}},
        "new_embodiment": {"state": {"arm": ONE}, "action": {"arm": ONE}},
    }
    path = write(tmp_path / "g.json", groot)
    read = stats.load(path, tag="libero_sim")
    assert set(read) == {"state.arm", "state.grip", "action.arm", "relative_action.arm"}
    assert read["relative_action.arm"].steps == 4 and read["relative_action.arm"].space == "relative"
    assert stats.concatenate([read["state.arm"], read["state.grip"]], "state").size == 4
    with pytest.raises(StatisticsError, match=r"libero_sim.*new_embodiment.*asked for None"):
        stats.load(path)
    with pytest.raises(StatisticsError, match=r"state.arm is absolute.*relative_action.arm is relative"):
        stats.concatenate([read["state.arm"], read["relative_action.arm"]], "x")

    keys = {"action_key": "action", "state_key": "observation.state"}
    droid = {**keys, "action_stats": {**ONE, "names": ["a", "b"]}, "state_stats": ONE}
    molmo = {"format": "molmoact2_norm_stats.v1", "metadata_by_tag": {"droid": droid}}
    read = stats.load(write(tmp_path / "m.json", molmo), tag="droid")
    assert set(read) == {"action", "observation.state"} and read["action"].names == ("a", "b")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n",
            "Git-LFS pointer, the content was never fetched",
        ),
        ("", "not strict JSON"),
        ('{"action": {"mean": [NaN], "std": [1.0]}}', "bare word NaN"),
        ("[]", "holds a list"),
        ("{}", "no feature"),
        ({"action": {"mean": [0.0], "std": [1.0, 2.0]}}, "action: shapes"),
        ({"action": {"q01": [1.0], "q99": [0.0]}}, r"action: q01\[0\] = 1.0 is above q99 = 0.0"),
        ({"action": {"mean": ["x"]}}, "expected lists of numbers"),
        ({"action": {"mean": [1e999]}}, "bare word|finite number|Infinity"),
    ],
)
def test_malformed_files_are_refused_by_name(tmp_path, content, message):
    with pytest.raises(StatisticsError, match=f"bad.json: .*({message})"):
        stats.load(write(tmp_path / "bad.json", content))
