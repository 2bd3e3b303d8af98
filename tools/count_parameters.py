"""How many parameters a configuration's model has, trains as upstream counts, and really trains.

    python tools/count_parameters.py --config configs/pi05.py
    python tools/count_parameters.py --config configs/pi05.py --config.tune.preset=full --json

Counts shapes: no weights, no data and no device are needed. Upstream also counts what gets no gradient (vocabulary
heads that nothing reads); "learns" is what has a path to the loss and is updated.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

from somaspeed_jax import recipes
from somaspeed_jax.command_line import parse
from somaspeed_jax.config import Config
from somaspeed_jax.models.layers.param import Runtime, param_specs
from somaspeed_jax.models.weights.counts import count_groups, upstream_trainable
from somaspeed_jax.state import split_trainable


def count(config: Config) -> dict[str, Any]:
    """The counts of a configuration as plain JSON: groups, and their sums."""
    recipe = recipes.get(config.model.name)
    model_config = recipe.model_config(config, None)
    specs = param_specs(recipe.build(model_config, Runtime()))
    learns, _ = split_trainable(specs, recipe.trainable(config))
    patterns, trained = (None, None) if config.tune.trainable else upstream_trainable(
        config.model.name, model_config, config.tune.preset
    )  # fmt: skip
    groups = count_groups(recipe.table(model_config), specs, set(learns), patterns)
    return {
        "model": config.model.name,
        "size": config.model.size,
        "tune": list(config.tune.trainable) or config.tune.preset,
        "upstream_total": sum(group.upstream for group in groups),
        "upstream_trained": trained,
        "held": sum(group.held for group in groups),
        "learns": sum(group.learns for group in groups),
        "groups": [dataclasses.asdict(group) for group in groups],
    }


def table(counts: dict[str, Any]) -> RichTable:
    title = f"{counts['model']}, size {counts['size']}, tune {counts['tune']}"
    shown = RichTable("part", title=title, show_footer=False)
    for heading in ("upstream total", "upstream trains", "held here", "learns"):
        shown.add_column(heading, justify="right")

    def number(value: int | None) -> str:
        return "–" if value is None else f"{value:,}"

    for group in counts["groups"]:
        shown.add_row(
            group["name"], *(number(group[key]) for key in ("upstream", "upstream_trained", "held", "learns"))
        )
    shown.add_section()
    shown.add_row("all", *(number(counts[key]) for key in ("upstream_total", "upstream_trained", "held", "learns")))
    return shown


def main(arguments: list[str] | None = None) -> int:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the files under configs/ import each other
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    try:
        counts = count(parse([argument for argument in arguments if argument != "--json"]).config)
    except ValueError as error:
        print(f"count_parameters: {error}", file=sys.stderr)
        return 2
    if "--json" in arguments:
        print(json.dumps(counts, indent=2))
    else:
        Console(width=110).print(table(counts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
