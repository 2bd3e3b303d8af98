"""This project's loader on the same samples as LeRobot's; prints one JSON line per run.

    python benchmarks/data/our_side.py rate DATASET --cache none --workers 2 --batch 8 --samples 640
    python benchmarks/data/our_side.py build DATASET --cache DIR     seconds to fill the frame cache
    python benchmarks/data/our_side.py sample DATASET --cache DIR    milliseconds a sample, in one thread
    python benchmarks/data/our_side.py wait DATASET --cache DIR      share of time waiting beside a step of 50 ms
    python benchmarks/data/our_side.py memory DATASET --cache DIR    growth from sample 2,000 to --samples

DATASET is what make_dataset.py made; without --cache frames are decoded.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np

from somaspeed_jax.data import frame_cache
from somaspeed_jax.data.lerobot import LeRobotDataset
from somaspeed_jax.data.order import Order
from somaspeed_jax.data.pipeline import load_sample, make_pipeline

HORIZON = 50
STEP_SECONDS = 0.05


class AsRecorded:
    """What LeRobot's loader returns, nothing more: pictures as recorded, state, action chunk."""

    image_recipe = "as recorded"

    def __init__(self, cameras):
        self.cameras = cameras

    def prepare_image(self, image):
        return image

    def __call__(self, record):
        return {
            "images": tuple(record["images"][camera] for camera in self.cameras),
            "state": record["state"],
            "actions": record["actions"],
            "action_is_pad": record["action_is_pad"],
            "index": np.int32(record["index"]),
        }


def memory() -> dict[str, float]:
    """MB of this process: resident, and its anonymous part (without pages of mapped files)."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        name: int(fields[field].split()[0]) / 1024 for name, field in (("resident", "VmRSS"), ("anonymous", "RssAnon"))
    }


def rate(open_pipeline, args) -> dict[str, float]:
    steps = -(-args.samples // args.batch)
    with open_pipeline(args.batch, steps + 2) as batches:
        next(batches), next(batches)  # workers started, files open
        start = time.perf_counter()
        for _ in batches:
            pass
        return {"samples_per_second": steps * args.batch / (time.perf_counter() - start)}


def wait(open_pipeline, args) -> dict[str, float]:
    with open_pipeline(args.batch, args.steps + 1) as batches:
        next(batches)  # arrives while the step is compiled
        before, start = batches.wait_seconds, time.perf_counter()
        for _ in batches:
            time.sleep(STEP_SECONDS)
        seconds = time.perf_counter() - start
        return {"wait_percent": 100 * (batches.wait_seconds - before) / seconds, "seconds_a_step": seconds / args.steps}


def grow(open_pipeline, args) -> dict[str, float]:
    first, last = 2_000 // args.batch, args.samples // args.batch
    with open_pipeline(args.batch, last) as batches:
        for step, _ in batches:
            if step + 1 == first:
                start = memory()
        end = memory()
    return {f"{name}_growth_mb": end[name] - start[name] for name in start} | {"resident_mb": end["resident"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("rate", "wait", "memory", "sample", "build"))
    parser.add_argument("dataset")
    parser.add_argument("--cache", default="none", help="folder of the frame cache, or none to decode")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--batch", type=int, default=80)
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    dataset = LeRobotDataset(args.dataset, horizon=HORIZON)
    transform = AsRecorded(dataset.cameras)
    cache = None
    start = time.perf_counter()
    if args.cache != "none":
        cache = frame_cache.build(
            dataset, transform, args.cache, max_bytes=10**10, workers=args.workers, progress=False
        )
    built = time.perf_counter() - start

    def open_pipeline(batch, steps):
        order = Order(len(dataset), batch, seed=0)
        return make_pipeline(
            dataset, transform, order, start_step=0, stop_step=steps, workers=args.workers, prefetch=2, cache=cache
        )

    if args.what == "build":
        result = {"build_seconds": built}
    elif args.what == "sample":
        ids = Order(len(dataset), args.samples, seed=0).record_ids(0)
        start = time.perf_counter()
        for index in ids:  # with the copy that a batch needs
            sample = load_sample(dataset, transform, int(index), cache)
            [picture.copy() for picture in sample["images"]]
        result = {"ms_a_sample": 1e3 * (time.perf_counter() - start) / len(ids)}
    else:
        result = {"rate": rate, "wait": wait, "memory": grow}[args.what](open_pipeline, args)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
