"""Batches: the same for any number of workers and processes, resumable, never short, errors with their message."""

import gc
import os
import signal
import threading
import time

import numpy as np
import pytest
from fake_source import FakeSource, FakeTransform

from somaspeed_jax.data import pipeline
from somaspeed_jax.data.order import Order
from somaspeed_jax.data.pipeline import eval_batches, make_pipeline


def collect(source, order, start, stop, **options):
    with make_pipeline(source, FakeTransform(), order, start_step=start, stop_step=stop, **options) as batches:
        return {step: batch["index"].tolist() for step, batch in batches}


def test_a_batch():
    threads = threading.active_count()
    (step, batch), *rest = make_pipeline(FakeSource(19), FakeTransform(), Order(19, 4, 0), start_step=5, stop_step=7)
    assert threading.active_count() == threads  # a run that reaches its end closes itself
    assert step == 5 and [s for s, _ in rest] == [6]
    ids = Order(19, 4, 0).record_ids(5)
    np.testing.assert_array_equal(batch["index"], ids)
    np.testing.assert_array_equal(batch["position"], [0, 1, 2, 3])
    assert batch["index"].dtype == batch["position"].dtype == np.int32
    assert batch["actions"].shape == (4, 3, 2) and batch["image_mask"].shape == (4, 2)
    front, wrist = batch["images"]
    assert front.shape == (4, 3, 4, 3) and front.dtype == np.uint8  # after prepare_image
    np.testing.assert_array_equal(front[:, 0, 0, 0], ids)
    np.testing.assert_array_equal(wrist[:, 0, 0, 0], ids + 100)


def test_U16_a_resumed_run_sees_what_the_uninterrupted_one_sees():
    order = Order(10, 2, seed=1)
    whole = collect(FakeSource(10), order, 0, 7)
    assert len(whole) == 7
    for stop in (3, 5):  # 5 is the end of an epoch
        assert collect(FakeSource(10), order, stop, 7) == {s: ids for s, ids in whole.items() if s >= stop}
    # two processes: rows of one global batch, in order
    halves = [collect(FakeSource(10), order, 3, 7, process_index=p, process_count=2) for p in (0, 1)]
    assert {s: halves[0][s] + halves[1][s] for s in halves[0]} == {s: whole[s] for s in range(3, 7)}


def test_U16_workers_change_nothing_and_reading_ahead_moves_no_position():
    order = Order(10, 2, seed=1)
    whole = collect(FakeSource(10), order, 0, 7)
    source = FakeSource(10)
    with make_pipeline(source, FakeTransform(), order, start_step=0, stop_step=7, workers=2, prefetch=2) as batches:
        seen = dict(next(batches) for _ in range(3))
        time.sleep(0.5)  # workers are ahead by now; the position to save is the step of the next batch
        assert batches.step == 3
        images = seen[2]["images"][0]
        expected = np.array(whole[2])
        first = {s: b["index"].tolist() for s, b in seen.items()}
        del seen
        gc.collect()
        np.testing.assert_array_equal(images[:, 0, 0, 0], expected)  # outlives the worker's memory
        assert type(images) is np.ndarray
    assert first == {s: whole[s] for s in range(3)}
    assert collect(source, order, 3, 7, workers=1) == {s: whole[s] for s in range(3, 7)}
    # a run that went to its end leaves nothing in shared memory, for which Python would print warnings at exit
    assert not [o for o in gc.get_objects() if type(o).__name__ == "SharedMemoryArray"]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_keeps_its_message_and_arrives_when_its_batch_is_due(workers):
    order = Order(19, 4, 0)
    bad = next(s for s in range(3, 20) if 3 in order.record_ids(s))
    batches = make_pipeline(
        FakeSource(19, fail_at=3), FakeTransform(), order, start_step=bad - 2, stop_step=30, workers=workers
    )
    assert [next(batches)[0] for _ in range(2)] == [bad - 2, bad - 1]
    with pytest.raises(ValueError, match="episode 0, frame 3: the video is cut short"):
        next(batches)
    with pytest.raises(StopIteration):
        next(batches)


def test_a_worker_that_is_killed_is_reported():
    import psutil

    children = psutil.Process().children
    before = {c.pid for c in children()}
    source = FakeSource(19, sleep=0.02)
    batches = make_pipeline(source, FakeTransform(), Order(19, 4, 0), start_step=0, stop_step=1000, workers=1)
    next(batches)
    (worker,) = [c for c in children() if c.pid not in before and "resource_tracker" not in " ".join(c.cmdline())]
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="exit code -9"):
        for _ in batches:
            pass


