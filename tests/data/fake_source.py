"""A dataset and a transform of a few numbers, for tests of what lies between them. Importable by worker processes."""

import time

import numpy as np


class FakeSource:
    """`size` records; pictures hold the record's number (100 more on the wrist), actions ten times it."""

    cameras = ("front", "wrist")

    def __init__(self, size: int, fail_at: int | None = None, sleep: float = 0.0):
        self.size, self.fail_at, self.sleep = size, fail_at, sleep

    def __len__(self):
        return self.size

    def record(self, index, images=True):
        time.sleep(self.sleep)
        if index == self.fail_at:
            raise ValueError(f"episode {index // 4}, frame {index % 4}: the video is cut short")
        return {
            "index": index,
            "episode_index": index // 4,
            "frame_index": index % 4,
            "task": "pick",
            "images": {name: self.frame(index, name) for name in self.cameras} if images else {},
            "state": np.full(2, index, np.float32),
            "actions": np.full((3, 2), 10 * index, np.float32),
            "action_is_pad": np.zeros(3, bool),
        }

    def frame(self, index, camera):
        return np.full((6, 8, 3), (index + 100 * self.cameras.index(camera)) % 256, np.uint8)


class FakeTransform:
    cameras = ("front", "wrist")
    image_recipe = "halve"

    def prepare_image(self, image):
        return np.ascontiguousarray(image[::2, ::2])

    def __call__(self, record):
        return {
            "images": tuple(record["images"][c] for c in self.cameras),
            "image_mask": np.ones(2, bool),
            "state": record["state"],
            "actions": record["actions"],
            "index": np.int32(record["index"]),
        }
