"""The batches of a run, by `data.cache`: decoded as needed, from the frame cache, or one batch again and again."""

from collections.abc import Iterator
from typing import Any

import jax

from somaspeed_jax.assemble import Data, cache_directory
from somaspeed_jax.config import Config
from somaspeed_jax.data import frame_cache
from somaspeed_jax.data.frame_cache import FrameCache
from somaspeed_jax.data.order import Order
from somaspeed_jax.data.pipeline import Pipeline, make_pipeline
from somaspeed_jax.data.transforms.base import Transform


class Repeated:
    """The first batch of a run for every step: no input at all, to time the device alone."""

    def __init__(self, pipeline: Pipeline, first: int, stop: int):
        with pipeline:
            _, self._rows = next(pipeline)
        self._steps: Iterator[int] = iter(range(first, stop))
        self.wait_seconds = 0.0

    def __iter__(self) -> "Repeated":
        return self

    def __next__(self) -> tuple[int, dict[str, Any]]:
        return next(self._steps), self._rows

    def __enter__(self) -> "Repeated":
        return self

    def __exit__(self, *_) -> None:
        pass


def open_cache(config: Config, dataset: Any, transform: Transform) -> FrameCache | None:
    """The frame cache of a dataset, built now if it is not there; None unless `data.cache` is frames."""
    if config.data.cache != "frames":
        return None
    return frame_cache.build(
        dataset,
        transform,
        cache_directory() / "frames",
        max_bytes=int(config.data.cache_gb * 1e9),
        workers=config.data.workers,
        progress=jax.process_index() == 0,
    )


def open_batches(
    config: Config, data: Data, transform: Transform, global_batch: int, first: int
) -> Pipeline | Repeated:
    """Batches of steps first .. config.steps - 1, this process's rows of each."""
    order = Order(len(data.train), global_batch, config.seed)
    synthetic = config.data.cache == "synthetic"
    pipeline = make_pipeline(
        data.train,
        transform,
        order,
        start_step=first,
        stop_step=first + 1 if synthetic else config.steps,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
        workers=0 if synthetic else config.data.workers,
        prefetch=config.data.prefetch,
        cache=open_cache(config, data.train, transform),
    )
    return Repeated(pipeline, first, config.steps) if synthetic else pipeline
