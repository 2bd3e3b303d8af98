"""Several datasets in one run: one with two cameras and six joints, one with one camera and three."""

import dataclasses
import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from small_run import run, small_config, steps

from somaspeed_jax import recipes
from somaspeed_jax.assemble import load_processor, make_learner, make_transform, open_data
from somaspeed_jax.batches import make_order, samples_drawn
from somaspeed_jax.config import ConfigError, resolve, to_config_dict
from somaspeed_jax.data.errors import DataError
from somaspeed_jax.data.mixture import check_alike
from somaspeed_jax.data.pipeline import load_sample
from somaspeed_jax.mixture_config import Entry, embodiments, parse_mixture, part_config
from somaspeed_jax.policy import TrainedPolicy, load_policy
from somaspeed_jax.step import Batch
from somaspeed_jax.validation import Validation

sys.path.insert(0, str(Path(__file__).parent / "data"))
from recordings import write_dataset


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    root = tmp_path_factory.mktemp("datasets")
    write_dataset(root / "pick", [12, 9, 14], cameras=("top", "wrist"), state_dims=6)
    write_dataset(root / "fold", [11, 8], cameras=("wrist",), state_dims=3)
    write_dataset(root / "fast", [11, 8], cameras=("wrist",), state_dims=3, fps=30)
    return root


def mixed(datasets, **sections):
    """pick three times as often as fold."""
    mixture = (f"{datasets / 'pick'}*3", f"{datasets / 'fold'}*1")
    data = {"path": "", "mixture": mixture, **sections.pop("data", {})}
    return small_config(Path(), steps=3, data=data, batch=dict(per_device=8), **sections)


@pytest.fixture(scope="module")
def uninterrupted(datasets, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("run")
    config = mixed(datasets)
    outcome, printed = run(config, workdir)
    return config, workdir, outcome, printed


@pytest.mark.slow
def test_trains_counts_and_says_what_each_dataset_gives(uninterrupted):
    _, workdir, _, printed = uninterrupted
    # 8 samples a step, blocks of 4 places: exact shares after every step
    assert [line["samples of pick"] for line in steps(workdir)] == [6, 12, 18]
    assert [line["samples of fold"] for line in steps(workdir)] == [2, 4, 6]
    assert all(np.isfinite(line["loss"]) for line in steps(workdir))
    for words in ("(pick: 75.0% of the samples)", "views: 1 absent, 2 wrist", "actions of 6 or 3 dimensions"):
        assert words in printed
    kept = {p.relative_to(workdir / "processor").as_posix() for p in (workdir / "processor").glob("*/*.json")}
    assert kept == {f"{name}/{file}.json" for name in ("pick", "fold") for file in ("statistics", "facts")}


@pytest.mark.slow
def test_resume_is_exact(uninterrupted, tmp_path):
    config, whole, outcome, _ = uninterrupted
    run(dataclasses.replace(config, stop_after_seconds=1e-9), tmp_path)
    resumed, printed = run(config, tmp_path)
    assert "resumed from step 1" in printed
    assert steps(tmp_path)[-1]["samples of pick"] == 18
    assert [line["loss"] for line in steps(tmp_path)] == [line["loss"] for line in steps(whole)]
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), resumed.state, outcome.state)


