"""One training step as shapes: what a plan compiles and what FLOPs are counted of, without data, weights or devices."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from somaspeed_jax import recipes
from somaspeed_jax.assemble import DTYPES, Learner, cache_directory
from somaspeed_jax.config import Config
from somaspeed_jax.data import stats
from somaspeed_jax.data.demo import ensure_demo_tokenizer
from somaspeed_jax.data.tokenizers import load_tokenizer
from somaspeed_jax.data.transforms.groot_groups import groups_by_name
from somaspeed_jax.flow import flow_loss
from somaspeed_jax.models.layers.param import bind
from somaspeed_jax.recipes import Facts
from somaspeed_jax.scaling import flops
from somaspeed_jax.state import TrainState, abstract_state
from somaspeed_jax.step import Batch, Prepare, observe

STAGES = ("context", "memory", "expert")


@dataclasses.dataclass(frozen=True)
class Robot:
    """What a plan must know of data that is not there yet.

    cameras: how many. picture: (height, width) that they record. prompt: tokens, 0 for the model's usual length.
    state, actions: dimensions.
    """

    cameras: int = 2
    picture: tuple[int, int] = (256, 256)
    prompt: int = 0
    state: int = 8
    actions: int = 7
    fps: float = 20.0


def robot_facts(config: Config, robot: Robot) -> Facts:
    """The facts that a dataset of this robot would have, its groups of actions not told apart."""
    names = tuple(f"action{i}" for i in range(robot.actions))
    known = Facts(
        cameras=config.data.cameras or tuple(f"observation.images.camera{i}" for i in range(robot.cameras)),
        state_names=tuple(f"state{i}" for i in range(robot.state)),
        action_names=names,
        fps=robot.fps,
        prompt_length=robot.prompt or config.data.prompt_length or LONGEST_PROMPT.get(config.model.name, 0),
        extra={
            "state_groups": [{"name": "state", "columns": list(range(robot.state))}],
            "action_groups": [dataclasses.asdict(group) for group in groups_by_name(names, robot.state, None)],
        },
    )
    if robot.prompt or config.data.prompt_length or config.model.name == "pi05":
        return known
    planned: Any = _transform(config, known)
    sources = [[robot.picture] * len(known.cameras)] if config.model.name == "groot" else []
    return dataclasses.replace(known, prompt_length=planned.required_prompt_length([INSTRUCTION], *sources))


# π0.5's upstreams pad to 200 tokens; GR00T's prompt has no length of its own, so that it is measured under a bound.
LONGEST_PROMPT = {"pi05": 200, "groot": 1024}
INSTRUCTION = "put the red block on the blue square"


def _transform(config: Config, facts: Facts) -> Any:
    """The model's transform. The words of a prompt hardly matter to shapes, so that the small demo tokenizer does."""
    recipe = recipes.get(config.model.name)
    kind = {"gemma": "sentencepiece"}.get(recipe.TOKENIZER, recipe.TOKENIZER)
    tokenizer = load_tokenizer(ensure_demo_tokenizer(cache_directory(), kind), recipe.TOKENIZER)  # pyright: ignore[reportArgumentType]
    rows = np.linspace(-1.0, 1.0, 16, dtype=np.float32)[:, None]
    statistics = {
        "state": stats.compute(np.repeat(rows, len(facts.state_names), 1), facts.state_names, feature="state"),
        "action": stats.compute(np.repeat(rows, len(facts.action_names), 1), facts.action_names, feature="action"),
    }
    absolute = dataclasses.replace(config.data, relative_actions=False)  # no shape depends on it
    return recipe.transform(dataclasses.replace(config, data=absolute), facts, statistics, tokenizer)


def sample_shapes(config: Config, facts: Facts, picture: tuple[int, int]) -> dict[str, Any]:
    """Shapes and types of one sample (a pytree of jax.ShapeDtypeStruct), by running the model's transform on zeros."""
    transform = _transform(config, facts)
    horizon = recipes.get(config.model.name).horizon(config)
    sample = transform(
        {
            "index": 0,
            "episode_index": 0,
            "frame_index": 0,
            "task": "move",
            "images": {name: transform.prepare_image(np.zeros((*picture, 3), np.uint8)) for name in facts.cameras},
            "state": np.zeros(len(facts.state_names), np.float32),
            "actions": np.zeros((horizon, len(facts.action_names)), np.float32),
            "action_is_pad": np.zeros(horizon, bool),
        }
    )
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), np.asarray(x).dtype), sample)


