"""The reader on small datasets whose numbers and pictures say which episode and frame they are."""

import pickle
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataset_checks import H, assert_exact, refusal
from recordings import CAMERA, code, edit_column, edit_info, number_in, write_dataset, write_lines

from somaspeed_jax.data.errors import DataError
from somaspeed_jax.data.lerobot import LeRobotDataset, split_episodes
from somaspeed_jax.data.order import Order

LENGTHS = [12, 7, 15, 20]

LAYOUTS = {
    "v3.0, one file": {},
    "v3.0, data and video files roll over apart": {
        "episodes_a_data_file": 3,
        "episodes_a_video_file": 2,
        "chunks_size": 1,
    },
    "v3.0, pictures in parquet": {"stored_as": "image", "episodes_a_data_file": 2},
    "v2.1": {"version": "v2.1"},
    "v2.0, two cameras, odd chunks": {
        "version": "v2.0",
        "chunks_size": 3,
        "cameras": ("left", "observation.images.rgb.right"),
    },
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_record_of_every_layout(name, tmp_path):
    write_dataset(tmp_path, LENGTHS, **LAYOUTS[name])
    dataset = LeRobotDataset(tmp_path, horizon=H)
    assert dataset.cameras == LAYOUTS[name].get("cameras", (CAMERA,))
    assert dataset.fps == 10 and dataset.state_names[5] == "joint_5.pos"
    assert_exact(dataset, LENGTHS)


def test_record_types_and_the_cheap_record(tmp_path):
    dataset = LeRobotDataset(write_dataset(tmp_path, [5]), horizon=H)
    record = dataset[3]
    kinds = {key: (value.dtype.name, value.shape) for key, value in record.items() if isinstance(value, np.ndarray)}
    assert kinds == {"state": ("float32", (6,)), "actions": ("float32", (H, 6)), "action_is_pad": ("bool", (H,))}
    assert record["images"][CAMERA].dtype == np.uint8
    np.testing.assert_array_equal(dataset.frame(3, CAMERA), record["images"][CAMERA])
    assert dataset.record(3, images=False)["images"] == {}
    record["state"][:] = 0  # a record is the caller's own
    assert dataset[3]["state"][1] == 3
    with pytest.raises(IndexError):
        dataset[5]


def test_numeric_gives_all_rows_of_the_chosen_episodes(tmp_path):
    dataset = LeRobotDataset(write_dataset(tmp_path, LENGTHS), horizon=H, episodes=[3, 1])
    state = dataset.numeric("observation.state")
    assert state.shape == (27, 6) and state.dtype == np.float32
    assert dataset.episode_rows == {1: slice(0, 7), 3: slice(7, 27)}
    assert dataset.numeric("timestamp").shape == (27, 1)
    assert [state[dataset.row(i), 1] for i in (0, 6, 7)] == [0, 6, 0]


def test_pickles_small_and_reads_on_in_another_process(tmp_path):
    dataset = LeRobotDataset(write_dataset(tmp_path, LENGTHS), horizon=H)
    image = dataset[20]["images"][CAMERA]
    copy = pickle.loads(pickle.dumps(dataset))
    np.testing.assert_array_equal(copy[20]["images"][CAMERA], image)
    assert repr(copy) == repr(dataset)


def test_the_fingerprint_is_of_the_content_and_the_choice(tmp_path):
    a = write_dataset(tmp_path / "a", LENGTHS)
    shutil.copytree(a, tmp_path / "elsewhere" / "a")
    original = LeRobotDataset(a, horizon=H).fingerprint
    assert LeRobotDataset(tmp_path / "elsewhere" / "a", horizon=8).fingerprint == original
    assert LeRobotDataset(a, horizon=H, episodes=[0, 1]).fingerprint != original
    edit_column(a / "data/chunk-000/file-000.parquet", "action", lambda rows: [[9.0] * 6, *rows[1:]])
    assert LeRobotDataset(a, horizon=H).fingerprint != original


def test_vectors_in_every_form_of_storage(tmp_path):
    """Text, doubles, variable lists and several axes give the same numbers as the fixed float32 list."""
    write_dataset(tmp_path, [5, 6], cameras=())
    path = tmp_path / "data/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    expected = np.array(table["observation.state"].to_pylist(), np.float32)
    rows = table["observation.state"].to_pylist()
    forms = {
        "large": pa.array(rows, pa.large_list(pa.float64())),
        "text": pa.array([str(row) for row in rows]),
        "half": pa.array(rows, pa.list_(pa.float16(), 6)),
        "grid": pa.array([[row[:3], row[3:]] for row in rows], pa.list_(pa.list_(pa.float32(), 3), 2)),
    }
    info = LeRobotDataset(tmp_path, horizon=H).features
    assert info["observation.state"].shape == (6,)
    features = {name: {"dtype": "float32", "shape": [6], "names": None} for name in forms}
    features["grid"]["shape"] = [2, 3]
    scalar = {"dtype": "int64", "shape": [1]}
    features |= {"action": features["text"], "episode_index": scalar, "task_index": scalar}
    for name, column in forms.items():
        table = table.append_column(name, column)
    pq.write_table(table, path)
    edit_info(tmp_path, features=features)
    for name in forms:
        dataset = LeRobotDataset(tmp_path, horizon=H, state_key=name)
        np.testing.assert_allclose(dataset.numeric(name), expected, rtol=1e-3)
    dataset = LeRobotDataset(tmp_path, horizon=H, state_key="text")
    assert dataset.numeric("grid").shape == (11, 2, 3)
    assert dataset.state_names == tuple(f"dim_{i}" for i in range(6))


def test_a_vector_of_another_length_is_refused(tmp_path):
    write_dataset(tmp_path, [5], cameras=())
    path = tmp_path / "data/chunk-000/file-000.parquet"
    edit_column(path, "action", lambda rows: [row[:5] for row in rows])
    assert "file-000.parquet: action: a row has 5 values; its declared shape [6] has 6" in refusal(tmp_path)
    edit_column(path, "action", lambda rows: [[*rows[0], 1.0], *rows[1:]])
    assert "rows have [5, 6] values" in refusal(tmp_path)


@pytest.mark.parametrize("kind", ["video", "image"])
def test_U04c_sizes_come_from_the_pictures(kind, tmp_path):
    write_dataset(tmp_path, [6], stored_as=kind)
    features = {
        "observation.state": {"dtype": "float32", "shape": [6], "names": None},
        "action": {"dtype": "float32", "shape": [6]},
        CAMERA: {"dtype": kind, "shape": [3, 480, 640], "names": None},
    }
    edit_info(tmp_path, features=features)
    dataset = LeRobotDataset(tmp_path, horizon=H)
    assert dataset[2]["images"][CAMERA].shape == (64, 64, 3)
    assert number_in(dataset[2]["images"][CAMERA]) == code(0, 2)


@pytest.mark.parametrize("kind", ["video", "image"])
def test_U11_the_declared_order_of_axes_does_not_change_the_pixels(kind, tmp_path):
    """(3, H, W), (H, W, 3), and shapes that say one thing and names another: the picture is what the file holds."""
    seen = []
    for number, (shape, names) in enumerate(
        [
            ([3, 64, 64], ["channels", "height", "width"]),
            ([64, 64, 3], ["height", "width", "channels"]),
            ([3, 64, 64], ["height", "width", "channels"]),
        ]
    ):
        root = tmp_path / str(number)
        write_dataset(root, [6], stored_as=kind)
        vector = {"dtype": "float32", "shape": [6], "names": None}
        camera = {"dtype": kind, "shape": shape, "names": names}
        edit_info(root, features={"observation.state": vector, "action": vector, CAMERA: camera})
        seen.append(LeRobotDataset(root, horizon=H)[3]["images"][CAMERA])
    assert seen[0].shape == (64, 64, 3) and number_in(seen[0]) == code(0, 3)
    np.testing.assert_array_equal(seen[1], seen[0])
    np.testing.assert_array_equal(seen[2], seen[0])


def test_U10_records_of_the_held_out_episodes_never_come(tmp_path):
    """Ten episodes, a share held out, many epochs: exactly the records of the others, each once an epoch."""
    lengths = [5, 3, 4, 6, 2, 5, 4, 3, 6, 5]
    write_dataset(tmp_path, lengths, cameras=())
    whole = LeRobotDataset(tmp_path, horizon=H)
    kept, held_out = split_episodes([e.index for e in whole.episodes], 0.6, seed=0)
    assert len(kept) == 4 and sorted(kept + held_out) == list(range(10))
    train, order = whole.subset(kept), Order(sum(lengths[e] for e in kept), 1, seed=0)
    expected = sorted((e, frame) for e in kept for frame in range(lengths[e]))
    for epoch in range(5):
        steps = range(epoch * len(train), (epoch + 1) * len(train))
        records = [train[int(order.record_ids(step)[0])] for step in steps]
        assert sorted((r["episode_index"], r["frame_index"]) for r in records) == expected
        assert {int(r["state"][0]) for r in records} == set(kept)


@pytest.mark.parametrize("value", [np.nan, np.inf, None])
def test_U07_a_number_that_is_none(value, tmp_path):
    write_dataset(tmp_path, [20, 20, 20, 20], cameras=(), episodes_a_data_file=2)

    def spoil(rows):
        rows[20 + 17][5] = value
        return rows

    edit_column(tmp_path / "data/chunk-000/file-001.parquet", "action", spoil)
    message = refusal(tmp_path)
    for part in ("file-001.parquet", "episode 3", "frame 17", "action[5]", "joint_5.pos"):
        assert part in message
    assert len(LeRobotDataset(tmp_path, horizon=H, episodes=[0, 1, 2])) == 60


def test_U09_only_some_episodes(tmp_path):
    lengths = [5, 9, 4, 8, 6, 7, 3, 10, 5, 6]
    write_dataset(tmp_path, lengths, episodes_a_data_file=4, episodes_a_video_file=3)
    dataset = LeRobotDataset(tmp_path, horizon=H, episodes=[9, 3, 7])
    assert [episode.index for episode in dataset.episodes] == [3, 7, 9]
    assert_exact(dataset, lengths)
    for key in ("observation.state", "action"):
        np.testing.assert_array_equal(np.unique(np.floor(dataset.numeric(key)[:, 0])), [3, 7, 9])
    assert dataset.tasks == ("episode 3", "episode 7", "episode 9")


@pytest.mark.parametrize(
    ("episodes", "words"),
    [([3, 12], "[12] do not exist"), ([3, 7, 3], "[3] are given more than once"), ([], "none is given")],
)
def test_U09_episodes_that_do_not_exist_or_repeat(episodes, words, tmp_path):
    write_dataset(tmp_path, [3] * 10, cameras=())
    message = refusal(tmp_path, episodes=episodes)
    assert words in message and "10 episodes, 0 to 9" in message and "data.episodes" in message


def test_U12_a_camera_by_another_name(tmp_path):
    name = "observation.images.rgb.left_wrist"
    write_dataset(tmp_path, [6], cameras=(name,))
    message = refusal(tmp_path, cameras=["wrist"])
    assert "'wrist'" in message and name in message and "data.cameras" in message
    assert list(LeRobotDataset(tmp_path, horizon=H, cameras=[name])[0]["images"]) == [name]
    assert "twice" in refusal(tmp_path, cameras=[name, name])


def test_cameras_come_in_the_order_asked_for(tmp_path):
    write_dataset(tmp_path, [6], cameras=("a", "b"))
    assert LeRobotDataset(tmp_path, horizon=H, cameras=["b", "a"]).cameras == ("b", "a")
    dataset = LeRobotDataset(tmp_path, horizon=H, cameras=())
    assert dataset.cameras == () and dataset[0]["images"] == {}
    with pytest.raises(DataError, match="not among those opened"):
        dataset.frame(0, "a")


def test_a_declared_camera_without_files_is_reported_and_refused_when_asked_for(tmp_path):
    write_dataset(tmp_path, [6, 6], version="v2.1", cameras=("a", "b"))
    shutil.rmtree(tmp_path / "videos/chunk-000/b")
    dataset = LeRobotDataset(tmp_path, horizon=H)
    assert dataset.cameras == ("a",)
    assert any("camera 'b' is left out" in line and "episode_000000.mp4" in line for line in dataset.report())
    assert "none of its files exists" in refusal(tmp_path, cameras=["a", "b"])
    (tmp_path / "videos").rename(tmp_path / "video")
    assert "no declared camera can be used" in refusal(tmp_path) and "videos/chunk-000" in refusal(tmp_path)


def test_a_picture_column_with_paths_only_is_refused(tmp_path):
    write_dataset(tmp_path, [4], stored_as="image")
    path = tmp_path / "data/chunk-000/file-000.parquet"
    edit_column(path, CAMERA, lambda rows: [{"bytes": None, "path": "frame.png"} for _ in rows])
    message = refusal(tmp_path)
    assert "file-000.parquet" in message and CAMERA in message and "only the path 'frame.png'" in message
    edit_column(path, CAMERA, lambda rows: [{"bytes": b"no picture", "path": ""} for _ in rows])
    assert "cannot be decoded as a picture" in refusal(tmp_path)


def test_depth_is_not_read_as_colour(tmp_path):
    write_dataset(tmp_path, [6], cameras=("a", "b"))
    features = {name: {"dtype": "float32", "shape": [6]} for name in ("observation.state", "action")}
    features["a"] = {"dtype": "video", "shape": [64, 64, 3]}
    features["b"] = {"dtype": "video", "shape": [64, 64, 1], "info": {"is_depth_map": True}}
    edit_info(tmp_path, features=features)
    assert LeRobotDataset(tmp_path, horizon=H).cameras == ("a",)
    assert "depth map" in refusal(tmp_path, cameras=["b"])


@pytest.mark.parametrize("tail", ["repeat", "drop"])
def test_U14_episodes_shorter_than_the_chunk(tail, tmp_path):
    lengths = [1, 2, H - 1, H, H + 1]
    write_dataset(tmp_path, lengths, cameras=())
    dataset = LeRobotDataset(tmp_path, horizon=H, tail=tail)
    coverage = dataset.coverage
    assert coverage.frames_on_disk == sum(lengths) == coverage.used + coverage.left_out
    assert len(dataset) == coverage.used == (sum(lengths) if tail == "repeat" else 3)
    assert coverage.empty_episodes == (() if tail == "repeat" else (0, 1, 2))
    assert_exact(dataset, lengths)
    padded = [dataset[i]["action_is_pad"].any() for i in range(len(dataset))]
    assert any(padded) == (tail == "repeat")
    line = dataset.report()[1]
    assert f"frames on disk {sum(lengths)} = used {coverage.used} + left out {coverage.left_out}" in line
    assert ("episodes without a sample: 0, 1, 2" in line) == (tail == "drop")


def test_U14_no_usable_sample_is_a_refusal(tmp_path):
    write_dataset(tmp_path, [1, 2, 3], cameras=())
    message = refusal(tmp_path, tail="drop")
    assert "no sample" in message and "longest of 3 episodes has 3 frames" in message and "data.tail" in message


def test_missing_action_names_what_there_is(tmp_path):
    write_dataset(tmp_path, [5], stored_as="image")
    message = refusal(tmp_path, action_key="actions")
    assert "holds image, not numbers" in refusal(tmp_path, state_key=CAMERA)
    assert "'actions' is not a feature" in message and "observation.state" in message and "data.action_key" in message


def test_an_episode_in_the_next_data_file_is_found_there(tmp_path):
    """LeRobot 0.4.0 wrote the previous file's number for the first episode of each file."""
    write_dataset(tmp_path, LENGTHS, episodes_a_data_file=2)
    edit_column(tmp_path / "meta/episodes/chunk-000/file-000.parquet", "data/file_index", lambda _: [0, 0, 0, 1])
    dataset = LeRobotDataset(tmp_path, horizon=H)
    assert any("does not hold episode 2" in line and "file-001.parquet" in line for line in dataset.report())
    assert_exact(dataset, LENGTHS)


def test_stale_totals_are_noted_and_the_table_is_used(tmp_path):
    write_dataset(tmp_path, [5, 6], cameras=())
    edit_info(tmp_path, total_frames=14983, total_episodes=50, splits={"train": "0:100"})
    dataset = LeRobotDataset(tmp_path, horizon=H)
    assert len(dataset) == 11
    assert sum("says 14983" in line or "says 50" in line for line in dataset.report()) == 2


def test_rows_that_do_not_match_the_table_are_refused(tmp_path):
    write_dataset(tmp_path, [5, 6], cameras=())
    edit_column(tmp_path / "meta/episodes/chunk-000/file-000.parquet", "length", lambda _: [5, 9])
    assert "has 6 rows of episode 1; the table of episodes says 9" in refusal(tmp_path)


def test_a_partial_download_uses_the_episodes_that_are_there(tmp_path):
    write_dataset(tmp_path, [5, 6, 7], version="v2.1")
    (tmp_path / "data/chunk-000/episode_000001.parquet").unlink()
    assert "episode_000001.parquet" in refusal(tmp_path)  # its video is there: something is wrong
    (tmp_path / "videos/chunk-000" / CAMERA / "episode_000001.mp4").unlink()
    dataset = LeRobotDataset(tmp_path, horizon=H)
    assert [episode.index for episode in dataset.episodes] == [0, 2]
    assert any("1 of 3 episodes have no files here" in line for line in dataset.report())
    assert "episode_000001.parquet" in refusal(tmp_path, episodes=[1])


def test_an_unknown_task_number_is_refused_and_a_missing_list_falls_back(tmp_path):
    write_dataset(tmp_path, [5, 6], version="v2.1", cameras=())
    path = tmp_path / "meta/tasks.jsonl"
    write_lines(path, [{"task_index": 0, "task": "episode 0"}])
    assert "task_index holds [1]" in refusal(tmp_path)
    path.unlink()
    assert_exact(LeRobotDataset(tmp_path, horizon=H), [5, 6])
    write_lines(tmp_path / "meta/episodes.jsonl", [{"episode_index": e, "tasks": [0], "length": 5 + e} for e in (0, 1)])
    assert "data.default_task" in refusal(tmp_path)
    assert LeRobotDataset(tmp_path, horizon=H, default_task="wave")[7]["task"] == "wave"


@pytest.mark.parametrize("stored_as", ["video", "image"])
def test_a_subset_is_what_opening_those_episodes_gives(stored_as, tmp_path):
    write_dataset(tmp_path, LENGTHS, stored_as=stored_as, episodes_a_data_file=3)
    whole = LeRobotDataset(tmp_path, horizon=H, tail="drop")
    fingerprint, records = whole.fingerprint, len(whole)
    part, opened = whole.subset([3, 1]), LeRobotDataset(tmp_path, horizon=H, tail="drop", episodes=[1, 3])
    assert len(part) == len(opened) and part.coverage == opened.coverage and part.tasks == opened.tasks
    assert part.task_episodes == opened.task_episodes == {"episode 1": 1, "episode 3": 3}
    assert part.episodes == opened.episodes and part.fingerprint == opened.fingerprint != fingerprint
    for key in ("observation.state", "action", "timestamp"):
        np.testing.assert_array_equal(part.numeric(key), opened.numeric(key))
    for index in range(len(opened)):
        np.testing.assert_equal(part[index], opened[index])
    assert (whole.fingerprint, len(whole)) == (fingerprint, records)
    with pytest.raises(DataError, match=r"asked for episodes \[0, 1\] of those opened, \[1, 3\]"):
        part.subset([0, 1])


@pytest.mark.parametrize("holdout", [0.1, 0.34, 0.9])
def test_U10_a_split_is_disjoint_complete_and_stable(holdout):
    train, held_out = split_episodes(17, holdout, seed=3)
    assert sorted(train + held_out) == list(range(17)) and held_out and train
    assert (train, held_out) == split_episodes(range(16, -1, -1), holdout, seed=3)
    assert held_out != split_episodes(17, holdout, seed=4)[1]
    assert split_episodes([4, 2], 0.0) == ([2, 4], [])


@pytest.mark.parametrize(("episodes", "holdout"), [([1, 2, 1], 0.5), (5, 1.0), (5, -0.1), (1, 0.5)])
def test_a_split_that_makes_no_sense_is_refused(episodes, holdout):
    with pytest.raises(ValueError, match=r"holdout|repeated"):
        split_episodes(episodes, holdout)
