"""GR00T's transform against what LeRobot 0.6.1's processors return on the same inputs.

The recording is cut: vectors to 16 of their 132 padded dimensions, pictures to every third pixel.
"""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from somaspeed_jax.data.errors import DataError
from somaspeed_jax.data.modality import Modality, Part
from somaspeed_jax.data.stats import FIELDS, FeatureStatistics, StatisticsError
from somaspeed_jax.data.tokenizers import load_tokenizer
from somaspeed_jax.data.transforms.groot import GrootTransform, GrootTransformConfig, formalise
from somaspeed_jax.data.transforms.groot_groups import (
    ActionGroup,
    Group,
    compose_pose,
    embodiment_id,
    groups_by_name,
    groups_from_modality,
    normalizers,
    relative_pose,
)
from somaspeed_jax.data.transforms.groot_images import GrootPictures
from somaspeed_jax.data.transforms.groot_processor import GrootProcessor, read_processor

FIXTURES = Path(__file__).parents[2] / "fixtures"
UPSTREAM = dict(np.load(FIXTURES / "groot_processor.npz"))
META = json.loads(str(UPSTREAM.pop("json")))
NAMES, TASKS, WIDTH, HORIZON = META["names"], META["tasks"], 16, 8
SIDECARS = ("libero_eval", "letterbox_noclip", "relative_non_eef", "relative_eef_decode")


def out(case: str, name: str) -> np.ndarray:
    return UPSTREAM[f"case/{case}/out/{name}"]


def whole_statistics(feature: str) -> FeatureStatistics:
    arrays = {field: UPSTREAM[f"stats/{feature}/{field}"] for field in FIELDS}
    size = len(arrays["min"])
    return FeatureStatistics(feature, tuple(NAMES[:size]), None, **arrays)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(FIXTURES / "qwen_vl_tiny", "qwen")


@pytest.fixture(scope="module")
def processors(tmp_path_factory) -> dict[str, GrootProcessor]:
    """The checkpoints' processor files, written as upstream has them and read back."""
    read = {}
    for case in SIDECARS:
        folder, config = tmp_path_factory.mktemp(case), META["cases"][case]["config"]
        write_processor(folder, config)
        read[case] = read_processor(folder, config["embodiment_tag"])
    return read


def write_processor(folder: Path, config: dict, **changes) -> None:
    kwargs = config["processor_kwargs"] | changes
    files = {
        "processor_config.json": {"processor_kwargs": kwargs},
        "statistics.json": {config["embodiment_tag"]: config["statistics"]},
        "embodiment_id.json": config["embodiment_id"],
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))


def from_processor(processor: GrootProcessor, tokenizer, **changes) -> GrootTransform:
    settings = dict(
        cameras=processor.video,
        chunk=processor.chunk,
        horizon=HORIZON,
        state_groups=processor.state_groups,
        action_groups=processor.action_groups,
        state_dim=WIDTH,
        action_dim=WIDTH,
        pictures=processor.pictures,
        embodiment=processor.embodiment,
        formalize_language=processor.formalize_language,
    )
    return GrootTransform(
        GrootTransformConfig(**settings | changes), tokenizer, processor.state_normalizers, processor.action_normalizers
    )


def plain(tokenizer, **changes) -> GrootTransform:
    """LeRobot without processor files: one group each, minimum and maximum of the dataset."""
    state, action = whole_statistics("observation.state"), whole_statistics("action")
    groups = (Group("state", tuple(range(8))),), groups_by_name(NAMES[:7], 8, None)
    settings = dict(
        cameras=("front", "side"),
        chunk=6,
        horizon=HORIZON,
        state_groups=groups[0],
        action_groups=groups[1],
        state_dim=WIDTH,
        action_dim=WIDTH,
        pictures=GrootPictures("lerobot"),
        embodiment=10,
        prompt_length=180,
    )
    settings |= changes
    return GrootTransform(
        GrootTransformConfig(**settings),
        tokenizer,
        normalizers(settings["state_groups"], state, None, "min_max"),
        normalizers(settings["action_groups"], action, None, "min_max"),
    )