@pytest.mark.slow
def test_a_policy_acts_for_one_of_the_datasets_as_in_training(uninterrupted):
    """With its own camera alone: the masked view of the mixture's batches takes no part."""
    config, workdir, _, _ = uninterrupted
    with pytest.raises(ConfigError, match="trained on a mixture of fold, pick: say whose"):
        load_policy(workdir)
    policy = load_policy(workdir, dataset="fold")
    assert policy.facts.cameras == ("wrist",) and len(policy.action_names) == 3
    data = open_data(config)
    source = data.train
    index = len(data.parts[0].train) + 4
    record = source.record(index)
    alone = policy.act({key: record[key] for key in ("images", "state", "task")})

    recipe = recipes.get("pi05")
    sample = load_sample(source, make_transform(config, recipe, data), index)
    assert sample["image_mask"].tolist() == [False, True] and not sample["images"][0].any()
    rows = {key: np.asarray(value)[None] for key, value in sample.items() if key != "images"}
    images = tuple(image[None] for image in sample["images"])
    rows |= {"images": images, "position": np.zeros(1, np.int32), "weight": np.ones(1, np.float32)}
    batch = Batch(**{name: rows[name] for name in Batch._fields})
    network, prepare = make_learner(config, data.facts).policy, recipe.prepare(config, data.facts)
    both = TrainedPolicy(config, policy.facts, policy.transform, prepare, network, policy._params)
    normalised = np.asarray(both._sample(both._params, batch, np.int32(0)))
    np.testing.assert_allclose(
        policy.transform.actions(normalised, record["state"])[0], alone, rtol=0, atol=1e-5 * np.abs(alone).max()
    )


@pytest.mark.slow
def test_held_out_episodes_of_each_dataset_are_measured_apart(uninterrupted, datasets):
    _, _, outcome, _ = uninterrupted
    config, recipe = mixed(datasets, data={"holdout": 0.3}), recipes.get("pi05")
    data = open_data(config)
    validation = Validation(
        config,
        make_learner(config, data.facts),
        data,
        make_transform(config, recipe, data),
        recipe.prepare(config, data.facts),
    )
    numbers = validation(outcome.state)
    names = [f"{name}: {key}" for name in ("pick", "fold") for key in ("loss", "action_mse", "mean_action_mse")]
    assert list(numbers) == ["loss", *names] and all(np.isfinite(value) for value in numbers.values())
    between = sorted((numbers["pick: loss"], numbers["fold: loss"]))
    assert between[0] < numbers["loss"] < between[1]


def test_each_dataset_has_its_own_statistics_cameras_and_split(datasets):
    config = mixed(datasets, data={"holdout": 0.3})
    data = open_data(config)
    pick, fold = data.parts
    assert (pick.facts.cameras, fold.facts.cameras) == (("top", "wrist"), ("wrist",))
    assert data.facts.cameras == ("top", "wrist")
    assert pick.statistics["action"].size == 6 and fold.statistics["action"].size == 3
    assert pick.facts.prompt_length == fold.facts.prompt_length == data.facts.prompt_length
    assert len(data.train) == len(pick.train) + len(fold.train)
    assert data.validation is not None and len(fold.train.episodes) == 1
    order = make_order(config, data, 8)
    assert samples_drawn(config, data, order, 5) == {"samples of pick": 30, "samples of fold": 10}


def test_U08b_two_rates_in_one_run_are_refused(datasets):
    mixture = (f"{datasets / 'pick'}*1", f"{datasets / 'fast'}*1")
    with pytest.raises(ConfigError, match="different rates, in frames a second: pick at 10, fast at 30"):
        open_data(mixed(datasets, data={"mixture": mixture}))


def test_cameras_are_chosen_by_name_over_all_datasets(datasets):
    assert open_data(mixed(datasets, data={"cameras": ("wrist",)})).facts.cameras == ("wrist",)
    with pytest.raises(ConfigError, match="top: fold has none of them; it has wrist"):
        open_data(mixed(datasets, data={"cameras": ("top",)}))
    with pytest.raises(ConfigError, match="no dataset of the mixture has hand"):
        open_data(mixed(datasets, data={"cameras": ("wrist", "hand")}))


