"""What the tests of the reader share: the refusal of a dataset, and that every record is its own."""

import numpy as np
import pytest
from recordings import code, number_in, values

from somaspeed_jax.data.errors import DataError
from somaspeed_jax.data.lerobot import LeRobotDataset

H = 4


def refusal(root, **options) -> str:
    """The message with which opening the dataset is refused."""
    with pytest.raises(DataError) as error:
        LeRobotDataset(root, horizon=H, **options)
    return str(error.value)


def assert_exact(dataset, lengths, pictures=True):
    """Every record's numbers, prompt, padding and picture are those of its own episode and frame."""
    i = 0
    for episode in dataset.episodes:
        for frame in range(episode.usable):
            record = dataset[i] if pictures else dataset.record(i, images=False)
            place = (record["index"], record["episode_index"], record["frame_index"])
            assert place == (i, episode.index, frame)
            dims = dataset.state_dim
            np.testing.assert_array_equal(record["state"], values(episode.index, np.array([frame]), dims)[0])
            steps = np.minimum(frame + np.arange(dataset.horizon), lengths[episode.index] - 1)
            np.testing.assert_array_equal(record["actions"], values(episode.index, steps, dims) + np.float32(0.5))
            np.testing.assert_array_equal(
                record["action_is_pad"], frame + np.arange(dataset.horizon) >= lengths[episode.index]
            )
            assert record["task"] == f"episode {episode.index}"
            for image in record["images"].values():
                assert number_in(image) == code(episode.index, frame)
            i += 1
    assert i == len(dataset)
