"""π0.5's transform against lerobot 0.6.1's and openpi's own processors, and its refusals."""

import dataclasses
import pickle
from pathlib import Path

import numpy as np
import pytest
from data_paths import shared_data
from hypothesis import given
from hypothesis import strategies as st

from somaspeed_jax.data.errors import DataError
from somaspeed_jax.data.lerobot import LeRobotDataset
from somaspeed_jax.data.normalize import Normalizer
from somaspeed_jax.data.stats import FeatureStatistics, StatisticsError, compute, compute_relative
from somaspeed_jax.data.tokenizers import load_tokenizer
from somaspeed_jax.data.transforms.pi05 import (
    Pi05Transform,
    Pi05TransformConfig,
    prompt_text,
    relative_mask,
    state_bins,
)

FIXTURES = Path(__file__).parents[2] / "fixtures"
LEROBOT = dict(np.load(FIXTURES / "processor_pi05.npz"))
OPENPI = dict(np.load(FIXTURES / "processor_pi05_openpi.npz"))
TOKENIZER = load_tokenizer(FIXTURES / "gemma_tiny", "gemma")
TASKS = [str(task) for task in LEROBOT["raw/tasks"]]
NAMES = tuple(str(name) for name in LEROBOT["raw/names"])
STATE, ACTION = LEROBOT["raw/state"], LEROBOT["raw/action"]
CONSTANT = 5  # the dimension whose statistics have no width
MOVING = [i for i in range(7) if i != CONSTANT]
MODES = {
    "default": ("quantiles", {}),
    "min_max": ("min_max", {}),
    "mean_std": ("mean_std", {}),
    "quantile10": ("quantiles", {"q01": "q10", "q99": "q90"}),
    "relative": ("quantiles", {}),
    "relative_no_names": ("quantiles", {}),
}
CONFIG = Pi05TransformConfig(("front", "wrist"), horizon=6, absent_cameras=1, image_size=(48, 48))


def statistics(feature, size, space="absolute", renamed=()):
    fields = {f: dict(renamed).get(f, f) for f in ("min", "max", "mean", "std", "q01", "q99")}
    arrays = {f: LEROBOT[f"stats/{feature}/{source}"][:size] for f, source in fields.items()}
    return FeatureStatistics(feature, NAMES[:size], None, space=space, **arrays)


def transform(case="default", convention="lerobot", **changes):
    mode, renamed = MODES[case]
    relative = changes.get("relative_actions", False)
    return Pi05Transform(
        dataclasses.replace(CONFIG, recipe=convention, **changes),
        TOKENIZER,
        Normalizer(statistics("observation.state", 8, renamed=renamed), mode, convention),
        Normalizer(statistics("action", 7, "relative" if relative else "absolute", renamed), mode, convention),
    )


def build(case):
    if not case.startswith("relative"):
        return transform(case)
    return transform(case, relative_actions=True, relative_exclude=("GRIPPER",) if case == "relative" else ())


def record(sample=0, **changes):
    picture = np.zeros((48, 48, 3), np.uint8)
    return {
        "index": 7,
        "episode_index": 4,
        "frame_index": 17,
        "task": TASKS[sample],
        "images": {"front": picture, "wrist": picture},
        "state": STATE[sample],
        "actions": ACTION[sample],
        "action_is_pad": np.zeros(6, bool),
        **changes,
    }


def still_state(sample):
    """The recorded state with the dimension that never moves at its constant."""
    state = STATE[sample].copy()
    state[CONSTANT] = 0.25
    return state


# ---------------------------------------------------------------------------------------------------- parity


@pytest.mark.parametrize("case", MODES)
@pytest.mark.parametrize("sample", range(3))
def test_sample_equals_lerobot(case, sample):
    made = build(case)(record(sample, state=still_state(sample) if case != "relative_no_names" else STATE[sample]))
    moving = made["actions"][:, MOVING]
    np.testing.assert_allclose(moving, LEROBOT[f"case/{case}/out/action"][sample][:, MOVING], rtol=0, atol=1e-6)
    assert made["actions"].shape == (6, 32) and made["actions"].dtype == np.float32
    assert not made["actions"][:, 7:].any()
    np.testing.assert_array_equal(made["action_mask"], np.tile(np.arange(32) < 7, (6, 1)))
    # In samples 1 and 2 the dimension without width is off its constant by 1e-4, which upstream scales to thousands.
    tokens, mask = TOKENIZER.encode(words_of(case, sample), bos=True), made["token_mask"]
    if sample == 0:
        np.testing.assert_array_equal(made["tokens"], LEROBOT[f"case/{case}/out/observation.language.tokens"][0])
        np.testing.assert_array_equal(mask, LEROBOT[f"case/{case}/out/observation.language.attention_mask"][0])
    np.testing.assert_array_equal(made["tokens"][mask], tokens)
    assert not made["tokens"][~mask].any() and made["tokens"].dtype == np.int32 and len(made["tokens"]) == 200


