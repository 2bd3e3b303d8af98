"""A trained policy that acts: what evaluation, the server and a notebook use.

policy = load_policy("runs/pi05-demo")
actions = policy.act({"images": {camera: uint8 [h, w, 3]}, "state": [s], "task": "reach the red block"})
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from somaspeed_jax import recipes
from somaspeed_jax.assemble import DTYPES, Learner, load_processor, make_learner, on_one_device
from somaspeed_jax.checkpoint import CheckpointError, Checkpoints
from somaspeed_jax.config import Config
from somaspeed_jax.data.transforms.base import Transform
from somaspeed_jax.flow import draw_noise, sample_actions, sample_keys
from somaspeed_jax.initial import check_frozen, initial_parameters
from somaspeed_jax.mixture_config import part_config
from somaspeed_jax.models.layers.param import Params, bind
from somaspeed_jax.recipes import Facts
from somaspeed_jax.state import abstract_state
from somaspeed_jax.step import Batch, Prepare, observe

Request = Mapping[str, Any]  # images {camera: uint8 [h, w, 3]}, state [s], task str


class TrainedPolicy:
    """Observations in robot units to action chunks in robot units.

    Attributes: `config`, `facts` (cameras, names, rate), `horizon`, `action_names`.
    """

    def __init__(
        self, config: Config, facts: Facts, transform: Transform, prepare: Prepare, policy: Any, params: Params
    ):
        self.config, self.facts, self.transform = config, facts, transform
        self.horizon, self.action_names = policy.horizon, facts.action_names
        self._params = params
        self._shape = (policy.horizon, policy.action_dim)
        self._calls = 0
        real = np.arange(policy.action_dim) < len(facts.action_names)

        def sample(params, batch: Batch, call):
            keys = sample_keys(jax.random.key(config.seed), call, batch.position)
            noise = draw_noise(keys, self._shape)
            return sample_actions(bind(policy, params), observe(batch, prepare, None), noise, dims=jnp.asarray(real))

        self._sample = jax.jit(sample)

    def act(self, observation: Request) -> np.ndarray:
        """One observation -> actions [t, a] float32 in robot units."""
        return self.act_batch([observation])[0]

    def act_batch(self, observations: Sequence[Request]) -> np.ndarray:
        """n observations -> actions [n, t, a] float32 in robot units. Each new n compiles once.

        Raises ValueError naming what an observation lacks or what does not fit.
        """
        samples = [self.transform.observation(self._record(o, i)) for i, o in enumerate(observations)]
        rows: dict[str, Any] = {
            name: np.stack([sample[name] for sample in samples]) for name in samples[0] if name != "images"
        }
        n = len(samples)
        batch = Batch(
            images=tuple(np.stack(views) for views in zip(*(sample["images"] for sample in samples), strict=True)),
            image_mask=rows["image_mask"],
            tokens=rows["tokens"],
            token_mask=rows["token_mask"],
            state=rows["state"],
            embodiment=rows["embodiment"],
            actions=np.zeros((n, *self._shape), np.float32),
            action_mask=np.zeros((n, *self._shape), bool),
            position=np.arange(n, dtype=np.int32),
            weight=np.ones(n, np.float32),
        )
        normalised = np.asarray(self._sample(self._params, batch, np.int32(self._calls)))
        self._calls += 1
        states = np.stack([np.asarray(o["state"], np.float32) for o in observations])
        return self.transform.actions(normalised, states)

    def _record(self, observation: Request, index: int) -> dict[str, Any]:
        for key in ("images", "state", "task"):
            if key not in observation:
                raise ValueError(f"observation {index} has no {key!r}; it needs images, state and task")
        state = np.asarray(observation["state"], np.float32)
        if state.shape != (len(self.facts.state_names),) or not np.isfinite(state).all():
            raise ValueError(
                f"observation {index}: state has shape {state.shape} (values {state.tolist()}), expected "
                f"{len(self.facts.state_names)} finite numbers: {', '.join(self.facts.state_names)}"
            )
        missing = [camera for camera in self.facts.cameras if camera not in observation["images"]]
        if missing:
            raise ValueError(
                f"observation {index} has no picture of {', '.join(missing)}; the policy reads "
                f"{', '.join(self.facts.cameras)}, the observation has {', '.join(observation['images']) or 'none'}"
            )
        images = {
            camera: self.transform.prepare_image(picture(observation["images"][camera], camera))
            for camera in self.facts.cameras
        }
        return {
            "images": images,
            "state": state,
            "task": observation["task"],
            "index": index,
            "episode_index": -1,
            "frame_index": -1,
        }


def picture(image: Any, camera: str) -> np.ndarray:
    """uint8 [h, w, 3] or [3, h, w] -> uint8 [h, w, 3]; anything else is refused by camera, shape and type."""
    image = np.asarray(image)
    if image.dtype == np.uint8 and image.ndim == 3:
        if image.shape[2] == 3:
            return np.ascontiguousarray(image)
        if image.shape[0] == 3:
            return np.ascontiguousarray(image.transpose(1, 2, 0))
    raise ValueError(
        f"camera {camera}: shape {image.shape} of {image.dtype}, "
        "expected uint8 [height, width, 3] or [3, height, width] in RGB order"
    )


def load_policy(
    workdir: str | Path, *, step: int | None = None, average: bool = True, dataset: str = ""
) -> TrainedPolicy:
    """The policy of a run's workdir.

    step: default the newest complete checkpoint. average: the moving average where the run keeps one. dataset: of a run
    on a mixture, the one whose cameras, embodiment, units and statistics the robot has.
    Raises CheckpointError or ValueError when there is no such checkpoint or the frozen weights are others.
    """
    workdir = Path(workdir)
    if not (workdir / "checkpoints").is_dir():
        raise CheckpointError(f"{workdir} holds no checkpoints: it is not the workdir of a run that has saved")
    with Checkpoints(workdir, keep=1_000_000) as checkpoints:
        step = checkpoints.latest if step is None else step
        if step is None:
            raise CheckpointError(f"{workdir / 'checkpoints'} has no complete checkpoint")
        config = on_one_device(checkpoints.config(step))
        recipe = recipes.get(config.model.name)
        statistics, facts, tokenizer = load_processor(workdir, recipe, dataset)
        config = part_config(config, dataset) if dataset else config
        learner = make_learner(config, facts)
        params = _restored(config, learner, checkpoints, step, average)
    transform = recipe.transform(config, facts, statistics, tokenizer)
    return TrainedPolicy(config, facts, transform, recipe.prepare(config, facts), learner.policy, params)


def _restored(config: Config, learner: Learner, checkpoints: Checkpoints, step: int, average: bool) -> Params:
    """Frozen parameters from their source, trained ones from the checkpoint."""
    recipe = recipes.get(config.model.name)
    _, frozen, facts = initial_parameters(config, recipe, learner)
    check_frozen(checkpoints.frozen(step), facts)
    like = abstract_state(learner.specs, learner.shardings, learner.optimizer, DTYPES[config.dtype.frozen])
    state = checkpoints.restore(step, dataclasses.replace(like, frozen=frozen), config.checkpoint.include_frozen)
    return {**state.frozen, **(state.ema if average and state.ema else state.trainable)}


def untrained_policy(config: Config, workdir: Path) -> TrainedPolicy:
    """The same policy with the parameters that the run started from, to compare with."""
    config = on_one_device(config)
    recipe = recipes.get(config.model.name)
    statistics, facts, tokenizer = load_processor(workdir, recipe)
    learner = make_learner(config, facts)
    trainable, frozen, _ = initial_parameters(config, recipe, learner)
    transform = recipe.transform(config, facts, statistics, tokenizer)
    prepare = recipe.prepare(config, facts)
    return TrainedPolicy(config, facts, transform, prepare, learner.policy, {**frozen, **trainable})