def record(transform: GrootTransform, row: int, steps: int) -> dict:
    """The recorded inputs of one sample; `steps` of its actions. Every camera shows sample 0's front."""
    picture = transform.prepare_image(UPSTREAM["raw/image_front"][0])
    return {
        "index": row,
        "episode_index": 0,
        "frame_index": row,
        "task": TASKS[row],
        "images": dict.fromkeys(transform.cameras, picture),
        "state": UPSTREAM["raw/state"][row],
        "actions": UPSTREAM["raw/action"][row][:steps],
        "action_is_pad": UPSTREAM["raw/action_is_pad"][row][:steps],
    }


def check_batch(case: str, transform: GrootTransform, steps: int, state: slice = slice(None)) -> None:
    samples = [transform(record(transform, row, steps)) for row in range(3)]
    stacked = {key: np.stack([sample[key] for sample in samples]) for key in samples[0] if key != "images"}
    np.testing.assert_array_equal(stacked["tokens"], out(case, "input_ids"))
    np.testing.assert_array_equal(stacked["token_mask"], out(case, "attention_mask"))
    np.testing.assert_array_equal(stacked["embodiment"], out(case, "embodiment_id"))
    np.testing.assert_array_equal(stacked["action_mask"], out(case, "action_mask"))
    np.testing.assert_allclose(stacked["state"][:, state], out(case, "state")[:, state], atol=1e-6, rtol=0)
    np.testing.assert_allclose(stacked["actions"], out(case, "action"), atol=1e-6, rtol=0)


def check_inverse(case: str, transform: GrootTransform, state: np.ndarray, atol: float = 1e-6) -> None:
    decoded = transform.actions(UPSTREAM["raw/model_output_132"], state)
    upstream = out(case, "post_chunk")[:, : decoded.shape[1]]
    np.testing.assert_allclose(decoded, upstream, atol=atol, rtol=0)


def test_without_processor_files(tokenizer):
    transform = plain(tokenizer)
    check_batch("default_train", transform, 6)
    check_inverse("default_train", transform, UPSTREAM["raw/state"])


def test_without_actions(tokenizer):
    transform = plain(tokenizer)
    rows = [record(transform, row, 0) for row in range(3)]
    samples = [transform.observation({k: v for k, v in r.items() if "action" not in k}) for r in rows]
    np.testing.assert_array_equal([s["tokens"] for s in samples], out("default_eval", "input_ids"))
    np.testing.assert_allclose([s["state"] for s in samples], out("default_eval", "state"), atol=1e-6, rtol=0)
    assert "actions" not in samples[0] and "action_mask" not in samples[0]


def test_one_camera(tokenizer):
    transform = plain(tokenizer, cameras=("wrist",), prompt_length=97)
    sample = transform.observation(record(transform, 0, 6))
    np.testing.assert_array_equal(sample["tokens"], out("one_camera", "input_ids")[0])


def test_libero_percentiles_and_gripper(tokenizer, processors):
    transform = from_processor(processors["libero_eval"], tokenizer, prompt_length=228, libero_gripper=True)
    assert transform.cameras == ("image", "wrist_image")
    check_batch("libero_eval", transform, 5)
    check_inverse("libero_eval", transform, UPSTREAM["raw/state"])


def test_letterbox_without_clipping_or_formalisation(tokenizer, processors):
    transform = from_processor(processors["letterbox_noclip"], tokenizer, prompt_length=192, chunk=6)
    assert transform.cameras == ("side", "front")
    check_batch("letterbox_noclip", transform, 6)
    check_inverse("letterbox_noclip", transform, UPSTREAM["raw/state"])


def test_relative_group(tokenizer, processors):
    transform = from_processor(processors["relative_non_eef"], tokenizer, prompt_length=180)
    check_batch("relative_non_eef", transform, 6)
    check_inverse("relative_non_eef", transform, UPSTREAM["raw/state"])


