"""Throughput of the real trainer against device count, in SomaSpeed's JSON schema.

    python tools/time_scaling.py --config configs/groot.py --gpus 1,2,4 --output scaling.json \
        [--seconds 480] [--trials 1] [--warmup 5] [--data decode|cached|synthetic] [--config.batch.per_device=80 ...]

Each count and trial is a fresh process. Records are added to the file as they come; the reason of a failed run is in a
log beside it. `--data synthetic` times the devices alone, `--data cached` leaves out decoding. Without a GPU the
devices are virtual ones of the CPU: good to try the tool, no scaling result.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from somaspeed_jax.command_line import parse as parse_config
from somaspeed_jax.scaling import plot, timing


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--gpus", required=True, help="device counts, such as 1,2,4; 1 is needed for efficiency")
    parser.add_argument("--output", type=Path, required=True, help="scaling file; records are added to one of ours")
    parser.add_argument("--seconds", type=float, default=480.0, help="seconds of training to measure (default 480)")
    parser.add_argument("--warmup", type=int, default=5, help="first updates left out (default 5)")
    parser.add_argument("--trials", type=int, default=1, help="fresh runs per count (default 1)")
    parser.add_argument("--data", choices=tuple(timing.DATA), default="decode", help="where samples come from")
    parser.add_argument("--limit", type=float, default=0.0, help="seconds for a run in all (default: --seconds + 3600)")
    parser.add_argument("--keep", type=Path, help="keep the runs' folders here instead of deleting them")
    return parser.parse_known_args(argv)


def make_study(arguments: argparse.Namespace, rest: list[str]) -> timing.Study:
    config = parse_config(rest).config
    counts = tuple(int(part) if part.isdigit() else 0 for part in arguments.gpus.split(","))
    if min(counts) < 1 or len(set(counts)) != len(counts):
        raise ValueError(f"--gpus: {arguments.gpus!r} is not a list of different device counts such as 1,2,4")
    for option, least in (("seconds", 0.0), ("warmup", 1), ("trials", 1)):
        if getattr(arguments, option) < least:
            raise ValueError(f"--{option}: is {getattr(arguments, option)}, expected at least {least}")
    return timing.Study(
        model=config.model.name,
        per_device=config.batch.per_device,
        counts=counts,
        arguments=tuple(rest),
        data=arguments.data,
        trials=arguments.trials,
        warmup=arguments.warmup,
        seconds=arguments.seconds,
        limit=arguments.limit or arguments.seconds + 3600.0,
        physical=visible_gpus(),
    )


def visible_gpus() -> tuple[str, ...] | None:
    """What CUDA_VISIBLE_DEVICES may hold on this machine; None without a GPU, or where JAX_PLATFORMS asks for none."""
    if os.environ.get("JAX_PLATFORMS", "").lower() == "cpu":
        return None
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return tuple(filter(None, os.environ["CUDA_VISIBLE_DEVICES"].split(","))) or None
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    gpus = [line for line in listed.stdout.splitlines() if line.startswith("GPU ")]
    return tuple(str(i) for i in range(len(gpus))) or None


def main(argv: list[str]) -> int:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the files under configs/ import each other
    arguments, rest = parse(argv)
    scratch = arguments.keep or Path(tempfile.mkdtemp(prefix="time_scaling-"))
    try:
        study = make_study(arguments, rest)
        content = timing.run(study, arguments.output, scratch)
    except (ValueError, OSError) as error:
        print(f"time_scaling: {error}", file=sys.stderr)
        return 2
    finally:
        if arguments.keep is None:
            shutil.rmtree(scratch, ignore_errors=True)
    print(plot.table([content], [arguments.output.stem]))
    print("wrote", arguments.output)
    records = [content.record(study.model, count) for count in study.counts]
    return 0 if all(record is not None and record.complete for record in records) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
