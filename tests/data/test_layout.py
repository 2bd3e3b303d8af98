"""Metadata that is incomplete, of another version, or not what its name says."""

import json

import av
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataset_checks import refusal
from recordings import CAMERA, edit_column, edit_info, write_dataset, write_lines

from somaspeed_jax.data.layout import read_layout
from somaspeed_jax.data.lerobot import LeRobotDataset

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"
VIDEO = {"v2.1": f"videos/chunk-000/{CAMERA}/episode_000001.mp4", "v3.0": f"videos/{CAMERA}/chunk-000/file-000.mp4"}
DATA = {"v2.1": "data/chunk-000/episode_000001.parquet", "v3.0": "data/chunk-000/file-000.parquet"}


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
@pytest.mark.parametrize(
    ("what", "kind"),
    [(what, kind) for what in ("video", "data", "table") for kind in ("pointer", "empty", "missing")]
    + [("video", "half"), ("data", "half"), ("stats", "pointer"), ("stats", "empty")],
)
def test_U03_a_file_that_is_not_what_its_name_says(what, kind, version, tmp_path):
    """Opening refuses, and names the file, though no sample has been drawn yet."""
    write_dataset(tmp_path, [8, 9], version=version)
    table = "meta/episodes.jsonl" if version == "v2.1" else "meta/episodes/chunk-000/file-000.parquet"
    path = tmp_path / {"video": VIDEO[version], "data": DATA[version], "stats": "meta/stats.json", "table": table}[what]
    content = path.read_bytes()
    if kind == "missing":
        path.unlink()
    else:
        path.write_bytes({"pointer": POINTER, "half": content[: len(content) // 2], "empty": b""}[kind])
    message = refusal(tmp_path)
    assert (path.parent.parent.name if (what, kind) == ("table", "missing") else path.name) in message
    words = {"pointer": "never fetched", "empty": "empty", "half": "Fetch it again", "missing": "not"}[kind]
    assert words in message


def test_U03_a_video_cut_in_half_whose_header_comes_first(tmp_path):
    """Such a file opens, and says that it has all its frames."""
    write_dataset(tmp_path, [40], version="v3.0")
    path = tmp_path / VIDEO["v3.0"]
    front = tmp_path / "front.mp4"
    with av.open(str(path)) as source, av.open(str(front), "w", options={"movflags": "faststart"}) as target:
        copy = target.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.size:
                packet.stream = copy
                target.mux(packet)
    whole = front.read_bytes()
    assert whole.index(b"moov") < whole.index(b"mdat")
    path.write_bytes(whole)
    assert len(LeRobotDataset(tmp_path, horizon=4)) == 40
    path.write_bytes(whole[: (whole.index(b"mdat") + len(whole)) // 2])
    with av.open(str(path)) as container:
        assert container.streams.video[0].frames == 40
    message = refusal(tmp_path)
    assert path.name in message and "cut short" in message


def test_a_broken_link_is_named_as_such(tmp_path):
    write_dataset(tmp_path, [8, 9], version="v2.1")
    path = tmp_path / VIDEO["v2.1"]
    path.unlink()
    path.symlink_to("/nowhere/blob")
    assert "episode_000001.mp4" in refusal(tmp_path) and "symbolic link" in refusal(tmp_path)


@pytest.mark.parametrize(("declared", "other"), [("v2.1", "v3.0"), ("v2.0", "v3.0"), ("v3.0", "v2.1")])
def test_U04a_metadata_of_one_version_and_files_of_another(declared, other, tmp_path):
    write_dataset(tmp_path, [5, 6], version=other, cameras=())
    edit_info(tmp_path, codebase_version=declared)
    message = refusal(tmp_path)
    wanted = "episodes.jsonl" if declared.startswith("v2") else "meta/episodes"
    assert f"declares {declared}" in message and wanted in message


@pytest.mark.parametrize(("declared", "wanted", "other"), [("v2.1", "jsonl", "parquet"), ("v3.0", "parquet", "jsonl")])
def test_U04a_only_the_list_of_tasks_is_of_another_version(declared, wanted, other, tmp_path):
    write_dataset(tmp_path, [5, 6], version=declared, cameras=())
    (tmp_path / f"meta/tasks.{wanted}").unlink()
    if other == "jsonl":
        write_lines(tmp_path / "meta/tasks.jsonl", [{"task_index": 0, "task": "t"}])
    else:
        pq.write_table(pa.table({"task_index": [0], "task": ["t"]}), tmp_path / "meta/tasks.parquet")
    message = refusal(tmp_path)
    assert f"tasks.{wanted}: not found" in message and f"declares {declared}" in message and f"tasks.{other}" in message


def test_path_templates_of_another_version_are_refused(tmp_path):
    write_dataset(tmp_path, [5, 6], version="v3.0", cameras=())
    edit_info(tmp_path, data_path="data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet")
    message = refusal(tmp_path)
    assert "declares v3.0" in message and "data_path" in message and "{file_index" in message


@pytest.mark.parametrize("column", ["task", "__index_level_0__", "instruction"])
def test_U04b_task_texts_as_a_column_or_as_the_index(column, tmp_path):
    write_dataset(tmp_path, [5, 6], version="v3.0", cameras=())
    texts = pa.table({"task_index": [0, 1], column: ["episode 0", "episode 1"]})
    pq.write_table(texts, tmp_path / "meta/tasks.parquet")
    dataset = LeRobotDataset(tmp_path, horizon=4)
    assert [dataset.record(i, images=False)["task"] for i in (0, 10)] == ["episode 0", "episode 1"]


def test_tasks_are_matched_by_number_not_by_position(tmp_path):
    write_dataset(tmp_path, [5, 6], version="v3.0", cameras=())
    shuffled = pa.table({"task_index": [1, 0], "task": ["episode 1", "episode 0"]})
    pq.write_table(shuffled, tmp_path / "meta/tasks.parquet")
    dataset = LeRobotDataset(tmp_path, horizon=4)
    assert dataset.record(0, images=False)["task"] == "episode 0"
    assert any("not in the order of task_index" in line for line in dataset.report())


def test_one_number_for_two_tasks_is_refused(tmp_path):
    write_dataset(tmp_path, [5], version="v2.1", cameras=())
    write_lines(tmp_path / "meta/tasks.jsonl", [{"task_index": 0, "task": "a"}, {"task_index": 0, "task": "b"}])
    assert "task_index 0 stands for two texts, 'a' and 'b'" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"codebase_version": "v1.6"}, "codebase_version is 'v1.6'"),
        ({"fps": 0}, "fps is 0"),
        ({"fps": "30"}, "fps is '30'"),
        ({"data_path": "data/{nonsense}/{file_index}"}, "cannot be filled in"),
        ({"chunks_size": 0}, "chunks_size is 0"),
        ({"features": []}, "features is []"),
        ({"features": {"action": {"shape": [2]}}}, "feature 'action' needs a dtype"),
    ],
)
def test_info_that_cannot_be_used(changes, words, tmp_path):
    write_dataset(tmp_path, [5], cameras=())
    edit_info(tmp_path, **changes)
    message = refusal(tmp_path)
    assert words in message and "info.json" in message


def test_info_that_is_not_there_or_not_json(tmp_path):
    assert "no such folder" in refusal(tmp_path / "absent")
    assert "info.json: the file does not exist" in refusal(tmp_path)
    write_dataset(tmp_path, [5], cameras=())
    (tmp_path / "meta/info.json").write_text("{")
    assert "info.json: is not JSON" in refusal(tmp_path)
    (tmp_path / "meta/info.json").write_text('{"fps": 10}')
    assert "has no field 'codebase_version'" in refusal(tmp_path)


def test_an_episode_listed_twice_is_refused(tmp_path):
    write_dataset(tmp_path, [5, 6], cameras=())
    edit_column(tmp_path / "meta/episodes/chunk-000/file-000.parquet", "episode_index", lambda _: [0, 0])
    assert "episode 0 is listed twice" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (["x", "y"], ("x", "y")),
        ([["x", "y"]], ("x", "y")),
        ({"motors": ["x", "y"]}, ("x", "y")),
        (None, ()),
        (["x", "y", "z"], ()),
    ],
)
def test_dimension_names_in_every_form(names, labels, tmp_path):
    write_dataset(tmp_path, [5], cameras=())
    edit_info(tmp_path, features={"action": {"dtype": "float32", "shape": [2], "names": names}})
    assert read_layout(tmp_path).features["action"].names == labels


