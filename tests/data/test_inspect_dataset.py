"""The inspection works on healthy datasets and on those that training refuses, and names what is wrong."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from data_paths import shared_data
from PIL import Image
from recordings import CAMERA, edit_column, edit_info, write_dataset

from somaspeed_jax.data.inspection import inspect_dataset

TOOL = Path(__file__).parents[2] / "tools" / "inspect_dataset.py"
DATA = shared_data()


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("inspect_dataset_tool", TOOL)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_healthy_dataset(tmp_path):
    found = inspect_dataset(write_dataset(tmp_path, [5, 9]))
    assert found.refusal is None and found.problems == ()
    assert (found.episodes_on_disk, found.rows_on_disk, found.lengths, found.recorded_fps) == (2, 14, (5, 9), 10)
    assert found.tasks == ("episode 0", "episode 1")
    (camera,) = found.cameras
    assert camera.header is not None and (camera.name, camera.files, camera.header.codec) == (CAMERA, 1, "h264")
    state = next(vector for vector in found.vectors if vector.name == "observation.state")
    np.testing.assert_array_equal(state.high[:2], [1, 8])
    np.testing.assert_array_equal(state.low[:2], [0, 0])
    assert state.labels[5] == "joint_5.pos"


def test_every_problem_is_named_not_just_the_first(tmp_path):
    write_dataset(tmp_path, [5, 6, 7], version="v2.1")
    edit_info(tmp_path, fps=20)
    edit_column(tmp_path / "data/chunk-000/episode_000001.parquet", "action", lambda rows: [[np.nan] * 6, *rows[1:]])
    (tmp_path / "videos/chunk-000" / CAMERA / "episode_000002.mp4").write_bytes(b"version https://git-lfs.github.com")
    found = inspect_dataset(tmp_path)
    assert found.recorded_fps == 10 and found.layout.fps == 20
    assert found.refusal is not None
    text = "\n".join((*found.problems, found.refusal))
    for words in ("episode 1, frame 0: action[0]", "episode_000002.mp4: this is a Git LFS pointer"):
        assert words in text
    assert np.isnan(next(vector for vector in found.vectors if vector.name == "action").high).all()


def test_the_command_draws_frames_over_plots(tool, tmp_path, capsys):
    write_dataset(tmp_path / "d", [5, 9], cameras=("a", "b"))
    sheet = tmp_path / "sheet.png"
    assert tool.main([str(tmp_path / "d"), "--output", str(sheet), "--episode", "1"]) == 0
    printed = capsys.readouterr().out
    for words in ("v3.0", "14 rows", "10 declared, 10 by timestamps", "joint_5.pos", "episode 1", "it trains as it is"):
        assert words in printed
    with Image.open(sheet) as image:
        assert image.width > 1000 and len(np.unique(np.asarray(image))) > 50
    assert tool.main([str(tmp_path / "d"), "--output", str(sheet), "--episode", "7"]) == 1
    assert "the dataset has episodes [0, 1]" in capsys.readouterr().out


def test_the_command_on_a_dataset_without_actions_and_with_a_broken_camera(tool, tmp_path, capsys):
    write_dataset(tmp_path / "d", [5], version="v2.1", cameras=("a", "b"))
    edit_info(tmp_path / "d", fps=30)
    (tmp_path / "d/videos/chunk-000/a/episode_000000.mp4").write_bytes(b"")
    sheet = tmp_path / "sheet.png"
    assert tool.main([str(tmp_path / "d"), "--output", str(sheet)]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert (
        "training refuses it" in printed and "30 declared, 10 by timestamps" in printed and "file is empty" in printed
    )
    assert sheet.exists()
    assert tool.main([str(tmp_path / "absent")]) == 1
    assert "no such folder" in " ".join(capsys.readouterr().out.split())


@pytest.mark.skipif(DATA is None, reason="the sample recordings are not here")
@pytest.mark.parametrize(
    ("name", "refusal", "rows"),
    [
        ("franka-usb-v21-raw", "declares fps = 10", 2966),
        ("tiny-synth-v20", "'action' is not a feature", 14),
        ("tiny-synth-v21", "'action' is not a feature", 9),
        ("tiny-synth-v30", "'action' is not a feature", 14),
        ("gr00t-gr1-pick-v20", None, 2096),
    ],
)
def test_sample_recordings(name, refusal, rows):
    assert DATA is not None
    found = inspect_dataset(DATA / name)
    assert found.rows_on_disk == rows
    assert (refusal is None and found.refusal is None) or refusal in (found.refusal or "")
