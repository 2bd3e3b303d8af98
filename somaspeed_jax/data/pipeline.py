"""From an order and a source to batches, ahead of the device and the same for any number of workers.

    order.record_ids(step) -> source[i] -> transform.prepare_image (or the frame cache) -> transform -> stacked batch

A batch is a dict of numpy arrays with a leading axis of this process's rows: the sample's fields (`images` a tuple of
uint8 [rows, h, w, 3]), `index` int32 [rows] (record ids) and `position` int32 [rows] (each row's place in the global
batch, which randomness is keyed by). Shapes never change within a run.
"""

import concurrent.futures
import itertools
import queue
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import grain
import numpy as np
from absl import flags

from somaspeed_jax.data.transforms.base import Record, Sample, Transform

Batch = dict[str, Any]


class Source(Protocol):
    """A dataset with random access (lerobot.py, mixture.py)."""

    def __len__(self) -> int: ...

    def record(self, index: int, images: bool = True) -> Record:
        """Record `index` with its pictures as recorded; without `images` none is decoded."""
        ...


class Frames(Protocol):
    """Pictures already passed through `prepare_image` (frame_cache.py)."""

    def images(self, index: int) -> dict[str, np.ndarray]:
        """{camera: uint8 [H, W, 3]} of record `index`."""
        ...


class RecordOrder(Protocol):
    """What a step trains on (order.py, mixture.py)."""

    global_batch: int

    def record_ids(self, step: int) -> np.ndarray: ...


def load_sample(source: Source, transform: Transform, index: int, cache: Frames | None = None) -> Sample:
    """One record as the model gets it."""
    if cache is None:
        record = source.record(index)
        record["images"] = {name: transform.prepare_image(image) for name, image in record["images"].items()}
    else:
        record = source.record(index, images=False)
        record["images"] = cache.images(index)
    return transform(record)


def stack(samples: Sequence[Sample]) -> Batch:
    """Samples -> batch with a leading axis. Raises ValueError naming field and record where shapes or types differ."""
    first = samples[0]
    for sample in samples[1:]:
        if sample.keys() != first.keys() or len(sample["images"]) != len(first["images"]):
            raise ValueError(
                f"record {int(sample['index'])} gives fields {sorted(sample)} with {len(sample['images'])} pictures, "
                f"record {int(first['index'])} gives {sorted(first)} with {len(first['images'])}: "
                "a batch needs one layout"
            )
    batch: Batch = {key: _stack([s[key] for s in samples], key, samples) for key in first if key != "images"}
    batch["images"] = tuple(
        _stack([s["images"][c] for s in samples], f"images[{c}]", samples) for c in range(len(first["images"]))
    )
    batch["index"] = batch["index"].astype(np.int32)
    return batch


def _stack(values: list[Any], field: str, samples: Sequence[Sample]) -> np.ndarray:
    arrays = [np.asarray(v) for v in values]
    for array, sample in zip(arrays, samples, strict=True):
        if array.shape != arrays[0].shape or array.dtype != arrays[0].dtype:
            raise ValueError(
                f"record {int(sample['index'])}: {field} is {array.dtype} {array.shape}, but {arrays[0].dtype} "
                f"{arrays[0].shape} in record {int(samples[0]['index'])}: shapes must not change within a run"
            )
    return np.stack(arrays)


class _Batches:
    """Random access to batches: element i is step `steps[i]`. This is what a worker receives and calls.

    `blanks` empty elements follow the last batch.
    """

    def __init__(self, source, transform, order, cache, steps: range, rows: slice, blanks: int = 0):
        self.source, self.transform, self.order, self.cache = source, transform, order, cache
        self.steps, self.rows, self.blanks = steps, rows, blanks

    def __len__(self) -> int:
        return len(self.steps) + self.blanks

    def __getitem__(self, index: int) -> Batch:
        if index >= len(self.steps):
            return {}
        ids = self.order.record_ids(self.steps[index])
        positions = np.arange(len(ids), dtype=np.int32)[self.rows]
        batch = stack([load_sample(self.source, self.transform, int(i), self.cache) for i in ids[self.rows]])
        return {**batch, "position": positions}

    def __repr__(self) -> str:
        return f"batches of steps {self.steps.start} to {self.steps.stop - 1}"


