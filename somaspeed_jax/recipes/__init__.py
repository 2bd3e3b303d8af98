"""One module a model: how configuration, data and network of that model meet.

Each module has the functions of `Recipe`. Nothing else in the program knows which model it trains.
"""

import dataclasses
import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, cast

from somaspeed_jax.config import Config
from somaspeed_jax.data.lerobot import LeRobotDataset
from somaspeed_jax.data.stats import FeatureStatistics
from somaspeed_jax.data.tokenizers import Tokenizer
from somaspeed_jax.data.transforms.base import Transform
from somaspeed_jax.models.layers.param import Runtime
from somaspeed_jax.models.weights.table import Table
from somaspeed_jax.optim import Group

Statistics = Mapping[str, FeatureStatistics]


@dataclasses.dataclass(frozen=True)
class Facts:
    """What a run knows of its data beside the statistics; kept with the run, so that a policy can act without them.

    cameras: dataset features in the model's order. state_names, action_names: of the robot's dimensions. fps: frames a
    second. prompt_length: tokens, fixed before the first step. extra: what one model alone needs (plain JSON).
    """

    cameras: tuple[str, ...]
    state_names: tuple[str, ...]
    action_names: tuple[str, ...]
    fps: float
    prompt_length: int
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self), indent=2, allow_nan=False))

    @staticmethod
    def load(path: Path) -> "Facts":
        values: dict[str, Any] = json.loads(path.read_text())
        read: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
        return Facts(**read)


class Recipe(Protocol):
    """The functions of a recipe module."""

    TOKENIZER: str  # kind, see data/tokenizers.py
    TAIL: str  # upstream's treatment of chunks that reach past the end of an episode: repeat | drop
    PREFIXES: tuple[str, ...]  # what names in a published file may begin with

    def model_config(self, config: Config, facts: Facts | None) -> Any:
        """Sizes and behaviour of the network. `facts` None: as published, without data (plans and counts)."""
        ...

    def horizon(self, config: Config) -> int:
        """Actions a chunk."""
        ...

    def build(self, model_config: Any, runtime: Runtime) -> Any:
        """The abstract policy."""
        ...

    def facts(self, config: Config, dataset: LeRobotDataset, tokenizer: Tokenizer, statistics: Statistics) -> Facts: ...

    def statistics(self, config: Config, dataset: LeRobotDataset) -> dict[str, FeatureStatistics]:
        """Statistics of the chosen rows, by feature name."""
        ...

    def transform(self, config: Config, facts: Facts, statistics: Statistics, tokenizer: Tokenizer) -> Transform: ...

    def prepare(self, config: Config, facts: Facts) -> Any:
        """Pictures on the device: see step.Prepare."""
        ...

    def trainable(self, config: Config) -> tuple[str, ...]:
        """Path patterns that train."""
        ...

    def groups(self, config: Config) -> list[Group]:
        """Optimiser groups over the trainable paths."""
        ...

    def table(self, model_config: Any) -> Table:
        """Upstream names and our paths."""
        ...

    def new_paths(self, config: Config) -> tuple[str, ...]:
        """Path patterns that no published file has (adapters)."""
        ...


def get(name: str) -> Recipe:
    """The recipe of a model by its configuration name."""
    return cast(Recipe, importlib.import_module(f"somaspeed_jax.recipes.{name}"))
