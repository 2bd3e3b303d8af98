"""tools/compute_stats.py: numeric columns only, strict JSON, dimensions that hardly move by name."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from somaspeed_jax.data import stats

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import compute_stats  # noqa: E402


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    """Three episodes of 40, 60 and 50 frames in layout v2.1; the camera that it declares has no files."""
    root = tmp_path_factory.mktemp("recordings") / "arm"
    (root / "meta").mkdir(parents=True)
    (root / "data" / "chunk-000").mkdir(parents=True)
    rng = np.random.default_rng(0)
    names = ["shoulder", "fixed", "gripper"]
    vector = {"dtype": "float32", "shape": [3], "names": names}
    scalar = {"dtype": "int64", "shape": [1], "names": None}
    info = {
        "codebase_version": "v2.1", "fps": 10, "total_episodes": 3, "chunks_size": 1000,
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
        "features": {
            "observation.images.top": {"dtype": "video", "shape": [8, 8, 3], "names": ["height", "width", "channels"]},
            "observation.state": vector, "action": vector, "timestamp": {**scalar, "dtype": "float32"},
            **{k: scalar for k in ("frame_index", "episode_index", "index", "task_index")},
        },
    }  # fmt: skip
    lengths = (40, 60, 50)
    for episode, n in enumerate(lengths):
        state = np.stack([rng.normal(size=n), np.full(n, 0.5), rng.uniform(size=n)], 1).astype(np.float32)
        action = state + np.float32([0.1, 0, 0]) * rng.normal(size=(n, 1)).astype(np.float32)
        columns = {
            "observation.state": list(state), "action": list(action), "timestamp": np.arange(n, dtype=np.float32) / 10,
            "frame_index": np.arange(n), "episode_index": np.full(n, episode), "task_index": np.zeros(n, np.int64),
            "index": np.arange(n) + sum(lengths[:episode]),
        }  # fmt: skip
        pq.write_table(pa.table(columns), root / "data" / "chunk-000" / f"episode_{episode:06d}.parquet")
    (root / "meta" / "info.json").write_text(json.dumps(info))
    (root / "meta" / "tasks.jsonl").write_text('{"task_index": 0, "task": "pick"}\n')
    lines = [json.dumps({"episode_index": e, "tasks": ["pick"], "length": n}) for e, n in enumerate(lengths)]
    (root / "meta" / "episodes.jsonl").write_text("\n".join(lines))
    return root


def rows(dataset: Path, column: str) -> list[np.ndarray]:
    files = sorted((dataset / "data").rglob("*.parquet"))
    return [np.stack(pq.read_table(f)[column].to_numpy()) for f in files]


def test_over_all_rows_and_still_dimensions_by_name(dataset, tmp_path, capsys):
    assert compute_stats.main([str(dataset), "--output", str(tmp_path / "s.json")]) == 0
    printed = capsys.readouterr().out
    assert "observation.state[1] (fixed) hardly moves: taken as the constant 0.5" in printed
    assert "action[1] (fixed) hardly moves" in printed and "(shoulder) hardly" not in printed
    read = stats.load(tmp_path / "s.json")
    state = np.concatenate(rows(dataset, "observation.state")).astype(np.float64)
    np.testing.assert_allclose(read["observation.state"].require("q99"), np.quantile(state, 0.99, axis=0), rtol=1e-12)
    assert read["action"].names == ("shoulder", "fixed", "gripper") and read["action"].count == 150
    json.loads((tmp_path / "s.json").read_text(), parse_constant=pytest.fail)


def test_U09_chosen_episodes_alone(dataset, tmp_path):
    assert compute_stats.main([str(dataset), "--output", str(tmp_path / "s.json"), "--episodes", "0", "2"]) == 0
    state = stats.load(tmp_path / "s.json")["observation.state"]
    first, _, last = rows(dataset, "observation.state")
    assert state.count == 90
    np.testing.assert_allclose(
        state.require("mean"), np.concatenate([first, last]).astype(np.float64).mean(0), rtol=1e-12
    )


def test_U30_relative_actions_are_marked_and_the_gripper_stays_absolute(dataset, tmp_path):
    arguments = [str(dataset), "--output", str(tmp_path / "s.json"), "--relative", "--horizon", "4"]
    assert compute_stats.main(arguments) == 0
    action = stats.load(tmp_path / "s.json")["action"]
    assert action.space == "relative" and action.count == 600
    chunks = []
    for state, actions in zip(rows(dataset, "observation.state"), rows(dataset, "action"), strict=True):
        for i in range(len(actions)):
            chunk = actions[np.minimum(np.arange(i, i + 4), len(actions) - 1)].astype(np.float64)
            chunks.append(chunk - np.float32([1, 1, 0]) * state[i])
    np.testing.assert_allclose(action.require("q01"), np.quantile(np.concatenate(chunks), 0.01, axis=0), atol=1e-7)


def test_refusals_name_what_is_wrong(dataset, tmp_path, capsys):
    output = ["--output", str(tmp_path / "s.json")]
    assert compute_stats.main([str(dataset), *output, "--action-key", "actions"]) == 1
    assert "'actions' is not a feature" in capsys.readouterr().err
    assert compute_stats.main([str(dataset), *output, "--relative", "--horizon", "4", "--exclude", "hand"]) == 1
    assert "--exclude ['hand']: no action dimension" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        compute_stats.main([str(dataset), *output, "--relative"])
    assert not (tmp_path / "s.json").exists()


def test_neither_jax_nor_a_device_is_touched(dataset, tmp_path):
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'tools')!r}); import compute_stats\n"
        f"assert compute_stats.main([{str(dataset)!r}, '--output', {str(tmp_path / 's.json')!r}]) == 0\n"
        "assert 'jax' not in sys.modules, 'jax was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_rare_movement_is_pointed_out():
    from somaspeed_jax.data.normalize import Normalizer

    gripper = np.zeros((1000, 1), np.float32)
    gripper[:5] = 1
    (line,) = Normalizer(stats.compute(gripper, ["gripper"], feature="action"), "quantiles", "lerobot").report()
    assert (
        "action[0] (gripper) hardly moves" in line and "moves, from 0 to 1: to learn that, normalise by min_max" in line
    )