def abstract_batch(sample: dict[str, Any], rows: int, *, accumulation: int = 1, sharding: Any = None) -> Batch:
    """The batch of `rows` samples a step, with the leading microbatch axis where a step accumulates."""
    lead = (accumulation, rows // accumulation) if accumulation > 1 else (rows,)

    def widen(x):
        return jax.ShapeDtypeStruct((*lead, *x.shape), x.dtype, sharding=sharding)

    fields = {name: jax.tree.map(widen, sample[name]) for name in Batch._fields if name in sample}
    scalar = {"position": jnp.int32, "weight": jnp.float32}
    fields |= {name: widen(jax.ShapeDtypeStruct((), dtype)) for name, dtype in scalar.items()}
    return Batch(**fields)


def learner_state(config: Config, learner: Learner) -> TrainState:
    """Shapes, types and shardings of the whole training state."""
    return abstract_state(learner.specs, learner.shardings, learner.optimizer, DTYPES[config.dtype.frozen])


class _Staged:
    """A bound policy whose three methods run under the names of STAGES."""

    def __init__(self, policy: Any):
        self.flow = policy.flow
        self.encode = jax.named_scope("stage.context")(policy.encode)
        self.condition = jax.named_scope("stage.memory")(policy.condition)
        self.velocity = jax.named_scope("stage.expert")(policy.velocity)


@dataclasses.dataclass(frozen=True)
class Stage:
    """FLOPs of one of STAGES for one sample; recomputation is what rematerialisation repeats."""

    forward: float = 0.0
    backward: float = 0.0
    recomputation: float = 0.0


def stage_flops(config: Config, learner: Learner, prepare: Prepare, sample: dict[str, Any]) -> dict[str, Stage]:
    """FLOPs a sample of each of STAGES; takes a second or two.

    The optimiser has no products. Model FLOPs, the ground of MFU, are forward and backward without recomputation.
    """
    return by_stage(gradient_products(config, learner, prepare, sample), learner.layout.mesh.size)


def gradient_products(
    config: Config, learner: Learner, prepare: Prepare, sample: dict[str, Any]
) -> list[flops.Product]:
    """Products of the loss and its gradient for one sample a device, from the jaxpr, under the names of STAGES."""
    policy, times = learner.policy, config.flow.times
    rows = learner.layout.mesh.size  # one a device: the fewest that the layout can split
    state = learner_state(config, learner)
    batch = abstract_batch(sample, rows)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), rows))
    noise = jax.ShapeDtypeStruct((rows, times, policy.horizon, policy.action_dim), jnp.float32)
    time = jax.ShapeDtypeStruct((rows, times), jnp.float32)

    def loss(trainable, frozen, batch, noise, time, keys):
        staged: Any = _Staged(bind(policy, {**frozen, **trainable}))
        observation = observe(batch, prepare, keys)
        return flow_loss(
            staged, observation, batch.actions, batch.action_mask, batch.weight, noise, time, keys
        ).numerator

    return flops.products(jax.value_and_grad(loss), state.trainable, state.frozen, batch, noise, time, keys)


def by_stage(found: Iterable[flops.Product], samples: int) -> dict[str, Stage]:
    """FLOPs a sample of each of STAGES, of the products of `samples` samples."""
    table = {stage: {"forward": 0.0, "backward": 0.0, "recomputation": 0.0} for stage in STAGES}
    for product in found:
        stage = next((s for s in STAGES if f"stage.{s}" in product.scope), "expert")
        table[stage][_pass(product.scope)] += product.total / samples
    return {stage: Stage(**values) for stage, values in table.items()}


def _pass(scope: str) -> str:
    if "rematted_computation" in scope:
        return "recomputation"
    return "backward" if "transpose(" in scope else "forward"