class Pipeline:
    """Iterator over (step, batch) that reads ahead in a thread. Made by `make_pipeline`; close it when done.

    Attributes:
      wait_seconds: time spent in `next` for a batch that was not there yet, the first one included.
      step: the step of the next batch.
    """

    def __init__(self, batches: Generator[Batch], steps: range, stop_workers: Callable[[], None] | None = None):
        self.wait_seconds = 0.0
        self.step = steps.start
        self._stop_step = steps.stop
        self._batches, self._stop_workers = batches, stop_workers
        self._ready: queue.Queue = queue.Queue(maxsize=1)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._read_ahead, name="read-ahead", daemon=True)
        self._thread.start()

    def _read_ahead(self) -> None:
        try:
            for batch in self._batches:
                if not self._offer(batch):
                    return
        except BaseException as error:  # handed to the consumer, which raises it
            self._offer(error)

    def _offer(self, item) -> bool:
        """Puts an item into the queue; false if the pipeline was closed meanwhile."""
        while not self._closing.is_set():
            try:
                self._ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                pass
        return False

    def __iter__(self) -> "Pipeline":
        return self

    def __next__(self) -> tuple[int, Batch]:
        if self.step >= self._stop_step:
            self.close()
        if self._closing.is_set():
            raise StopIteration
        start = time.perf_counter()
        item = self._ready.get()
        self.wait_seconds += time.perf_counter() - start
        if isinstance(item, BaseException):
            self.close()
            raise item
        self.step += 1
        return self.step - 1, item

    def close(self) -> None:
        """Stops the thread and the workers. Harmless when called twice."""
        self._closing.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=30)
        if not self._thread.is_alive():
            self._batches.close()
        if self._stop_workers is not None:
            self._stop_workers()

    def __enter__(self) -> "Pipeline":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _copied(batches: Iterator[Batch]) -> Generator[Batch]:
    """Batches in memory of their own. A worker's are in shared memory, which can then go back at once: a consumer may
    hold a batch for as long as a transfer to the device takes, and nothing is left over when the program ends."""
    for batch in batches:
        copy = {k: tuple(map(np.array, v)) if isinstance(v, tuple) else np.array(v) for k, v in batch.items()}
        del batch
        yield copy


def _in_threads(batches: _Batches, workers: int, prefetch: int) -> Generator[Batch]:
    """Batches in order, built by threads of this process, `prefetch` at a time ahead of the consumer."""
    with concurrent.futures.ThreadPoolExecutor(max(1, workers)) as pool:
        indices = iter(range(len(batches)))
        pending = deque(pool.submit(batches.__getitem__, k) for k in itertools.islice(indices, max(1, prefetch)))
        try:
            while pending:
                yield pending.popleft().result()
                pending.extend(pool.submit(batches.__getitem__, k) for k in itertools.islice(indices, 1))
        finally:
            for future in pending:
                future.cancel()


def _start_worker(index: int, count: int) -> None:
    import cv2

    cv2.setNumThreads(1)  # one process a core is the parallelism; OpenCV's own pool would oversubscribe it


SHARED_MEMORY = Path("/dev/shm")


def _check_shared_memory(sample: Sample, rows: int, held: int) -> None:
    """Batches travel from workers through shared memory; where it is too small a worker dies without a word."""
    fields = [*sample["images"], *(v for k, v in sample.items() if k != "images")]
    needed = sum(np.asarray(v).nbytes for v in fields) * rows * held
    if SHARED_MEMORY.is_dir() and (free := shutil.disk_usage(SHARED_MEMORY).free) < needed:
        raise ValueError(
            f"{SHARED_MEMORY} has {free / 1e6:.0f} MB free, workers need {needed / 1e6:.0f} MB for {held} batches of "
            f"{rows} rows. Give the container more (docker run --shm-size=8g), or use fewer data.workers, a smaller "
            "data.prefetch, or data.workers=0"
        )