class Gated(FakeSource):
    """Gives records only while its gate is open."""

    def __init__(self):
        super().__init__(10)
        self.gate = threading.Event()

    def record(self, index, images=True):
        self.gate.wait()
        return super().record(index, images)


def test_waiting_is_measured_and_reading_ahead_hides_it():
    source = Gated()
    with make_pipeline(source, FakeTransform(), Order(10, 2, 0), start_step=0, stop_step=4, prefetch=4) as batches:
        threading.Timer(1.0, source.gate.set).start()
        next(batches)
        before = batches.wait_seconds
        assert before > 0.9
        while not batches._ready.full():
            time.sleep(0.01)
        next(batches)
        assert batches.wait_seconds - before < 0.5  # it was there


def test_close_in_the_middle_leaves_no_thread():
    before = threading.active_count()
    batches = make_pipeline(FakeSource(10, sleep=0.01), FakeTransform(), Order(10, 2, 0), start_step=0, stop_step=1000)
    next(batches)
    batches.close()
    batches.close()  # harmless
    assert threading.active_count() == before
    with pytest.raises(StopIteration):
        next(batches)


def test_U21_a_batch_that_does_not_split_over_the_processes_is_refused():
    with pytest.raises(
        ValueError, match=r"batch of 19 does not split over 4 processes.*nearest batches that do: 16, 20"
    ):
        make_pipeline(
            FakeSource(19),
            FakeTransform(),
            Order(19, 19, 0),
            start_step=0,
            stop_step=1,
            process_index=1,
            process_count=4,
        )


def test_shapes_that_change_are_refused_by_record_and_field():
    class Growing(FakeTransform):
        def __call__(self, record):
            return {**super().__call__(record), "state": np.zeros(1 + record["index"] // 5, np.float32)}

    batches = make_pipeline(FakeSource(10), Growing(), Order(10, 10, 0), start_step=0, stop_step=1)
    with pytest.raises(ValueError, match=r"record \d: state is float32 \(\d,\), but float32 \(\d,\) in record \d"):
        next(batches)


def test_too_little_shared_memory_is_refused_before_a_worker_dies(monkeypatch, tmp_path):
    usage = type("Usage", (), {"free": 1_000})
    monkeypatch.setattr(pipeline.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ValueError, match=r"MB free, workers need .* batches of 4 rows.*--shm-size"):
        make_pipeline(FakeSource(19), FakeTransform(), Order(19, 4, 0), start_step=0, stop_step=1, workers=2)


class Undecodable(FakeSource):
    def frame(self, index, camera):
        raise AssertionError("decoded")


class Prepared:
    def images(self, index):
        time.sleep(0.001)
        return {camera: np.full((3, 4, 3), index, np.uint8) for camera in ("front", "wrist")}


@pytest.mark.parametrize("workers", [0, 3])
def test_prepared_pictures_replace_decoding_and_threads_change_nothing(workers):
    order, reference = Order(10, 2, 0), Order(10, 2, 0)
    options = {"start_step": 3, "stop_step": 60, "workers": workers, "prefetch": 4, "cache": Prepared()}
    with make_pipeline(Undecodable(10), FakeTransform(), order, **options) as batches:
        for count, (step, batch) in enumerate(batches):
            assert step == 3 + count
            np.testing.assert_array_equal(batch["index"], reference.record_ids(step))
            np.testing.assert_array_equal(batch["images"][1][:, 0, 0, 0], batch["index"])
    assert count == 56


def test_evaluation_counts_every_record_once():
    ids = [7, 3, 9, 1, 12]
    batches = list(eval_batches(FakeSource(19), FakeTransform(), ids, 2))
    assert [b["weight"].tolist() for b in batches] == [[1, 1], [1, 1], [1, 0]]
    counted = [int(i) for b in batches for i, w in zip(b["index"], b["weight"], strict=True) if w]
    assert counted == ids
    assert [b["position"].tolist() for b in batches] == [[0, 1], [2, 3], [4, 5]]
    assert all(b["actions"].shape == (2, 3, 2) for b in batches)
    halves = [
        list(eval_batches(FakeSource(19), FakeTransform(), ids, 4, process_index=p, process_count=2)) for p in (0, 1)
    ]
    assert [h["weight"].tolist() for half in halves for h in half] == [[1, 1], [1, 0], [1, 1], [0, 0]]
