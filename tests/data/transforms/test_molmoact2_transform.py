"""MolmoAct2's transform against what LeRobot 0.6.1's processors return on the same inputs."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from somaspeed_jax.data.errors import DataError
from somaspeed_jax.data.normalize import NormalizationError
from somaspeed_jax.data.stats import FeatureStatistics, StatisticsError
from somaspeed_jax.data.tokenizers import load_tokenizer
from somaspeed_jax.data.transforms.molmoact2 import JointFrame, MolmoAct2Transform, normalizer, read_norm_tag
from somaspeed_jax.data.transforms.molmoact2_prompt import (
    ImageLayout,
    PromptFormat,
    clean_task,
    image_layout,
    state_bins,
    state_text,
    token_budget,
)

FIXTURES = Path(__file__).parents[2] / "fixtures"
HORIZON, ACTION = 6, 7
SMALL = ImageLayout(size=(84, 84))
PROMPT = PromptFormat(setup="tabletop arm", control="joint position")


@pytest.fixture(scope="module")
def upstream():
    with safe_open(FIXTURES / "molmoact2_processor.safetensors", "np") as f:
        tensors = {key: f.get_tensor(key) for key in f.keys()}  # noqa: SIM118 (not a dict)
        return tensors | {"meta": json.loads(f.metadata()["json"])}


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(FIXTURES / "molmoact2_tokenizer.json", "molmoact2")


def statistics(upstream, feature):
    names = tuple(upstream["meta"]["names"][: ACTION if feature == "action" else None])
    fields = {field: upstream[f"stats/{feature}/{field}"] for field in ("min", "max", "q01", "q99")}
    return FeatureStatistics(feature, names, None, **fields)


def make(upstream, tokenizer, *, named=True, normalize_gripper=False, cameras=("front", "wrist"), **options):
    state, action = statistics(upstream, "observation.state"), statistics(upstream, "action")
    return MolmoAct2Transform(
        tokenizer,
        normalizer(state, names=state.names if named else None, normalize_gripper=normalize_gripper),
        normalizer(action, names=action.names if named else None, normalize_gripper=normalize_gripper),
        cameras=cameras,
        horizon=HORIZON,
        **{"prompt": PROMPT, "layout": SMALL, "prompt_length": 240, **options},
    )


def record(upstream, row, transform, cameras=("front", "wrist")):
    return {
        "index": row,
        "episode_index": 0,
        "frame_index": row,
        "task": upstream["meta"]["tasks"][row],
        "images": {c: transform.prepare_image(upstream[f"raw/image_{c}"][row]) for c in cameras},
        "state": upstream["raw/state"][row],
        "actions": upstream["raw/action"][row],
        "action_is_pad": upstream["raw/action_is_pad"][row],
    }


def check_prompt(upstream, case, row, sample):
    """Ours is upstream's row, padded on the left to another length."""
    keep = upstream[f"case/{case}/out/attention_mask"][row].astype(bool)
    np.testing.assert_array_equal(
        sample["tokens"][sample["token_mask"]], upstream[f"case/{case}/out/input_ids"][row][keep]
    )
    assert sample["token_mask"][-1] and not np.any(np.diff(sample["token_mask"].astype(int)) < 0)
    assert sample["tokens"].dtype == np.int32 and sample["token_mask"].dtype == bool


CASES = {
    "continuous": {},
    "normalize_gripper": {"normalize_gripper": True},
    "no_names": {"named": False},
    "language_untouched": {
        "prompt": PromptFormat("tabletop arm", "joint position", False, False, clean_language=False)
    },
    "joint_frame": {"frame": JointFrame((1.0, -1.0), (0.5, 0.25))},
    "camera_order": {"cameras": ("wrist", "front")},
    "one_camera": {"cameras": ("wrist",)},
    "odd_grid": {"layout": ImageLayout(size=(70, 70))},
    "full_378": {"layout": ImageLayout(), "prompt_length": 576},
    "col_tokens": {"layout": ImageLayout(size=(84, 84), column_token=True)},
}


