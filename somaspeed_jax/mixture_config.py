"""The entries of `data.mixture`: PATH*WEIGHT, or PATH:EMBODIMENT*WEIGHT for a model with embodiments.

data.mixture = ("data/so101-pick*2", "data/so101-fold*1")
data.mixture = ("data/franka:oxe_droid_relative_eef_relative_joint*0.7", "data/mine:new_embodiment*0.3")
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from somaspeed_jax.config import Config

ENTRY = re.compile(r"(?P<path>.+?)(:(?P<embodiment>[A-Za-z0-9_]+))?\*(?P<weight>[^*]+)")


@dataclasses.dataclass(frozen=True)
class Entry:
    """One dataset of a mixture. name: what metrics, start-up lines and the kept processor call it. embodiment: GR00T's
    tag, or "". weight: its share of the samples, on any positive scale."""

    name: str
    path: str
    embodiment: str
    weight: float


def parse_mixture(mixture: Sequence[str]) -> tuple[Entry, ...]:
    """The entries, named by the last part of their paths (numbered where two are alike). Raises ValueError."""
    found = []
    for text in mixture:
        match = ENTRY.fullmatch(text)
        try:
            weight = float(match["weight"]) if match else math.nan
        except ValueError:
            weight = math.nan
        if not match or not math.isfinite(weight) or weight <= 0:
            raise ValueError(f"{text!r} is not PATH*WEIGHT or PATH:EMBODIMENT*WEIGHT with a weight above 0")
        name = match["path"].rstrip("/").rsplit("/", 1)[-1]
        number = sum(entry.name.partition("#")[0] == name for entry in found)
        found.append(
            Entry(f"{name}#{number + 1}" if number else name, match["path"], match["embodiment"] or "", weight)
        )
    return tuple(found)


def mixture_faults(config: "Config") -> list[str]:
    """What is wrong with `data.mixture`, alone and beside the other fields."""
    if not config.data.mixture:
        return []
    try:
        entries = parse_mixture(config.data.mixture)
    except ValueError as error:
        return [f"config.data.mixture: {error}"]
    faults = []
    if len(entries) == 1:
        faults.append(f"config.data.mixture: has one dataset; set config.data.path={entries[0].path!r} instead")
    twice = [path for path, times in Counter(entry.path for entry in entries).items() if times > 1]
    if twice:
        faults.append(f"config.data.mixture: {', '.join(twice)} is named twice; give it one entry and a larger weight")
    if config.data.path:
        faults.append(
            f"config.data.path: is {config.data.path!r}, but config.data.mixture names the datasets; leave one empty"
        )
    if config.data.episodes:
        faults.append("config.data.episodes: means one dataset, but config.data.mixture names several; leave it empty")
    if config.stats.source == "file":
        faults.append(
            "config.stats.source: is 'file', but each dataset of config.data.mixture has statistics of its own; use "
            "'dataset' or 'checkpoint'"
        )
    if config.evaluation.closed_loop_starts:
        faults.append("config.evaluation.closed_loop_starts: plays the demo's policy, which a mixture has not; set 0")
    tagged = [entry for entry in entries if entry.embodiment]
    if tagged and config.model.name != "groot":
        faults.append(
            f"config.data.mixture: {tagged[0].name} names an embodiment, which {config.model.name} does not have"
        )
    elif tagged and len(tagged) < len(entries):
        untagged = ", ".join(entry.name for entry in entries if not entry.embodiment)
        faults.append(f"config.data.mixture: no embodiment for {untagged}; name all of them, or none")
    return faults


def part_config(config: "Config", name: str) -> "Config":
    """The configuration as one dataset of the mixture sees it: its own path and embodiment. `mixture` stays, since the
    network is the whole mixture's; where both are set, `path` says which dataset is meant."""
    entry = next(entry for entry in parse_mixture(config.data.mixture) if entry.name == name)
    return dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, path=entry.path),
        groot=dataclasses.replace(config.groot, embodiment=entry.embodiment or config.groot.embodiment),
    )


def embodiments(config: "Config") -> tuple[str, ...]:
    """The tags of all datasets of the run, in order, each once."""
    tags = [entry.embodiment or config.groot.embodiment for entry in parse_mixture(config.data.mixture)]
    return tuple(dict.fromkeys(tags or [config.groot.embodiment]))
