"""MolmoAct2: configuration, data and network together."""

import dataclasses
from typing import Any, cast

from somaspeed_jax.augment import common
from somaspeed_jax.config import Config, ConfigError
from somaspeed_jax.data import stats
from somaspeed_jax.data.lerobot import LeRobotDataset
from somaspeed_jax.data.tokenizers import Tokenizer
from somaspeed_jax.data.transforms.molmoact2 import MolmoAct2Transform, normalizer
from somaspeed_jax.data.transforms.molmoact2_prompt import ImageLayout, PromptFormat
from somaspeed_jax.models import molmoact2 as model
from somaspeed_jax.models.layers.param import Runtime
from somaspeed_jax.models.weights import molmoact2 as weights
from somaspeed_jax.models.weights.molmoact2_config import config_from_json
from somaspeed_jax.models.weights.source import find_directory, read_config
from somaspeed_jax.models.weights.table import Table
from somaspeed_jax.optim import Group
from somaspeed_jax.recipes import Facts, Statistics

TOKENIZER = "molmoact2"
TAIL = "repeat"
PREFIXES = ("", "model.")


def horizon(config: Config) -> int:
    return config.model.horizon or _size(config).horizon


def model_config(config: Config, facts: Facts | None = None) -> model.MolmoAct2Config:
    size = dataclasses.replace(_size(config), horizon=horizon(config))
    if config.model.euler_steps:
        size = dataclasses.replace(size, flow=dataclasses.replace(size.flow, steps=config.model.euler_steps))
    return size.with_lora() if config.tune.preset == "lora" else size


def build(model_config: model.MolmoAct2Config, runtime: Runtime) -> model.MolmoAct2:
    return model.build(model_config, runtime)


def statistics(config: Config, dataset: LeRobotDataset) -> dict[str, stats.FeatureStatistics]:
    _refuse_relative(config)
    found = stats.of_dataset(dataset)
    return {"state": found[dataset.state_key], "action": found[dataset.action_key]}


def facts(config: Config, dataset: LeRobotDataset, tokenizer: Tokenizer, statistics: Statistics) -> Facts:
    expected, found = _size(config).ids, model.prompt_ids(tokenizer.id)
    if found != expected:
        raise ConfigError(
            f"tokenizer {tokenizer.source}: its picture and end tokens are {found}, the model's are {expected}; "
            "use the tokenizer that belongs to these weights"
        )
    known = Facts(
        cameras=tuple(dataset.cameras),
        state_names=tuple(dataset.state_names),
        action_names=tuple(dataset.action_names),
        fps=float(dataset.fps),
        prompt_length=0,
    )
    needed = transform(config, known, statistics, tokenizer).required_prompt_length(
        dataset.tasks, dataset.task_episodes
    )
    asked = config.data.prompt_length
    if asked and asked < needed:
        raise ConfigError(
            f"config.data.prompt_length: is {asked}, but the longest prompt of this dataset has up to {needed} tokens; "
            "raise it, or set 0 to take what is needed"
        )
    return dataclasses.replace(known, prompt_length=asked or needed)


def transform(config: Config, facts: Facts, statistics: Statistics, tokenizer: Tokenizer) -> MolmoAct2Transform:
    size = _size(config)
    if config.data.normalization not in ("", "quantiles"):
        raise ConfigError(f"config.data.normalization: is {config.data.normalization!r}; molmoact2 has quantiles alone")
    gripper = config.molmoact2.normalize_gripper
    return MolmoAct2Transform(
        tokenizer,
        normalizer(statistics["state"], names=facts.state_names, normalize_gripper=gripper),
        normalizer(statistics["action"], names=facts.action_names, normalize_gripper=gripper),
        cameras=facts.cameras,
        prompt=PromptFormat(setup=config.molmoact2.setup, control=config.molmoact2.control),
        layout=ImageLayout(size.vision.image, size.vision.patch),
        horizon=horizon(config),
        action_dim=size.action_dim,
        prompt_length=facts.prompt_length or None,
        behaviour=_behaviour(config),
    )


def prepare(config: Config, facts: Facts) -> Any:
    """Pictures to [-1, 1]; neither upstream release augments by default."""
    if config.data.augment not in ("", "none"):
        raise ConfigError(f"config.data.augment: is {config.data.augment!r}, expected '' or 'none' for molmoact2")
    return _prepare


def _prepare(images, keys):
    return tuple(common.signed_range(common.unit_range(image)) for image in images)


def trainable(config: Config) -> tuple[str, ...]:
    return config.tune.trainable or model.trainable_patterns(config.tune.preset, _behaviour(config))


def groups(config: Config) -> list[Group]:
    return [
        Group(g.name, g.patterns, g.lr_scale, config.optim.weight_decay, g.clip_group)
        for g in model.parameter_groups(config.tune.preset, _behaviour(config))
    ]


def table(model_config: model.MolmoAct2Config) -> Table:
    return weights.table(model_config)


def new_paths(config: Config) -> tuple[str, ...]:
    return (r".*\.lora\.[ab]",) if config.tune.preset == "lora" else ()


def _behaviour(config: Config) -> model.Behaviour:
    return cast(model.Behaviour, config.molmoact2.behaviour)


def _size(config: Config) -> model.MolmoAct2Config:
    """The checkpoint's own sizes where there is one, else a named size."""
    if config.weights.path:
        values = read_config(find_directory(config.weights.path))
        if values.get("type") == "molmoact2":  # a folder that LeRobot saved names the checkpoint it started from
            values = read_config(find_directory(values["checkpoint_path"]))
        if values.get("model_type") == "molmoact2":
            return config_from_json(values, behaviour=_behaviour(config))
    if config.model.size not in model.SIZES:
        raise ConfigError(
            f"config.model.size: is {config.model.size!r}, expected one of {', '.join(model.SIZES)} for molmoact2"
        )
    return dataclasses.replace(model.SIZES[config.model.size], behaviour=_behaviour(config))


def _refuse_relative(config: Config) -> None:
    if config.data.relative_actions:
        raise ConfigError("config.data.relative_actions: molmoact2 has no relative actions; use absolute ones")