def local_rows(global_batch: int, process_index: int, process_count: int) -> slice:
    """The contiguous rows of the global batch that this process feeds."""
    if global_batch % process_count or not 0 <= process_index < process_count:
        below = global_batch // process_count * process_count
        near = ", ".join(str(b) for b in (below, below + process_count) if b)
        raise ValueError(
            f"a global batch of {global_batch} does not split over {process_count} processes (this is number "
            f"{process_index}); the nearest batches that do: {near}"
        )
    rows = global_batch // process_count
    return slice(process_index * rows, (process_index + 1) * rows)


def make_pipeline(
    source: Source,
    transform: Transform,
    order: RecordOrder,
    *,
    start_step: int,
    stop_step: int,
    process_index: int = 0,
    process_count: int = 1,
    workers: int = 0,
    prefetch: int = 2,
    cache: Frames | None = None,
) -> Pipeline:
    """Batches of steps start_step .. stop_step - 1; to resume is to start at another step.

    Args:
      source: the dataset. It is pickled into each worker, so it must open files lazily, or used by threads.
      workers: processes that build batches, worker w every w-th one; 0: a thread of this process. With `cache` they
        are threads in any case: there is nothing to decode, and passing pictures between processes costs more.
      prefetch: batches ready ahead of the consumer; with processes, at least one in each.
      cache: prepared pictures in place of decoding and `transform.prepare_image`.

    An exception in a worker is raised by `next` when its batch is due, with the original message. Raises ValueError
    for a batch that does not split over the processes, and for shared memory too small for the workers.
    """
    steps = range(start_step, stop_step)
    rows = local_rows(order.global_batch, process_index, process_count)
    if workers == 0 or cache is not None:
        return Pipeline(_in_threads(_Batches(source, transform, order, cache, steps, rows), workers, prefetch), steps)
    if not flags.FLAGS.is_parsed():  # grain reads its flags, which a test or a notebook never parsed
        flags.FLAGS.mark_as_parsed()
    each = -(-prefetch // workers) or 1
    held = workers * (each + 1) + 1  # in each worker's queue and hands; being copied here
    first = int(order.record_ids(start_step)[rows][0])
    _check_shared_memory(load_sample(source, transform, first, cache), rows.stop - rows.start, held)
    # grain keeps each worker's last element until the program ends: let that be a blank, without shared memory
    batches = _Batches(source, transform, order, cache, steps, rows, blanks=workers)
    dataset = grain.MapDataset.source(batches).to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=1))
    options = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=each)
    iterator = iter(dataset.mp_prefetch(options, worker_init_fn=_start_worker))
    return Pipeline(_copied(itertools.islice(iterator, len(steps))), steps, iterator.close)


def eval_batches(
    source: Source,
    transform: Transform,
    ids: Sequence[int],
    batch: int,
    *,
    process_index: int = 0,
    process_count: int = 1,
    cache: Frames | None = None,
) -> Iterator[Batch]:
    """Batches in which every record of `ids` counts once.

    The last batch is filled up with its last record. `weight` float32 [rows] is 0 for those rows and 1 for all others;
    `position` int32 [rows] is a record's rank in `ids`, so that fixed noise belongs to the record and not to the
    batch size.
    """
    rows = local_rows(batch, process_index, process_count)
    for first in range(0, len(ids), batch):
        ranks = np.arange(first, first + batch)[rows]
        chosen = np.minimum(ranks, len(ids) - 1)
        stacked = stack([load_sample(source, transform, int(ids[r]), cache) for r in chosen])
        yield {**stacked, "position": ranks.astype(np.int32), "weight": (ranks < len(ids)).astype(np.float32)}
