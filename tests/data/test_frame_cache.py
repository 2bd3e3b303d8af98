"""The frame cache: what is read equals what decoding gives; kills, limits and several processes do no harm."""

import multiprocessing
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from data_paths import shared_data
from fake_source import FakeSource, FakeTransform

from somaspeed_jax.data import frame_cache
from somaspeed_jax.data.errors import DataError
from somaspeed_jax.data.lerobot import LeRobotDataset

GB = 10**9


class Episodes(FakeSource):
    """19 records in episodes 2, 3, 5 (none usable), 8."""

    fingerprint = "a dataset"
    episodes = (
        SimpleNamespace(index=2, usable=7),
        SimpleNamespace(index=3, usable=1),
        SimpleNamespace(index=5, usable=0),
        SimpleNamespace(index=8, usable=11),
    )

    def __init__(self, log: Path | None = None, sleep=0.0, die_after: int | None = None):
        super().__init__(19, sleep=sleep)
        self.log, self.die_after, self.decoded = log, die_after, 0

    def frame(self, index, camera):
        time.sleep(self.sleep)
        self.decoded += 1
        if self.die_after is not None and self.decoded > self.die_after:
            os.kill(os.getpid(), 9)
        if self.log is not None:
            with open(self.log, "a") as f:
                f.write(f"{index} {camera}\n")
        picture = super().frame(index, camera)
        picture[0, 0] = (index, 7, 9)
        return picture


def build(source, directory, transform=None, **options):
    options = {"max_bytes": GB, "progress": False, **options}
    return frame_cache.build(source, transform or FakeTransform(), directory, **options)


def assert_right(cache, source, transform=None):
    transform = transform or FakeTransform()
    assert len(cache) == len(source)
    for index in range(len(source)):
        for camera, picture in cache.images(index).items():
            np.testing.assert_array_equal(picture, transform.prepare_image(source.frame(index, camera)))


def test_the_cache_holds_what_decoding_gives(tmp_path):
    cache = build(Episodes(), tmp_path)
    assert cache.shapes == {"front": (3, 4, 3), "wrist": (3, 4, 3)} and cache.bytes == 2 * 19 * 36
    assert_right(cache, Episodes())
    assert_right(pickle.loads(pickle.dumps(cache)), Episodes())
    with pytest.raises(IndexError, match="record 19 of 19"):
        cache.images(19)
    with pytest.raises(ValueError, match="read-only"):
        cache.images(0)["front"][:] = 0


def test_a_second_run_decodes_nothing(tmp_path):
    build(Episodes(), tmp_path)
    again = Episodes(log=tmp_path / "log")
    assert_right(build(again, tmp_path), Episodes())
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize("change", ["recipe", "content", "records"])
def test_another_recipe_dataset_or_choice_of_records_is_another_cache(tmp_path, change):
    first = build(Episodes(), tmp_path)
    source, transform = Episodes(), FakeTransform()
    if change == "recipe":
        transform.image_recipe = "another"
    elif change == "content":
        source.fingerprint = "another"
    else:
        source.episodes = source.episodes[:2]
    assert build(source, tmp_path, transform).folder != first.folder


def test_pictures_that_the_recipe_enlarges_are_stored_as_recorded(tmp_path):
    class Enlarge(FakeTransform):
        def prepare_image(self, image):
            return np.repeat(np.repeat(image, 4, 0), 4, 1)

    cache = build(Episodes(), tmp_path, Enlarge())
    assert cache.shapes["front"] == (6, 8, 3)
    assert cache.images(0)["front"].shape == (24, 32, 3)
    assert_right(cache, Episodes(), Enlarge())


def test_built_by_several_workers(tmp_path):
    assert_right(build(Episodes(), tmp_path, workers=2), Episodes())


KILLED = """
import sys
sys.path[:0] = {paths!r}
from test_frame_cache import Episodes, build
build(Episodes(die_after={die_after}), {directory!r})
"""


def test_a_killed_build_goes_on_where_it_stopped(tmp_path):
    directory = tmp_path / "caches"
    # 7 + 1 records with two cameras are decoded, then the process is killed inside the last episode
    code = KILLED.format(
        paths=[str(p) for p in Path(__file__).parents[:2]], die_after=2 + 16 + 5, directory=str(directory)
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    rest = Episodes(log=tmp_path / "log")
    cache = build(rest, directory)
    decoded = {int(line.split()[0]) for line in (tmp_path / "log").read_text().splitlines()}
    assert decoded == set(range(8, 19))
    assert_right(cache, Episodes())


def test_a_data_file_cut_short_is_built_again(tmp_path):
    cache = build(Episodes(), tmp_path)
    with open(cache.folder / "wrist.u8", "r+b") as f:
        f.truncate(100)
    assert_right(build(Episodes(), tmp_path), Episodes())


def _build_and_check(directory, log):
    assert_right(build(Episodes(log=log, sleep=0.002), directory), Episodes())


def test_several_processes_at_once_decode_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_build_and_check, args=(tmp_path / "c", tmp_path / "log")) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    lines = (tmp_path / "log").read_text().splitlines()
    assert len(lines) == 2 * 19 + 2  # every frame once; record 0 twice, to learn its shape


def test_the_bound_names_what_is_needed_and_what_is_there(tmp_path):
    with pytest.raises(
        DataError, match=r"19 records \(front 3x4, wrist 3x4\) needs 0.00 GB.*data.cache_gb.*data.cache='decode'"
    ):
        build(Episodes(), tmp_path, max_bytes=1367)
    assert not list(tmp_path.glob("*/*.u8"))
    cache = build(Episodes(), tmp_path, max_bytes=1368)
    other = Episodes()
    other.fingerprint = "another"
    with pytest.raises(DataError, match=f"already holds 0.00 GB \\({cache.folder.name}\\)"):
        build(other, tmp_path, max_bytes=1400)


def test_a_disk_that_is_too_small_is_refused_at_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(frame_cache.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(DataError, match=r"disk of .* has 0.00 GB free. Keep the cache on another"):
        build(Episodes(), tmp_path)


def test_pictures_of_several_sizes_are_refused(tmp_path):
    class Sizes(Episodes):
        def frame(self, index, camera):
            picture = super().frame(index, camera)
            return picture if index < 8 else picture[:4]

    with pytest.raises(
        DataError,
        match=r"episode 8, record 8, camera 'front': picture is uint8 \(2, 4, 3\), others are uint8 \(3, 4, 3\)",
    ):
        build(Sizes(), tmp_path)
    assert sorted(os.listdir(next(tmp_path.iterdir()) / "done")) == ["2", "3"]


@pytest.mark.skipif(shared_data() is None, reason="needs the sample recordings")
def test_a_real_recording(tmp_path):
    class Small:
        cameras = ("observation.images.wrist_cam",)
        image_recipe = "every eighth pixel"

        def prepare_image(self, image):
            return np.ascontiguousarray(image[::8, ::8])

    dataset = LeRobotDataset(
        shared_data() / "franka-usb-v30", horizon=4, cameras=Small.cameras, episodes=[1], tail="drop"
    )
    cache = build(dataset, tmp_path, Small())
    assert len(cache) == len(dataset)
    for index in (0, len(dataset) // 2, len(dataset) - 1):
        (picture,) = cache.images(index).values()
        np.testing.assert_array_equal(picture, dataset.record(index)["images"][Small.cameras[0]][::8, ::8])
