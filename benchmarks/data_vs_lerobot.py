"""Samples a second of this project's loader beside LeRobot's, in turn, in one run, on the same dataset.

    python benchmarks/data_vs_lerobot.py --other-python path/to/python-with-lerobot

Both sides give two 256 x 256 pictures, the state and a chunk of 50 actions, shuffled, batch 8, and have the same number
of workers. LeRobot's side is its dataset (PyAV) under torch's DataLoader. Each round runs every configuration once, so
that whatever else the machine does falls on all of them; ratios are of medians over rounds. Without --other-python only
our side runs. Results go to benchmarks/data/results-<date>.md.
"""

import argparse
import datetime
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
OURS, THEIRS, MAKE = (HERE / "data" / name for name in ("our_side.py", "lerobot_side.py", "make_dataset.py"))


def call(python: str, script: Path, *arguments: Any) -> dict[str, Any]:
    """The last line that a script prints, read as JSON."""
    command = [python, str(script), *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    if run.returncode:
        raise RuntimeError(f"{shlex.join(command)} failed:\n{run.stderr[-3000:]}")
    return json.loads(run.stdout.strip().splitlines()[-1])


def busy() -> tuple[float, float]:
    """(busy, all) CPU seconds of the machine since it started."""
    fields = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return float(sum(fields) - fields[3] - fields[4]), float(sum(fields))


def measure(args: argparse.Namespace, dataset: Path, cache: Path) -> dict[str, list[float]]:
    """Samples a second of every configuration, one figure a round."""
    rates: dict[str, list[float]] = {}
    for round_ in range(args.rounds):
        for workers in (0, 2):
            runs = [
                ("decode", sys.executable, OURS, ("rate", dataset, "--cache", "none"), args.samples),
                ("cache", sys.executable, OURS, ("rate", dataset, "--cache", cache), 10 * args.samples),
            ]
            if args.other_python:
                runs.insert(0, ("lerobot", args.other_python, THEIRS, (dataset,), args.samples))
            for name, python, script, arguments, samples in runs:
                result = call(python, script, *arguments, "--workers", workers, "--batch", 8, "--samples", samples)
                rates.setdefault(f"{name}/{workers}", []).append(result["samples_per_second"])
                print(
                    f"round {round_ + 1}: {name}, {workers} workers: {rates[f'{name}/{workers}'][-1]:.1f} samples/s",
                    flush=True,
                )
    return rates


def rows(rates: dict[str, list[float]], extra: dict[str, dict[str, float]]) -> list[tuple[str, str, str, str]]:
    """(what, measured, target, met)."""
    median = {name: statistics.median(values) for name, values in rates.items()}
    out = []
    for workers in (0, 2):
        for name, target in (("lerobot", 0.0), ("decode", 1.5), ("cache", 10.0)):
            if (key := f"{name}/{workers}") not in median:
                continue
            label = {"lerobot": "LeRobot", "decode": "decode on the fly", "cache": "from the cache"}[name]
            spread = f"{min(rates[key]):.0f} to {max(rates[key]):.0f}"
            text, met = f"{median[key]:.0f} samples/s ({spread})", ""
            if target and f"lerobot/{workers}" in median:
                ratio = median[key] / median[f"lerobot/{workers}"]
                text, met = f"{text}, {ratio:.1f} x LeRobot", "yes" if ratio >= target else "no"
            out.append((f"{label}, {workers} workers", text, f"{target:g} x" if target else "", met))
    for what, value, unit, target in (
        ("a sample from the cache, one thread", extra["sample"]["ms_a_sample"], "ms", 1.0),
        ("waiting for data, batch 80, step 50 ms, cache", extra["wait"]["wait_percent"], "%", 1.0),
        ("memory growth to sample 20,000, cache", extra["memory_cache"]["resident_growth_mb"], "MB", 50.0),
        ("memory growth to sample 20,000, decode", extra["memory_decode"]["resident_growth_mb"], "MB", 50.0),
    ):
        out.append((what, f"{value:.2f} {unit}", f"under {target:g} {unit}", "yes" if value < target else "no"))
    out.append(("building the cache, 4,000 frames, 2 workers", f"{extra['build']['build_seconds']:.1f} s", "", ""))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other-python", help="a Python in which lerobot 0.6.1 is installed")
    parser.add_argument(
        "--dataset", type=Path, help="made by data/make_dataset.py; default: made in a temporary folder"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--samples", type=int, default=640, help="samples a measurement; ten times as many from the cache"
    )
    args = parser.parse_args()
    start = busy()
    with tempfile.TemporaryDirectory() as folder:
        dataset, cache = args.dataset or Path(folder) / "dataset", Path(folder) / "cache"
        if args.dataset is None:
            subprocess.run([sys.executable, str(MAKE), str(dataset)], check=True)
        extra = {"build": call(sys.executable, OURS, "build", dataset, "--cache", cache, "--workers", 2)}
        rates = measure(args, dataset, cache)
        load = os.getloadavg()[0]
        for name, arguments in {
            "sample": ("sample", dataset, "--cache", cache, "--samples", 4000),
            "wait": ("wait", dataset, "--cache", cache),
            "memory_cache": ("memory", dataset, "--cache", cache),
            "memory_decode": ("memory", dataset, "--samples", 20_000),
        }.items():
            extra[name] = call(sys.executable, OURS, *arguments)
            print(name, extra[name], flush=True)
    used = busy()
    used_percent = 100 * (used[0] - start[0]) / (used[1] - start[1])
    table = rows(rates, extra)
    cpu = next(
        (x.split(":")[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x), ""
    )
    date = datetime.date.today().isoformat()
    lines = [
        f"# Loader throughput, {date}",
        "",
        f"`python benchmarks/data_vs_lerobot.py --rounds {args.rounds} --samples {args.samples}"
        + (" --other-python ..." if args.other_python else "")
        + f"` on {os.cpu_count()} cores ({cpu}), Python {platform.python_version()}; the machine was "
        f"{used_percent:.0f} % busy on average, load average {load:.1f} after the rates. Median (range) over rounds.",
        "",
        "| | measured | target | met |",
        "|---|---|---|---|",
        *(f"| {' | '.join(row)} |" for row in table),
        "",
    ]
    path = HERE / "data" / f"results-{date}.md"
    path.write_text("\n".join(lines))
    print("\n".join(lines) + f"\nwrote {path}")


if __name__ == "__main__":
    main()
