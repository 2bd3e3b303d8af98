"""Open-loop evaluation against errors that are known: an oracle, a constant offset, the baselines by hand."""

import json

import numpy as np
import pytest

from somaspeed_jax.data import demo, tabletop
from somaspeed_jax.data.lerobot import LeRobotDataset
from somaspeed_jax.evaluate.open_loop import evaluate_open_loop
from somaspeed_jax.evaluate.plots import write_plots

HORIZON = 6


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    path = demo.ensure_demo(tmp_path_factory.mktemp("demo"), episodes=4)
    return LeRobotDataset(path, horizon=HORIZON, episodes=[1, 3])


class Recorded:
    """Gives back the recorded chunk of a state, plus `offset` [t, a]."""

    def __init__(self, dataset, offset=0.0):
        records = [dataset.record(i, images=False) for i in range(len(dataset))]
        self.chunks = {r["state"].tobytes(): r["actions"] + offset for r in records}
        self.batches = []

    def __call__(self, observations):
        self.batches.append(len(observations))
        assert set(observations[0]["images"]) == set(tabletop.CAMERAS)
        return np.stack([self.chunks[o["state"].tobytes()] for o in observations])


def test_the_recorded_chunk_has_no_error(dataset):
    oracle = Recorded(dataset)
    result = evaluate_open_loop(oracle, dataset, np.zeros(2), batch=8)
    assert result.errors["policy"].rmse_by_dimension.max() == 0
    assert result.errors["repeat_last_action"].rmse_by_dimension.min() > 0
    assert result.records == len(dataset) - 2  # one first frame an episode
    assert set(oracle.batches) == {8}
    assert result.beats_baselines().all()


def test_an_offset_is_found_at_its_dimension_and_step(dataset):
    offset = np.zeros((HORIZON, 2), np.float32)
    offset[3, 1] = 0.01
    errors = evaluate_open_loop(Recorded(dataset, offset), dataset, np.zeros(2)).errors["policy"]
    expected = np.zeros((HORIZON, 2))
    expected[3, 1] = 0.01
    np.testing.assert_allclose(errors.mae, expected, atol=1e-7)
    np.testing.assert_allclose(errors.rmse, expected, atol=1e-7)


def test_baselines_by_hand(dataset):
    mean = np.array([0.4, 0.1])
    errors = evaluate_open_loop(Recorded(dataset), dataset, mean).errors
    actions = [dataset.numeric("action")[rows] for rows in dataset.episode_rows.values()]
    for step in range(HORIZON):
        # pairs (action before the frame, action `step` after it) that lie inside an episode
        repeat = np.concatenate([a[step + 1 :] - a[: len(a) - step - 1] for a in actions])
        np.testing.assert_allclose(errors["repeat_last_action"].mae[step], np.abs(repeat).mean(0), rtol=1e-5)
        off = np.concatenate([a[step + 1 :] - mean for a in actions])
        np.testing.assert_allclose(errors["mean_action"].rmse[step], np.sqrt((off**2).mean(0)), rtol=1e-5)


def test_the_summary_is_strict_json(dataset):
    long = LeRobotDataset(dataset.path, horizon=200, episodes=[1])  # no record reaches the last steps
    result = evaluate_open_loop(Recorded(long), long, np.zeros(2))
    found = json.loads(json.dumps(result.summary(), allow_nan=False))
    assert found["errors"]["policy"]["mae"][199] == [None, None]
    assert found["dimensions"] == ["target_x", "target_y"]
    assert found["episodes"] == [1]


def test_plots_are_written(dataset, tmp_path):
    result = evaluate_open_loop(Recorded(dataset), dataset, np.zeros(2), stride=2)
    assert result.records == (len(dataset) - 2 + 1) // 2
    paths = write_plots(result, tmp_path / "plots")
    assert [p.name for p in paths] == ["error_by_step.png", "episode_1.png", "episode_3.png"]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in paths)


def test_a_chunk_of_another_shape_is_refused(dataset):
    with pytest.raises(ValueError, match=r"shape \(32, 5, 2\), expected \(32, 6, 2\)"):
        evaluate_open_loop(lambda o: np.zeros((len(o), 5, 2)), dataset, np.zeros(2))
    with pytest.raises(ValueError, match="384 values that are not finite"):
        evaluate_open_loop(lambda o: np.full((len(o), 6, 2), np.inf), dataset, np.zeros(2))
