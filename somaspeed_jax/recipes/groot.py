"""GR00T N1.7: configuration, data and network together."""

import dataclasses
import functools
from typing import Any, cast

import numpy as np

from somaspeed_jax.augment import groot as augmentation
from somaspeed_jax.config import Config, ConfigError
from somaspeed_jax.data import stats
from somaspeed_jax.data.lerobot import LeRobotDataset
from somaspeed_jax.data.normalize import Mode
from somaspeed_jax.data.tokenizers import Tokenizer
from somaspeed_jax.data.transforms import groot_groups
from somaspeed_jax.data.transforms.groot import GrootTransform, GrootTransformConfig
from somaspeed_jax.data.transforms.groot_groups import ActionGroup, groups_by_name, groups_from_modality
from somaspeed_jax.data.transforms.groot_images import GrootPictures
from somaspeed_jax.mixture_config import embodiments
from somaspeed_jax.models import groot as model
from somaspeed_jax.models.layers.linear import LoraSpec
from somaspeed_jax.models.layers.param import Runtime
from somaspeed_jax.models.weights import groot as weights
from somaspeed_jax.models.weights.groot_config import config_from_json
from somaspeed_jax.models.weights.source import find_directory, read_config
from somaspeed_jax.models.weights.table import Table
from somaspeed_jax.optim import Group
from somaspeed_jax.recipes import Facts, Statistics

TOKENIZER = "qwen"
TAIL = "drop"  # upstream trains on chunks that lie inside their episode
PREFIXES = ("", "_groot_model.")

PROMPT_LIMIT = 1024
LORA = LoraSpec(rank=16, alpha=32.0)  # ours: upstream has no adapters


def horizon(config: Config) -> int:
    """Actions a record; the network's own horizon is what they are padded to."""
    return config.model.horizon or _size(config).horizon


def model_config(config: Config, facts: Facts | None = None) -> model.GrootConfig:
    size, settings = _size(config), config.groot
    return dataclasses.replace(
        size,
        steps=config.model.euler_steps or size.steps,
        dropout=size.dropout if settings.dropout else 0.0,
        vl_dropout=size.vl_dropout if settings.dropout else 0.0,
        state_dropout=settings.state_dropout,
        mask_vl_padding=settings.mask_vl_padding,
        lora=LORA if config.tune.preset == "lora" else None,
    )


def build(model_config: model.GrootConfig, runtime: Runtime) -> model.Groot:
    return model.build(model_config, runtime)


def statistics(config: Config, dataset: LeRobotDataset) -> dict[str, stats.FeatureStatistics]:
    state, actions = dataset.numeric(config.data.state_key), dataset.numeric(config.data.action_key)
    computed = {
        "state": stats.compute(state, dataset.state_names, feature=config.data.state_key),
        "action": stats.compute(actions, dataset.action_names, feature=config.data.action_key),
    }
    _, groups = _groups(config, dataset)
    reference, mask = np.zeros_like(actions), np.zeros(actions.shape[1], bool)
    for group in groups:
        if group.relative_to:
            reference[:, list(group.columns)] = state[:, list(group.relative_to)]
            mask[list(group.columns)] = True
    if mask.any():
        computed["relative_action"] = stats.compute_relative(
            actions,
            reference,
            np.concatenate([np.full(episode.length, episode.index) for episode in dataset.episodes]),
            horizon(config),
            dataset.action_names,
            mask=mask,
            per_step=True,
            feature="relative_action",
        )
    return computed


def facts(config: Config, dataset: LeRobotDataset, tokenizer: Tokenizer, statistics: Statistics) -> Facts:
    expected, found = _size(config).image_token, tokenizer.id("<|image_pad|>")
    if found != expected:
        raise ConfigError(
            f"tokenizer {tokenizer.source}: <|image_pad|> is {found}, the model's picture token is {expected}; "
            "use the tokenizer that belongs to these weights"
        )
    states, actions = _groups(config, dataset)
    known = Facts(
        cameras=tuple(dataset.cameras),
        state_names=tuple(dataset.state_names),
        action_names=tuple(dataset.action_names),
        fps=float(dataset.fps),
        prompt_length=config.data.prompt_length or PROMPT_LIMIT,
        extra={
            "state_groups": [dataclasses.asdict(group) for group in states],
            "action_groups": [dataclasses.asdict(group) for group in actions],
        },
    )
    sources = [dataset.frame(0, camera).shape[:2] for camera in dataset.cameras]
    needed = transform(config, known, statistics, tokenizer).required_prompt_length(
        dataset.tasks, cast(list[tuple[int, int]], sources), dataset.task_episodes
    )
    return dataclasses.replace(known, prompt_length=config.data.prompt_length or needed)


