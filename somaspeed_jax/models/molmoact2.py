"""MolmoAct2: a SigLIP 2 tower and a Qwen3 language model read pictures and prompt; one action block per language layer
reads that layer's keys and values.

Formulas: LeRobot 0.6.1, policies/molmoact2 (modeling_molmoact2.py and molmoact2_hf_model/modeling_molmoact2.py),
continuous action mode.

    encode     pictures, prompt -> keys (normed, rotated) and values of all language layers; of the last nothing else
    condition  the two adapters that all layers share, and the norms of what they give
    velocity   action blocks: self-attention, cross-attention to the adapted keys and values, SwiGLU

The flow times of a sample share its context: they are part of the query axis of the cross-attention.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from somaspeed_jax.flow_spec import FlowSpec
from somaspeed_jax.models.base import Observation
from somaspeed_jax.models.language.qwen3 import Qwen3Block, Qwen3KeyValue, Qwen3Sizes
from somaspeed_jax.models.layers.attention import attend
from somaspeed_jax.models.layers.linear import Embedding, Linear, LoraSpec
from somaspeed_jax.models.layers.mlp import GatedMlp
from somaspeed_jax.models.layers.norm import rms_normalise
from somaspeed_jax.models.layers.param import Initialiser, Runtime, normal, stack, zeros
from somaspeed_jax.models.layers.rotary import rotary_angles, rotate
from somaspeed_jax.models.layers.stack import run_stack
from somaspeed_jax.models.vision.molmo import MolmoVision, MolmoVisionSizes

Behaviour = Literal["lerobot_0_6", "head"]

EPS = 1e-6  # of every norm in the action expert, none of which has a weight
ACTION_THETA = 10_000.0  # rotary base over action steps

# LeRobot's adapters on the vision-language model; B starts at zero.
LORA = LoraSpec(rank=64, alpha=16.0, init_a=0.01)


@dataclasses.dataclass(frozen=True)
class ExpertSizes:
    """Sizes of the action expert: width d, hidden f, heads n, width of the time features."""

    width: int = 768
    hidden: int = 3072
    heads: int = 8
    time_width: int = 256

    def __post_init__(self):
        if self.width % self.heads or (self.width // self.heads) % 2 or self.time_width % 2:
            raise ValueError(
                f"action expert of width {self.width} with {self.heads} heads and {self.time_width} time features: "
                "heads must divide the width into even parts, and the time features must be even"
            )

    @property
    def head_width(self) -> int:
        return self.width // self.heads


@dataclasses.dataclass(frozen=True)
class PromptIds:
    """Token numbers that the network itself looks at.

    patch: takes one pooled picture vector, in order. image: all picture tokens, patch included, which see each other
    in both directions. end: the end-of-turn token, which also begins a prompt.
    """

    patch: int = 154_626
    image: tuple[int, ...] = (154_624, 154_625, 154_626, 154_627, 154_628, 154_630, 154_631, 154_632)
    end: int = 151_645


def prompt_ids(token_id: Callable[[str], int]) -> PromptIds:
    """PromptIds of a tokenizer; `token_id` gives the number of a token."""
    names = ("im_start", "im_end", "im_patch", "im_col", "low_res_im_start", "im_low", "frame_start", "frame_end")
    return PromptIds(token_id("<im_patch>"), tuple(token_id(f"<{name}>") for name in names), token_id("<|im_end|>"))


@dataclasses.dataclass(frozen=True)
class MolmoAct2Config:
    """Sizes and behaviour; the defaults are the published base model's.

    vision, text, expert: sizes; layers: language layers and, as many, action blocks.
    vocabulary, extra_vocabulary: rows of the two embedding tables, whose numbers follow each other.
    rope_theta: rotary base of the language model.
    action_dim, horizon: A and t.
    behaviour: `lerobot_0_6`: picture tokens see each other in training and in use, and the action expert does not see
      end-of-turn tokens when `hide_end` (checkpoints of action mode "both"). `head`: picture tokens see each other in
      use (`keys` None) but not in training, and the expert sees every prompt token.
    batch_positions: count a prompt's positions from the first token of the longest prompt of the batch, as
      LeRobot 0.6.1 does, so that a sample's keys depend on its neighbours. Default: from the sample's own first token,
      as that release does for a batch of one and LeRobot's head always.
    fresh_modulation: standard deviation of new modulation and output kernels. 0 (upstream) makes a new expert's output
      exactly 0; a model that is trained from nothing learns faster from a small positive value.
    lora: adapters on every linear layer of the vision-language model, or None.
    """

    vision: MolmoVisionSizes = MolmoVisionSizes()
    text: Qwen3Sizes = Qwen3Sizes(2560, 9728, 32, 8, 128, cast_first=False)
    layers: int = 36
    vocabulary: int = 154_624
    extra_vocabulary: int = 128
    rope_theta: float = 5_000_000.0
    expert: ExpertSizes = ExpertSizes()
    action_dim: int = 32
    horizon: int = 30
    flow: FlowSpec = FlowSpec(
        noise_at=0, beta=(1.0, 1.5), time_scale=0.999, time_offset=0.001, steps=10, zero_padding=True, reduction="rows"
    )
    ids: PromptIds = PromptIds()
    behaviour: Behaviour = "lerobot_0_6"
    hide_end: bool = True
    batch_positions: bool = False
    fresh_modulation: float = 0.0
    lora: LoraSpec | None = None

    def __post_init__(self):
        if self.behaviour not in ("lerobot_0_6", "head"):
            raise ValueError(f"molmoact2: behaviour is {self.behaviour!r}; expected lerobot_0_6 or head")
        if self.behaviour == "head" and self.batch_positions:
            raise ValueError("molmoact2: batch_positions is LeRobot 0.6.1's; behaviour head counts each sample's own")
        if self.vision.out != self.text.width:
            raise ValueError(f"molmoact2: vision.out is {self.vision.out}, text.width {self.text.width}; must be equal")

    def with_lora(self) -> "MolmoAct2Config":
        """The same model with LeRobot's adapters."""
        return dataclasses.replace(self, lora=LORA)