def words_of(case, sample):
    """Upstream's prompt with the bin of the dimension without width as that of its constant."""
    head, tail = str(LEROBOT[f"case/{case}/prompts"][sample]).split(", State: ")
    bins = tail.split(";")[0].split(" ")
    bins[CONSTANT] = "128" if case == "mean_std" else "0"
    return f"{head}, State: {' '.join(bins)};\nAction: "


@pytest.mark.parametrize("case", MODES)
@pytest.mark.parametrize("sample", range(3))
def test_prompt_of_recorded_states_equals_lerobot(case, sample):
    text = prompt_text(TASKS[sample], state_bins(LEROBOT[f"case/{case}/out/observation.state"][sample]))
    assert text == str(LEROBOT[f"case/{case}/prompts"][sample])
    mask = LEROBOT[f"case/{case}/out/observation.language.attention_mask"][sample]
    recorded = LEROBOT[f"case/{case}/out/observation.language.tokens"][sample]
    assert TOKENIZER.encode(text, bos=True) == recorded[mask].tolist()


@pytest.mark.parametrize("case", MODES)
def test_normalised_state_equals_lerobot(case):
    made = build(case).state_normalizer.normalise(STATE)
    keep = np.arange(8) != CONSTANT
    recorded = LEROBOT[f"case/{case}/out/observation.state"]
    np.testing.assert_allclose(made[:, keep], recorded[:, keep], rtol=0, atol=1e-6)


@pytest.mark.parametrize("case", MODES)
def test_robot_actions_equal_lerobot(case):
    made = build(case).actions(LEROBOT["raw/model_output"], STATE)
    recorded = LEROBOT[f"case/{case}/out/post_chunk"]
    np.testing.assert_allclose(made[..., MOVING], recorded[..., MOVING], rtol=0, atol=1e-6)
    if case != "mean_std":  # upstream multiplies the constant's noise by 0 there, and so keeps the constant
        np.testing.assert_allclose(made[..., CONSTANT], recorded[..., CONSTANT], rtol=0, atol=1e-6)


def test_inference_needs_no_actions_and_equals_lerobot():
    request = record(1)
    del request["actions"], request["action_is_pad"]
    made = transform().observation(request)
    assert set(made) == {"images", "image_mask", "tokens", "token_mask", "state", "embodiment", "index"}
    np.testing.assert_array_equal(
        made["tokens"][made["token_mask"]], TOKENIZER.encode(words_of("default", 1), bos=True)
    )


def test_state_bins_equal_lerobot_at_the_edges():
    made = state_bins(LEROBOT["case/digitize_edges/in/state"][0])
    np.testing.assert_array_equal(made, LEROBOT["case/digitize_edges/out/bins"])
    assert prompt_text("x", made) == str(LEROBOT["case/digitize_edges/prompts"][0])


@pytest.mark.parametrize("sample", range(3))
@pytest.mark.parametrize("with_state", [True, False])
def test_prompt_equals_openpi(sample, with_state):
    made = transform(convention="openpi", state_in_prompt=with_state).observation(record(sample))
    key = f"prompt/{'state' if with_state else 'stateless'}/{sample}"
    np.testing.assert_array_equal(made["tokens"], OPENPI[f"{key}/tokens"])
    np.testing.assert_array_equal(made["token_mask"], OPENPI[f"{key}/mask"])


def test_openpi_counts_padded_dimensions():
    assert transform(convention="openpi")(record())["action_mask"].all()


def test_recipes_differ_in_their_pictures():
    picture = LEROBOT["raw/image_front"]
    lerobot, openpi = transform(), transform(convention="openpi")
    np.testing.assert_array_equal(openpi.prepare_image(picture), OPENPI["resize/front/48x48"])
    assert (lerobot.prepare_image(picture) != openpi.prepare_image(picture)).any()
    assert lerobot.image_recipe != openpi.image_recipe