def transform(config: Config, facts: Facts, statistics: Statistics, tokenizer: Tokenizer) -> GrootTransform:
    size = _size(config)
    mode = cast(Mode, config.data.normalization or ("quantiles" if config.groot.use_percentiles else "min_max"))
    states = tuple(groot_groups.Group(**_tuples(group)) for group in facts.extra["state_groups"])
    actions = tuple(ActionGroup(**_tuples(group)) for group in facts.extra["action_groups"])
    row = groot_groups.embodiment_id(config.groot.embodiment)
    if not config.groot.decay_unused_rows:
        row = _ids(config).index(row)
    return GrootTransform(
        GrootTransformConfig(
            cameras=facts.cameras,
            chunk=horizon(config),
            state_groups=states,
            action_groups=actions,
            horizon=size.horizon,
            state_dim=size.state_dim,
            action_dim=size.action_dim,
            pictures=_pictures(config),
            patch=size.vision.patch,
            prompt_length=facts.prompt_length,
            embodiment=row,
        ),
        tokenizer,
        groot_groups.normalizers(states, statistics["state"], None, mode),
        groot_groups.normalizers(actions, statistics["action"], statistics.get("relative_action"), mode),
    )


def prepare(config: Config, facts: Facts) -> Any:
    """Random window and colour jitter in training, the central window otherwise."""
    if config.data.augment not in ("", "none", "groot"):
        raise ConfigError(f"config.data.augment: is {config.data.augment!r}, expected '', 'none' or 'groot' for groot")
    bounds, random = config.groot.colour_jitter, config.data.augment != "none"
    if len(bounds) not in (0, 4):
        raise ConfigError(f"config.groot.colour_jitter: has {len(bounds)} values, expected 4, or () for none")
    jitter = augmentation.ColourJitter(*bounds) if bounds and random else None
    settings = augmentation.GrootAugmentation(_pictures(config), random_window=random, jitter=jitter)
    return functools.partial(_prepare, settings=settings)


def _prepare(images, keys, *, settings):
    return augmentation.prepare(images, keys, settings)


def trainable(config: Config) -> tuple[str, ...]:
    return config.tune.trainable or model.trainable_patterns(config.tune.preset)


def groups(config: Config) -> list[Group]:
    """Upstream's two groups: norms and biases of linear layers are not decayed."""
    return [
        Group("no_decay", (r".*\.(bias|scale)",), weight_decay=0.0),
        Group("decay", (r".*",), weight_decay=config.optim.weight_decay),
    ]


def table(model_config: model.GrootConfig) -> Table:
    return weights.table(model_config)


def new_paths(config: Config) -> tuple[str, ...]:
    return (r".*\.lora\.[ab]",) if config.tune.preset == "lora" else ()


def _size(config: Config) -> model.GrootConfig:
    """The checkpoint's own sizes where there is one, else a named size; with the rows of this run's embodiments."""
    if config.weights.path:
        values = read_config(find_directory(config.weights.path))
        if "backbone_embedding_dim" in values:
            return config_from_json(values, _rows(config, int(values["max_num_embodiments"])))
    if config.model.size not in model.SIZES:
        raise ConfigError(
            f"config.model.size: is {config.model.size!r}, expected one of {', '.join(model.SIZES)} for groot"
        )
    size = model.SIZES[config.model.size]
    if config.model.size != "published":
        needed = len(_ids(config))
        return size if needed <= len(size.embodiments) else dataclasses.replace(size, embodiments=tuple(range(needed)))
    return dataclasses.replace(size, embodiments=_rows(config, size.embodiment_slots))


def _rows(config: Config, slots: int) -> tuple[int, ...]:
    if config.groot.decay_unused_rows:
        return tuple(range(slots))
    return _ids(config)


def _ids(config: Config) -> tuple[int, ...]:
    """Upstream's rows of the embodiments in this run, each once."""
    return tuple(dict.fromkeys(groot_groups.embodiment_id(tag) for tag in embodiments(config)))


def _pictures(config: Config) -> GrootPictures:
    vision = _size(config).vision
    if vision == model.SIZES["published"].vision:
        return GrootPictures(crop_fraction=config.groot.crop_fraction)
    side = vision.patch * round(vision.positions**0.5)
    return GrootPictures(
        target=(side, side), crop_fraction=config.groot.crop_fraction, multiple=2 * vision.patch, min_pixels=0
    )


def _groups(config: Config, dataset: LeRobotDataset) -> tuple[tuple[groot_groups.Group, ...], tuple[ActionGroup, ...]]:
    """modality.json's groups where the dataset has them, else one of state and one or more of actions.

    With relative actions a group is relative to the state group of its own name, unless `data.relative_exclude` names
    it.
    """
    if dataset.modality is None:
        exclude = config.data.relative_exclude if config.data.relative_actions else None
        actions = groups_by_name(dataset.action_names, dataset.state_dim, exclude)
        return (groot_groups.Group("state", tuple(range(dataset.state_dim))),), actions
    relative = {}
    if config.data.relative_actions:
        excluded = [part.lower() for part in config.data.relative_exclude]
        relative = {
            name: name
            for name in dataset.modality.action
            if name in dataset.modality.state and not any(part in name.lower() for part in excluded)
        }
    return groups_from_modality(dataset.modality, config.data.state_key, config.data.action_key, relative=relative)


def _tuples(group: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in group.items()}
