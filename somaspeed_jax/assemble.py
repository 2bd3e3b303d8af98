"""From a configuration to everything that training and acting need: data, statistics, tokenizer, network, layout."""

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from somaspeed_jax import recipes
from somaspeed_jax.config import Config, ConfigError
from somaspeed_jax.data import stats
from somaspeed_jax.data.demo import ensure_demo, ensure_demo_tokenizer
from somaspeed_jax.data.hub import resolve_dataset
from somaspeed_jax.data.lerobot import LeRobotDataset
from somaspeed_jax.data.split import split_episodes
from somaspeed_jax.data.tokenizers import Tokenizer, load_tokenizer
from somaspeed_jax.mesh import Layout, make_mesh
from somaspeed_jax.models.layers.param import ParamSpec, param_specs
from somaspeed_jax.optim import Group, Schedule, adamw, assign_groups, schedule
from somaspeed_jax.recipes import Facts, Recipe, Statistics
from somaspeed_jax.state import TrainState, split_trainable, state_shardings

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
DEMO = "demo"


def cache_directory() -> Path:
    """Where the program keeps what it made itself: SOMASPEED_CACHE, or ~/.cache/somaspeed_jax."""
    return Path(os.environ.get("SOMASPEED_CACHE", Path.home() / ".cache" / "somaspeed_jax"))


@dataclasses.dataclass(frozen=True)
class Data:
    """The opened data of a run. `validation` is None without a held-out share."""

    train: LeRobotDataset
    validation: LeRobotDataset | None
    statistics: Statistics
    tokenizer: Tokenizer
    facts: Facts


def open_data(config: Config) -> Data:
    """Opens and checks the dataset, splits it, computes or reads statistics, finds the prompt length."""
    recipe = recipes.get(config.model.name)
    path = dataset_path(config)
    options: dict[str, Any] = dict(
        horizon=recipe.horizon(config),
        cameras=config.data.cameras or None,
        state_key=config.data.state_key,
        action_key=config.data.action_key,
        trust_timestamps=config.data.trust_timestamps,
        tail=config.data.tail or recipe.TAIL,
        task_key=config.data.task_key or None,
        default_task=config.data.default_task or None,
    )
    train = LeRobotDataset(path, episodes=config.data.episodes or None, **options)
    validation = None
    if config.data.holdout:
        kept, held_out = split_episodes([e.index for e in train.episodes], config.data.holdout, config.seed)
        train, validation = train.subset(kept), train.subset(held_out)
    tokenizer = load_tokenizer(tokenizer_source(config, recipe), recipe.TOKENIZER)  # pyright: ignore[reportArgumentType]
    statistics = read_statistics(config, recipe, train)
    return Data(train, validation, statistics, tokenizer, recipe.facts(config, train, tokenizer, statistics))


def dataset_path(config: Config) -> Path:
    if not config.data.path:
        raise ConfigError(
            "config.data.path: is empty; give a LeRobot dataset directory, a Hugging Face dataset id, or 'demo'"
        )
    if config.data.path == DEMO:
        return ensure_demo(cache_directory())
    return resolve_dataset(config.data.path, config.data.episodes or None)


def tokenizer_source(config: Config, recipe: Recipe) -> Path | str:
    if config.data.tokenizer == DEMO:
        kinds = {"gemma": "sentencepiece"}
        return ensure_demo_tokenizer(cache_directory(), kinds.get(recipe.TOKENIZER, recipe.TOKENIZER))
    source = config.data.tokenizer or config.weights.path
    if not source:
        raise ConfigError(
            "config.data.tokenizer: is empty and there is no config.weights.path to take it from; give a directory, "
            "a file or a Hugging Face repo id, or 'demo' for the small tokenizer that the program trains itself"
        )
    return source


def read_statistics(config: Config, recipe: Recipe, dataset: LeRobotDataset) -> Statistics:
    if config.stats.source == "dataset":
        return recipe.statistics(config, dataset)
    path = Path(config.stats.file if config.stats.source == "file" else config.weights.path)
    if config.stats.source == "checkpoint":
        path = processor_directory(path) / "statistics.json"
    found = stats.load(path)
    keys = {"state": config.data.state_key, "action": config.data.action_key}
    chosen = {name: found.get(name, found.get(key)) for name, key in keys.items()}
    missing = [f"{name} (or {keys[name]})" for name, value in chosen.items() if value is None]
    if missing:
        raise ConfigError(f"statistics file {path} has no {', '.join(missing)}; it has {', '.join(found)}")
    sizes = {"state": len(dataset.state_names), "action": len(dataset.action_names)}
    for name, value in chosen.items():
        if value is not None and value.size != sizes[name]:
            raise ConfigError(
                f"statistics file {path}: {name} has {value.size} dimensions, the dataset has {sizes[name]}; "
                "use --config.stats.source=dataset or the file that belongs to this robot"
            )
    return {name: value for name, value in chosen.items() if value is not None}