def test_relative_pose_decodes_and_encodes(tokenizer, processors):
    transform = from_processor(processors["relative_eef_decode"], tokenizer, prompt_length=180)
    state = out("relative_eef_decode", "raw_state")
    check_inverse("relative_eef_decode", transform, state, atol=1e-5)
    # Upstream refuses to train on such a group; ours is the decoder's inverse, for poses inside the statistics.
    low, high = (transform.action_normalizers[0].statistics.require(field) for field in ("min", "max"))
    rng = np.random.default_rng(0)
    drawn = compose_pose(np.array([0, 0, 0, 1, 0, 0, 0, 1, 0.0]), rng.normal(0, 0.5, (4000, 9)))
    inside = drawn[((drawn > low) & (drawn < high)).all(-1)][:HORIZON]
    gripper = rng.uniform(-1, 1, (HORIZON, 1)).astype(np.float32)
    recorded = np.concatenate([compose_pose(state[0, None, :9], inside), gripper], axis=-1)
    row = record(transform, 0, 0) | {"state": state[0], "actions": recorded, "action_is_pad": np.zeros(HORIZON, bool)}
    decoded = transform.actions(transform(row)["actions"], state[0])
    np.testing.assert_allclose(decoded, recorded, atol=1e-5, rtol=0)


def relative_by_name(tokenizer) -> GrootTransform:
    arrays = {field: UPSTREAM[f"case/relative_stats/out/{field}"] for field in FIELDS}
    relative = FeatureStatistics("action", tuple(NAMES[:7]), None, space="relative", **arrays)
    action = whole_statistics("action")
    groups = groups_by_name(NAMES[:7], 8, ["gripper"])
    assert [(group.columns, group.relative_to) for group in groups] == [((0, 1, 2, 3, 4, 5),) * 2, ((6,), ())]
    state_groups = (Group("state", tuple(range(8))),)
    config = GrootTransformConfig(
        ("front", "side"), 6, state_groups, groups, HORIZON, WIDTH, WIDTH, GrootPictures("lerobot"),
        prompt_length=180, embodiment=10,
    )  # fmt: skip
    return GrootTransform(
        config,
        tokenizer,
        normalizers(state_groups, whole_statistics("observation.state"), None, "quantiles"),
        normalizers(groups, action, relative, "quantiles"),
    )


def test_relative_actions_by_name(tokenizer):
    transform = relative_by_name(tokenizer)
    # Upstream has lost the statistics of the state's last dimension here, and takes a range of 0 to 1.
    check_batch("relative_native", transform, 6, state=slice(7))
    check_inverse("relative_native", transform, UPSTREAM["raw/state"])


@pytest.mark.parametrize("case", ["plain", "relative_by_name"])
def test_recorded_actions_come_back(tokenizer, case):
    """U30: normalised, padded and decoded with the state of the request, a chunk is what was recorded."""
    transform = plain(tokenizer) if case == "plain" else relative_by_name(tokenizer)
    row = record(transform, 1, 6)
    sample = transform(row)
    inside = np.abs(sample["actions"][:6, :7]) < 1  # clipped values cannot come back
    decoded = transform.actions(sample["actions"], row["state"])
    np.testing.assert_allclose(decoded[inside], row["actions"][inside], atol=1e-5, rtol=0)
    assert inside.mean() > 0.6


def test_language():
    for task, formal, _ in META["language"]:
        assert formalise(task) == formal


def test_columns_may_be_in_another_order(tokenizer):
    """Groups read scattered columns of the robot's vectors, and the inverse puts them back."""
    groups = (ActionGroup("b", (4, 5, 6)), ActionGroup("a", (0, 1, 2, 3)))
    shuffled, straight = plain(tokenizer, action_groups=groups), plain(tokenizer)
    row = record(straight, 0, 6)
    expected = straight(row)["actions"][:, [4, 5, 6, 0, 1, 2, 3]]
    np.testing.assert_array_equal(shuffled(row)["actions"][:, :7], expected)
    decoded = [t.actions(t(row)["actions"], row["state"]) for t in (shuffled, straight)]
    np.testing.assert_array_equal(*decoded)


