"""Frames decoded once, kept as plain bytes in memory-mapped files.

Decoding video at random costs milliseconds a frame, again in every epoch; reading a prepared frame costs a copy. A
cache holds what `transform.prepare_image` makes of each frame: the recipe's fixed operations, up to its first random
one. Where those enlarge a camera's pictures, the pictures are stored as recorded and enlarged when read.

    <directory>/<key>/cache.json           what is in it
    <directory>/<key>/<camera>.u8          uint8 [records, h, w, 3]
    <directory>/<key>/done/<episode>       one empty file per finished episode, made after its frames are on the disk

The key is a digest of the dataset's content, the recipe, the cameras and the records. A build that was killed goes on
where it stopped. Of several processes that want the same cache one builds and the others wait.
"""

import concurrent.futures
import contextlib
import fcntl
import hashlib
import json
import logging
import multiprocessing
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import rich.progress

from somaspeed_jax.data.errors import DataError
from somaspeed_jax.data.lerobot import LeRobotDataset
from somaspeed_jax.data.transforms.base import Transform

FORMAT = 1
WRITE_BYTES = 8 << 20  # frames gathered before they are written


class FrameCache:
    """Prepared pictures of every record of a dataset; made by `build`, read by `images`.

    It may be pickled: files are mapped when first read.
    """

    def __init__(self, folder: Path, shapes: dict[str, tuple[int, int, int]], records: int, enlarge: Any):
        """`enlarge`: {camera: prepare_image} of the cameras that are stored as recorded."""
        self.folder, self.shapes, self.records, self._enlarge = folder, shapes, records, enlarge
        self._maps: dict[str, np.ndarray] = {}

    def __len__(self) -> int:
        return self.records

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": {}}

    @property
    def bytes(self) -> int:
        """Size on disk of the frames."""
        return sum(self.records * int(np.prod(shape)) for shape in self.shapes.values())

    def images(self, index: int) -> dict[str, np.ndarray]:
        """{camera: uint8 [H, W, 3]} of record `index`, prepared. The arrays are views of the file: read-only."""
        if not 0 <= index < self.records:
            raise IndexError(f"record {index} of {self.records} in the frame cache {self.folder}")
        if not self._maps:
            self._maps = {
                camera: np.memmap(_file(self.folder, camera), np.uint8, "r", shape=(self.records, *shape))
                for camera, shape in self.shapes.items()
            }
        out = {}
        for camera, frames in self._maps.items():
            picture = np.asarray(frames[index])
            out[camera] = self._enlarge[camera](picture) if camera in self._enlarge else picture
        return out


def build(
    source: LeRobotDataset,
    transform: Transform,
    directory: str | Path,
    *,
    max_bytes: int,
    workers: int = 0,
    progress: bool = True,
) -> FrameCache:
    """The frame cache of `source` under `transform`, made if it is not there or not whole.

    Args:
      directory: holds caches of several datasets and recipes.
      max_bytes: bound on all caches in `directory` together.
      workers: processes that decode, an episode each at a time; 0 decodes in this one.
      progress: show a progress bar on the terminal.

    Raises DataError naming sizes and remedy where the bound or the disk is too small, and whatever decoding raises.
    What was finished until then is kept.
    """
    directory = Path(directory)
    folder = directory / _key(source, transform)
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / "lock"):
        layout = _layout(source, transform, folder)
        cache = FrameCache(
            folder,
            {camera: tuple(shape) for camera, shape in layout["shapes"].items()},
            layout["records"],
            {camera: transform.prepare_image for camera in layout["as_recorded"]},
        )
        todo = _open_files(cache, source)
        if todo:
            _check_space(cache, directory, max_bytes)
            _reserve(cache)
            _fill(cache, source, transform, todo, workers, progress)
    return cache


def _key(source: LeRobotDataset, transform: Transform) -> str:
    records = [(episode.index, episode.usable) for episode in source.episodes]
    text = repr((FORMAT, source.fingerprint, transform.image_recipe, transform.cameras, records))
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _file(folder: Path, camera: str) -> Path:
    return folder / f"{camera}.u8"


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Waits for the lock; the system drops it when its holder dies."""
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logging.info("waiting for another process that builds the frame cache %s", path.parent)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _layout(source: LeRobotDataset, transform: Transform, folder: Path) -> dict[str, Any]:
    """What the cache holds, written next to the frames; found by preparing one record's pictures."""
    path = folder / "cache.json"
    if path.is_file():
        return json.loads(path.read_text())
    shapes, as_recorded = {}, []
    for camera in transform.cameras:
        recorded = source.frame(0, camera)
        prepared = transform.prepare_image(recorded)
        if recorded.size < prepared.size:
            as_recorded.append(camera)
        shapes[camera] = list((recorded if camera in as_recorded else prepared).shape)
    layout = {
        "records": sum(episode.usable for episode in source.episodes),
        "shapes": shapes,
        "as_recorded": as_recorded,
        "recipe": transform.image_recipe,
        "dataset": source.fingerprint,
    }
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(layout, indent=1))
    os.replace(temporary, path)
    return layout


