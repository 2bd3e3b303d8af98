"""π0.5: configuration, data and network together. Two published recipes: LeRobot's and openpi's."""

import dataclasses
import functools
from typing import Any, Literal, cast

from somaspeed_jax.augment import pi05 as augmentation
from somaspeed_jax.config import Config, ConfigError
from somaspeed_jax.data import stats
from somaspeed_jax.data.lerobot import LeRobotDataset
from somaspeed_jax.data.normalize import Mode, Normalizer
from somaspeed_jax.data.tokenizers import Tokenizer
from somaspeed_jax.data.transforms.pi05 import Pi05Transform, Pi05TransformConfig, relative_mask
from somaspeed_jax.models import pi05 as model
from somaspeed_jax.models.layers.param import Runtime
from somaspeed_jax.models.weights import pi05 as weights
from somaspeed_jax.models.weights.table import Table
from somaspeed_jax.optim import Group
from somaspeed_jax.recipes import Facts, Statistics

TOKENIZER = "gemma"
TAIL = "repeat"
PREFIXES = ("", "model.")

PROMPT_LIMIT = 200  # tokens, both upstreams
OPENPI_VIEWS = 3


def horizon(config: Config) -> int:
    return config.model.horizon or _size(config).horizon


def model_config(config: Config, facts: Facts | None = None) -> model.Pi05Config:
    size = dataclasses.replace(_size(config), horizon=horizon(config))
    if config.model.euler_steps:
        size = dataclasses.replace(size, flow=dataclasses.replace(size.flow, steps=config.model.euler_steps))
    return size.with_lora() if config.tune.preset == "lora" else size


def build(model_config: model.Pi05Config, runtime: Runtime) -> model.Pi05:
    return model.build(model_config, runtime)


def statistics(config: Config, dataset: LeRobotDataset) -> dict[str, stats.FeatureStatistics]:
    relative = None
    if config.data.relative_actions:
        relative = relative_mask(dataset.action_names, config.data.relative_exclude)
    found = stats.of_dataset(dataset, relative=relative)
    return {"state": found[dataset.state_key], "action": found[dataset.action_key]}


def facts(config: Config, dataset: LeRobotDataset, tokenizer: Tokenizer, statistics: Statistics) -> Facts:
    known = Facts(
        cameras=tuple(dataset.cameras),
        state_names=tuple(dataset.state_names),
        action_names=tuple(dataset.action_names),
        fps=float(dataset.fps),
        prompt_length=config.data.prompt_length or PROMPT_LIMIT,
    )
    transform_ = transform(config, known, statistics, tokenizer)
    needed = transform_.required_prompt_length(dataset.tasks, dataset.task_episodes)
    return dataclasses.replace(known, prompt_length=config.data.prompt_length or needed)


def transform(config: Config, facts: Facts, statistics: Statistics, tokenizer: Tokenizer) -> Pi05Transform:
    recipe = cast(Literal["lerobot", "openpi"], config.pi05.recipe)
    mode = cast(Mode, config.data.normalization or "quantiles")
    size = _size(config)
    return Pi05Transform(
        Pi05TransformConfig(
            cameras=facts.cameras,
            horizon=horizon(config),
            absent_cameras=OPENPI_VIEWS - len(facts.cameras) if recipe == "openpi" else 0,
            image_size=size.vision.image,
            action_dim=size.action_dim,
            prompt_length=facts.prompt_length,
            state_in_prompt=config.pi05.state_in_prompt,
            recipe=recipe,
            relative_actions=config.data.relative_actions,
            relative_exclude=config.data.relative_exclude,
        ),
        tokenizer,
        Normalizer(statistics["state"], mode, recipe),
        Normalizer(statistics["action"], mode, recipe),
    )


def prepare(config: Config, facts: Facts) -> Any:
    """openpi's recipe augments, LeRobot's does not; `data.augment` of none or openpi decides otherwise."""
    choice = config.data.augment or ("openpi" if config.pi05.recipe == "openpi" else "none")
    if choice not in ("none", "openpi"):
        raise ConfigError(f"config.data.augment: is {choice!r}, expected '', 'none' or 'openpi' for pi05")
    settings = augmentation.Pi05Augmentation() if choice == "openpi" else None
    return functools.partial(_prepare, cameras=facts.cameras, settings=settings)


def _prepare(images, keys, *, cameras, settings):
    return augmentation.prepare(images, cameras, keys, settings)


def trainable(config: Config) -> tuple[str, ...]:
    return config.tune.trainable or model.trainable_patterns(config.tune.preset)


def groups(config: Config) -> list[Group]:
    """One group: neither upstream exempts norms or biases from decay."""
    return [Group("all", (r".*",), weight_decay=config.optim.weight_decay)]


def table(model_config: model.Pi05Config) -> Table:
    return weights.table(model_config)


def new_paths(config: Config) -> tuple[str, ...]:
    return (r".*\.lora\.[ab]",) if config.tune.preset == "lora" else ()


def _size(config: Config) -> model.Pi05Config:
    if config.model.size not in model.SIZES:
        raise ConfigError(
            f"config.model.size: is {config.model.size!r}, expected one of {', '.join(model.SIZES)} for pi05"
        )
    return model.SIZES[config.model.size]