def test_groups_from_a_modality_file():
    parts = {"arm": Part("observation.state", 0, 5), "hand": Part("observation.state", 5, 6)}
    actions = {"arm": Part("action", 1, 6), "hand": Part("action", 0, 1)}
    modality = Modality(parts, actions, {}, {})
    states, groups = groups_from_modality(
        modality, "observation.state", "action", action=["hand", "arm"], relative={"arm": "arm"}
    )
    assert [group.columns for group in states] == [(0, 1, 2, 3, 4), (5,)]
    assert groups == (ActionGroup("hand", (0,)), ActionGroup("arm", (1, 2, 3, 4, 5), (0, 1, 2, 3, 4)))
    with pytest.raises(DataError, match=r"no action\.leg; it has arm, hand"):
        groups_from_modality(modality, "observation.state", "action", action=["leg"])
    with pytest.raises(DataError, match=r"cut from 'observation\.state', the run reads 'other'"):
        groups_from_modality(modality, "other", "action")


def test_poses_compose():
    rng = np.random.default_rng(0)
    poses = rng.normal(size=(2, 5, 9)).astype(np.float32)
    absolute = compose_pose(poses[0], poses[1])
    np.testing.assert_allclose(compose_pose(poses[0], relative_pose(poses[0], absolute)), absolute, atol=1e-5)
    identity = np.array([0, 0, 0, 1, 0, 0, 0, 1, 0], np.float32)
    np.testing.assert_allclose(relative_pose(absolute, absolute), np.tile(identity, (5, 1)), atol=1e-5)


def test_prompt_length(tokenizer):
    transform = plain(tokenizer)
    sizes = [(120, 160), (120, 160)]
    assert transform.required_prompt_length(TASKS, sizes) == 180  # the limit
    assert plain(tokenizer, prompt_length=1024).required_prompt_length(TASKS, sizes) == 184


def test_U15_a_prompt_that_is_too_long(tokenizer):
    transform, sizes, long = plain(tokenizer), [(120, 160), (120, 160)], "word " * 5000
    with pytest.raises(
        DataError, match=r"episode 3: task 'word word .*\.\.\.': the prompt has \d{4,} tokens .* limit is 180"
    ):
        transform.required_prompt_length([long], sizes, {long: 3})
    row = record(transform, 0, 6) | {"task": long, "episode_index": 7}
    with pytest.raises(DataError, match="episode 7, frame 0: task"):
        transform(row)


