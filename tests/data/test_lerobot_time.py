"""When rows and pictures were taken: rates, timestamps, and an episode's place in a video file."""

import pytest
from dataset_checks import H, assert_exact, refusal
from recordings import CAMERA, code, edit_column, edit_info, number_in, write_dataset, write_video

from somaspeed_jax.data.errors import DataError
from somaspeed_jax.data.lerobot import LeRobotDataset


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
