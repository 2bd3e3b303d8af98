"""The parameters that a run starts from, published or random, straight into their shards."""

import re
from typing import Any

import jax

from somaspeed_jax.assemble import DTYPES, Learner
from somaspeed_jax.config import Config
from somaspeed_jax.models.layers.param import Params
from somaspeed_jax.models.weights.fingerprint import compare, fingerprint, read_fingerprint
from somaspeed_jax.models.weights.load import load_params
from somaspeed_jax.models.weights.source import open_source
from somaspeed_jax.models.weights.table import choose_prefix, prefixed
from somaspeed_jax.recipes import Recipe
from somaspeed_jax.state import random_params, storage_type

FrozenFacts = dict[str, Any]


def initial_parameters(config: Config, recipe: Recipe, learner: Learner) -> tuple[Params, Params, FrozenFacts]:
    """(trainable, frozen, what the frozen ones are: source and fingerprint)."""
    if not config.weights.path:
        trainable = _random(config, learner, learner.trainable, trainable=True)
        frozen = _random(config, learner, learner.frozen, trainable=False)
        return trainable, frozen, {"source": f"init:{config.seed}", "tensors": {}}
    source = open_source(config.weights.path)
    table = recipe.table(learner.model_config)
    prefix = choose_prefix(list(source.names()), table, recipe.PREFIXES)
    chosen = set(learner.trainable)
    patterns = (*recipe.new_paths(config), *config.weights.new)
    new = [path for path in learner.specs if any(re.fullmatch(pattern, path) for pattern in patterns)]
    frozen_dtype = DTYPES[config.dtype.frozen]
    loaded = load_params(
        source,
        prefixed(table, prefix),
        learner.specs,
        new=new,
        sharding_for=lambda path: learner.layout.param(learner.specs[path], path in chosen),
        dtype_for=lambda path: storage_type(learner.specs[path], path in chosen, frozen_dtype),
    )
    loaded |= _random(config, learner, [path for path in new if path in chosen], trainable=True)
    loaded |= _random(config, learner, [path for path in new if path not in chosen], trainable=False)
    facts = {
        "source": config.weights.path,
        "tensors": fingerprint(source, table, chosen, prefix=prefix),
    }
    return (
        {path: loaded[path] for path in learner.trainable},
        {path: loaded[path] for path in learner.frozen},
        facts,
    )


def check_frozen(saved: FrozenFacts, now: FrozenFacts) -> None:
    """Refuses to continue a checkpoint over other frozen weights than it was trained on."""
    if saved["tensors"] or now["tensors"]:
        where = f"config.weights.path={now['source']!r} (the checkpoint was trained over {saved['source']!r})"
        compare(read_fingerprint(saved["tensors"], "the checkpoint"), now["tensors"], where)
    elif saved["source"] != now["source"]:
        raise ValueError(f"the checkpoint was trained over {saved['source']}, this run starts from {now['source']}")


def _random(config: Config, learner: Learner, paths: list[str], *, trainable: bool) -> dict[str, jax.Array]:
    if not paths:
        return {}
    return random_params(
        learner.specs,
        paths,
        config.seed,
        learner.layout,
        trainable=trainable,
        frozen_dtype=DTYPES[config.dtype.frozen],
    )