def test_U11_a_red_square_arrives_red(tokenizer):
    transform = plain(tokenizer)
    picture = np.zeros((120, 160, 3), np.uint8)
    picture[40:80, 60:100, 0] = 255
    row = record(transform, 0, 6) | {"images": dict.fromkeys(("front", "side"), transform.prepare_image(picture))}
    for arrived in transform(row)["images"]:
        middle = arrived[arrived.shape[0] // 2, arrived.shape[1] // 2]
        np.testing.assert_array_equal(middle, (255, 0, 0))
        assert not arrived[..., 1:].any() and not arrived[0, 0].any()


def test_U12_a_camera_by_another_name_is_refused_with_both_sets(tokenizer):
    transform = plain(tokenizer)
    row = record(transform, 0, 6)
    images = {"rgb.front": row["images"]["front"]}
    with pytest.raises(DataError, match=r"\['front', 'side'\]; the record has \['rgb.front'\].*`cameras`"):
        transform(row | {"images": images})


def test_U13_more_dimensions_than_the_model_has():
    with pytest.raises(DataError, match="robot's action has 133 dimensions, GR00T takes 1 to 132"):
        GrootTransformConfig(("a",), 6, (Group("s", (0,)),), (ActionGroup("a", tuple(range(133))),))
    GrootTransformConfig(("a",), 6, (Group("s", (0,)),), (ActionGroup("a", tuple(range(35))),))


def test_U13_statistics_of_another_size_are_refused_and_states_may_differ_in_size(tokenizer):
    transform = plain(tokenizer)
    config = dataclasses.replace(transform.config, action_groups=(ActionGroup("action", tuple(range(14))),))
    with pytest.raises(DataError, match=r"action: groups \[\('action', 14\)\] with statistics of \[7\] dimensions"):
        GrootTransform(config, tokenizer, transform.state_normalizers, transform.action_normalizers)
    sample = transform(record(transform, 0, 6))  # a state of 8 dimensions, actions of 7
    assert sample["state"].shape == (WIDTH,) and not sample["state"][8:].any()
    assert sample["action_mask"].sum(1)[0] == 7 and not sample["actions"][:, 7:].any()


def test_refusals(tokenizer):
    transform = plain(tokenizer)
    row = record(transform, 0, 6)
    with pytest.raises(DataError, match=r"no picture of \['side'\]"):
        transform(row | {"images": {"front": row["images"]["front"]}})
    with pytest.raises(DataError, match="pass the picture through prepare_image"):
        transform(row | {"images": dict.fromkeys(("front", "side"), UPSTREAM["raw/image_front"][0])})
    with pytest.raises(DataError, match=r"actions have shape \(5, 7\), expected \(6, 7\)"):
        transform(row | {"actions": row["actions"][:5]})
    with pytest.raises(DataError, match="each action dimension once"):
        plain(tokenizer, action_groups=(ActionGroup("a", (0, 1, 1)),))
    with pytest.raises(DataError, match="relative_exclude names"):
        groups_by_name(NAMES[:7], 8, ["no such part"])
    with pytest.raises(DataError, match="none for action dimensions"):
        groups_by_name(NAMES[:7], 3, ["gripper"])
    with pytest.raises(DataError, match=r"unknown_robot.*new_embodiment"):
        embodiment_id("unknown_robot")
    groups = groups_by_name(NAMES[:7], 8, ["gripper"])
    with pytest.raises(DataError, match="needs statistics of relative actions"):
        normalizers(groups, whole_statistics("action"), None, "quantiles")
    config = dataclasses.replace(plain(tokenizer).config, action_groups=groups)
    absolute = [normalizers((group,), whole_statistics("action"), None, "min_max")[0] for group in flat(groups)]
    with pytest.raises(StatisticsError, match="absolute actions used for relative"):
        GrootTransform(config, tokenizer, plain(tokenizer).state_normalizers, absolute)


def flat(groups: tuple[ActionGroup, ...]) -> list[Group]:
    return [Group(group.name, group.columns) for group in groups]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"apply_sincos_state_encoding": True}, "apply_sincos_state_encoding = True is not supported"),
        ({"random_rotation_angle": 5}, "random_rotation_angle = 5 is not supported"),
        ({"cropp_fraction": 0.9}, "cropp_fraction is not known"),
    ],
)
def test_processor_fields_are_refused_by_name(tmp_path, changes, message):
    write_processor(tmp_path, META["cases"]["libero_eval"]["config"], **changes)
    with pytest.raises(DataError, match=message):
        read_processor(tmp_path, "libero_sim")


def test_processor_files_are_obeyed(processors):
    libero = processors["libero_eval"]
    assert libero.pictures == GrootPictures("aspect", (256, 256), 256, 0.95)
    assert (libero.embodiment, libero.chunk, libero.state_dropout, libero.colour_jitter) == (2, 5, 0.2, None)
    letterbox = processors["letterbox_noclip"].pictures
    assert letterbox == GrootPictures("lerobot", (96, 96), None, 87 / 96, letterbox=True)


def test_pictures_are_refused():
    with pytest.raises(DataError, match="geometry is 'round'"):
        GrootPictures("round")  # pyright: ignore[reportArgumentType]
    with pytest.raises(DataError, match=r"crop_fraction is 1\.5"):
        GrootPictures(crop_fraction=1.5)
    with pytest.raises(ValueError, match="expected a uint8 picture"):
        GrootPictures().prepare(np.zeros((4, 4, 3), np.float32))