def modality(**groups):
    parts = {"state": {"arm": {"start": 0, "end": 5}}, "action": {"arm": {"start": 0, "end": 6, "absolute": False}}}
    return json.dumps(parts | {"video": {}, "annotation": {}} | groups)


def test_modality_names_parts_cameras_and_prompts(tmp_path):
    write_dataset(tmp_path, [5, 6], version="v2.1", cameras=())
    path = tmp_path / "data/chunk-000/episode_000001.parquet"
    for path in sorted((tmp_path / "data/chunk-000").iterdir()):
        table = pq.read_table(path)
        flipped = pa.array([1 - n for n in table["task_index"].to_pylist()])
        pq.write_table(table.append_column("annotation.human.task", flipped), path)
    groups = {
        "video": {"front": {"original_key": "observation.images.front"}},
        "annotation": {"human.task": {}, "other": {"original_key": "task_index"}},
        "state": {"arm": {"original_key": "action", "start": 0, "end": 5}},
    }
    (tmp_path / "meta/modality.json").write_text(modality(**groups))
    dataset = LeRobotDataset(tmp_path, horizon=4)
    assert dataset.modality is not None
    assert dataset.modality.state["arm"].key == "action" and dataset.modality.state["arm"].dims == 5
    assert not dataset.modality.action["arm"].absolute
    assert dataset.modality.video == {"front": "observation.images.front"}
    assert any("state.arm is cut from 'action'" in line for line in dataset.report())
    assert dataset.record(0, images=False)["task"] == "episode 0"
    for key in ("human.task", "annotation.human.task"):
        flipped = LeRobotDataset(tmp_path, horizon=4, task_key=key)
        assert flipped.record(0, images=False)["task"] == "episode 1"
    message = refusal(tmp_path, task_key="human.validity")
    assert "data.task_key is 'human.validity'" in message and "annotation.human.task" in message


def test_a_modality_slice_outside_its_feature_is_refused(tmp_path):
    write_dataset(tmp_path, [5], cameras=())
    (tmp_path / "meta/modality.json").write_text(modality(action={"hand": {"start": 4, "end": 7}}))
    message = refusal(tmp_path)
    assert "modality.json: action.hand is the slice 4:7 of 'action', which has 6 dimensions" in message
    (tmp_path / "meta/modality.json").write_text(modality(action={"hand": {"start": 4}}))
    assert "action.hand needs start and end" in refusal(tmp_path)
