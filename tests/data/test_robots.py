"""The example robots of configs/ over small recordings with those robots' names."""

from pathlib import Path

import numpy as np
import pytest
from recordings import edit_info, write_dataset

from somaspeed_jax import recipes
from somaspeed_jax.assemble import open_data
from somaspeed_jax.command_line import parse
from somaspeed_jax.data.errors import DataError

ROOT = Path(__file__).resolve().parents[2]
JOINTS = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")
ALOHA = ("waist", "shoulder", "elbow", "forearm_roll", "wrist_angle", "wrist_rotate", "gripper")
ROBOTS = {
    "so101": ([f"{joint}.pos" for joint in JOINTS], ("front", "wrist")),
    "bimanual": ([f"{side}_{joint}" for side in ("left", "right") for joint in ALOHA],
                 ("cam_high", "cam_left_wrist", "cam_right_wrist")),
}  # fmt: skip


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))


def recording(root: Path, names: list[str], cameras: list[str]) -> Path:
    """Three short episodes. The pictures are in the files in another order than the model's."""
    write_dataset(root, [9, 8, 7], cameras=cameras[::-1], stored_as="image", state_dims=len(names))
    vector = {"dtype": "float32", "shape": [len(names)], "names": names}
    pictures = {camera: {"dtype": "image", "shape": [64, 64, 3]} for camera in cameras[::-1]}
    edit_info(root, features={"observation.state": vector, "action": vector, **pictures})
    return root


def config_of(robot: str, path: Path):
    """The robot's file on a small model with the demo's tokenizer."""
    return parse(["--config", f"configs/{robot}.py:small", f"--config.data.path={path}"]).config


@pytest.mark.parametrize("robot", ROBOTS)
def test_cameras_in_the_models_order_joints_relative_grippers_absolute(robot, tmp_path):
    names, short = ROBOTS[robot]
    cameras = [f"observation.images.{camera}" for camera in short]
    config = config_of(robot, recording(tmp_path, names, cameras))
    data = open_data(config)
    (part,) = data.parts
    transform = recipes.get("pi05").transform(config, part.facts, part.statistics, data.tokenizer)
    assert list(data.facts.cameras) == cameras
    assert data.facts.action_names == tuple(names)
    assert part.statistics["action"].space == "relative"
    assert part.validation is not None and len(part.validation.episodes) == 1

    rows = part.train.record(3, images=False)
    record = {**rows, "images": {camera: transform.prepare_image(part.train.frame(3, camera)) for camera in cameras}}
    sample = transform(record)
    assert len(sample["images"]) == len(cameras)
    back = transform.actions(sample["actions"], record["state"])
    moved = transform.actions(sample["actions"], record["state"] + 10) - back
    gripper = ["gripper" in name for name in names]
    assert sum(gripper) == (1 if robot == "so101" else 2)
    moving = [i for i in range(len(names)) if np.ptp(record["actions"][:, i]) > 0]
    np.testing.assert_allclose(back[:, moving], record["actions"][:, moving], atol=1e-4)
    np.testing.assert_allclose(moved, np.broadcast_to(np.where(gripper, 0, 10), moved.shape), atol=1e-4)


def test_a_recording_with_other_names_is_refused_with_the_field_to_set(tmp_path):
    names, short = ROBOTS["so101"]
    path = recording(tmp_path / "cameras", names, ["observation.images.top", "observation.images.wrist"])
    with pytest.raises(DataError, match=r"observation\.images\.front.*observation\.images\.top.*data\.cameras"):
        open_data(config_of("so101", path))
    cameras = [f"observation.images.{camera}" for camera in short]
    path = recording(tmp_path / "names", [f"motor_{i}" for i in range(6)], cameras)
    with pytest.raises(DataError, match=r"relative_exclude names \['gripper'\].*motor_5.*relative_exclude=\(\)"):
        open_data(config_of("so101", path))
