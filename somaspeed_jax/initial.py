"""The parameters that a run starts from, published or random, straight into their shards."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np

from somaspeed_jax.assemble import DTYPES, Learner
from somaspeed_jax.checkpoint import CheckpointError, Checkpoints
from somaspeed_jax.config import Config
from somaspeed_jax.export.saved import SavedArrays
from somaspeed_jax.models.layers.param import Params
from somaspeed_jax.models.weights.fingerprint import compare, fingerprint, read_fingerprint, sampled_digest
from somaspeed_jax.models.weights.load import load_params
from somaspeed_jax.models.weights.opening import open_weights
from somaspeed_jax.models.weights.table import choose_prefix, prefixed
from somaspeed_jax.recipes import Recipe
from somaspeed_jax.state import random_params, storage_type

FrozenFacts = dict[str, Any]


def initial_parameters(config: Config, recipe: Recipe, learner: Learner) -> tuple[Params, Params, FrozenFacts]:
    """(trainable, frozen, what the frozen ones are: source and fingerprint)."""
    if not config.weights.path:
        values = _random(config, learner, list(learner.specs))
        facts: FrozenFacts = {"source": f"init:{config.seed}", "tensors": {}}
    elif (Path(config.weights.path) / "checkpoints").is_dir():
        values, facts = _from_run(config, recipe, learner)
    else:
        values, facts = _published(config, recipe, learner)
    return (
        {path: values[path] for path in learner.trainable},
        {path: values[path] for path in learner.frozen},
        facts,
    )


def _published(config: Config, recipe: Recipe, learner: Learner) -> tuple[Params, FrozenFacts]:
    """Weights in an upstream layout; what the configuration says is new is drawn."""
    source = open_weights(config.weights.path, learner.model_config)
    table = recipe.table(learner.model_config)
    prefix = choose_prefix(list(source.names()), table, recipe.PREFIXES)
    patterns = (*recipe.new_paths(config), *config.weights.new)
    new = [path for path in learner.specs if any(re.fullmatch(pattern, path) for pattern in patterns)]
    loaded = load_params(
        source,
        prefixed(table, prefix),
        learner.specs,
        new=new,
        sharding_for=lambda path: _sharding(learner, path),
        dtype_for=lambda path: _dtype(config, learner, path),
    )
    facts = {
        "source": config.weights.path,
        "tensors": fingerprint(source, table, set(learner.trainable), prefix=prefix),
    }
    return {**loaded, **_random(config, learner, new)}, facts


def _from_run(config: Config, recipe: Recipe, learner: Learner) -> tuple[Params, FrozenFacts]:
    """Another run's newest weights (its average where it keeps one), over what that run itself started from."""
    workdir = Path(config.weights.path)
    with Checkpoints(workdir, keep=1_000_000) as checkpoints:
        step = checkpoints.latest
        if step is None:
            raise CheckpointError(f"config.weights.path: {workdir} has no complete checkpoint")
        before = checkpoints.config(step)
    base = dataclasses.replace(
        config,
        seed=before.seed,
        weights=dataclasses.replace(config.weights, path=before.weights.path),
    )
    trainable, frozen, facts = initial_parameters(base, recipe, learner)
    state = workdir / "checkpoints" / str(step) / "state"
    saved = SavedArrays(state, "ema") or SavedArrays(state, "trainable")
    unknown = [path for path in saved if path not in learner.specs]
    wrong = [
        f"{path}: {tuple(saved[path].shape)}, expected {learner.specs[path].shape}"
        for path in saved
        if path in learner.specs and tuple(saved[path].shape) != learner.specs[path].shape
    ]
    if unknown or wrong:
        raise CheckpointError(
            f"config.weights.path: the run in {workdir} does not fit this model:\n  "
            + "\n  ".join([f"{path}: this model has no such parameter" for path in unknown] + wrong)
        )
    values = {**trainable, **frozen}
    digests = dict(facts["tensors"])
    for path, array in saved.items():
        host = np.asarray(array).astype(_dtype(config, learner, path))
        values[path] = jax.device_put(host, _sharding(learner, path))
        if path in learner.frozen:
            digests[path] = {"dtype": "F32", "shape": list(array.shape), "digest": sampled_digest(np.asarray(array))}
    return values, {"source": f"{workdir} step {step}", "tensors": digests}


def check_frozen(saved: FrozenFacts, now: FrozenFacts) -> None:
    """Refuses to continue a checkpoint over other frozen weights than it was trained on."""
    if saved["tensors"] or now["tensors"]:
        where = f"config.weights.path={now['source']!r} (the checkpoint was trained over {saved['source']!r})"
        compare(read_fingerprint(saved["tensors"], "the checkpoint"), now["tensors"], where)
    elif saved["source"] != now["source"]:
        raise ValueError(f"the checkpoint was trained over {saved['source']}, this run starts from {now['source']}")


def _sharding(learner: Learner, path: str) -> jax.sharding.Sharding:
    return learner.layout.param(learner.specs[path], path in learner.groups)


def _dtype(config: Config, learner: Learner, path: str) -> Any:
    return storage_type(learner.specs[path], path in learner.groups, DTYPES[config.dtype.frozen])


def _random(config: Config, learner: Learner, paths: list[str]) -> Params:
    """Initial values of `paths`, trainable and frozen, each where and as it is stored."""
    values: Params = {}
    for trainable in (True, False):
        chosen = [path for path in paths if (path in learner.groups) == trainable]
        if chosen:
            dtype = DTYPES[config.dtype.frozen]
            values |= random_params(
                learner.specs, chosen, config.seed, learner.layout, trainable=trainable, frozen_dtype=dtype
            )
    return values
