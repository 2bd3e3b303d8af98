"""Several datasets in one run: exact shares, each dataset's records once in each of its epochs, exact resume."""

import numpy as np
import pytest
from fake_source import FakeSource, FakeTransform

from somaspeed_jax.data.errors import DataError
from somaspeed_jax.data.mixture import (
    MixtureFrames,
    MixtureOrder,
    MixtureSource,
    MixtureTransform,
    camera_views,
    check_alike,
)
from somaspeed_jax.data.pipeline import make_pipeline


class OneCamera(FakeTransform):
    cameras = ("front",)

    def __call__(self, record):
        return {**super().__call__(record), "image_mask": np.ones(1, bool)}


def drawn(order, steps):
    return np.concatenate([order.record_ids(step) for step in range(steps)])


def test_shares_are_exact_over_blocks_and_epochs_are_whole():
    order = MixtureOrder([70, 400, 30], [0.5, 0.3, 0.2], global_batch=4, seed=0)
    assert order.block == 10 and order.places == [5, 3, 2]
    ids = drawn(order, 700)
    datasets = order.dataset_of(ids)
    for block in datasets.reshape(-1, 10):
        assert np.bincount(block, minlength=3).tolist() == [5, 3, 2]
    # places are shuffled within a block, so compare a dataset's epochs where block and epoch end together
    first = ids[datasets == 0]
    for window in first.reshape(-1, 70):  # 14 blocks = an epoch of 70 records
        assert sorted(window) == list(range(70))
    assert set(ids[datasets == 2] - order.offsets[2]) == set(range(30))


def test_counts_are_those_of_the_records_drawn():
    order = MixtureOrder([7, 40], [3, 1], global_batch=3, seed=5)
    for steps in (0, 1, 2, 9, 100):
        ids = drawn(order, steps) if steps else np.array([], np.int64)
        assert order.counts(steps) == np.bincount(order.dataset_of(ids), minlength=2).tolist()


def test_a_pure_function_of_seed_and_step():
    a, b = (MixtureOrder([7, 40], [0.123, 0.877], 4, seed=2) for _ in range(2))
    forward = [a.record_ids(s).tolist() for s in range(50)]
    assert [b.record_ids(s).tolist() for s in range(49, -1, -1)][::-1] == forward
    assert MixtureOrder([7, 40], [0.123, 0.877], 4, seed=3).record_ids(0).tolist() != forward[0]


@pytest.mark.parametrize(
    "weights", [[1, 1, 1], [0.1, 0.2, 0.7], [1234, 777, 99], [1 / 3, 1 / 7, 11 / 21], [0.01, 1, 1]]
)
def test_places_follow_the_weights(weights):
    order = MixtureOrder([5, 5, 5], weights, 4, 0)
    exact = np.array(weights) / sum(weights) * order.block
    assert order.block <= 1000 and np.abs(order.places - exact).max() < 1


def test_refusals():
    with pytest.raises(DataError, match="below 1 in 1000 it would never be drawn"):
        MixtureOrder([5, 5], [1e-5, 1], 4, 0)
    with pytest.raises(DataError, match="each must be a positive number"):
        MixtureOrder([5, 5], [0, 1], 4, 0)
    with pytest.raises(DataError, match="1 weights for 2 datasets"):
        MixtureOrder([5, 5], [1], 4, 0)
    other = FakeTransform()
    other.image_recipe = "another"
    with pytest.raises(DataError, match=r"one picture recipe, found \['another', 'halve'\]"):
        MixtureTransform([FakeTransform(), other])
    with pytest.raises(IndexError, match="record 9 of 9"):
        MixtureSource([FakeSource(4), FakeSource(5)]).record(9)


def test_batches_of_datasets_with_different_cameras():
    source, transform = MixtureSource([FakeSource(4), FakeSource(5)]), MixtureTransform([FakeTransform(), OneCamera()])
    order = MixtureOrder([4, 5], [1, 1], 6, seed=0)
    with make_pipeline(source, transform, order, start_step=1, stop_step=2) as batches:
        ((_, batch),) = batches
    ids = order.record_ids(1)
    np.testing.assert_array_equal(batch["index"], ids)
    second = ids >= 4
    assert second.any() and not second.all()
    np.testing.assert_array_equal(batch["image_mask"], np.stack([np.ones(6, bool), ~second], 1))
    np.testing.assert_array_equal(batch["images"][0][:, 0, 0, 0], np.where(second, ids - 4, ids))
    np.testing.assert_array_equal(batch["images"][1][:, 0, 0, 0], np.where(second, 0, ids + 100))
    np.testing.assert_array_equal(batch["state"][:, 0], np.where(second, ids - 4, ids))


def test_cameras_of_one_name_share_a_view_and_others_fill_what_is_left():
    assert camera_views([("top", "wrist"), ("wrist",), ("front",), ("wrist", "side")]) == (
        ["top", "wrist"],
        [[0, 1], [1], [0], [1, 0]],
    )
    assert camera_views([("top",), ("wrist",)], ("top", "wrist")) == (["top", "wrist"], [[0], [1]])
    with pytest.raises(DataError, match=r"cameras \['a', 'b'\] do not fit into the run's views \['top'\]"):
        camera_views([("a", "b")], ("top",))


def test_a_camera_of_the_second_view_and_a_wider_state():
    class Wrist(OneCamera):
        cameras = ("wrist",)

    source = MixtureSource([FakeSource(4), FakeSource(5)])
    transform = MixtureTransform([FakeTransform(), Wrist()], state_dim=3)
    record = source.record(5)
    sample = transform({**record, "images": {c: transform.prepare_image(i) for c, i in record["images"].items()}})
    assert sample["image_mask"].tolist() == [False, True]
    assert not sample["images"][0].any() and (sample["images"][1] == 101).all()
    assert sample["state"].tolist() == [1, 1, 0]


def test_datasets_of_different_shapes_are_refused_by_name():
    class Longer(FakeTransform):
        def __call__(self, record):
            return {**super().__call__(record), "actions": np.zeros((4, 2), np.float32)}

    source = MixtureSource([FakeSource(4), FakeSource(5)])
    check_alike(source, MixtureTransform([FakeTransform(), OneCamera()]), ["pick", "fold"])
    with pytest.raises(DataError, match=r"actions has shape \(4, 2\) in fold and \(3, 2\) in pick"):
        check_alike(source, MixtureTransform([FakeTransform(), Longer()]), ["pick", "fold"])


def test_frames_of_several_caches():
    class Cache:
        def __init__(self, name):
            self.name = name

        def images(self, index):
            return {self.name: np.full((1, 1, 3), index, np.uint8)}

    frames = MixtureFrames([Cache("a"), Cache("b")], [4, 5])
    assert frames.images(3)["a"][0, 0, 0] == 3 and frames.images(4)["b"][0, 0, 0] == 0