def test_pickles_into_workers():
    made, again = transform(), pickle.loads(pickle.dumps(transform()))
    np.testing.assert_array_equal(made(record())["tokens"], again(record())["tokens"])


# ------------------------------------------------------------------------------------------- U11, U12: cameras


@pytest.mark.parametrize("convention", ["lerobot", "openpi"])
def test_U11_red_square_arrives_red(convention):
    made = transform(convention=convention)
    picture = np.zeros((120, 160, 3), np.uint8)
    picture[40:80, 60:100, 0] = 255
    images = {camera: made.prepare_image(picture) for camera in ("front", "wrist")}
    for arrived in made(record(images=images))["images"]:
        np.testing.assert_array_equal(arrived[24, 24], (255, 0, 0))
        np.testing.assert_array_equal(arrived[2, 24], 0)  # the bar above
        assert not arrived[..., 1:].any()


def test_cameras_arrive_in_the_models_order():
    images = {"wrist": np.full((48, 48, 3), 1, np.uint8), "front": np.full((48, 48, 3), 2, np.uint8)}
    made = transform()(record(images=images))
    assert [image[0, 0, 0] for image in made["images"]] == [2, 1]


def test_U12_one_declared_camera_gives_one_picture():
    made = transform(convention="openpi", cameras=("wrist",), absent_cameras=2)(record())
    assert len(made["images"]) == 1 and made["image_mask"].tolist() == [True]


def test_U12_undeclared_absent_cameras_are_refused():
    with pytest.raises(DataError, match=r"absent_cameras=0: openpi's π0.5 has 3 views"):
        transform(convention="openpi", cameras=("wrist",), absent_cameras=0)


def test_U12_other_names_are_refused_with_both_sets():
    images = {"observation.images.rgb.left_wrist": np.zeros((48, 48, 3), np.uint8)}
    with pytest.raises(
        DataError, match=r"episode 4, frame 17: .*\['front', 'wrist'\]; the record has \['observation.images.rgb.left"
    ):
        transform()(record(images=images))


def test_unprepared_picture_is_refused():
    images = {camera: np.zeros((96, 96, 3), np.uint8) for camera in ("front", "wrist")}
    with pytest.raises(DataError, match=r"camera front: \(96, 96\) pixels, expected \(48, 48\); pass .* prepare_image"):
        transform()(record(images=images))


# ----------------------------------------------------------------------------------------------- U13: dimensions


def small(size, feature="action", space="absolute", names=None):
    rows = np.random.default_rng(0).normal(size=(50, size)).astype(np.float32)
    return compute(rows, names, feature=feature, space=space)


def of_sizes(state, action, **changes):
    return Pi05Transform(
        dataclasses.replace(CONFIG, **changes),
        TOKENIZER,
        Normalizer(small(state, "observation.state"), "quantiles", "lerobot"),
        Normalizer(small(action), "quantiles", "lerobot"),
    )


def test_U13_more_action_dimensions_than_the_model_are_refused():
    with pytest.raises(DataError, match=r"action has 35 dimensions, π0.5 has 32"):
        of_sizes(35, 35)


def test_U13_statistics_of_another_size_are_refused():
    with pytest.raises(DataError, match=r"episode 4.*\(6, 7\), expected \(6, 14\)"):
        of_sizes(8, 14)(record())
    with pytest.raises(DataError, match=r"episode 4.*shape \(8,\), the statistics have 14"):
        of_sizes(14, 7)(record())


def test_U13_state_and_action_of_different_sizes_are_accepted_and_only_real_state_is_written():
    made = of_sizes(3, 7)(record(state=np.zeros(3, np.float32)))
    assert made["actions"].shape == (6, 32)
    text = prompt_text(TASKS[0], state_bins(np.zeros(3, np.float32)))
    assert text.endswith("State: 128 128 128;\nAction: ")


def test_U13_names_survive_padding():
    assert transform().action_names == NAMES[:7] and transform().state_names == NAMES
    assert transform().action_names.index("gripper.pos") == 6


# ---------------------------------------------------------------------------------------------- U15: long prompts


def test_U15_five_thousand_characters_are_refused():
    made, task = transform(), "stack the blocks " * 300
    with pytest.raises(DataError, match=r"episode 4, frame 17: task 'stack the .*\.\.\.': .* (\d{4}) tokens, .* 200"):
        made(record(task=task))
    with pytest.raises(DataError, match=r"episode 4: task 'stack"):
        made.required_prompt_length([task], {task: 4})