@pytest.mark.parametrize("case", CASES)
def test_training_sample(upstream, tokenizer, case):
    transform = make(upstream, tokenizer, **CASES[case])
    for row in range(upstream[f"case/{case}/out/input_ids"].shape[0]):
        sample = transform(record(upstream, row, transform, transform.cameras))
        check_prompt(upstream, case, row, sample)
        np.testing.assert_allclose(sample["actions"], upstream[f"case/{case}/out/action"][row], rtol=0, atol=1e-6)
        expected = np.zeros((HORIZON, 32), bool)
        expected[:, :ACTION] = ~upstream[f"case/{case}/out/action_horizon_is_pad"][row][:, None]
        np.testing.assert_array_equal(sample["action_mask"], expected)
        assert sample["actions"].dtype == np.float32
        assert sample["image_mask"].all() and len(sample["images"]) == len(transform.cameras)
        assert not sample["state"].any()


@pytest.mark.parametrize("case", ["continuous", "normalize_gripper", "no_names", "joint_frame"])
def test_back_to_robot_units(upstream, tokenizer, case):
    transform = make(upstream, tokenizer, **CASES[case])
    robot = transform.actions(upstream["raw/model_output"], upstream["raw/state"])
    np.testing.assert_allclose(robot, upstream[f"case/{case}/out/post_chunk"], rtol=0, atol=1e-6)


def test_actions_come_back_as_recorded(upstream, tokenizer):
    """Within the trained range, and the constant dimension as itself."""
    transform = make(upstream, tokenizer)
    low, high = (upstream[f"stats/action/{q}"] for q in ("q01", "q99"))
    recorded = np.clip(upstream["raw/action"], low, high)
    sample = transform(record(upstream, 0, transform) | {"actions": recorded[0]})
    robot = transform.actions(sample["actions"], upstream["raw/state"][0])
    inside = np.arange(ACTION) != 6  # the gripper is clipped by the test itself, to quantiles it does not use
    np.testing.assert_allclose(robot[:, inside], recorded[0][:, inside], rtol=0, atol=1e-5)
    np.testing.assert_allclose(robot[:, 6], recorded[0][:, 6], rtol=0, atol=0)


