"""The order of records is a pure function of (seed, step)."""

from collections import Counter

import numpy as np
import pytest

from somaspeed_jax.data.order import Order, Stream


def drawn(order: Order, steps: range) -> list[int]:
    return [int(i) for step in steps for i in order.record_ids(step)]


def test_U10_each_record_once_an_epoch_over_many_epochs():
    chosen = [3, 1, 4, 8]  # what a split left of ten records: the order knows nothing of the others
    ids = drawn(Order(len(chosen), 2, seed=7), range(2 * 50))
    for epoch in range(50):
        assert sorted(chosen[i] for i in ids[4 * epoch : 4 * epoch + 4]) == sorted(chosen)


def test_U21_a_batch_that_does_not_divide_the_records_is_never_short():
    order = Order(19, 4, seed=0)
    batches = [order.record_ids(step) for step in range(19 * 4)]
    assert all(batch.shape == (4,) and batch.dtype == np.int64 for batch in batches)
    ids = np.concatenate(batches)
    for epoch in range(16):
        assert sorted(ids[19 * epoch : 19 * epoch + 19]) == list(range(19))
    # 19 records and a batch of 50: every record two or three times
    assert set(Counter(Order(19, 50, 0).record_ids(0).tolist()).values()) == {2, 3}


def test_epochs_seeds_and_neighbouring_runs_differ():
    epochs = [tuple(Stream(100, seed)[g] for g in range(100 * e, 100 * e + 100)) for seed in (0, 1) for e in (0, 1)]
    assert len(set(epochs)) == 4
    overlap = np.mean([[np.mean(np.equal(a, b)) for b in epochs if b is not a] for a in epochs])
    assert overlap < 0.05  # unrelated permutations agree in one place of a hundred


def test_steps_in_any_order_and_shuffled_evenly():
    a, b = Order(1000, 8, seed=3), Order(1000, 8, seed=3)
    forward = [a.record_ids(step).tolist() for step in range(300)]
    assert [b.record_ids(step).tolist() for step in reversed(range(300))][::-1] == forward
    # each tenth of an epoch draws from the whole range: neighbours do not stay together
    ids = np.array(drawn(Order(1000, 10, seed=0), range(100)))
    assert np.abs(ids.reshape(10, 100).mean(1) - 499.5).max() < 120  # 4 standard deviations of the mean of 100
    assert np.mean(np.abs(np.diff(ids)) < 10) < 0.04


def test_refusals():
    with pytest.raises(ValueError, match="no records to train on"):
        Order(0, 4, 0)
    with pytest.raises(ValueError, match="global batch is 0"):
        Order(4, 0, 0)
    with pytest.raises(ValueError, match="seed is -1"):
        Order(4, 4, -1)