def test_entries():
    assert parse_mixture(("a/pick*2", "user/pick:new_embodiment*.5")) == (
        Entry("pick", "a/pick", "", 2.0),
        Entry("pick#2", "user/pick", "new_embodiment", 0.5),
    )
    for text in ("a/pick", "a/pick*", "a/pick*0", "a/pick*-1", "a/pick*many", "*2", "a*nan"):
        with pytest.raises(ValueError, match="is not PATH"):
            parse_mixture((text,))


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"data": {"mixture": ("a*1", "b")}}, "config.data.mixture: 'b' is not PATH\\*WEIGHT"),
        ({"data": {"mixture": ("a*1",)}}, "set config.data.path='a' instead"),
        ({"data": {"mixture": ("a*1", "a*2")}}, "a is named twice"),
        ({"data": {"mixture": ("a*1", "b*2"), "path": "c"}}, "config.data.path: is 'c'"),
        ({"data": {"mixture": ("a*1", "b*2"), "episodes": (1,)}}, "config.data.episodes: means one dataset"),
        ({"data": {"mixture": ("a*1", "b:libero_sim*2")}}, "b names an embodiment, which pi05 does not have"),
        ({"data": {"mixture": ("a*1", "b:libero_sim*2")}, "model": {"name": "groot"}}, "no embodiment for a"),
        ({"data": {"mixture": ("a*1", "b*2")}, "stats": {"source": "file", "file": "x"}}, "statistics of its own"),
        ({"data": {"mixture": ("a*1", "b*2")}, "evaluation": {"closed_loop_starts": 5}}, "closed_loop_starts"),
    ],
)
def test_contradictions_are_refused(sections, words):
    config = small_config(Path(), **{**sections, "data": {"path": "", **sections["data"]}})
    with pytest.raises(ConfigError, match=words):
        resolve(to_config_dict(config))


def test_groot_holds_the_rows_of_all_embodiments():
    mixture = ("a:libero_sim*1", "b:new_embodiment*1", "c:libero_sim*1")
    config = small_config(Path(), model=dict(name="groot", size="published"), data=dict(path="", mixture=mixture))
    assert embodiments(config) == ("libero_sim", "new_embodiment")
    recipe = recipes.get("groot")
    assert recipe.model_config(config, None).embodiments == (2, 10)
    assert recipe.model_config(part_config(config, "b"), None).embodiments == (2, 10)


@pytest.mark.parametrize("model", ["groot", "molmoact2"])
def test_samples_of_the_other_models_are_alike(datasets, model):
    """A view masked in front of the one that is there, each dataset's embodiment row, states padded to one width."""
    tags = (":libero_sim", ":new_embodiment") if model == "groot" else ("", "")
    mixture = (f"{datasets / 'pick'}{tags[0]}*3", f"{datasets / 'fold'}{tags[1]}*1")
    config = mixed(
        datasets, data={"mixture": mixture, "tail": "repeat"}, model=dict(name=model, size="demo", horizon=8)
    )
    recipe, data = recipes.get(model), open_data(config)
    transform = make_transform(config, recipe, data)
    check_alike(data.train, transform, ["pick", "fold"])
    pick, fold = (load_sample(data.train, transform, i) for i in (0, len(data.parts[0].train)))
    assert (pick["image_mask"].tolist(), fold["image_mask"].tolist()) == ([True, True], [False, True])
    assert (pick["embodiment"], fold["embodiment"]) == ((0, 1) if model == "groot" else (0, 0))
    assert fold["action_mask"][0].sum() == 3 and pick["action_mask"][0].sum() == 6
    if model == "groot":
        assert recipe.model_config(config, data.facts).embodiments == (0, 1)


def test_U15_a_long_task_is_refused_at_the_start_with_its_episode(datasets, tmp_path):
    write_dataset(tmp_path, [5, 6], version="v2.1", cameras=("wrist",))
    lines = [{"task_index": e, "task": f"episode {e}" + " and so on" * 500 * e} for e in range(2)]
    (tmp_path / "meta/tasks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for model in ("pi05", "groot", "molmoact2"):
        config = mixed(datasets, data={"path": str(tmp_path), "mixture": ()}, model=dict(name=model, size="demo"))
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, tail="repeat"))
        with pytest.raises(DataError, match=r"episode 1: .*\d{4} tokens.* limit is \d+"):
            open_data(config)


def test_a_run_on_one_dataset_has_no_dataset_to_choose(tmp_path):
    (tmp_path / "processor").mkdir()
    with pytest.raises(ConfigError, match="dataset is 'fold', but the run was trained on one dataset alone"):
        load_processor(tmp_path, recipes.get("pi05"), "fold")
