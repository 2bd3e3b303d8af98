"""From a configuration to everything that training and acting need: data, statistics, tokenizer, network, layout."""

import dataclasses
import os
import shutil
from collections.abc import Sequence
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
from somaspeed_jax.data.layout import read_layout
from somaspeed_jax.data.lerobot import LeRobotDataset
from somaspeed_jax.data.mixture import MixtureSource, MixtureTransform, camera_views
from somaspeed_jax.data.split import split_episodes
from somaspeed_jax.data.tokenizers import Tokenizer, load_tokenizer
from somaspeed_jax.data.transforms.base import Transform
from somaspeed_jax.mesh import Layout, make_mesh
from somaspeed_jax.mixture_config import parse_mixture, part_config
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
class Part:
    """One dataset of a run with what belongs to it alone. `validation` is None without a held-out share; `name` is
    what a mixture calls it, and `weight` its share of the samples on any scale."""

    train: LeRobotDataset
    validation: LeRobotDataset | None
    statistics: Statistics
    facts: Facts
    name: str = ""
    weight: float = 1.0


@dataclasses.dataclass(frozen=True)
class Data:
    """The opened data of a run: one dataset, or the parts of a mixture. `facts` are the run's: of the one dataset, or
    the first's with the cameras that the mixture has views for."""

    parts: tuple[Part, ...]
    tokenizer: Tokenizer
    facts: Facts

    @property
    def train(self) -> LeRobotDataset | MixtureSource:
        return self.parts[0].train if len(self.parts) == 1 else MixtureSource([part.train for part in self.parts])

    @property
    def validation(self) -> LeRobotDataset | MixtureSource | None:
        """The held-out episodes; None without a held-out share."""
        held_out = [part.validation for part in self.parts if part.validation is not None]
        return None if not held_out else held_out[0] if len(self.parts) == 1 else MixtureSource(held_out)


def open_data(config: Config) -> Data:
    """Opens and checks the datasets, splits them, computes or reads statistics, finds the prompt length."""
    recipe = recipes.get(config.model.name)
    tokenizer = load_tokenizer(tokenizer_source(config, recipe), recipe.TOKENIZER)  # pyright: ignore[reportArgumentType]
    if config.data.path or not config.data.mixture:
        part = _open_part(config, recipe, tokenizer, config.data.cameras)
        return Data((part,), tokenizer, part.facts)
    parts = []
    for entry in parse_mixture(config.data.mixture):
        own = part_config(config, entry.name)
        cameras = _present_cameras(config, dataset_path(own), entry.name)
        part = _open_part(own, recipe, tokenizer, cameras, entry.name)
        parts.append(dataclasses.replace(part, name=entry.name, weight=entry.weight))
    return _join(config, parts, tokenizer)


def _open_part(config: Config, recipe: Recipe, tokenizer: Tokenizer, cameras: Sequence[str], name: str = "") -> Part:
    train = LeRobotDataset(
        dataset_path(config),
        episodes=config.data.episodes or None,
        horizon=recipe.horizon(config),
        cameras=cameras or None,
        state_key=config.data.state_key,
        action_key=config.data.action_key,
        trust_timestamps=config.data.trust_timestamps,
        tail=config.data.tail or recipe.TAIL,
        task_key=config.data.task_key or None,
        default_task=config.data.default_task or None,
    )
    validation = None
    if config.data.holdout:
        kept, held_out = split_episodes([e.index for e in train.episodes], config.data.holdout, config.seed)
        train, validation = train.subset(kept), train.subset(held_out)
    statistics = read_statistics(config, recipe, train, name)
    return Part(train, validation, statistics, recipe.facts(config, train, tokenizer, statistics))


def _present_cameras(config: Config, path: Path, name: str) -> list[str]:
    """Those of `data.cameras` that a dataset of the mixture has; [] without `data.cameras`."""
    if not config.data.cameras:
        return []
    known = [feature for feature, kind in read_layout(path).features.items() if kind.is_camera]
    found = [camera for camera in config.data.cameras if camera in known]
    if not found:
        raise ConfigError(
            f"config.data.cameras: {', '.join(config.data.cameras)}: {name} has none of them; it has {', '.join(known)}"
        )
    return found


