"""Which records a step trains on: a pure function of (seed, step), so a position in the data is a step number."""

import numpy as np

# `import grain` brings the jax module along but starts no backend, in workers neither.
from grain.experimental import index_shuffle


def epoch_seed(*numbers: int) -> int:
    """One 32-bit seed out of several numbers (a run's seed, an epoch), unrelated for neighbouring inputs."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


class Stream:
    """An endless sequence of shuffled epochs over `size` records.

    `stream[g]` is a record in 0 .. size - 1; positions e * size .. (e + 1) * size - 1 hold every record once. The
    permutation is never stored: grain's index_shuffle is a keyed bijection evaluated at one point. (It takes about
    12 ms an epoch, however small: a millisecond a record where there are ten, microseconds where there are thousands.)
    """

    def __init__(self, size: int, seed: int):
        if size < 1:
            raise ValueError("no records to train on: the chosen episodes give no sample")
        if seed < 0:
            raise ValueError(f"seed is {seed}, expected a number of at least 0")
        self.size, self.seed = size, seed
        self._last = -1, 0  # an epoch and its key, kept in one attribute because threads share an order

    def __getitem__(self, position: int) -> int:
        epoch, place = divmod(position, self.size)
        last, key = self._last
        if epoch != last:
            key = epoch_seed(self.seed, epoch)
            self._last = epoch, key
        return index_shuffle(place, self.size - 1, key, 4)


class Order:
    """Records of each step of a run over one dataset.

    Step n takes positions n * global_batch .. (n + 1) * global_batch - 1 of an endless `Stream`: no batch is ever
    short, and where the batch does not divide the epoch a batch holds the end of one epoch and the start of the next.
    """

    def __init__(self, num_records: int, global_batch: int, seed: int):
        if global_batch < 1:
            raise ValueError(f"global batch is {global_batch}, expected at least 1")
        self.num_records, self.global_batch = num_records, global_batch
        self._stream = Stream(num_records, seed)

    def record_ids(self, step: int) -> np.ndarray:
        """int64 [global_batch]: row i of the global batch of `step` is record record_ids[i]."""
        first = step * self.global_batch
        return np.array([self._stream[g] for g in range(first, first + self.global_batch)], np.int64)