SIZES: dict[str, MolmoAct2Config] = {
    "published": MolmoAct2Config(),
    # Trained from nothing on the demo tabletop in minutes on a CPU.
    "demo": MolmoAct2Config(
        vision=MolmoVisionSizes(
            image=(48, 48), patch=8, positions=36, width=64, hidden=128, heads=4, head_width=16, taps=(1, 0),
            pool_width=64, pool_heads=4, pool_head_width=16, projector=128, out=96,
        ),
        text=Qwen3Sizes(96, 256, 4, 2, 24, cast_first=False),
        layers=3, vocabulary=668, extra_vocabulary=16, expert=ExpertSizes(64, 192, 4, 32),
        action_dim=8, horizon=8, ids=PromptIds(670, (668, 669, 670, 671, 672, 674, 675, 676), 386),
        fresh_modulation=0.02,
    ),
    "tiny": MolmoAct2Config(
        vision=MolmoVisionSizes(
            image=(24, 24), patch=8, positions=9, width=32, hidden=48, heads=2, head_width=16, taps=(2, 1),
            pool_width=32, pool_heads=2, pool_head_width=16, projector=96, out=64,
        ),
        text=Qwen3Sizes(64, 96, 4, 2, 16, cast_first=False),
        layers=3, vocabulary=128, extra_vocabulary=16, expert=ExpertSizes(48, 192, 4, 32),
        horizon=5, ids=PromptIds(130, (128, 129, 130, 131, 132, 134, 135, 136), 1),
    ),
}  # fmt: skip


class Context(NamedTuple):
    """Keys (normed, rotated) and values of every language layer, heads side by side, [l, b, p, k * e] each; `mask`
    [b, p] bool: which prompt tokens the action expert sees."""

    keys: jax.Array
    values: jax.Array
    mask: jax.Array