def _join(config: Config, parts: list[Part], tokenizer: Tokenizer) -> Data:
    """The parts of a mixture under one prompt length, their cameras in the order of the run's views."""
    rates = {part.name: part.facts.fps for part in parts}
    if len(set(rates.values())) > 1:
        shown = ", ".join(f"{name} at {fps:g}" for name, fps in rates.items())
        raise ConfigError(
            f"config.data.mixture: the datasets run at different rates, in frames a second: {shown}. The same number "
            "of actions would last differently long; convert them to one rate"
        )
    unused = [c for c in config.data.cameras if not any(c in part.facts.cameras for part in parts)]
    if unused:
        raise ConfigError(f"config.data.cameras: no dataset of the mixture has {', '.join(unused)}")
    names, filled = camera_views([part.facts.cameras for part in parts], config.data.cameras)
    length = max(part.facts.prompt_length for part in parts)
    joined = []
    for part, views in zip(parts, filled, strict=True):
        cameras = tuple(camera for _, camera in sorted(zip(views, part.facts.cameras, strict=True)))
        joined.append(
            dataclasses.replace(part, facts=dataclasses.replace(part.facts, cameras=cameras, prompt_length=length))
        )
    return Data(tuple(joined), tokenizer, dataclasses.replace(joined[0].facts, cameras=tuple(names)))


def make_transform(config: Config, recipe: Recipe, data: Data) -> Transform:
    """The transform of the run's records: the dataset's, or each dataset's own in a mixture."""
    if len(data.parts) == 1:
        part = data.parts[0]
        return recipe.transform(config, part.facts, part.statistics, data.tokenizer)
    return MixtureTransform(
        [
            recipe.transform(part_config(config, part.name), part.facts, part.statistics, data.tokenizer)
            for part in data.parts
        ],
        views=data.facts.cameras,
        state_dim=max(len(part.facts.state_names) for part in data.parts),
    )


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


def read_statistics(config: Config, recipe: Recipe, dataset: LeRobotDataset, name: str = "") -> Statistics:
    """The statistics of a dataset by `stats.source`; `name` is what a mixture calls it."""
    if config.stats.source == "dataset":
        return recipe.statistics(config, dataset)
    path = Path(config.stats.file if config.stats.source == "file" else config.weights.path)
    if config.stats.source == "checkpoint":
        path = processor_directory(path) / name / "statistics.json"
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
    """Keeps what a policy needs to act: statistics, facts, tokenizer. Written aside, then renamed.

    A mixture has the statistics and facts of each dataset in a folder of its name.
    """
    final = processor_directory(workdir)
    aside = final.with_name("processor.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    for part in data.parts:
        folder = aside / part.name
        folder.mkdir(exist_ok=True)
        stats.save(folder / "statistics.json", part.statistics)
        part.facts.save(folder / "facts.json")
    data.tokenizer.save(aside)
    shutil.rmtree(final, ignore_errors=True)
    aside.rename(final)


def load_processor(workdir: Path, recipe: Recipe, dataset: str = "") -> tuple[Statistics, Facts, Tokenizer]:
    """What `save_processor` kept; of a mixture, the dataset of that name, which must be given."""
    folder = processor_directory(workdir)
    if not folder.is_dir():
        raise ConfigError(f"{workdir} has no processor folder: it is not the workdir of a run")
    names = sorted(path.parent.name for path in folder.glob("*/facts.json"))
    if dataset not in (names or [""]):
        trained = f"a mixture of {', '.join(names)}: say whose cameras, units and statistics to use with dataset=NAME"
        raise ConfigError(
            f"{workdir}: dataset is {dataset!r}, but the run was trained on {trained if names else 'one dataset alone'}"
        )
    tokenizer = load_tokenizer(folder, recipe.TOKENIZER)  # pyright: ignore[reportArgumentType]
    own = folder / dataset
    return stats.load(own / "statistics.json"), Facts.load(own / "facts.json"), tokenizer


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


def on_one_device(config: Config) -> Config:
    """The same run on one device, whatever it was trained on."""
    return dataclasses.replace(
        config,
        mesh=dataclasses.replace(config.mesh, devices=1, replica=1, fsdp=1),
        batch=dataclasses.replace(config.batch, global_batch=0),
    )


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