@pytest.mark.parametrize("sample", range(3))
def test_U15_what_lerobot_cuts_off_is_refused(sample):
    assert LEROBOT["case/truncated/out/observation.language.attention_mask"][sample].all()  # cut at 48
    with pytest.raises(DataError, match=r"tokens, the limit is 48"):
        transform(prompt_length=48)(record(sample))


@pytest.mark.parametrize("with_state", [True, False])
def test_U15_under_at_and_over_the_limit(with_state):
    def of(limit):
        return transform(state_in_prompt=with_state, prompt_length=limit)

    tokens = of(200).prompt_tokens(TASKS[0], STATE[0])
    for limit in (len(tokens) + 1, len(tokens)):
        made = of(limit)(record())
        # The state and the end of the prompt are all there.
        assert made["tokens"][made["token_mask"]].tolist() == tokens
        assert made["token_mask"].sum() == len(tokens)
    with pytest.raises(DataError, match=rf"episode 4.*has {len(tokens)} tokens, the limit is {len(tokens) - 1}"):
        of(len(tokens) - 1)(record())


@given(
    st.lists(st.floats(-3, 3, width=32), min_size=8, max_size=8),
    st.text(st.characters(exclude_categories=("Cs",)), max_size=20),
)
def test_required_prompt_length_bounds_every_state(state, task):
    made = transform()
    required = made.required_prompt_length([task])
    assert required % 8 == 0
    assert len(made.prompt_tokens(task, np.array(state, np.float32))) <= required


