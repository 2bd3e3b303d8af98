"""The reader on small datasets whose numbers and pictures say which episode and frame they are."""

import pickle
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from recordings import CAMERA, code, edit_column, edit_info, number_in, values, write_dataset, write_lines, write_video

from somaspeed_jax.data.errors import DataError
from somaspeed_jax.data.lerobot import LeRobotDataset, split_episodes

LENGTHS = [12, 7, 15, 20]
H = 4


def refusal(root, **options) -> str:
    with pytest.raises(DataError) as error:
        LeRobotDataset(root, horizon=H, **options)
    return str(error.value)


def assert_exact(dataset, lengths, pictures=True):
    """Every record's numbers, prompt, padding and picture are those of its own episode and frame."""
    i = 0
    for episode in dataset.episodes:
        for frame in range(episode.usable):
            record = dataset[i] if pictures else dataset.record(i, images=False)
            place = (record["index"], record["episode_index"], record["frame_index"])
            assert place == (i, episode.index, frame)
            dims = dataset.state_dim
            np.testing.assert_array_equal(record["state"], values(episode.index, np.array([frame]), dims)[0])
            steps = np.minimum(frame + np.arange(dataset.horizon), lengths[episode.index] - 1)
            np.testing.assert_array_equal(record["actions"], values(episode.index, steps, dims) + np.float32(0.5))
            np.testing.assert_array_equal(
                record["action_is_pad"], frame + np.arange(dataset.horizon) >= lengths[episode.index]
            )
            assert record["task"] == f"episode {episode.index}"
            for image in record["images"].values():
                assert number_in(image) == code(episode.index, frame)
            i += 1
    assert i == len(dataset)


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


def test_U01_a_start_time_past_the_end_of_a_shared_video(tmp_path):
    write_dataset(tmp_path, [12, 7, 15])
    assert_exact(LeRobotDataset(tmp_path, horizon=H), [12, 7, 15])  # first and last rows included
    table = tmp_path / "meta/episodes/chunk-000/file-000.parquet"
    edit_column(table, f"videos/{CAMERA}/from_timestamp", lambda times: [times[0], times[1] + 10, times[2]])
    message = refusal(tmp_path)
    for part in ("file-000.mp4", "episode 1", CAMERA, "11.200 s to 11.900 s", "0 s to 3.400 s"):
        assert part in message
    assert len(LeRobotDataset(tmp_path, horizon=H, episodes=[0, 2])) == 27


def test_U01_a_start_time_inside_another_episode(tmp_path):
    """Within the file, but the pictures would be a neighbour's."""
    write_dataset(tmp_path, [12, 7, 15])
    table = tmp_path / "meta/episodes/chunk-000/file-000.parquet"
    edit_column(table, f"videos/{CAMERA}/from_timestamp", lambda times: [times[0], times[1] + 0.2, times[2]])
    message = refusal(tmp_path)
    assert "file-000.mp4: episode 1 has 1.400 s to 2.100 s, and episode 2 starts within it at 1.900 s" in message


