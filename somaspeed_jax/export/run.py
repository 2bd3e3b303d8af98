"""A run's checkpoint as a directory that upstream loads."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from somaspeed_jax import recipes
from somaspeed_jax.assemble import DTYPES, Learner, load_processor, make_learner, on_one_device, processor_directory
from somaspeed_jax.checkpoint import CheckpointError, Checkpoints
from somaspeed_jax.config import Config
from somaspeed_jax.export import lerobot_pi05
from somaspeed_jax.export.lerobot_pi05 import SideFiles, json_bytes
from somaspeed_jax.export.saved import SavedArrays
from somaspeed_jax.initial import FrozenFacts
from somaspeed_jax.models.weights import groot_config, molmoact2_config, pi05
from somaspeed_jax.models.weights.export import Deltas, Exported, export_weights
from somaspeed_jax.models.weights.fingerprint import compare, fingerprint, read_fingerprint
from somaspeed_jax.models.weights.lora import deltas
from somaspeed_jax.models.weights.opening import open_weights
from somaspeed_jax.models.weights.safetensors_file import INDEX, WeightsError
from somaspeed_jax.models.weights.source import Source
from somaspeed_jax.models.weights.table import choose_prefix
from somaspeed_jax.recipes import Recipe
from somaspeed_jax.state import random_params

# Statistics that belong to the data of the source, not to the run's.
STALE = {"statistics.json", "norm_stats.json"}
COPIED = (".json", ".jinja", ".txt", ".model")


@dataclasses.dataclass(frozen=True)
class Report:
    """What was exported: from which step, which values, in which types, and what a person must know of it."""

    directory: Path
    step: int
    values: str  # "moving average" or "raw"
    stored: str
    source: str
    adapters: int  # kernels into which an adapter was merged
    exported: Exported
    notes: list[str]


def export_run(
    checkpoint: Path,
    directory: Path,
    *,
    average: bool = True,
    stored: Literal["float32", "source"] = "float32",
    weights: str = "",
    dataset: str = "",
    shard_bytes: int | None = None,
) -> Report:
    """Writes the policy of a checkpoint in upstream's layout.

    checkpoint: a run's workdir (its newest checkpoint), or `<workdir>/checkpoints/<step>`.
    average: the moving average where the run keeps one, else the raw parameters.
    stored, shard_bytes: see `export_weights`. weights: where the run's frozen weights are now, if not where they were.
    dataset: of a run on a mixture, the one whose statistics and facts go with the weights.
    Raises CheckpointError or WeightsError; nothing is written then.
    """
    workdir, step = _locate(checkpoint)
    with Checkpoints(workdir, keep=1_000_000) as checkpoints:
        step = checkpoints.latest if step is None else step
        if step is None:
            raise CheckpointError(f"{workdir / 'checkpoints'} has no complete checkpoint")
        config, frozen = checkpoints.config(step), checkpoints.frozen(step)
    recipe = recipes.get(config.model.name)
    statistics, facts, _ = load_processor(workdir, recipe, dataset)
    learner = make_learner(on_one_device(config), facts)
    source, prefix = _open_source(weights, frozen, recipe, learner)

    state = workdir / "checkpoints" / str(step) / "state"
    moving = SavedArrays(state, "ema") if average else {}
    saved = moving or SavedArrays(state, "trainable")
    adapters = _adapters(learner, saved)
    values = {path: value for path, value in saved.items() if ".lora." not in path}
    values |= _drawn(config, recipe, learner, SavedArrays(state, "frozen"), everything=source is None)

    if config.model.name == "pi05":
        side = lerobot_pi05.lerobot_files(config, learner.model_config, facts, statistics)
        export_prefix = pi05.EXPORT_PREFIX
    else:
        side, export_prefix = _copied_files(source) if source else _written_files(config, learner), prefix
    origin = {
        "step": step,
        "values": "moving average" if moving else "raw",
        "trained_tensors": stored,
        "source": frozen["source"],
        "merged_adapters": len(adapters),
    }
    exported = export_weights(
        directory,
        source,
        recipe.table(learner.model_config),
        learner.specs,
        values,
        source_prefix=prefix,
        export_prefix=export_prefix,
        deltas=adapters,
        stored=stored,
        shard_bytes=shard_bytes,
        files={**side.content, **_processor_files(workdir, dataset), "somaspeed_export.json": json_bytes(origin)},
    )
    return Report(directory, step, origin["values"], stored, frozen["source"], len(adapters), exported, side.notes)


def _locate(checkpoint: Path) -> tuple[Path, int | None]:
    """(workdir, step or None for the newest)."""
    if (checkpoint / "checkpoints").is_dir():
        return checkpoint, None
    if checkpoint.is_dir() and checkpoint.name.isdecimal() and checkpoint.parent.name == "checkpoints":
        return checkpoint.parent.parent, int(checkpoint.name)
    raise CheckpointError(
        f"{checkpoint} is neither the workdir of a run that has saved nor one of its checkpoints/<step>"
    )


def _open_source(weights: str, frozen: FrozenFacts, recipe: Recipe, learner: Learner) -> tuple[Source | None, str]:
    """The weights that the run started from and the prefix of their names; (None, "") for random ones.

    Raises WeightsError where they are not those that the checkpoint names.
    """
    if frozen["source"].startswith("init:"):
        if weights:
            raise WeightsError(
                f"{weights}: the run started from random weights ({frozen['source']}): it needs no others"
            )
        return None, ""
    path = weights or frozen["source"]
    source, table = open_weights(path, learner.model_config), recipe.table(learner.model_config)
    prefix = choose_prefix(list(source.names()), table, recipe.PREFIXES)
    saved = read_fingerprint(frozen["tensors"], "the checkpoint")
    compare(saved, fingerprint(source, table, set(learner.trainable), prefix=prefix), path)
    return source, prefix


def _adapters(learner: Learner, saved: Mapping[str, Any]) -> Deltas:
    values = {path: np.asarray(value) for path, value in saved.items() if ".lora." in path}
    return deltas(learner.policy, values) if values else {}


def _drawn(
    config: Config, recipe: Recipe, learner: Learner, kept: Mapping[str, Any], *, everything: bool
) -> dict[str, Any]:
    """Parameters that were neither trained nor read from a file: all frozen ones of a run without weights, and those
    that the configuration calls new. From the checkpoint where it keeps them, else drawn again from the seed."""
    patterns = (*recipe.new_paths(config), *config.weights.new)
    paths = [path for path in learner.frozen if everything or any(re.fullmatch(pattern, path) for pattern in patterns)]
    missing = [path for path in paths if path not in kept]
    drawn = random_params(
        learner.specs, missing, config.seed, learner.layout, trainable=False, frozen_dtype=DTYPES[config.dtype.frozen]
    ) if missing else {}  # fmt: skip
    return {**{path: kept[path] for path in paths if path in kept}, **drawn}


def _processor_files(workdir: Path, dataset: str) -> dict[str, bytes]:
    """The run's own statistics, facts and tokenizer, under `processor/`."""
    folder = processor_directory(workdir)
    found = [*folder.iterdir(), *((folder / dataset).iterdir() if dataset else ())]
    return {f"processor/{path.name}": path.read_bytes() for path in sorted(found) if path.is_file()}


def _written_files(config: Config, learner: Learner) -> SideFiles:
    """config.json of a run that started from random weights."""
    write = {"groot": groot_config.config_to_json, "molmoact2": molmoact2_config.config_to_json}[config.model.name]
    return SideFiles({"config.json": json_bytes(write(learner.model_config))}, [])


def _copied_files(source: Source) -> SideFiles:
    """The source's own configuration and tokenizer files."""
    found = [path for path in sorted(source.directory.iterdir()) if path.suffix in COPIED and path.name != INDEX]
    left = [path.name for path in found if path.name in STALE]
    notes = [f"{name} of the source is not copied: the run's own statistics are in processor/" for name in left]
    return SideFiles({path.name: path.read_bytes() for path in found if path.name not in STALE}, notes)