def test_required_prompt_length_is_reached_and_within_the_limit():
    made = transform()
    longest = made.required_prompt_length(TASKS)
    counts = [len(TOKENIZER.encode(prompt_text(task, [255] * 8), bos=True)) for task in TASKS]
    assert longest == -(-max(counts) // 8) * 8 < 200
    exact = transform(prompt_length=max(counts))
    assert exact.required_prompt_length(TASKS) == max(counts)
    with pytest.raises(DataError, match=f"has {max(counts)} tokens, the limit is {max(counts) - 1}"):
        transform(prompt_length=max(counts) - 1).required_prompt_length(TASKS)
    with pytest.raises(DataError, match="no tasks"):
        made.required_prompt_length([])


# ---------------------------------------------------------------------------------------- U30: units of actions


@pytest.mark.parametrize("convention", ["lerobot", "openpi"])
@pytest.mark.parametrize("relative", [False, True])
def test_U30_recorded_chunk_comes_back_in_robot_units(convention, relative):
    generator = np.random.default_rng(3)
    state = generator.normal(size=(40, 9)).astype(np.float32)
    actions = (state + generator.normal(scale=0.1, size=state.shape)).astype(np.float32)
    names = [*(f"joint_{i}" for i in range(7)), "left_gripper_finger", "right_gripper_finger"]
    mask = relative_mask(names, ["gripper"])
    assert mask.tolist() == [True] * 7 + [False] * 2
    if relative:
        of_action = compute_relative(actions, state, np.zeros(40, np.int64), 6, names, mask=mask)
    else:
        of_action = compute(actions, names, feature="action")
    made = Pi05Transform(
        dataclasses.replace(CONFIG, recipe=convention, relative_actions=relative),
        TOKENIZER,
        Normalizer(compute(state, names, feature="observation.state"), "quantiles", convention),
        Normalizer(of_action, "quantiles", convention),
    )
    chunk = actions[10:16]
    sample = made(record(state=state[10], actions=chunk))
    np.testing.assert_allclose(made.actions(sample["actions"], state[10]), chunk, rtol=0, atol=1e-5)
    # A batch with K draws of a chunk each, and another state to be relative to.
    moved = made.actions(np.tile(sample["actions"], (2, 3, 1, 1)), np.tile(state[11], (2, 3, 1)))
    shift = np.where(mask & relative, state[11] - state[10], 0)
    np.testing.assert_allclose(moved, np.tile(chunk + shift, (2, 3, 1, 1)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("relative", [False, True])
def test_U30_statistics_of_the_other_space_are_refused(relative):
    space = "absolute" if relative else "relative"
    with pytest.raises(StatisticsError, match=f"action: statistics of {space} actions used for"):
        Pi05Transform(
            dataclasses.replace(CONFIG, relative_actions=relative),
            TOKENIZER,
            Normalizer(statistics("observation.state", 8), "quantiles", "lerobot"),
            Normalizer(statistics("action", 7, space), "quantiles", "lerobot"),
        )


def test_exclusion_that_matches_nothing_is_refused():
    with pytest.raises(DataError, match=r"relative_exclude names \['claw'\], which no action dimension has"):
        transform(relative_actions=True, relative_exclude=("claw",))


def test_relative_actions_without_a_state_dimension_are_refused():
    names = ["x", "y", "z"]
    with pytest.raises(DataError, match=r"observation.state has only 2 dimensions, none for .*\['z'\]"):
        Pi05Transform(
            dataclasses.replace(CONFIG, relative_actions=True, relative_exclude=()),
            TOKENIZER,
            Normalizer(small(2, "observation.state"), "quantiles", "lerobot"),
            Normalizer(small(3, space="relative", names=names), "quantiles", "lerobot"),
        )


# ------------------------------------------------------------------------------------------------- other refusals


def test_normalisers_of_the_other_recipe_are_refused():
    with pytest.raises(DataError, match=r"observation.state is normalised as openpi does, the recipe is lerobot"):
        Pi05Transform(
            CONFIG,
            TOKENIZER,
            Normalizer(statistics("observation.state", 8), "quantiles", "openpi"),
            Normalizer(statistics("action", 7), "quantiles", "lerobot"),
        )


def test_not_a_number_names_the_frame():
    state = STATE[0].copy()
    state[3] = np.nan
    with pytest.raises(
        DataError, match=r"episode 4, frame 17: observation.state: input\[3\] \(wrist_flex.pos\) is nan"
    ):
        transform()(record(state=state))


def test_model_output_of_another_width_is_refused():
    with pytest.raises(DataError, match=r"\(6, 7\) does not have 32 dimensions"):
        transform().actions(ACTION[0], STATE[0])


@pytest.mark.parametrize(
    "changes,match",
    [
        ({"cameras": ()}, "at least one, each once"),
        ({"cameras": ("a", "a")}, "at least one, each once"),
        ({"horizon": 0}, "horizon is 0"),
        ({"recipe": "other"}, "recipe is 'other'; expected one of lerobot, openpi"),
        ({"absent_cameras": -1}, "never negative"),
    ],
)
def test_configurations_that_cannot_be_are_refused(changes, match):
    with pytest.raises(DataError, match=match):
        dataclasses.replace(CONFIG, **changes)


# ------------------------------------------------------------------------------------------------ a real recording


@pytest.mark.skipif(shared_data() is None, reason="no sample recordings at hand")
@pytest.mark.parametrize("relative", [False, True])
def test_real_recording_to_samples_and_back(relative):
    folder = shared_data()
    assert folder is not None
    dataset = LeRobotDataset(folder / "franka-usb-v30", horizon=6)
    states, chunks = dataset.numeric("observation.state"), dataset.numeric("action")
    exclude = (dataset.action_names[-1],)
    if relative:
        mask = relative_mask(dataset.action_names, exclude)
        episodes = np.concatenate([np.full(e.length, e.index) for e in dataset.episodes])
        reference = states[:, : chunks.shape[1]]
        of_action = compute_relative(chunks, reference, episodes, 6, dataset.action_names, mask=mask)
    else:
        of_action = compute(chunks, dataset.action_names, feature="action")
    of_state = compute(states, dataset.state_names, feature="observation.state")
    config = dataclasses.replace(
        CONFIG, cameras=dataset.cameras, relative_actions=relative, relative_exclude=exclude, prompt_length=400
    )
    made = Pi05Transform(
        config, TOKENIZER, Normalizer(of_state, "quantiles", "lerobot"), Normalizer(of_action, "quantiles", "lerobot")
    )
    made = Pi05Transform(
        dataclasses.replace(config, prompt_length=made.required_prompt_length(dataset.tasks)),
        TOKENIZER,
        made.state_normalizer,
        made.action_normalizer,
    )
    for index in (0, 40, len(dataset) - 1):
        raw = dataset.record(index)
        sample = made({**raw, "images": {name: made.prepare_image(image) for name, image in raw["images"].items()}})
        assert [image.shape for image in sample["images"]] == [(48, 48, 3)] * len(dataset.cameras)
        assert sample["token_mask"].sum() > 0.7 * len(sample["tokens"])
        back = made.actions(sample["actions"], raw["state"])
        moving = ~np.isin(np.arange(len(dataset.action_names)), [d.index for d in made.action_normalizer.near_constant])
        np.testing.assert_allclose(back[:, moving], raw["actions"][:, moving], rtol=0, atol=1e-5)
