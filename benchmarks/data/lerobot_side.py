"""LeRobot's dataset under a torch DataLoader; run by a Python that has lerobot. Prints one JSON line.

python lerobot_side.py DATASET --workers 2 --batch 8 --samples 640
"""

import argparse
import json
import os
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

import lerobot
import torch
from lerobot.datasets.lerobot_dataset import LeRobotDataset

HORIZON, FPS = 50, 30


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("dataset")
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--samples", type=int, required=True)
    args = parser.parse_args()
    times = {"action": [i / FPS for i in range(HORIZON)]}
    dataset = LeRobotDataset("local/benchmark", root=args.dataset, video_backend="pyav", delta_timestamps=times)
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_size=args.batch,
        shuffle=True,
        num_workers=args.workers,
        drop_last=True,
        generator=torch.Generator().manual_seed(0),
        prefetch_factor=2 if args.workers else None,
    )
    batches = iter(loader)
    next(batches), next(batches)  # workers started, files open
    start, count = time.perf_counter(), 0
    while count < args.samples:
        count += len(next(batches)["index"])
    seconds = time.perf_counter() - start
    print(
        json.dumps({"samples_per_second": count / seconds, "lerobot": lerobot.__version__, "torch": torch.__version__})
    )


if __name__ == "__main__":
    main()
