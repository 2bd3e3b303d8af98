"""The batches of a run, by `data.cache`: decoded as needed, from the frame cache, or one batch again and again."""

from collections.abc import Iterator
from typing import Any

import jax

from somaspeed_jax.assemble import Data, cache_directory
from somaspeed_jax.config import Config
from somaspeed_jax.data import frame_cache
from somaspeed_jax.data.mixture import MixtureFrames, MixtureOrder, MixtureSource, MixtureTransform, check_alike
from somaspeed_jax.data.order import Order
from somaspeed_jax.data.pipeline import Frames, Pipeline, make_pipeline
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


def open_cache(config: Config, data: Data, transform: Transform) -> Frames | None:
    """The frame caches of a run's datasets, built now where they are not there; None unless `data.cache` is frames."""
    if config.data.cache != "frames":
        return None
    own = transform.transforms if isinstance(transform, MixtureTransform) else [transform]
    caches = [
        frame_cache.build(
            part.train,
            part_transform,
            cache_directory() / "frames",
            max_bytes=int(config.data.cache_gb * 1e9),
            workers=config.data.workers,
            progress=jax.process_index() == 0,
        )
        for part, part_transform in zip(data.parts, own, strict=True)
    ]
    return caches[0] if len(caches) == 1 else MixtureFrames(caches, [len(part.train) for part in data.parts])


def make_order(config: Config, data: Data, global_batch: int) -> Order | MixtureOrder:
    """Which records each step trains on."""
    if len(data.parts) == 1:
        return Order(len(data.train), global_batch, config.seed)
    sizes, weights = [len(part.train) for part in data.parts], [part.weight for part in data.parts]
    return MixtureOrder(sizes, weights, global_batch, config.seed)


def samples_drawn(config: Config, data: Data, order: Order | MixtureOrder, step: int) -> dict[str, int]:
    """{"samples of NAME": how many the steps before `step` have drawn} of a mixture; {} of one dataset."""
    if isinstance(order, Order) or config.data.cache == "synthetic":
        return {}
    return {f"samples of {part.name}": n for part, n in zip(data.parts, order.counts(step), strict=True)}


def open_batches(
    config: Config, data: Data, transform: Transform, order: Order | MixtureOrder, first: int
) -> Pipeline | Repeated:
    """Batches of steps first .. config.steps - 1, this process's rows of each."""
    synthetic, source = config.data.cache == "synthetic", data.train
    if isinstance(source, MixtureSource) and isinstance(transform, MixtureTransform):
        check_alike(source, transform, [part.name for part in data.parts])
    pipeline = make_pipeline(
        source,
        transform,
        order,
        start_step=first,
        stop_step=first + 1 if synthetic else config.steps,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
        workers=0 if synthetic else config.data.workers,
        prefetch=config.data.prefetch,
        cache=open_cache(config, data, transform),
    )
    return Repeated(pipeline, first, config.steps) if synthetic else pipeline
