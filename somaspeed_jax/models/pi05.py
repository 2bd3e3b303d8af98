"""π0.5: SigLIP and a Gemma trunk read pictures and words; Gemma action layers read the trunk's keys and values.

Reference: Physical Intelligence's openpi (src/openpi/models/pi0.py, gemma.py, siglip.py) and LeRobot's pi05 policy.
Both run prefix and action tokens through one joint attention. The prefix never sees the actions, so here the prefix
runs alone and the action layers attend to its keys and values: the same sums, one encode for any number of flow times.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from somaspeed_jax.flow_spec import FlowSpec
from somaspeed_jax.models.base import Observation
from somaspeed_jax.models.language.gemma import (
    ROPE_THETA,
    AdaRMSNorm,
    ExpertLayer,
    GemmaConfig,
    KeyValue,
    LastTrunkLayer,
    TrunkLayer,
)
from somaspeed_jax.models.layers.linear import Embedding, Linear, LoraSpec
from somaspeed_jax.models.layers.param import Initialiser, Runtime, normal, stack, zeros
from somaspeed_jax.models.layers.rotary import rotary_angles
from somaspeed_jax.models.layers.stack import run_stack
from somaspeed_jax.models.vision.siglip import Siglip, SiglipConfig

FLOW = FlowSpec(noise_at=1, beta=(1.5, 1.0), time_scale=0.999, time_offset=0.001, steps=10)

# openpi's adapters: rank 16 in the trunk, 32 in the expert, scale 1, neither factor zero.
TRUNK_LORA = LoraSpec(rank=16, alpha=16.0, init_a=0.01, init_b=0.01)
EXPERT_LORA = LoraSpec(rank=32, alpha=32.0, init_a=0.01, init_b=0.01)


@dataclasses.dataclass(frozen=True)
class Pi05Config:
    """Sizes of π0.5; the defaults are the published model's.

    fresh_modulation: standard deviation of new adaRMS kernels. 0 (openpi) makes a new expert's blocks identities;
      a model that is trained from nothing learns faster from a small positive value.
    """

    vision: SiglipConfig = SiglipConfig()
    trunk: GemmaConfig = GemmaConfig(width=2048, depth=18, mlp=16384)
    expert: GemmaConfig = GemmaConfig(width=1024, depth=18, mlp=4096)
    vocabulary: int = 257_152
    action_dim: int = 32
    horizon: int = 50
    flow: FlowSpec = FLOW
    fresh_modulation: float = 0.0

    def __post_init__(self):
        for field in ("depth", "heads", "kv_heads", "head_width"):
            trunk, expert = getattr(self.trunk, field), getattr(self.expert, field)
            if trunk != expert:
                raise ValueError(f"pi05: trunk.{field} is {trunk} and expert.{field} is {expert}; they must be equal")

    def with_lora(self) -> "Pi05Config":
        """The same model with openpi's adapters in trunk and expert."""
        trunk = dataclasses.replace(self.trunk, lora=TRUNK_LORA)
        return dataclasses.replace(self, trunk=trunk, expert=dataclasses.replace(self.expert, lora=EXPERT_LORA))


def _small(
    width: int, depth: int, mlp: int, expert: int, vision: SiglipConfig, vocabulary: int, heads=8, head_width=16, **kw
):
    shared: dict[str, Any] = dict(depth=depth, heads=heads, kv_heads=1, head_width=head_width)
    return Pi05Config(
        vision=vision,
        trunk=GemmaConfig(width=width, mlp=mlp, **shared),
        expert=GemmaConfig(width=expert, mlp=4 * expert, **shared),
        vocabulary=vocabulary,
        **kw,
    )


