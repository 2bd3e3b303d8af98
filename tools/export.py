"""Writes a run's policy in upstream's layout: π0.5 for LeRobot, GR00T and MolmoAct2 as their weights came.

    python tools/export.py runs/pi05-demo exported/pi05-demo
    python tools/export.py runs/pi05/checkpoints/30000 exported/pi05 --raw --store source

Tensors that were not trained are copied byte for byte from the weights that the run started from; trained ones come
from the checkpoint, adapters merged in float32. The directory appears whole or not at all.
"""

import argparse
import sys
from pathlib import Path


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="a run's workdir, or <workdir>/checkpoints/<step>")
    parser.add_argument("directory", type=Path, help="what to write; must not exist, or be empty")
    parser.add_argument("--raw", action="store_true", help="the raw parameters, not their moving average")
    parser.add_argument(
        "--store",
        choices=("float32", "source"),
        default="float32",
        help="type of trained tensors: float32 loses nothing; source rounds to the type of the weights they came from",
    )
    parser.add_argument("--weights", default="", help="where the run's frozen weights are now, if they moved")
    parser.add_argument("--dataset", default="", help="of a run on a mixture: whose statistics go with the weights")
    parser.add_argument("--shard-gb", type=float, help="several files of about this size and an index; default: one")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    from somaspeed_jax.export.run import export_run

    try:
        report = export_run(
            args.checkpoint,
            args.directory,
            average=not args.raw,
            stored=args.store,
            weights=args.weights,
            dataset=args.dataset,
            shard_bytes=None if args.shard_gb is None else int(args.shard_gb * 1e9),
        )
    except (ValueError, OSError) as error:
        print(f"export: {error}", file=sys.stderr)
        return 2
    done = report.exported
    print(f"{report.directory}: step {report.step}, {report.values} parameters, trained over {report.source}")
    print(
        f"  {done.trained} tensors from the checkpoint as {report.stored}, {done.copied} copied byte for byte", end=""
    )
    print(f", {done.zeros} that nothing reads as zeros" if done.zeros else "")
    if report.adapters:
        print(f"  {report.adapters} adapters merged in float32")
    for note in report.notes:
        print(f"  {note}")
    print("  " + ", ".join(done.files))
    return 0


if __name__ == "__main__":
    sys.exit(main())