def processor_directory(workdir: Path) -> Path:
    return workdir / "processor"


def save_processor(workdir: Path, data: Data) -> None:
    """Keeps what a policy needs to act: statistics, facts, tokenizer. Written aside, then renamed."""
    final = processor_directory(workdir)
    aside = final.with_name("processor.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    stats.save(aside / "statistics.json", data.statistics)
    data.facts.save(aside / "facts.json")
    data.tokenizer.save(aside)
    shutil.rmtree(final, ignore_errors=True)
    aside.rename(final)


def load_processor(workdir: Path, recipe: Recipe) -> tuple[Statistics, Facts, Tokenizer]:
    """What `save_processor` kept."""
    folder = processor_directory(workdir)
    if not folder.is_dir():
        raise ConfigError(f"{workdir} has no processor folder: it is not the workdir of a run")
    tokenizer = load_tokenizer(folder, recipe.TOKENIZER)  # pyright: ignore[reportArgumentType]
    return stats.load(folder / "statistics.json"), Facts.load(folder / "facts.json"), tokenizer


@dataclasses.dataclass(frozen=True)
class Learner:
    """The abstract half of a training run: network, layout, what trains, optimiser. Needs no data and no values."""

    model_config: Any
    policy: Any
    layout: Layout
    specs: dict[str, ParamSpec]
    trainable: list[str]
    frozen: list[str]
    groups: dict[str, Group]
    rate: Schedule
    optimizer: optax.GradientTransformation
    shardings: TrainState
    global_batch: int
    accumulation: int


def make_learner(config: Config, facts: Facts | None, devices: list[Any] | None = None) -> Learner:
    """Network, mesh, trainable split, optimiser groups and batch arithmetic of a configuration."""
    recipe = recipes.get(config.model.name)
    devices = choose_devices(config) if devices is None else devices
    layout = Layout(
        make_mesh(config.mesh.replica, config.mesh.fsdp, devices),
        config.mesh.frozen,
        DTYPES[config.dtype.compute],
        DTYPES[config.dtype.reduce],
    )
    runtime = layout.runtime(config.remat.context, config.remat.expert)
    model_config = recipe.model_config(config, facts)
    policy = recipe.build(model_config, runtime)
    specs = param_specs(policy)
    trainable, frozen = split_trainable(specs, recipe.trainable(config))
    groups = assign_groups(recipe.groups(config), trainable)
    o = config.optim
    rate = schedule(o.schedule, peak=o.lr, floor=o.floor, warmup=o.warmup, decay=o.decay_steps, steps=config.steps)
    optimizer = adamw(
        rate,
        groups,
        betas=(o.betas[0], o.betas[1]),
        eps=o.eps,
        clip_norm=o.clip_norm,
        moments_dtype=DTYPES[o.moments],
    )
    shardings = state_shardings(specs, trainable, frozen, optimizer, layout, config.ema.decay > 0)
    global_batch, accumulation = batch_arithmetic(config, len(devices))
    return Learner(
        model_config, policy, layout, specs, trainable, frozen, groups, rate, optimizer, shardings, global_batch,
        accumulation,
    )  # fmt: skip


def choose_devices(config: Config) -> list[Any]:
    present = jax.devices()
    if config.mesh.devices > len(present):
        raise ConfigError(
            f"config.mesh.devices: is {config.mesh.devices}, but {len(present)} devices are present"
            f" ({present[0].device_kind})"
        )
    return present[: config.mesh.devices] if config.mesh.devices else present


def batch_arithmetic(config: Config, devices: int) -> tuple[int, int]:
    """(global batch, microbatches a step). Refuses what does not divide, naming the nearest batches that do."""
    unit = config.batch.per_device * devices
    total = config.batch.global_batch or unit
    if total % unit:
        below, above = total // unit * unit, -(-total // unit) * unit
        near = " and ".join(str(n) for n in (below, above) if n)
        raise ConfigError(
            f"config.batch.global_batch: {total} is not a multiple of config.batch.per_device x devices = "
            f"{config.batch.per_device} x {devices} = {unit}; the nearest that work are {near}"
        )
    return total, total // unit