SIZES: dict[str, Pi05Config] = {
    "published": Pi05Config(),
    # Trained from nothing on the demo tabletop in minutes on a CPU.
    "demo": _small(
        96, 3, 256, 64, SiglipConfig(96, 2, 192, 4, 16, (48, 48)), 512,
        heads=2, head_width=64, action_dim=8, horizon=8, fresh_modulation=0.02,
    ),
    # Real recordings on a CPU: the published geometry of pictures at a quarter of the resolution.
    "small": _small(
        192, 4, 512, 128, SiglipConfig(192, 4, 384, 4, 14, (112, 112)), 512,
        heads=4, head_width=32, horizon=16, fresh_modulation=0.02,
    ),
    # 80 M parameters: side-by-side timings.
    "bench": dataclasses.replace(
        _small(512, 8, 4096, 256, SiglipConfig(256, 6, 1024, 4, 14, (112, 112)), 8192, heads=8, head_width=64),
    ),
}  # fmt: skip


class Context(NamedTuple):
    """Keys and values of every trunk layer, [l, b, p, k, e] each, and which prefix tokens are real, [b, p]."""

    keys_values: KeyValue
    mask: jax.Array


class Memory(NamedTuple):
    """Context, and the rotary angles [b, 1, t, e/2] of the action tokens, which follow the valid prefix."""

    keys_values: KeyValue
    mask: jax.Array
    angles: jax.Array


class Trunk(nnx.Module):
    """All layers but the last run whole; of the last, keys and values."""

    def __init__(self, config: GemmaConfig, runtime: Runtime):
        self.layers = stack(config.depth - 1, TrunkLayer(config, runtime))
        self.last = LastTrunkLayer(config, runtime)
        self.runtime = runtime

    def __call__(self, x: jax.Array, angles: jax.Array, mask: jax.Array) -> KeyValue:
        """x [b, p, d] -> keys and values [l, b, p, k, e]."""
        x, kv = run_stack(
            self.layers,
            lambda layer, x, _: layer(x, angles, mask),
            x,
            runtime=self.runtime,
            remat=self.runtime.remat_context,
        )
        last = self.runtime.gathered(self.last)(x, angles)
        return KeyValue(*(jnp.concatenate([a, b[None]]) for a, b in zip(kv, last, strict=True)))


class Expert(nnx.Module):
    """The action layers and their final modulated norm."""

    def __init__(self, config: GemmaConfig, runtime: Runtime, modulation_init: Initialiser):
        self.layers = stack(config.depth, ExpertLayer(config, runtime, modulation_init))
        self.norm = AdaRMSNorm(config.width, runtime, modulation_init)
        self.runtime = runtime

    def __call__(self, x: jax.Array, memory: Memory, condition: jax.Array) -> jax.Array:
        """x [b, K, t, d], condition [b, K, d] -> [b, K, t, d]."""

        def body(layer, x, prefix):
            return layer(x, prefix, memory.mask, memory.angles, condition), None

        x, _ = run_stack(
            self.layers, body, x, memory.keys_values, runtime=self.runtime, remat=self.runtime.remat_expert
        )
        return self.runtime.gathered(self.norm)(x, condition)[0]


