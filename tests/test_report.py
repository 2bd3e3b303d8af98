"""What a run says of itself before its first step."""

import dataclasses

import numpy as np
import pytest

from somaspeed_jax import recipes
from somaspeed_jax.assemble import tokenizer_source
from somaspeed_jax.config import Config, Data, Model
from somaspeed_jax.data.stats import compute
from somaspeed_jax.data.tokenizers import load_tokenizer
from somaspeed_jax.data.transforms.groot_groups import ActionGroup, Group
from somaspeed_jax.recipes import Facts
from somaspeed_jax.report import near_constant

NAMES = ("shoulder", "gripper_servo")


@pytest.mark.parametrize("model", ["pi05", "groot", "molmoact2"])
def test_U06_every_model_names_the_dimensions_that_hardly_move(model):
    """Feature, index, name and constant, whatever a model's transform calls its normalisers."""
    config = Config(model=Model(name=model, size="demo"), data=Data(tokenizer="demo"))
    recipe = recipes.get(model)
    tokenizer = load_tokenizer(tokenizer_source(config, recipe), recipe.TOKENIZER)  # pyright: ignore[reportArgumentType]
    rows = np.stack([np.full(50, 0.5), np.linspace(-1, 1, 50)], 1).astype(np.float32)
    statistics = {"state": compute(rows, NAMES, feature="state"), "action": compute(rows, NAMES, feature="action")}
    groups = {
        "state_groups": [dataclasses.asdict(Group("state", (0, 1)))],
        "action_groups": [dataclasses.asdict(ActionGroup("action", (0, 1)))],
    }
    facts = Facts(("top",), NAMES, NAMES, 10.0, 200, groups if model == "groot" else {})
    lines = near_constant(recipe.transform(config, facts, statistics, tokenizer))
    assert len(lines) == 2
    for feature, line in zip(("state", "action"), lines, strict=True):
        assert feature in line and "[0] (shoulder) hardly moves: taken as the constant 0.5" in line