@pytest.mark.parametrize(("case", "size", "every"), [("continuous", 84, 1), ("odd_grid", 70, 1), ("full_378", 378, 9)])
def test_pictures_within_one_grey_level(upstream, tokenizer, case, size, every):
    transform = make(upstream, tokenizer, layout=ImageLayout(size=(size, size)))
    name = "pixel_values__u8" if every == 1 else f"pixel_values_every_{every}th__u8"
    expected = upstream[f"case/{case}/out/{name}"].astype(int)
    grid = size // 14
    for row in range(expected.shape[0] // 2):
        for i, camera in enumerate(("front", "wrist")):
            picture = transform.prepare_image(upstream[f"raw/image_{camera}"][row])
            patches = picture.reshape(grid, 14, grid, 14, 3).transpose(0, 2, 1, 3, 4).reshape(grid * grid, -1)[::every]
            error = np.abs(patches.astype(int) - expected[2 * row + i])
            assert error.max() <= 1
            assert np.mean(error > 0) < 0.02  # ties only
    np.testing.assert_array_equal(transform.prepare_image(picture), picture)


def test_task_clean_up(upstream):
    for text, expected in upstream["meta"]["language_cases"]:
        assert clean_task(text or "") == expected


def test_state_tokens(upstream):
    state, index = upstream["case/state_tokens/in/state"], upstream["case/state_tokens/out/index"]
    np.testing.assert_array_equal(state_bins(state, 256), index)
    assert state_text(state, 256) == upstream["meta"]["text"]["state_tokens"]


def test_prompt_text(upstream, tokenizer):
    transform = make(upstream, tokenizer)
    for row, expected in enumerate(upstream["meta"]["text"]["continuous"]):
        state = transform.state.normalise(upstream["raw/state"][row])
        assert PROMPT.text(upstream["meta"]["tasks"][row], state, 2) == expected


def test_prompt_text_without_setup():
    assert "The setup is . The" in PromptFormat().text("go", np.zeros(1, np.float32), 1)
    wrapped = PromptFormat(setup="<setup_start>arm<setup_end>").text("go", np.zeros(1, np.float32), 1)
    assert "The setup is <setup_start>arm<setup_end>." in wrapped


def test_checkpoint_statistics_and_tag(upstream, tokenizer, tmp_path):
    features = {"state_stats": "observation.state", "action_stats": "action"}
    entry = {
        field: {k: upstream[f"stats/{feature}/{k}"].tolist() for k in ("min", "max", "q01", "q99")}
        for field, feature in features.items()
    }
    entry |= {"camera_keys": ["wrist", "front"], "setup_type": "from the checkpoint", "control_mode": "ee delta"}
    path = tmp_path / "norm_stats.json"
    path.write_text(json.dumps({"metadata_by_tag": {"demo": entry | {"action_horizon": 4}}}))
    tag = read_norm_tag(path, "demo")
    assert (tag.cameras, tag.horizon, tag.action_mask) == (("wrist", "front"), 4, None)
    prompt = PromptFormat(setup=tag.setup, control=tag.control)
    transform = make(upstream, tokenizer, named=False, cameras=tag.cameras, prompt=prompt)
    for row in range(3):
        check_prompt(upstream, "norm_tag", row, transform.observation(record(upstream, row, transform, tag.cameras)))
    robot = transform.actions(upstream["raw/model_output"], upstream["raw/state"])
    np.testing.assert_allclose(robot, upstream["case/norm_tag/out/post_chunk"], rtol=0, atol=1e-6)

    with pytest.raises(StatisticsError, match="no norm tag 'libero'; the file has demo"):
        read_norm_tag(path, "libero")
    entry["action_stats"]["mask"] = [True] * 6 + [False]
    path.write_text(json.dumps({"metadata_by_tag": {"demo": entry}}))
    mask = read_norm_tag(path, "demo").action_mask
    masked = normalizer(statistics(upstream, "action"), mask=mask)
    np.testing.assert_array_equal(masked.mask, [True] * 6 + [False])


def test_token_budget(upstream):
    for arguments, expected in upstream["meta"]["budget"]:
        assert token_budget(ImageLayout(), arguments["num_images"], arguments["state_dim"]) == expected


def test_padding_side_and_length(upstream, tokenizer):
    """One fixed length whatever the task, padding on the left with the pad id."""
    transform = make(upstream, tokenizer)
    samples = [transform(record(upstream, row, transform)) for row in range(3)]
    assert {s["tokens"].shape for s in samples} == {(240,)}
    for sample in samples:
        assert set(sample["tokens"][~sample["token_mask"]]) == {tokenizer.pad_id}
    length = transform.required_prompt_length(upstream["meta"]["tasks"])
    longest = max(int(s["token_mask"].sum()) for s in samples)
    assert length % 8 == 0 and longest <= length < longest + 8


def test_head_trains_on_the_repeated_tail(upstream, tokenizer):
    transform = make(upstream, tokenizer, behaviour="head")
    row = record(upstream, 2, transform)
    assert row["action_is_pad"].any()
    assert transform(row)["action_mask"][:, :ACTION].all()


def test_absent_camera(upstream, tokenizer):
    """The prompt of a sample without one of its cameras is that of a sample with the others alone."""
    transform = make(upstream, tokenizer)
    row = record(upstream, 0, transform)
    row["images"]["front"] = None
    sample = transform.observation(row)
    np.testing.assert_array_equal(sample["image_mask"], [False, True])
    assert len(sample["images"]) == 2 and not sample["images"][0].any()
    check_prompt(upstream, "one_camera", 0, sample)


def test_pickles(upstream, tokenizer):
    """Workers get the transform by pickle."""
    transform = make(upstream, tokenizer)
    row = record(upstream, 1, transform)
    again = pickle.loads(pickle.dumps(transform))
    np.testing.assert_array_equal(again(row)["tokens"], transform(row)["tokens"])


def test_U11_a_red_square_arrives_red(upstream, tokenizer):
    transform = make(upstream, tokenizer)
    picture = np.zeros((120, 160, 3), np.uint8)
    picture[40:80, 60:100, 0] = 255
    images = dict.fromkeys(("front", "wrist"), transform.prepare_image(picture))
    for arrived in transform(record(upstream, 0, transform) | {"images": images})["images"]:
        np.testing.assert_array_equal(arrived[42, 42], (255, 0, 0))
        assert not arrived[..., 1:].any() and not arrived[0, 0].any()


def test_U13_more_dimensions_than_the_model_has(upstream, tokenizer):
    with pytest.raises(ValueError, match=r"actions of 7 dimensions, the model has 4"):
        make(upstream, tokenizer, action_dim=4)
    padded = make(upstream, tokenizer)(record(upstream, 0, make(upstream, tokenizer)))
    assert padded["actions"].shape[1] == 32 and not padded["actions"][:, 7:].any()
    assert not padded["action_mask"][:, 7:].any()


def test_U15_a_prompt_that_is_too_long(upstream, tokenizer):
    transform = make(upstream, tokenizer)
    row = record(upstream, 0, transform)
    long = row | {"task": "word " * 5000}
    with pytest.raises(DataError, match=r"episode 0, frame 0: the prompt of task 'word .* tokens, the limit is 240"):
        transform.observation(long)
    with pytest.raises(DataError, match=r"episode 7: the prompt of task 'word .* tokens, the limit is 240"):
        transform.required_prompt_length(["go", long["task"]], {long["task"]: 7})


def test_refusals(upstream, tokenizer):
    transform = make(upstream, tokenizer)
    row = record(upstream, 0, transform)
    with pytest.raises(DataError, match=r"episode 0, frame 0: no camera wrist; the record has front"):
        transform.observation(row | {"images": {"front": row["images"]["front"]}})
    with pytest.raises(
        DataError, match=r"episode 0, frame 0: camera front: picture of \(120, 160\), prepare_image makes \(84, 84\)"
    ):
        transform.observation(row | {"images": row["images"] | {"front": upstream["raw/image_front"][0]}})
    loud = row["actions"].copy()
    loud[0, 6] = 1.5
    with pytest.raises(DataError, match=r"episode 0, frame 0: action: dimension 6 \(gripper.pos\).*normalize_gripper"):
        transform(row | {"actions": loud})
    with pytest.raises(DataError, match=r"episode 0, frame 0: actions of shape \(5, 7\); expected \(6, 7\)"):
        transform(row | {"actions": row["actions"][:5]})
    with pytest.raises(ValueError, match="behaviour is 'new'"):
        make(upstream, tokenizer, behaviour="new")
    wide = statistics(upstream, "action")
    wide = FeatureStatistics("action", wide.names, None, wide.min, wide.max * 3, q01=wide.q01, q99=wide.q99)
    with pytest.raises(NormalizationError, match=r"dimension 6 \(gripper.pos\) is not normalised .* span \[0, 3\]"):
        normalizer(wide, names=wide.names)


def test_image_layout_of_a_checkpoint():
    config = {"image_processor": {"crop_mode": "resize", "size": {"height": 378, "width": 378}, "patch_size": 14}}
    assert image_layout(config | {"use_single_crop_col_tokens": False}) == ImageLayout()
    assert image_layout(config | {"use_single_crop_col_tokens": None}).column_token
    assert ImageLayout().tokens == 198
    with pytest.raises(ValueError, match=r"image_processor.crop_mode is 'overlap-and-resize-c2'; supported: 'resize'"):
        image_layout({"image_processor": {}})
    with pytest.raises(ValueError, match="not a multiple of the patch size"):
        ImageLayout(size=(80, 84))