def time_embedding(time: jax.Array, width: int) -> jax.Array:
    """[sin | cos] of 2π t / period, periods geometric from 4e-3 to 4 (openpi, models/pi0.py). [...] -> [..., width].

    time: in [0, 1]. Within 1e-6 of the float64 value, which is LeRobot's. A float32 product of up to 250 turns would
    be 2e-4 off, which is most of what float32 gradients then lack: so time and frequency are split into twelve bits,
    whose product is exact and loses its whole turns, and a rest.
    """
    turns_per_unit = 1.0 / (4e-3 * (4.0 / 4e-3) ** np.linspace(0.0, 1.0, width // 2))
    step = 2.0 ** (np.floor(np.log2(turns_per_unit)) - 11)
    high = np.round(turns_per_unit / step) * step
    low = (turns_per_unit - high).astype(np.float32)
    high = high.astype(np.float32)
    time = time.astype(jnp.float32)[..., None]
    coarse = jnp.round(time * 4096) / 4096
    turns = coarse * high
    turns = turns - jnp.floor(turns) + ((time - coarse) * high + time * low)
    angle = 2 * math.pi * turns
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)


class Pi05(nnx.Module):
    """The policy. See `somaspeed_jax.models.base.Policy`."""

    def __init__(self, config: Pi05Config, runtime: Runtime):
        modulation = normal(config.fresh_modulation) if config.fresh_modulation else zeros
        width = config.expert.width
        self.vision = Siglip(config.vision, runtime)
        self.projector = Linear(config.vision.width, config.trunk.width, runtime)
        self.embed = Embedding(config.vocabulary, config.trunk.width, stddev=config.trunk.width**-0.5)
        self.trunk = Trunk(config.trunk, runtime)
        self.expert = Expert(config.expert, runtime, modulation)
        self.action_in = Linear(config.action_dim, width, runtime, exact=True)
        self.action_out = Linear(width, config.action_dim, runtime, exact=True)
        self.time_in = Linear(width, width, runtime, exact=True)
        self.time_out = Linear(width, width, runtime, exact=True)
        self.config, self.runtime = config, runtime
        self.flow, self.action_dim, self.horizon = config.flow, config.action_dim, config.horizon

    def encode(self, observation: Observation, keys: jax.Array | None) -> Context:
        """Pictures and prompt -> keys and values of every trunk layer. Deterministic."""
        x, mask = self.prefix(observation)
        positions = jnp.cumsum(mask, axis=1) - 1
        angles = rotary_angles(positions, self.config.trunk.head_width, ROPE_THETA)
        return Context(self.trunk(x, angles, mask), mask)

    def prefix(self, observation: Observation) -> tuple[jax.Array, jax.Array]:
        """Embedded picture and prompt tokens [b, p, d] and which of them are real [b, p].

        Word embeddings are multiplied by sqrt(d); picture features are not.
        """
        compute, width = self.runtime.compute, self.config.trunk.width
        words = (self.embed(observation.tokens) * math.sqrt(width)).astype(compute)
        if not observation.images:
            return self.runtime.pin(words), observation.token_mask
        images = jnp.stack(observation.images, axis=1)  # one encode for all cameras
        b, c = images.shape[:2]
        vision = self.runtime.gathered(self.projector)(self.vision(images.reshape(b * c, *images.shape[2:])))
        pictures = vision.reshape(b, -1, width).astype(compute)
        picture_mask = jnp.repeat(observation.image_mask, self.config.vision.tokens, axis=1)
        x = jnp.concatenate([pictures, words], axis=1)
        return self.runtime.pin(x), jnp.concatenate([picture_mask, observation.token_mask], axis=1)

    def condition(self, context: Context, observation: Observation, keys: jax.Array | None) -> Memory:
        """Positions of the action tokens: they follow the last valid prefix token."""
        start = jnp.sum(context.mask, axis=1)[:, None]
        positions = start + jnp.arange(self.horizon)
        angles = rotary_angles(positions, self.config.expert.head_width, ROPE_THETA)[:, None]
        return Memory(context.keys_values, context.mask, angles)

    def velocity(self, memory: Memory, x: jax.Array, time: jax.Array, keys: jax.Array | None) -> jax.Array:
        """x [b, K, t, a] at time [b, K] -> d x / d t [b, K, t, a] float32."""
        width = self.config.expert.width
        rt = self.runtime
        hidden = jax.nn.silu(rt.gathered(self.time_in)(time_embedding(time, width)))
        condition = jax.nn.silu(rt.gathered(self.time_out)(hidden))
        tokens = rt.gathered(self.action_in)(x).astype(rt.compute)
        return rt.gathered(self.action_out)(self.expert(tokens, memory, condition))


def build(config: Pi05Config, runtime: Runtime | None = None) -> Pi05:
    """The abstract policy: shapes, no values."""
    return Pi05(config, runtime or Runtime())


EXPERT = (r"expert\..*", r"action_in\..*", r"action_out\..*", r"time_in\..*", r"time_out\..*")


def trainable_patterns(preset: str) -> tuple[str, ...]:
    """Full-match patterns of the parameters that a preset trains.

    expert: LeRobot's train_expert_only. full: everything with a path to the loss. lora: openpi's LoRA configuration,
    which trains the adapters, the whole vision tower with its projector, and the action and time projections.
    """
    presets = {
        "expert": EXPERT,
        "full": (r".*",),
        "lora": (r".*\.lora\.[ab]", r"vision\..*", r"projector\..*", *EXPERT[1:]),
    }
    return presets[preset]
