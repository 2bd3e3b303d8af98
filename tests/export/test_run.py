"""A run's checkpoint, exported and loaded again through upstream's layout."""

import dataclasses
import json
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from weight_files import BFLOAT16, random_tensors, write_tensors

from somaspeed_jax import recipes
from somaspeed_jax.assemble import Data, Part, make_learner, save_processor
from somaspeed_jax.checkpoint import CheckpointError, Checkpoints
from somaspeed_jax.config import Config
from somaspeed_jax.data.stats import FeatureStatistics
from somaspeed_jax.export.run import export_run
from somaspeed_jax.initial import initial_parameters
from somaspeed_jax.models.weights.load import load_params
from somaspeed_jax.models.weights.lora import deltas
from somaspeed_jax.models.weights.safetensors_file import WeightsError
from somaspeed_jax.models.weights.source import open_source, read_config
from somaspeed_jax.models.weights.table import choose_prefix, prefixed
from somaspeed_jax.recipes import Facts
from somaspeed_jax.state import create_state

FACTS = Facts(("observation.images.top",), ("x", "y"), ("x", "y"), 10.0, 16)


class NoTokenizer:
    def save(self, directory: Path) -> None:
        (directory / "tokenizer.json").write_text("{}")


def statistics(name: str) -> FeatureStatistics:
    values = {field: np.arange(2.0) + i for i, field in enumerate(("min", "q01", "mean", "std", "q99", "max"))}
    return FeatureStatistics(name, ("x", "y"), 10, **values)


@dataclasses.dataclass
class Run:
    """A run that was saved after pretended training: each trained parameter moved by a little."""

    workdir: Path
    config: Config
    specs: Any
    policy: Any
    params: dict[str, np.ndarray]
    average: dict[str, np.ndarray]


def make_run(workdir: Path, *, weights: Path | None = None, preset: str = "expert", ema: float = 0.0) -> Run:
    config = Config()
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, name="pi05", size="demo"),
        weights=dataclasses.replace(config.weights, path=str(weights or "")),
        tune=dataclasses.replace(config.tune, preset=preset),
        ema=dataclasses.replace(config.ema, decay=ema),
        mesh=dataclasses.replace(config.mesh, devices=1, replica=1, fsdp=1),
    )
    recipe = recipes.get("pi05")
    learner = make_learner(config, FACTS)
    trainable, frozen, facts = initial_parameters(config, recipe, learner)
    trainable = {path: value + 2**-12 for path, value in trainable.items()}
    state = create_state(trainable, frozen, learner.optimizer, learner.shardings)
    if ema:
        state = dataclasses.replace(state, ema={path: value * 2 for path, value in state.ema.items()})
    workdir.mkdir()
    with Checkpoints(workdir, keep=3) as checkpoints:
        checkpoints.save(7, dataclasses.replace(state, step=jnp.int32(7)), config, facts, False)
    stats = {name: statistics(name) for name in ("state", "action")}
    save_processor(workdir, Data((Part(cast(Any, None), None, stats, FACTS),), cast(Any, NoTokenizer()), FACTS))
    on_host = jax.tree.map(np.asarray, {**frozen, **trainable})
    return Run(workdir, config, learner.specs, learner.policy, on_host, jax.tree.map(np.asarray, dict(state.ema)))


@pytest.fixture(scope="module", autouse=True)
def no_tokenizer():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("somaspeed_jax.assemble.load_tokenizer", lambda *_: NoTokenizer())
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Small weights in LeRobot's bare layout, bfloat16."""
    recipe = recipes.get("pi05")
    config = dataclasses.replace(Config(), model=dataclasses.replace(Config().model, size="demo"))
    tensors = random_tensors(recipe.table(recipe.model_config(config, None)), dtype_of=lambda _: BFLOAT16)
    directory = tmp_path_factory.mktemp("base")
    write_tensors(directory, tensors)
    return directory


@pytest.fixture(scope="module")
def tuned(tmp_path_factory, base) -> Run:
    """The action expert over the frozen rest of `base`, with a moving average."""
    return make_run(tmp_path_factory.mktemp("tuned") / "run", weights=base, ema=0.9)


def read(directory: Path, run: Run):
    recipe = recipes.get("pi05")
    table = recipe.table(recipe.model_config(run.config, FACTS))
    source = open_source(directory)
    prefix = choose_prefix(list(source.names()), table, recipe.PREFIXES)
    return load_params(source, prefixed(table, prefix), without_adapters(run.specs))


def without_adapters(values):
    return {path: value for path, value in values.items() if ".lora." not in path}