def _open_files(cache: FrameCache, source: LeRobotDataset) -> list[tuple[int, int, int]]:
    """(episode, first record, records) of the episodes that are not in the cache yet."""
    done = cache.folder / "done"
    whole = all(
        (path := _file(cache.folder, camera)).is_file() and path.stat().st_size == cache.records * int(np.prod(shape))
        for camera, shape in cache.shapes.items()
    )
    if not whole:
        shutil.rmtree(done, ignore_errors=True)
    done.mkdir(exist_ok=True)
    finished = set(os.listdir(done))
    todo, first = [], 0
    for episode in source.episodes:
        if str(episode.index) not in finished and episode.usable:
            todo.append((episode.index, first, episode.usable))
        first += episode.usable
    return todo


def _check_space(cache: FrameCache, directory: Path, max_bytes: int) -> None:
    others = {
        folder.name: sum(file.stat().st_size for file in folder.glob("*.u8"))
        for folder in directory.iterdir()
        if folder.is_dir() and folder != cache.folder
    }
    others = {name: size for name, size in others.items() if size}
    shapes = ", ".join(f"{camera} {'x'.join(map(str, shape[:2]))}" for camera, shape in cache.shapes.items())
    needed = f"the frame cache of {cache.records} records ({shapes}) needs {cache.bytes / 1e9:.2f} GB"
    if cache.bytes + sum(others.values()) > max_bytes:
        held = f"{directory} already holds {sum(others.values()) / 1e9:.2f} GB ({', '.join(others) or 'nothing'})"
        raise DataError(
            f"{needed}, {held}, and data.cache_gb allows {max_bytes / 1e9:.2f} GB. Raise it, delete what is no longer "
            "used, or set data.cache='decode' to decode on the fly"
        )
    present = sum(file.stat().st_blocks * 512 for file in cache.folder.glob("*.u8"))
    free = shutil.disk_usage(cache.folder).free
    if cache.bytes - present > free:
        raise DataError(
            f"{needed}, and the disk of {directory} has {free / 1e9:.2f} GB free. Keep the cache on another "
            "disk, or set data.cache='decode' to decode on the fly"
        )


def _reserve(cache: FrameCache) -> None:
    """Files of full length. Space is taken as frames are written; a full disk is an error of that write."""
    for camera, shape in cache.shapes.items():
        with open(_file(cache.folder, camera), "ab") as file:
            file.truncate(cache.records * int(np.prod(shape)))


def _fill(cache, source, transform, todo: list[tuple[int, int, int]], workers: int, progress: bool) -> None:
    bar = rich.progress.Progress(
        rich.progress.TextColumn("decoding {task.completed}/{task.total} frames"),
        rich.progress.BarColumn(),
        rich.progress.TimeRemainingColumn(),
        disable=not progress,
    )
    task = bar.add_task("", total=sum(count for *_, count in todo) * len(cache.shapes))
    with bar:
        if workers == 0:
            for episode in todo:
                bar.advance(task, _write_episode(cache, source, transform, *episode))
            return
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(
            min(workers, len(todo)), context, _start, (cache, source, transform)
        ) as pool:
            futures = [pool.submit(_write_in_worker, *episode) for episode in todo]
            try:
                for future in concurrent.futures.as_completed(futures):
                    bar.advance(task, future.result())
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise


_worker: tuple[Any, Any, Any] | None = None


def _start(cache, source, transform) -> None:
    import cv2

    global _worker
    cv2.setNumThreads(1)
    _worker = cache, source, transform


def _write_in_worker(episode: int, first: int, count: int) -> int:
    assert _worker is not None
    return _write_episode(*_worker, episode, first, count)


def _write_episode(
    cache: FrameCache, source: LeRobotDataset, transform: Transform, episode: int, first: int, count: int
) -> int:
    """Decodes an episode, one camera after the other in order of time, and marks it finished. Returns the frames."""
    for camera, shape in cache.shapes.items():
        frame_bytes = int(np.prod(shape))
        with open(_file(cache.folder, camera), "r+b") as file:
            file.seek(first * frame_bytes)
            waiting = []
            for record in range(first, first + count):
                picture = source.frame(record, camera)
                if camera not in cache._enlarge:
                    picture = transform.prepare_image(picture)
                if picture.shape != shape or picture.dtype != np.uint8:
                    raise DataError(
                        f"episode {episode}, record {record}, camera {camera!r}: picture is {picture.dtype} "
                        f"{picture.shape}, others are uint8 {shape}. Pictures of several sizes cannot be cached; set "
                        "data.cache='decode'"
                    )
                waiting.append(picture.tobytes())
                if len(waiting) * frame_bytes >= WRITE_BYTES:
                    file.write(b"".join(waiting))
                    waiting.clear()
            file.write(b"".join(waiting))
            file.flush()
            os.fsync(file.fileno())
    (cache.folder / "done" / str(episode)).touch()
    return count * len(cache.shapes)