def test_a_start_time_between_two_frames_is_found_before_a_picture_is_used(tmp_path):
    """The rate of a file that runs unevenly cannot give the frame's number."""
    write_dataset(tmp_path, [10, 10], fps=10)
    path = tmp_path / "videos" / CAMERA / "chunk-000/file-000.mp4"
    path.unlink()
    write_video(path, [code(n // 10, n % 10) for n in range(20)], 10.19)  # within the tolerance of a header's rate
    table = tmp_path / "meta/episodes/chunk-000/file-000.parquet"
    edit_column(table, f"videos/{CAMERA}/from_timestamp", lambda times: [0.0, 1.04])
    dataset = LeRobotDataset(tmp_path, horizon=H)
    with pytest.raises(DataError, match=r"file-000\.mp4: episode 1, camera .* frame 10 is at 0\.98.* 1\.0400"):
        dataset[10]


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


def test_U08_the_declared_rate_is_not_the_recorded_one(tmp_path):
    write_dataset(tmp_path, [10, 10], fps=10)
    edit_info(tmp_path, fps=20)
    message = refusal(tmp_path, cameras=())
    assert "recorded at 10 frames a second" in message and "fps = 20" in message and "0.1 s apart" in message
    assert "trust_timestamps" in message
    dataset = LeRobotDataset(tmp_path, horizon=H, trust_timestamps=True)
    assert dataset.fps == 10
    assert_exact(dataset, [10, 10])


def test_U08_a_video_at_another_rate(tmp_path):
    write_dataset(tmp_path, [10, 10], fps=10)
    path = tmp_path / "videos" / CAMERA / "chunk-000/file-000.mp4"
    path.unlink()
    write_video(path, range(40), 20)
    message = refusal(tmp_path)
    assert "file-000.mp4" in message and "20 frames a second" in message and "rows are at 10" in message
    assert "file-000.mp4" in refusal(tmp_path, trust_timestamps=True)  # the rows do not say where the pictures are


def test_U08_an_hour_of_float32_timestamps(tmp_path):
    """Neighbouring float32 values are 0.24 ms apart after an hour: no complaint may come of it."""
    write_dataset(tmp_path, [30 * 3600], fps=30, cameras=(), state_dims=2)
    dataset = LeRobotDataset(tmp_path, horizon=H)
    assert len(dataset) == 108_000 and dataset.fps == 30
    assert len(dataset.report()) == 2  # the summary and the coverage, nothing odd


def test_U08_episodes_of_different_rates(tmp_path):
    write_dataset(tmp_path, [10, 10], fps=10, cameras=(), episodes_a_data_file=1)
    path = tmp_path / "data/chunk-000/file-001.parquet"
    edit_column(path, "timestamp", lambda times: [t / 3 for t in times])
    assert "episode 1 is recorded at 30" in refusal(tmp_path)
    message = refusal(tmp_path, trust_timestamps=True)
    assert "episode 0 is recorded at 10" in message and "episode 1 at 30" in message


def test_timestamps_that_start_late_follow_the_video_where_it_has_the_pictures(tmp_path):
    """By time if the video has a picture for each time asked for, by number if not, and said in both cases."""
    for shift, extra in ((1, 1), (3, 5), (1, 0)):
        root = write_dataset(tmp_path / f"{shift}-{extra}", [10], version="v2.1")
        edit_column(
            root / "data/chunk-000/episode_000000.parquet", "timestamp", lambda t, k=shift: [x + k / 10 for x in t]
        )
        path = root / f"videos/chunk-000/{CAMERA}/episode_000000.mp4"
        path.unlink()
        write_video(path, range(10 + extra), 10)
        dataset = LeRobotDataset(root, horizon=H)
        expected = shift if extra else 0
        assert [number_in(dataset.frame(i, CAMERA)) for i in range(10)] == [i + expected for i in range(10)]
        how = f"row t is picture t + {shift} " if extra else "row t is picture t "
        assert any(f"timestamps start at {shift}/fps, {how}" in line for line in dataset.report())


def test_a_video_shorter_or_longer_than_its_rows(tmp_path):
    write_dataset(tmp_path, [10], version="v2.1")
    path = tmp_path / f"videos/chunk-000/{CAMERA}/episode_000000.mp4"
    for frames in (14, 9):
        path.unlink()
        write_video(path, range(frames), 10)
        if frames == 14:
            assert any("goes on after the last row" in line for line in LeRobotDataset(tmp_path, horizon=H).report())
    assert (
        "episode 0" in refusal(tmp_path) and "frames 0 to 9" in refusal(tmp_path) and "(9 frames)" in refusal(tmp_path)
    )


def test_one_pause_is_noted_and_time_running_backwards_is_refused(tmp_path):
    write_dataset(tmp_path, [10], fps=10, cameras=())
    path = tmp_path / "data/chunk-000/file-000.parquet"
    edit_column(path, "timestamp", lambda times: [*times[:5], *(t + 0.7 for t in times[5:])])
    assert any("1 steps are not 1/fps" in line for line in LeRobotDataset(tmp_path, horizon=H).report())
    edit_column(path, "timestamp", lambda times: times[::-1])
    assert "episode 0: timestamp does not increase" in refusal(tmp_path)


def test_frame_numbers_with_a_gap_are_refused(tmp_path):
    write_dataset(tmp_path, [10], cameras=())
    edit_column(
        tmp_path / "data/chunk-000/file-000.parquet", "frame_index", lambda f: [*f[:5], *(n + 1 for n in f[5:])]
    )
    assert "episode 0: frame_index is 6 in row 5 of the episode; expected 5" in refusal(tmp_path)


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
