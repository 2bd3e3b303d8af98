"""Says what a directory of weights holds and whether it fits a model. Reads headers: seconds, whatever the size.

    python tools/check_weights.py lerobot/pi05_base
    python tools/check_weights.py path/to/weights --model groot
    python tools/check_weights.py exported/demo --config configs/pi05.py:demo

Without --config the sizes are the published ones. Exit status: 0 it fits, 1 it does not, 2 there is nothing to check.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

MODELS = ("pi05", "groot", "molmoact2")


def parse(arguments: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", help="a directory, a .safetensors file or a Hugging Face repository (owner/name)")
    parser.add_argument("--model", choices=MODELS, help="default: the one that knows most of the names")
    parser.add_argument("--config", help="take model and sizes from configs/<model>.py[:variant] instead")
    return parser.parse_known_args(arguments)


def candidates(args: argparse.Namespace, overrides: list[str]) -> list[tuple[str, Any]]:
    """(model, its configuration) to compare with."""
    from somaspeed_jax import recipes
    from somaspeed_jax.command_line import parse as parse_config
    from somaspeed_jax.config import Config, Model

    if args.config:
        config = parse_config(["--config", args.config, *overrides]).config
        return [(config.model.name, recipes.get(config.model.name).model_config(config, None))]
    if overrides:
        raise ValueError(f"{' '.join(overrides)}: overrides go with --config")
    names = [args.model] if args.model else MODELS
    return [(name, recipes.get(name).model_config(Config(model=Model(name=name)), None)) for name in names]


def main(arguments: list[str] | None = None) -> int:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the files under configs/ import each other
    args, overrides = parse(arguments)
    from somaspeed_jax import recipes
    from somaspeed_jax.models.weights.contents import contents, fit
    from somaspeed_jax.models.weights.opening import open_weights

    try:
        compared = []
        for name, model_config in candidates(args, overrides):
            source = open_weights(args.directory, model_config)
            recipe = recipes.get(name)
            compared.append((name, source, fit(source, recipe.table(model_config), recipe.PREFIXES)))
        name, source, found = max(compared, key=lambda item: item[2].known)
        held = contents(source)
    except (ValueError, OSError) as error:
        print(f"check_weights: {error}", file=sys.stderr)
        return 2
    kind = f", config.json says {held.kind!r}" if held.kind else ""
    types = ", ".join(f"{count:,} {code}" for code, count in held.types.items())
    print(f"{held.directory}: {held.tensors} tensors in {len(held.files)} files, {held.bytes / 1e9:.3f} GB{kind}")
    print(f"  {held.elements:,} elements: {types}")
    if not found.known:
        print(f"  no tensor of {' or '.join(name for name, *_ in compared)}")
        return 1
    prefix = f", names begin with {found.prefix!r}" if found.prefix else ""
    print(f"  {name}: {found.known} tensors known, {found.read} read, the rest is kept for export{prefix}")
    print(f"  does not fit: {found.fault}" if found.fault else "  fits: every tensor is accounted for")
    return 1 if found.fault else 0


if __name__ == "__main__":
    sys.exit(main())