class Memory(NamedTuple):
    """What the action blocks read: `keys` and `values` [l, b, p, n, e], `mask` [b, p] bool, and `steps` [b, t] bool,
    the action steps that are real, or None where all are (see `MolmoAct2.mask_steps`)."""

    keys: jax.Array
    values: jax.Array
    mask: jax.Array
    steps: jax.Array | None


def _xavier(scale: float = 1.0) -> Initialiser:
    return jax.nn.initializers.variance_scaling(scale, "fan_avg", "uniform")


def time_features(time: jax.Array, width: int) -> jax.Array:
    """[sin | cos] of t exp(-ln(10^4) i / (width / 2 - 1)), t in [0, 1] unscaled. [...] -> [..., width] float32."""
    half = width // 2
    frequencies = jnp.exp(-math.log(10_000.0) / max(half - 1, 1) * jnp.arange(half, dtype=jnp.float32))
    angle = time.astype(jnp.float32)[..., None] * frequencies
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)


def _modulated(x: jax.Array, shift: jax.Array, scale: jax.Array) -> jax.Array:
    """rms(x) (1 + scale) + shift in x's type; x [b, K, t, d], shift and scale [b, K, d]."""
    y = rms_normalise(x, EPS) * (1.0 + scale.astype(jnp.float32))[:, :, None] + shift.astype(jnp.float32)[:, :, None]
    return y.astype(x.dtype)


