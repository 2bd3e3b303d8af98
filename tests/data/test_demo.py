"""The demo dataset: a true LeRobot v3.0 layout, pictures at the right rows, made once, equal for equal seeds."""

import json
import multiprocessing
from pathlib import Path

import av
import numpy as np
import pyarrow.parquet as pq
import pytest

from somaspeed_jax.data import demo, tabletop

EPISODES = 70  # more than one video file


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return demo.ensure_demo(tmp_path_factory.mktemp("demo"), episodes=EPISODES, seed=3)


@pytest.fixture(scope="module")
def rows(root) -> dict[str, np.ndarray]:
    table = pq.read_table(root / "data" / "chunk-000" / "file-000.parquet")
    return {name: np.array(table[name].to_pylist()) for name in table.column_names}


@pytest.fixture(scope="module")
def episodes(root) -> dict[str, list]:
    return pq.read_table(root / "meta" / "episodes" / "chunk-000" / "file-000.parquet").to_pydict()


def test_tables_agree_with_each_other(root, rows, episodes):
    info = json.loads((root / "meta" / "info.json").read_text())
    assert info["codebase_version"] == "v3.0"
    assert info["total_episodes"] == EPISODES == len(episodes["episode_index"])
    assert info["total_frames"] == len(rows["index"]) == episodes["dataset_to_index"][-1]
    np.testing.assert_array_equal(rows["index"], np.arange(len(rows["index"])))
    tasks = dict(zip(*pq.read_table(root / "meta" / "tasks.parquet").to_pydict().values(), strict=True))
    for e in range(EPISODES):
        mine = rows["episode_index"] == e
        assert mine.sum() == episodes["length"][e]
        np.testing.assert_array_equal(rows["frame_index"][mine], np.arange(mine.sum()))
        np.testing.assert_allclose(rows["timestamp"][mine], np.arange(mine.sum()) / info["fps"], atol=1e-6)
        assert {tasks[t] for t in rows["task_index"][mine]} == set(episodes["tasks"][e])


@pytest.mark.parametrize("camera", tabletop.CAMERAS)
def test_each_row_has_its_own_picture(root, rows, episodes, camera):
    """Row k of an episode is frame round(from_timestamp * fps) + k of its file: first and last row of each episode."""
    scenes = tabletop.make_scenes(EPISODES, np.random.default_rng(3))
    folder = root / "videos" / camera / "chunk-000"
    files = [_decode(folder / f"file-{i:03d}.mp4") for i in range(len(list(folder.iterdir())))]
    assert len(files) == 2
    assert sum(map(len, files)) == len(rows["index"])
    for e in (0, 1, 63, 64, EPISODES - 1):
        for k in (0, episodes["length"][e] - 1):
            frame = round(episodes[f"videos/{camera}/from_timestamp"][e] * tabletop.FPS) + k
            seen = files[episodes[f"videos/{camera}/file_index"][e]][frame].astype(int)

            def off(episode, row, seen=seen):
                """How far a row's drawing is from the frame, mean levels of 255: the video is lossy."""
                now = scenes.select(np.array([episode]))
                at = episodes["dataset_from_index"][episode] + row
                now.tip = rows["observation.state"][[at]].astype(np.float32)
                return np.abs(seen - now.images()[camera][0]).mean()

            neighbour = k + 1 if k == 0 else k - 1
            other = (e + 1) % EPISODES
            assert off(e, k) < off(e, neighbour) and 2 * off(e, k) < off(other, 0), (e, k)


def test_random_access_is_cheap(root):
    with av.open(str(root / "videos" / tabletop.CAMERAS[0] / "chunk-000" / "file-000.mp4")) as container:
        assert container.streams.video[0].codec_context.name == "h264"
        keys = [i for i, frame in enumerate(container.decode(video=0)) if frame.key_frame]
    assert np.diff(keys).max() <= 4


def test_statistics_are_those_of_the_rows(root, rows):
    statistics = json.loads((root / "meta" / "stats.json").read_text())
    for name in ("observation.state", "action"):
        values = rows[name]
        found = statistics[name]
        np.testing.assert_allclose(found["mean"], values.mean(0), rtol=1e-6)
        np.testing.assert_allclose(found["std"], values.std(0), rtol=1e-6)
        np.testing.assert_allclose([found["min"], found["max"]], [values.min(0), values.max(0)])
        np.testing.assert_allclose(found["q99"], np.quantile(values, 0.99, axis=0), rtol=1e-6)
        assert found["count"] == [len(values)]
    for camera in tabletop.CAMERAS:
        assert np.shape(statistics[camera]["std"]) == (3, 1, 1)
        assert 0.05 < np.min(statistics[camera]["std"]) < np.max(statistics[camera]["std"]) < 0.3


def test_every_demonstration_ends_on_its_block(rows, episodes):
    scenes = tabletop.make_scenes(EPISODES, np.random.default_rng(3))
    last = np.array(episodes["dataset_to_index"]) - 1
    scenes.tip = rows["observation.state"][last].astype(np.float32)
    assert scenes.reached().all()


def test_the_seed_decides(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        demo.make_demo(tmp_path / name, episodes=3, seed=seed)
    tables = [pq.read_table(tmp_path / name / "data" / "chunk-000" / "file-000.parquet") for name in "abc"]
    assert tables[0].equals(tables[1])
    assert not tables[0].equals(tables[2])


def test_two_processes_make_one_dataset(tmp_path):
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        paths = pool.starmap(demo.ensure_demo, [(tmp_path, 3, 0)] * 2)
    assert paths[0] == paths[1]
    assert [p.name for p in tmp_path.iterdir()] == [paths[0].name]


def test_a_failed_attempt_leaves_nothing(tmp_path):
    with pytest.raises(ValueError, match="episodes = 0"):
        demo.ensure_demo(tmp_path, episodes=0)
    assert not list(tmp_path.iterdir())


def _decode(path: Path) -> list[np.ndarray]:
    with av.open(str(path)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