def same(found, expected):
    assert found.keys() == expected.keys()
    for path, value in found.items():
        np.testing.assert_array_equal(np.asarray(value), np.asarray(expected[path], np.float32), err_msg=path)


def test_trained_parameters_from_the_checkpoint_the_rest_byte_for_byte(tmp_path, base, tuned):
    report = export_run(tuned.workdir, tmp_path / "out", average=False)
    assert (report.step, report.values, report.adapters) == (7, "raw", 0)
    assert report.exported.zeros == 0 and report.exported.trained > 20
    same(read(tmp_path / "out", tuned), tuned.params)
    was, now = open_source(base), open_source(tmp_path / "out")
    kept = [name for name in was.names() if ".gemma_expert.model." not in name and "paligemma" in name]
    assert len(kept) == report.exported.copied
    for name in kept:
        assert now.dtype(f"model.{name}") == BFLOAT16
        assert now.tensor(f"model.{name}").tobytes() == was.tensor(name).tobytes(), name


def test_the_moving_average_and_the_files_beside_the_weights(tmp_path, base, tuned):
    report = export_run(tuned.workdir / "checkpoints" / "7", tmp_path / "out")
    assert report.values == "moving average"
    same(read(tmp_path / "out", tuned), {**tuned.params, **tuned.average})
    assert all((tmp_path / "out" / name).is_file() for name in report.exported.files)
    config = read_config(tmp_path / "out")
    assert config["type"] == "pi05" and config["chunk_size"] == 8 and config["max_action_dim"] == 8
    assert set(config["input_features"]) == {"observation.images.top", "observation.state"}
    before = json.loads((tmp_path / "out" / "policy_preprocessor.json").read_text())
    normalizer = next(step for step in before["steps"] if step["registry_name"] == "normalizer_processor")
    stored = open_source(tmp_path / "out" / normalizer["state_file"])
    np.testing.assert_array_equal(stored.tensor("observation.state.q01"), np.float32([1, 2]))
    np.testing.assert_array_equal(stored.tensor("action.q99"), np.float32([4, 5]))
    assert json.loads((tmp_path / "out" / "somaspeed_export.json").read_text()) == {
        "step": 7,
        "values": "moving average",
        "trained_tensors": "float32",
        "source": str(base),
        "merged_adapters": 0,
    }
    assert (tmp_path / "out" / "processor" / "statistics.json").is_file()


def test_without_a_source_frozen_parameters_are_drawn_again_and_what_is_not_read_is_zeros(tmp_path):
    run = make_run(tmp_path / "run")
    report = export_run(run.workdir, tmp_path / "out")
    assert report.source == "init:0" and report.exported.copied == 0 and report.exported.zeros > 0
    same(read(tmp_path / "out", run), run.params)
    with pytest.raises(WeightsError, match="needs no others"):
        export_run(run.workdir, tmp_path / "no", weights="somewhere")


def test_adapters_are_merged(tmp_path, base):
    run = make_run(tmp_path / "run", weights=base, preset="lora")
    report = export_run(run.workdir, tmp_path / "out")
    assert report.adapters == 16  # 7 in a trunk stack, 2 in its last layer, 7 in the expert
    expected = {path: np.asarray(value, np.float32) for path, value in without_adapters(run.params).items()}
    original = read(base, run)
    for path, change in deltas(run.policy, run.params).items():
        layers = range(run.specs[path].shape[0]) if run.specs[path].stacked else [None]
        added = np.stack([change(layer) for layer in layers]).reshape(expected[path].shape)
        assert np.abs(added).max() > 0
        expected[path] = np.asarray(original[path]) + added
    same(read(tmp_path / "out", run), expected)


def test_other_frozen_weights_are_refused(tmp_path, base, tuned):
    source = open_source(base)
    tensors = {name: np.array(source.tensor(name)) for name in source.names()}
    write_tensors(tmp_path / "moved", tensors)
    export_run(tuned.workdir, tmp_path / "out", weights=str(tmp_path / "moved"))
    name = "paligemma_with_expert.paligemma.model.language_model.layers.0.input_layernorm.weight"
    tensors[name] = tensors[name] + BFLOAT16.type(1)
    write_tensors(tmp_path / "other", tensors)
    with pytest.raises(WeightsError, match=f"not the weights that the checkpoint was trained on(.|\n)*{name}"):
        export_run(tuned.workdir, tmp_path / "no", weights=str(tmp_path / "other"))
    assert not (tmp_path / "no").exists()


def test_what_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="neither the workdir"):
        export_run(tmp_path, tmp_path / "out")
