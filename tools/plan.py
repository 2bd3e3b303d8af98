"""What a run needs and how fast it should be, before anyone rents a machine.

    python tools/plan.py --config configs/pi05.py --gpus 8 --gpu a40 [--config.batch.per_device=32 ...] [--json]

The true training step at full size is compiled from shapes for the GPU, without a GPU (pip install
'somaspeed-jax[plan]'); without the CUDA compiler for the CPU, which says less. What a dataset would tell is given by
--cameras, --picture, --prompt, --state and --actions.
"""

import argparse
import os
import sys
from pathlib import Path


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--gpus", type=int, default=8, help="how many GPUs (default 8)")
    parser.add_argument("--gpu", default="h100", help="a40, a100, h100 or h200 (default h100)")
    parser.add_argument("--cameras", type=int, default=2, help="cameras of the robot (default 2)")
    parser.add_argument("--picture", default="256x256", help="height x width of its pictures (default 256x256)")
    parser.add_argument("--prompt", type=int, default=0, help="prompt tokens; 0: the model's usual length")
    parser.add_argument("--state", type=int, default=8, help="state dimensions (default 8)")
    parser.add_argument("--actions", type=int, default=7, help="action dimensions (default 7)")
    parser.add_argument("--meshes", default="", help="meshes of the table, such as 1x8,2x4; 'all' for every one")
    parser.add_argument("--batches", default="", help="batches per device of the table, such as 8,16,32")
    parser.add_argument("--knobs", action="store_true", help="show what saves memory even where the plan fits")
    parser.add_argument("--compiler", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--json", action="store_true", help="print JSON for a program instead of text")
    return parser.parse_known_args(argv)


def main(argv: list[str]) -> int:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the files under configs/ import each other
    arguments, rest = parse(argv)
    # A plan uses no device; the CUDA plugin must not look for one. Virtual devices serve the CPU compiler.
    os.environ["JAX_PLATFORMS"] = "cpu"
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={arguments.gpus}".strip()

    from somaspeed_jax.command_line import parse as parse_config
    from somaspeed_jax.scaling.planner import Planner, strict_json

    try:
        planner = Planner.create(parse_config(rest).config, arguments)
        plan = planner.plan()
        turned = planner.turn_knobs(plan) if arguments.knobs or not plan.prediction(planner.gpu).fits else []
        others = planner.table(plan)
    except (ValueError, RuntimeError) as error:
        print(f"plan: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        print(strict_json(plan, turned, others))
    else:
        print(planner.text(plan, turned, others))
    return 0 if plan.prediction(planner.gpu).fits else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
