"""U30: normalised ground truth in place of the model's output comes back from the server in robot units."""

import numpy as np
import pytest
from policy_client import Client, running_at

from somaspeed_jax.data import demo, stats
from somaspeed_jax.data.demo_tokenizer import ensure_demo_tokenizer
from somaspeed_jax.data.lerobot import LeRobotDataset
from somaspeed_jax.data.normalize import Normalizer
from somaspeed_jax.data.tokenizers import load_tokenizer
from somaspeed_jax.data.transforms.pi05 import Pi05Transform, Pi05TransformConfig
from somaspeed_jax.evaluate.open_loop import evaluate_open_loop

HORIZON = 5
NAMES = ("arm_x", "arm_y", "gripper_left", "gripper_right")
CAMERA = "observation.images.front"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(ensure_demo_tokenizer(tmp_path_factory.mktemp("t"), "sentencepiece"), "gemma")


@pytest.fixture(scope="module")
def recording():
    """Two episodes of 20 frames: state and action [40, 4], an arm in centimetres and a two-finger gripper in metres."""
    rng = np.random.default_rng(0)
    scale = np.array([30, 12, 0.04, 0.04], np.float32)
    state = (np.cumsum(rng.normal(0, 0.1, (40, 4)), 0) * scale + 5 * scale).astype(np.float32)
    action = (state + rng.normal(0, 0.1, (40, 4)) * scale).astype(np.float32)
    return state, action, np.repeat([0, 1], 20)


def records(recording, shape=(8, 8)):
    state, action, episode = recording
    for i in range(len(state)):
        steps = np.minimum(i + np.arange(HORIZON), np.flatnonzero(episode == episode[i]).max())
        image = np.full((*shape, 3), i, np.uint8)
        yield {"index": i, "task": "go", "state": state[i], "actions": action[steps], "images": {CAMERA: image}}


def transform(tokenizer, state, action, cameras=(CAMERA,), relative=False, exclude=("gripper",)):
    config = Pi05TransformConfig(
        cameras=cameras,
        absent_cameras=0,
        horizon=HORIZON,
        image_size=(8, 8),
        relative_actions=relative,
        relative_exclude=exclude,
    )
    return Pi05Transform(
        config, tokenizer, Normalizer(state, "quantiles", "lerobot"), Normalizer(action, "quantiles", "lerobot")
    )


class TrueModel:
    """A policy whose model output is the normalised ground truth of the frame with that state."""

    def __init__(self, transform, records):
        self.transform = transform
        self.normalised = {r["state"].tobytes(): transform(r)["actions"] for r in records}

    def __call__(self, observations):
        states = np.stack([o["state"] for o in observations])
        known = np.zeros((HORIZON, self.transform.config.action_dim), np.float32)  # the warm-up's state is no record's
        return self.transform.actions(np.stack([self.normalised.get(s.tobytes(), known) for s in states]), states)


@pytest.mark.parametrize("relative", [False, True])
def test_the_server_returns_the_recorded_chunk(relative, recording, tokenizer, tmp_path):
    state, action, episode = recording
    moves = np.array([True, True, False, False])  # the fingers stay absolute
    computed = {
        "state": stats.compute(state, NAMES, feature="state"),
        "action": stats.compute_relative(action, state, episode, HORIZON, NAMES, mask=moves)
        if relative
        else stats.compute(action, NAMES, feature="action"),
    }
    stats.save(tmp_path / "statistics.json", computed)
    kept = stats.load(tmp_path / "statistics.json")  # as a checkpoint keeps them
    policy = TrueModel(transform(tokenizer, kept["state"], kept["action"], relative=relative), records(recording))
    scale = np.abs(action).max(0)
    with running_at(policy, cameras=(CAMERA,), state_dim=4) as (_, port):
        client = Client(port)
        for record in records(recording):
            answer = client.infer(
                {"observation/front": record["images"][CAMERA], "state": record["state"], "prompt": record["task"]}
            )
            np.testing.assert_allclose(answer["actions"] / scale, record["actions"] / scale, atol=1e-5)


def test_statistics_of_the_other_kind_are_refused(recording, tokenizer):
    state, action, episode = recording
    of_state = stats.compute(state, NAMES, feature="state")
    absolute = stats.compute(action, NAMES, feature="action")
    relative = stats.compute_relative(action, state, episode, HORIZON, NAMES)
    with pytest.raises(ValueError, match="relative"):
        transform(tokenizer, of_state, absolute, relative=True)
    with pytest.raises(ValueError, match="absolute"):
        transform(tokenizer, of_state, relative, relative=False)


def test_open_loop_evaluation_and_server_agree_on_every_frame(tokenizer, tmp_path):
    path = demo.ensure_demo(tmp_path, episodes=2)
    dataset = LeRobotDataset(path, horizon=HORIZON)
    of = {k: stats.compute(dataset.numeric(k), feature=k) for k in (dataset.state_key, dataset.action_key)}
    moves = transform(tokenizer, of[dataset.state_key], of[dataset.action_key], dataset.cameras)
    found = []

    class Half(TrueModel):
        """Half the ground truth, so that there is an error to agree on."""

        def __call__(self, observations):
            chunk = super().__call__(observations) * np.float32(0.5)
            found.extend((o["state"].tobytes(), c) for o, c in zip(observations, chunk, strict=True))
            return chunk

    resized = [dataset[i] for i in range(len(dataset))]
    for r in resized:
        r["images"] = {camera: moves.prepare_image(image) for camera, image in r["images"].items()}
    policy = Half(moves, resized)
    result = evaluate_open_loop(policy, dataset, np.zeros(2), batch=4)
    assert result.errors["policy"].mae_by_dimension.min() > 0
    evaluated = dict(found)
    with running_at(policy, cameras=dataset.cameras, state_dim=2) as (_, port):
        client = Client(port)
        for i in range(1, 6):
            record = dataset[i]
            answer = client.infer({"images": record["images"], "state": record["state"], "prompt": record["task"]})
            np.testing.assert_array_equal(answer["actions"], evaluated[record["state"].tobytes()])