class ActionBlock(nnx.Module):
    """One block of the action expert.

    With c = silu(time embedding): x += gate · self-attention(rms(x) (1 + scale) + shift), likewise cross-attention and
    SwiGLU; the nine vectors are one linear function of c. Queries and keys are RMS-normed per head without a weight;
    only self-attention rotates them.
    """

    def __init__(self, config: MolmoAct2Config, runtime: Runtime):
        d, hidden = config.expert.width, config.expert.hidden
        closing = _xavier(1.0 / (2 * config.layers))  # variance; upstream scales the values by its square root
        fresh = normal(config.fresh_modulation) if config.fresh_modulation else zeros
        self.qkv = Linear(d, 3 * d, runtime, init=_xavier())
        self.self_out = Linear(d, d, runtime, init=closing)
        self.cross_q = Linear(d, d, runtime, init=_xavier())
        self.cross_out = Linear(d, d, runtime, init=closing)
        self.mlp = GatedMlp(
            gate=Linear(d, hidden, runtime, init=_xavier()),
            up=Linear(d, hidden, runtime, init=_xavier()),
            down=Linear(hidden, d, runtime, init=closing),
            activation=jax.nn.silu,
        )
        self.modulation = Linear(d, 9 * d, runtime, init=fresh)
        self.heads = config.expert.heads

    def __call__(
        self, x: jax.Array, condition: jax.Array, keys: jax.Array, values: jax.Array, memory: Memory
    ) -> jax.Array:
        """One block over the K chunks of each sample.

        x: [b, K, t, d]. condition: [b, K, d], silu of the time embedding. keys, values: [b, p, n, e], this layer's.
        memory: for its masks. Returns x's shape and type.
        """
        (
            self_shift, self_scale, self_gate, cross_shift, cross_scale, cross_gate, mlp_shift, mlp_scale, mlp_gate,
        ) = jnp.split(self.modulation(condition), 9, axis=-1)  # fmt: skip

        def gated(y: jax.Array, gate: jax.Array) -> jax.Array:
            return (y * gate[:, :, None]).astype(x.dtype)

        x = x + gated(self._self_attention(_modulated(x, self_shift, self_scale), memory.steps), self_gate)
        y = _modulated(x, cross_shift, cross_scale)
        x = x + gated(self._cross_attention(y, keys, values, memory.mask), cross_gate)
        return x + gated(self.mlp(_modulated(x, mlp_shift, mlp_scale)), mlp_gate)

    def _self_attention(self, x: jax.Array, steps: jax.Array | None) -> jax.Array:
        """Every step of a chunk sees every real step of it. x [b, K, t, d]."""
        b, chunks, t, d = x.shape
        qkv = self.qkv(x).reshape(b * chunks, t, 3, self.heads, d // self.heads)
        angles = rotary_angles(jnp.arange(t), d // self.heads, ACTION_THETA)
        q, k = (rotate(rms_normalise(qkv[:, :, i], EPS), angles).astype(qkv.dtype) for i in (0, 1))
        mask = None if steps is None else jnp.repeat(steps, chunks, axis=0)[:, None]
        return self.self_out(attend(q, k, qkv[:, :, 2], mask).reshape(b, chunks, t, d))

    def _cross_attention(self, x: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array) -> jax.Array:
        """Every step of every chunk sees the prompt of its sample. x [b, K, t, d]."""
        b, chunks, t, d = x.shape
        q = self.cross_q(x).reshape(b, chunks * t, self.heads, d // self.heads)
        q = rms_normalise(q, EPS).astype(values.dtype)
        return self.cross_out(attend(q, keys, values, mask[:, None]).reshape(b, chunks, t, d))


class ActionExpert(nnx.Module):
    """Adapters, time embedding, blocks and output of the action expert. Action and time projections are float32."""

    def __init__(self, config: MolmoAct2Config, runtime: Runtime):
        sizes = config.expert
        context_width = config.text.kv_heads * config.text.head_width
        fresh = normal(config.fresh_modulation) if config.fresh_modulation else zeros
        self.time_in = Linear(sizes.time_width, sizes.width, runtime, exact=True, init=_xavier())
        self.time_out = Linear(sizes.width, sizes.width, runtime, exact=True, init=_xavier())
        self.action_in = Linear(config.action_dim, sizes.width, runtime, exact=True, init=_xavier())
        self.context_k = Linear(context_width, sizes.width, runtime, bias=False, init=_xavier())
        self.context_v = Linear(context_width, sizes.width, runtime, bias=False, init=_xavier())
        self.blocks = stack(config.layers, ActionBlock(config, runtime))
        self.modulation = Linear(sizes.width, 2 * sizes.width, runtime, init=fresh)
        self.action_out = Linear(sizes.width, config.action_dim, runtime, exact=True, init=fresh)
        self.sizes, self.runtime = sizes, runtime

    def adapt(self, keys: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys and values [l, b, p, k * e] of the language layers -> [l, b, p, n, e] of the expert's.

        One layer at a time, recomputed in the backward pass: kept would be twice as much again as what comes in.
        """
        context_k, context_v = self.runtime.gathered(self.context_k), self.runtime.gathered(self.context_v)
        heads = (self.sizes.heads, self.sizes.head_width)

        def adapt_layer(layer: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            k = rms_normalise(context_k(layer[0]), EPS)
            v = rms_normalise(context_v(layer[1]), EPS)
            k = rms_normalise(k.reshape(*k.shape[:-1], *heads), EPS)
            return k.astype(self.runtime.compute), v.reshape(k.shape).astype(self.runtime.compute)

        return jax.lax.map(jax.checkpoint(adapt_layer), (keys, values))

    def __call__(self, memory: Memory, x: jax.Array, time: jax.Array) -> jax.Array:
        """x [b, K, t, a], time [b, K] -> [b, K, t, a] float32."""
        whole = self.runtime.gathered
        hidden = jax.nn.silu(whole(self.time_in)(time_features(time, self.sizes.time_width)))
        condition = jax.nn.silu(whole(self.time_out)(hidden)).astype(self.runtime.compute)
        x = self.runtime.pin(whole(self.action_in)(x).astype(self.runtime.compute))

        def body(block: ActionBlock, x: jax.Array, layer: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            return block(x, condition, *layer, memory), None

        x, _ = run_stack(
            self.blocks,
            body,
            x,
            (memory.keys, memory.values),
            runtime=self.runtime,
            remat=self.runtime.remat_expert,
        )
        shift, scale = jnp.split(whole(self.modulation)(condition), 2, axis=-1)
        return whole(self.action_out)(_modulated(x, shift, scale))


class PromptEmbedding(nnx.Module):
    """Two tables whose token numbers follow each other: the language model's words, and what was added to them."""

    def __init__(self, config: MolmoAct2Config):
        self.base = Embedding(config.vocabulary, config.text.width)
        self.extra = Embedding(config.extra_vocabulary, config.text.width)
        self.vocabulary = config.vocabulary

    def __call__(self, ids: jax.Array) -> jax.Array:
        """ids [b, p] -> [b, p, d] float32."""
        return jnp.where((ids < self.vocabulary)[..., None], self.base(ids), self.extra(ids - self.vocabulary))


class Trunk(nnx.Module):
    """All language layers but the last run whole; of the last, keys and values."""

    def __init__(self, config: MolmoAct2Config, runtime: Runtime):
        self.layers = stack(config.layers - 1, Qwen3Block(config.text, runtime, lora=config.lora))
        self.last = Qwen3KeyValue(config.text, runtime, lora=config.lora)
        self.runtime = runtime

    def __call__(self, x: jax.Array, angles: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x [b, p, d] -> keys and values [l, b, p, k * e]."""
        x, layers = run_stack(
            self.layers,
            lambda layer, x, _: layer(x, angles, mask),
            x,
            runtime=self.runtime,
            remat=self.runtime.remat_context,
        )
        last = self.runtime.gathered(self.last)(x, angles)
        keys, values = (jnp.concatenate([a, b[None]]) for a, b in zip(layers, last, strict=True))
        return keys.reshape(*keys.shape[:3], -1), values.reshape(*values.shape[:3], -1)


class MolmoAct2(nnx.Module):
    """The policy. See `somaspeed_jax.models.base.Policy`. The model has no dropout; `keys` tells training from use."""

    def __init__(self, config: MolmoAct2Config, runtime: Runtime):
        self.vision = MolmoVision(config.vision, runtime, lora=config.lora)
        self.embed = PromptEmbedding(config)
        self.llm = Trunk(config, runtime)
        self.expert = ActionExpert(config, runtime)
        self.config, self.runtime = config, runtime
        self.flow, self.action_dim, self.horizon = config.flow, config.action_dim, config.horizon

    def encode(self, observation: Observation, keys: jax.Array | None) -> Context:
        """Pictures and prompt -> keys and values of every language layer."""
        tokens, token_mask = observation.tokens, observation.token_mask
        x = self.runtime.pin(self.prompt(observation))
        angles = rotary_angles(self.positions(token_mask), self.config.text.head_width, self.config.rope_theta)
        k, v = self.llm(x, angles, self.attention_mask(tokens, token_mask, training=keys is not None))
        visible = token_mask
        if self.config.behaviour == "lerobot_0_6" and self.config.hide_end:
            visible = visible & (tokens != self.config.ids.end)
        return Context(k, v, visible)

    def prompt(self, observation: Observation) -> jax.Array:
        """Embedded prompt [b, p, d] with the vectors of the pictures that a sample has ADDED to its patch tokens."""
        tokens = observation.tokens
        words = self.embed(tokens)
        if not observation.images:
            return words.astype(self.runtime.compute)
        images = jnp.stack(observation.images, axis=1)  # one encode for all cameras
        b, c = images.shape[:2]
        features = self.vision(images.reshape(b * c, *images.shape[2:]))
        windows = features.shape[1]
        features = features.reshape(b, c * windows, -1)
        # The n-th patch token takes the n-th vector, counted over the sample's present cameras.
        is_patch = tokens == self.config.ids.patch
        place = jnp.clip(jnp.cumsum(is_patch, axis=1) - 1, 0, c * windows - 1)
        present_first = jnp.argsort(~observation.image_mask, axis=1, stable=True)
        place = jnp.take_along_axis(present_first, place // windows, axis=1) * windows + place % windows
        pictures = jnp.take_along_axis(features, place[..., None], axis=1)
        return jnp.where(is_patch[..., None], words + pictures, words).astype(self.runtime.compute)

    def positions(self, token_mask: jax.Array) -> jax.Array:
        """token_mask [b, p] (padded on the left) -> rotary positions [b, p]; 0 on padding."""
        position = jnp.cumsum(token_mask, axis=1) - 1
        if self.config.batch_positions:
            length = jnp.sum(token_mask, axis=1, keepdims=True)
            position = position + jnp.max(length) - length
        return jnp.where(token_mask, position, 0)

    def attention_mask(self, tokens: jax.Array, token_mask: jax.Array, training: bool) -> jax.Array:
        """[b, p, p] bool: causal over real tokens; picture tokens see each other too, save in `head`'s training."""
        order = jnp.arange(tokens.shape[1])
        allowed = (order[:, None] >= order)[None]
        if self.config.behaviour == "lerobot_0_6" or not training:
            picture = jnp.isin(tokens, jnp.asarray(self.config.ids.image))
            allowed = allowed | (picture[:, :, None] & picture[:, None, :])
        return allowed & token_mask[:, None, :] & token_mask[:, :, None]

    def condition(self, context: Context, observation: Observation, keys: jax.Array | None) -> Memory:
        """The adapted and normed keys and values of every layer."""
        return Memory(*self.expert.adapt(context.keys, context.values), context.mask, None)

    def mask_steps(self, memory: Memory, steps: jax.Array) -> Memory:
        """Memory for training on chunks of which only `steps` [b, t] are real (`lerobot_0_6`): no step sees the
        others. `head` trains on the repeated last action and leaves memory as it is."""
        return memory._replace(steps=steps) if self.config.behaviour == "lerobot_0_6" else memory

    def velocity(self, memory: Memory, x: jax.Array, time: jax.Array, keys: jax.Array | None) -> jax.Array:
        """x [b, K, t, a] at time [b, K] -> d x / d t [b, K, t, a] float32."""
        return self.expert(memory, x, time)


def build(config: MolmoAct2Config, runtime: Runtime | None = None) -> MolmoAct2:
    """The abstract policy: shapes, no values."""
    return MolmoAct2(config, runtime or Runtime())


class GroupSpec(NamedTuple):
    """Parameters with a learning rate of their own: full-match path patterns, a factor on the action expert's rate,
    and the name of the group whose gradients are clipped by one norm."""

    name: str
    patterns: tuple[str, ...]
    lr_scale: float
    clip_group: str


def trainable_patterns(preset: str, behaviour: Behaviour = "lerobot_0_6") -> tuple[str, ...]:
    """Full-match patterns of the parameters that a preset trains.

    expert: the action expert with its adapters (LeRobot 0.6.1 train_action_expert_only, head train_mode_vlm=freeze).
    full: everything with a path to the loss but the word embeddings (freeze_embedding, on by default); the table of
    added tokens is frozen with them in 0.6.1 and trained by head.
    lora: adapters of the vision-language model and the whole action expert (enable_lora_vlm).
    """
    added = (r"embed\.extra\..*",) if behaviour == "head" else ()
    presets = {
        "expert": (r"expert\..*",),
        "full": (r"expert\..*", r"llm\..*", r"vision\..*", *added),
        "lora": (r"expert\..*", r"(llm|vision)\..*\.lora\.[ab]"),
    }
    if preset not in presets:
        raise ValueError(f"molmoact2: unknown preset {preset!r}; known: {', '.join(presets)}")
    return presets[preset]


def parameter_groups(preset: str, behaviour: Behaviour = "lerobot_0_6") -> tuple[GroupSpec, ...]:
    """LeRobot's learning rates relative to the action expert's 5e-5: language 1e-5, connector and tower 5e-6, all of
    them 5e-5 with LoRA. One clipping norm in 0.6.1, one a group in head. A parameter belongs to the first group that
    matches."""
    language, rest = (1.0, 1.0) if preset == "lora" else (0.2, 0.1)
    groups = (
        ("expert", (r"expert\..*",), 1.0),
        ("connector", (r"vision\.(pooling|projector)\..*", r"embed\.extra\..*"), rest),
        ("vit", (r"vision\..*",), rest),
        ("llm", (r"llm\..*", r"embed\.base\..*"), language),
    )
    return tuple(GroupSpec(*group, group[0] if behaviour == "head" else "all") for group in groups)
