"""GR00T N1.7: Qwen3-VL, then a diffusion transformer that alternates between its text and its picture tokens.

Formulas: LeRobot 0.6.1, policies/groot/groot_n1_7.py and action_head/cross_attention_dit.py (NVIDIA Isaac-GR00T, N1.7),
with the building blocks of diffusers (Attention, FeedForward, Timesteps).

    encode     vision tower with taps, text layers up to the selected one; its last norm and the logits do not exist
    condition  norm and self-attention over the features, the state token, keys and values of every cross-attention
    velocity   action tokens, quads of blocks (text, self, picture, self), the embodiment's decoder

Two choices are ours. Where two dropouts follow one another upstream, one with the product of their rates is drawn,
which has the same distribution. And the layers that hold weights per embodiment hold only the rows of the
embodiments in the data (`GrootConfig.embodiments`).
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from somaspeed_jax.flow_spec import FlowSpec
from somaspeed_jax.models.base import Observation
from somaspeed_jax.models.language.qwen3 import Qwen3Block, Qwen3Sizes, causal_mask
from somaspeed_jax.models.layers.attention import attend
from somaspeed_jax.models.layers.linear import Embedding, Linear, LoraSpec
from somaspeed_jax.models.layers.mlp import Mlp
from somaspeed_jax.models.layers.norm import LayerNorm, layer_normalise
from somaspeed_jax.models.layers.param import Runtime, normal, param, stack, zeros
from somaspeed_jax.models.layers.stack import run_stack
from somaspeed_jax.models.vision.qwen3_vl import (
    Grid,
    VisionSizes,
    VisionTower,
    interleaved_angles,
    patchify,
    place_images,
)

_EPS = 1e-5
_OUT_EPS = 1e-6
_TIME_CHANNELS = 256
_LOG_PERIOD = np.float32(np.log(10_000.0))
# Purposes, so that no two draws of a sample share a key.
_CONDITION, _VELOCITY = 1, 2
_STATE, _INPUT_STATE = 1001, 1002  # beyond any layer number


@dataclasses.dataclass(frozen=True)
class GrootConfig:
    """All sizes of the model.

    vision, text: sizes of the tower and of one text layer; text_layers: how many are kept. vocabulary, rope_theta,
    mrope_section, image_token: of the text. vl_layers, vl_heads: self-attention over the features, whose heads share
    the text's width. dit_layers (a multiple of 4), dit_heads, dit_head_width: the action expert, of width
    dit_heads * dit_head_width. category_width: hidden width of the embodiment's encoders and decoder.
    state_dim, action_dim: padded. positions: rows of the action position table.
    embodiment_slots: rows of the upstream tensors. embodiments: the rows held here, in order; `Observation.embodiment`
    counts in this tuple, not in upstream's ids.
    dropout, vl_dropout: in the expert's blocks and in those over the features. state_dropout: probability of dropping
    the encoded state; input_state_dropout: the same for the state before its encoder (Isaac-GR00T has both).
    mask_vl_padding: true: padding takes no part in the self-attention over the features, so a sample equals upstream's
    at batch size one; false: it does, as upstream at the given padded length.
    beta, time_scale, buckets, steps: flow matching. lora: adapters on the text's linears, or None (ours).
    """

    vision: VisionSizes
    text: Qwen3Sizes
    text_layers: int
    vocabulary: int
    mrope_section: tuple[int, int, int]
    image_token: int
    vl_layers: int
    vl_heads: int
    dit_layers: int
    dit_heads: int
    dit_head_width: int
    category_width: int
    state_dim: int
    action_dim: int
    horizon: int
    positions: int
    embodiment_slots: int
    embodiments: tuple[int, ...]
    rope_theta: float = 5_000_000.0
    dropout: float = 0.2
    vl_dropout: float = 0.2
    state_dropout: float = 0.2
    input_state_dropout: float = 0.0
    mask_vl_padding: bool = True
    beta: tuple[float, float] = (1.5, 1.0)
    time_scale: float = 0.999
    buckets: int = 1000
    steps: int = 4
    lora: LoraSpec | None = None

    def __post_init__(self):
        def require(holds: bool, fields: str, found: object, expected: str) -> None:
            if not holds:
                raise ValueError(f"GrootConfig.{fields} is {found}: {expected}")

        require(self.dit_layers % 4 == 0, "dit_layers", self.dit_layers, "a multiple of 4 (text, self, image, self)")
        require(self.text.width % self.vl_heads == 0, "vl_heads", self.vl_heads, f"must divide {self.text.width}")
        require(self.vision.out == self.text.width, "vision.out", self.vision.out, f"must be {self.text.width}")
        taps = len(self.vision.taps)
        require(taps <= self.text_layers, "text_layers", self.text_layers, f"at least one a tap, {taps}")
        require(self.horizon <= self.positions, "horizon", self.horizon, f"at most positions, {self.positions}")
        known = set(range(self.embodiment_slots))
        held = self.embodiments
        require(
            bool(held) and len(set(held)) == len(held) and set(held) <= known,
            "embodiments",
            held,
            f"at least one, all different, of 0 to {self.embodiment_slots - 1}",
        )

    @property
    def width(self) -> int:
        """Width of the action expert."""
        return self.dit_heads * self.dit_head_width


SIZES: dict[str, GrootConfig] = {
    "published": GrootConfig(
        vision=VisionSizes(
            width=1024, hidden=4096, heads=16, depth=24, patch=16, positions=2304, taps=(5, 11, 17), out=2048
        ),
        text=Qwen3Sizes(width=2048, hidden=6144, heads=16, kv_heads=8, head_width=128),
        text_layers=16,
        vocabulary=151936,
        mrope_section=(24, 20, 20),
        image_token=151655,
        vl_layers=4,
        vl_heads=32,
        dit_layers=32,
        dit_heads=32,
        dit_head_width=48,
        category_width=1024,
        state_dim=132,
        action_dim=132,
        horizon=40,
        positions=1024,
        embodiment_slots=32,
        embodiments=(10,),
    ),
    # The published layout at the size of a laptop, for the demo dataset's pictures (48x48), tokenizer and robot.
    "demo": GrootConfig(
        vision=VisionSizes(width=48, hidden=128, heads=2, depth=4, patch=8, positions=36, taps=(0, 1, 2), out=64),
        text=Qwen3Sizes(width=64, hidden=160, heads=4, kv_heads=2, head_width=16),
        text_layers=4,
        vocabulary=391,
        mrope_section=(4, 2, 2),
        image_token=389,
        vl_layers=1,
        vl_heads=4,
        dit_layers=4,
        dit_heads=4,
        dit_head_width=16,
        category_width=64,
        state_dim=8,
        action_dim=8,
        horizon=16,
        positions=16,
        embodiment_slots=4,
        embodiments=(1,),
    ),
    # The size of the reference numbers in the tests.
    "tiny": GrootConfig(
        vision=VisionSizes(width=32, hidden=64, heads=2, depth=3, patch=4, positions=16, taps=(0, 1), out=64),
        text=Qwen3Sizes(width=64, hidden=96, heads=4, kv_heads=2, head_width=16),
        text_layers=3,
        vocabulary=160,
        mrope_section=(4, 2, 2),
        image_token=150,
        vl_layers=2,
        vl_heads=4,
        dit_layers=4,
        dit_heads=4,
        dit_head_width=8,
        category_width=32,
        state_dim=9,
        action_dim=10,
        horizon=6,
        positions=16,
        embodiment_slots=4,
        embodiments=(0, 1, 2, 3),
        dropout=0.0,
        vl_dropout=0.0,
        state_dropout=0.0,
    ),
}


def dropout(x: jax.Array, rate: float, keys: jax.Array | None, site: int) -> jax.Array:
    """Dropout of x [*keys.shape, ...] by keys drawn per sample (and flow time): the same bits on every mesh.

    site tells the dropouts that share `keys` apart. Identity where `keys` is None.
    """
    if keys is None or rate == 0.0:
        return x
    shape = x.shape[keys.ndim :]

    def draw(key: jax.Array) -> jax.Array:
        return jax.random.bernoulli(jax.random.fold_in(key, site), 1.0 - rate, shape)

    for _ in range(keys.ndim):
        draw = jax.vmap(draw)
    return jnp.where(draw(keys), x / (1.0 - rate), 0.0).astype(x.dtype)


def _drop_rows(x: jax.Array, rate: float, keys: jax.Array | None, label: int) -> jax.Array:
    """x [b, d] with whole rows set to zero, not scaled, with probability `rate`."""
    if keys is None or rate == 0.0:
        return x
    dropped = jax.vmap(lambda key: jax.random.bernoulli(key, rate))(_fold(keys, label))
    return jnp.where(dropped[:, None], 0.0, x)


def _fold(keys: jax.Array | None, label: jax.Array | int) -> jax.Array | None:
    """Every key with `label` folded in."""
    if keys is None:
        return None

    def fold(key: jax.Array) -> jax.Array:
        return jax.random.fold_in(key, label)

    for _ in range(keys.ndim):
        fold = jax.vmap(fold)
    return fold(keys)


def _per_chunk(keys: jax.Array | None, chunks: int) -> jax.Array | None:
    """keys [b] -> [b, K], chunk i the same whatever K is."""
    if keys is None:
        return None
    return jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))(keys, jnp.arange(chunks))


def _twice(rate: float) -> float:
    """The rate of one dropout that is distributed as two in a row."""
    return 1.0 - (1.0 - rate) ** 2


def sinusoid(x: jax.Array, exponents: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """(sin, cos) of x * e^exponents, each [*x.shape, width / 2] float32.

    Flow times reach 998, where one unit in the last place of a frequency turns the angle by 6e-5. So the exponents are
    made by upstream's float32 operations, and the exponential is rounded correctly.
    """
    frequencies = np.exp(exponents.astype(np.float64)).astype(np.float32)
    angles = x.astype(jnp.float32)[..., None] * frequencies
    return jnp.sin(angles), jnp.cos(angles)


class CategoryLinear(nnx.Module):
    """A linear layer with weights per embodiment: kernel [E, i, o], offset [E, o]. Biases are named `offset` here
    because upstream decays them, unlike those of its other linear layers."""

    def __init__(self, embodiments: int, d_in: int, d_out: int, runtime: Runtime):
        self.kernel = param((embodiments, d_in, d_out), normal(0.02))
        self.offset = param((embodiments, d_out), zeros, "vector")
        self.compute = runtime.compute

    def __call__(self, x: jax.Array, embodiment: jax.Array) -> jax.Array:
        """x [b, ..., i], embodiment [b] -> [b, ..., o] float32 sums of products in the compute type.

        Every row held is applied to the whole batch and each sample keeps its own: with the few embodiments of a run
        this is cheaper than upstream's copy of the weights per sample.
        """
        x = x.astype(self.compute)
        kernel, offset = self.kernel[...].astype(self.compute), self.offset[...].astype(jnp.float32)
        pick = embodiment.reshape(-1, *[1] * (x.ndim - 1))
        out = (x @ kernel[0]).astype(jnp.float32) + offset[0]
        for row in range(1, kernel.shape[0]):
            out = jnp.where(pick == row, (x @ kernel[row]).astype(jnp.float32) + offset[row], out)
        return out


class CategoryMlp(nnx.Module):
    """Two category layers with a ReLU between."""

    def __init__(self, embodiments: int, d_in: int, hidden: int, d_out: int, runtime: Runtime):
        self.fc1 = CategoryLinear(embodiments, d_in, hidden, runtime)
        self.fc2 = CategoryLinear(embodiments, hidden, d_out, runtime)

    def __call__(self, x: jax.Array, embodiment: jax.Array) -> jax.Array:
        """x [b, ..., i], embodiment [b] -> [b, ..., o] float32."""
        return self.fc2(jax.nn.relu(self.fc1(x, embodiment)), embodiment)


class ActionEncoder(nnx.Module):
    """Noisy actions and their flow time -> tokens."""

    def __init__(self, embodiments: int, action_dim: int, width: int, runtime: Runtime):
        self.w1 = CategoryLinear(embodiments, action_dim, width, runtime)
        self.w2 = CategoryLinear(embodiments, 2 * width, width, runtime)
        self.w3 = CategoryLinear(embodiments, width, width, runtime)
        self.width = width

    def __call__(self, x: jax.Array, time: jax.Array, embodiment: jax.Array) -> jax.Array:
        """x [b, K, t, a], time [b, K] (bucket), embodiment [b] -> [b, K, t, d] float32."""
        actions = self.w1(x, embodiment)
        half = self.width // 2
        sin, cos = sinusoid(time, -np.arange(half, dtype=np.float32) * (_LOG_PERIOD / np.float32(half)))
        tau = jnp.broadcast_to(jnp.concatenate([sin, cos], axis=-1)[:, :, None], actions.shape)
        hidden = jax.nn.silu(self.w2(jnp.concatenate([actions, tau], axis=-1), embodiment))
        return self.w3(hidden, embodiment)


def _feed_forward(mlp: Mlp, x: jax.Array, rate: float, keys: jax.Array | None) -> jax.Array:
    hidden = dropout(mlp.activation(mlp.fc1(x)), rate, keys, 1)
    return dropout(mlp.fc2(hidden), rate, keys, 2)


class FeatureBlock(nnx.Module):
    """Pre-norm self-attention over the vision-language features (upstream: vl_self_attention)."""

    def __init__(self, config: GrootConfig, runtime: Runtime):
        width = config.text.width
        self.norm1 = LayerNorm(width, eps=_EPS)
        self.qkv = Linear(width, 3 * width, runtime)
        self.out = Linear(width, width, runtime)
        self.norm3 = LayerNorm(width, eps=_EPS)
        self.mlp = Mlp(width, 4 * width, runtime)
        self.heads, self.rate = config.vl_heads, config.vl_dropout

    def __call__(self, x: jax.Array, mask: jax.Array | None, keys: jax.Array | None) -> jax.Array:
        """x [b, p, d], mask [b, 1, p] or None, keys [b] or None -> x."""
        qkv = self.qkv(self.norm1(x))
        q, k, v = jnp.moveaxis(qkv.reshape(*x.shape[:2], 3, self.heads, -1), 2, 0)
        out = self.out(attend(q, k, v, mask).reshape(x.shape))
        x = x + dropout(out, _twice(self.rate), keys, 0)
        return x + _feed_forward(self.mlp, self.norm3(x), self.rate, keys)


class ExpertBlock(nnx.Module):
    """A block of the diffusion transformer. Its norms have no parameters; the first is modulated by the flow time.

    cross: attend to given keys and values instead of the block's own tokens.
    """

    def __init__(self, config: GrootConfig, runtime: Runtime, *, cross: bool):
        width = config.width
        self.modulation = Linear(width, 2 * width, runtime)  # scale, then shift
        if cross:
            self.q = Linear(width, width, runtime)
        else:
            self.qkv = Linear(width, 3 * width, runtime)
        self.out = Linear(width, width, runtime)
        self.mlp = Mlp(width, 4 * width, runtime)
        self.cross, self.heads, self.rate = cross, config.dit_heads, config.dropout

    def __call__(
        self, x: jax.Array, time: jax.Array, memory: "CrossMemory | None", keys: jax.Array | None
    ) -> jax.Array:
        """x [b, K, s, d] float32, time [b, K, d] after its SiLU, keys [b, K] or None -> x.

        A sample's K chunks share `memory`: they are one query axis of K * s. Self-attention is within a chunk.
        """
        b, chunks, s, width = x.shape
        scale, shift = jnp.split(self.modulation(time).astype(jnp.float32)[:, :, None], 2, axis=-1)
        normed = layer_normalise(x, _EPS) * (1.0 + scale) + shift
        if memory is None:
            qkv = self.qkv(normed).reshape(b * chunks, s, 3, self.heads, -1)
            out = attend(*jnp.moveaxis(qkv, 2, 0))
        else:
            q = self.q(normed).reshape(b, chunks * s, self.heads, -1)
            out = attend(q, memory.k, memory.v, memory.mask[:, None])
        out = self.out(out.reshape(b, chunks, s, width))
        x = x + dropout(out, _twice(self.rate), keys, 0)
        return x + _feed_forward(self.mlp, layer_normalise(x, _EPS), self.rate, keys)


class Quad(nnx.Module):
    """Four blocks: to the text, self, to the pictures, self."""

    def __init__(self, config: GrootConfig, runtime: Runtime):
        self.text = ExpertBlock(config, runtime, cross=True)
        self.self1 = ExpertBlock(config, runtime, cross=False)
        self.image = ExpertBlock(config, runtime, cross=True)
        self.self2 = ExpertBlock(config, runtime, cross=False)


class TimeEncoder(nnx.Module):
    """Flow-time bucket -> embedding: 256 channels [cos | sin], two layers with a SiLU between."""

    def __init__(self, width: int, runtime: Runtime):
        self.fc1 = Linear(_TIME_CHANNELS, width, runtime)
        self.fc2 = Linear(width, width, runtime)

    def __call__(self, time: jax.Array) -> jax.Array:
        """time [...] -> [..., d] in the compute type."""
        half = _TIME_CHANNELS // 2
        sin, cos = sinusoid(time, -_LOG_PERIOD * np.arange(half, dtype=np.float32) / np.float32(half - 1))
        return self.fc2(jax.nn.silu(self.fc1(jnp.concatenate([cos, sin], axis=-1))))


class Decoder(nnx.Module):
    """Last modulated norm of the expert, its projection, and the embodiment's decoder."""

    def __init__(self, config: GrootConfig, runtime: Runtime):
        self.modulation = Linear(config.width, 2 * config.width, runtime)  # shift, then scale
        self.proj = Linear(config.width, config.category_width, runtime)
        self.mlp = CategoryMlp(
            len(config.embodiments), config.category_width, config.category_width, config.action_dim, runtime
        )

    def __call__(self, x: jax.Array, time: jax.Array, embodiment: jax.Array) -> jax.Array:
        """x [b, K, t, d], time [b, K, d] after its SiLU -> [b, K, t, a] float32."""
        shift, scale = jnp.split(self.modulation(time).astype(jnp.float32)[:, :, None], 2, axis=-1)
        x = layer_normalise(x, _OUT_EPS) * (1.0 + scale) + shift
        return self.mlp(self.proj(x), embodiment)


class Language(nnx.Module):
    """The kept text layers: those that take in a tap, then the rest. The last norm and the logits are never read."""

    def __init__(self, config: GrootConfig, runtime: Runtime):
        taps = len(config.vision.taps)

        def layers(count: int) -> Qwen3Block | None:
            return stack(count, Qwen3Block(config.text, runtime, lora=config.lora)) if count else None

        self.embed = Embedding(config.vocabulary, config.text.width)
        self.tapped = layers(taps)
        self.rest = layers(config.text_layers - taps)


class Context(NamedTuple):
    """What `encode` gives: features [b, p, d] float32; is_image, token_mask [b, p] bool."""

    features: jax.Array
    is_image: jax.Array
    token_mask: jax.Array


class CrossMemory(NamedTuple):
    """Keys and values of the cross-attention blocks over one kind of token: k, v [quads, b, m, n, e] (one quad's
    inside the scan), mask [b, m]."""

    k: jax.Array
    v: jax.Array
    mask: jax.Array


class Memory(NamedTuple):
    """What `condition` gives: the encoded state [b, d] float32, text and pictures, embodiment [b]."""

    state: jax.Array
    text: CrossMemory
    image: CrossMemory
    embodiment: jax.Array


def _select(chosen: jax.Array, count: int, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Packs the tokens chosen [b, p] into `count` places, in order: arrays [b, p, ...] -> [b, count, ...]."""
    order = jnp.argsort(~chosen, axis=1, stable=True)[:, :count]
    return tuple(jnp.take_along_axis(x, order.reshape(*order.shape, *[1] * (x.ndim - 2)), axis=1) for x in arrays)


class Head(nnx.Module):
    """The parameters that upstream trains by default: everything after the vision-language model."""

    def __init__(self, config: GrootConfig, runtime: Runtime):
        rows, width, text = len(config.embodiments), config.width, config.text.width
        quads = config.dit_layers // 4
        self.vlln = LayerNorm(text, eps=_EPS)
        self.features = stack(config.vl_layers, FeatureBlock(config, runtime)) if config.vl_layers else None
        self.state = CategoryMlp(rows, config.state_dim, config.category_width, width, runtime)
        # Keys, then values, of the quads' cross-attention: read by `condition`, so apart from the rest of the quads.
        self.text_kv = stack(quads, Linear(text, 2 * width, runtime))
        self.image_kv = stack(quads, Linear(text, 2 * width, runtime))
        self.action = ActionEncoder(rows, config.action_dim, width, runtime)
        self.positions = Embedding(config.positions, width)
        self.time = TimeEncoder(width, runtime)
        self.quads = stack(quads, Quad(config, runtime))
        self.decoder = Decoder(config, runtime)


class Groot(nnx.Module):
    """The policy; see `models/base.py: Policy`.

    `velocity` takes the time as the network sees it, the bucket floor(buckets * t) as a float, which `flow.py` makes.
    """

    def __init__(self, config: GrootConfig, runtime: Runtime):
        self.vision = VisionTower(config.vision, runtime)
        self.language = Language(config, runtime)
        self.head = Head(config, runtime)
        self.config, self.runtime = config, runtime
        self.action_dim, self.horizon = config.action_dim, config.horizon
        self.flow = FlowSpec(
            noise_at=0,
            beta=config.beta,
            time_scale=config.time_scale,
            reflect=True,
            buckets=config.buckets,
            steps=config.steps,
            reduction="elements",
            epsilon=1e-6,
        )

    def encode(self, observation: Observation, keys: jax.Array | None) -> Context:
        """Features of the prompt and its pictures: the selected layer's residual stream. Draws nothing.

        images: [b, h, w, 3] in [-1, 1], sides multiples of patch * merge. tokens: [b, p], padded on the left, with
        one placeholder per picture token for the cameras present in that row.
        """
        del keys
        return self.encode_patches([patchify(image, self.config.vision) for image in observation.images], observation)

    def _grids(self, observation: Observation) -> list[Grid]:
        return [self.config.vision.grid(*image.shape[1:3]) for image in observation.images]

    def encode_patches(self, patches: list[jax.Array], observation: Observation) -> Context:
        """`encode` from patches, one [b, rows * columns, 3 * 2 * patch²] a camera; of `images` only sizes are read."""
        config, runtime = self.config, self.runtime
        grids = self._grids(observation)
        features, taps = self._look(patches, grids)
        placement = place_images(
            observation.tokens,
            observation.token_mask,
            observation.image_mask,
            grids,
            image_token=config.image_token,
            merge=config.vision.merge,
        )
        at, source = placement.is_image[..., None], placement.source[..., None]
        angles = interleaved_angles(
            placement.positions, config.text.head_width, config.rope_theta, config.mrope_section
        )
        mask = causal_mask(observation.token_mask)
        x = self.language.embed(observation.tokens)
        x = runtime.pin(jnp.where(at, jnp.take_along_axis(features, source, axis=1).astype(x.dtype), x))

        def layer(block: Qwen3Block, x: jax.Array, tap: jax.Array | None) -> tuple[jax.Array, None]:
            x, _ = block(x, angles, mask)
            if tap is not None:
                x = x + jnp.where(at, jnp.take_along_axis(tap, source, axis=1).astype(x.dtype), 0.0)
            return x, None

        remat = runtime.remat_context
        if self.language.tapped is not None:
            x, _ = run_stack(self.language.tapped, layer, x, jnp.stack(taps), runtime=runtime, remat=remat)
        if self.language.rest is not None:
            x, _ = run_stack(self.language.rest, layer, x, runtime=runtime, remat=remat)
        return Context(x, placement.is_image, observation.token_mask)

    def _look(self, patches: list[jax.Array], grids: list[Grid]) -> tuple[jax.Array, list[jax.Array]]:
        """Features and taps [b, all picture tokens, d], cameras in order; those of one size pass the tower at once."""
        per_camera: list[list[jax.Array]] = [[] for _ in grids]
        for grid in dict.fromkeys(grids):
            cameras = [i for i, other in enumerate(grids) if other == grid]
            together = jnp.stack([patches[i] for i in cameras], axis=1)
            b, c = together.shape[:2]
            features, taps = self.vision(together.reshape(b * c, *together.shape[2:]), grid)
            for kind in (features, *taps):
                split = kind.reshape(b, c, *kind.shape[1:])
                for place, camera in enumerate(cameras):
                    per_camera[camera].append(split[:, place])
        features, *taps = [jnp.concatenate(kind, axis=1) for kind in zip(*per_camera, strict=True)]
        return features, taps

    def condition(self, context: Context, observation: Observation, keys: jax.Array | None) -> Memory:
        """What the action expert reads.

        The picture tokens of all cameras have a place each and the text tokens the others: also in a row without some
        of the cameras, a prompt must not have more text than that.
        """
        config, runtime, head = self.config, self.runtime, self.head
        keys = _fold(keys, _CONDITION)
        features = self._attend_features(context, keys)

        embodiment = observation.embodiment
        state = _drop_rows(observation.state, config.input_state_dropout, keys, _INPUT_STATE)
        state = runtime.gathered(head.state)(state, embodiment)
        state = _drop_rows(state, config.state_dropout, keys, _STATE)

        def cross(layers: nnx.Module, chosen: jax.Array, count: int) -> CrossMemory:
            tokens, mask = _select(chosen, count, features, chosen)

            def project(linear, carry, _):
                kv = linear(tokens).reshape(*tokens.shape[:2], 2, config.dit_heads, config.dit_head_width)
                return carry, (kv[:, :, 0], kv[:, :, 1])

            _, (k, v) = run_stack(layers, project, (), runtime=runtime)
            return CrossMemory(k, v, mask)

        is_text = context.token_mask & ~context.is_image
        images = sum(config.vision.tokens(grid) for grid in self._grids(observation))
        text = cross(head.text_kv, is_text, features.shape[1] - images)
        return Memory(state, text, cross(head.image_kv, context.is_image, images), embodiment)

    def _attend_features(self, context: Context, keys: jax.Array | None) -> jax.Array:
        head, runtime = self.head, self.runtime
        features = runtime.gathered(head.vlln)(context.features)
        if head.features is None:
            return features
        mask = context.token_mask[:, None] if self.config.mask_vl_padding else None

        def body(block: FeatureBlock, x: jax.Array, layer: jax.Array) -> tuple[jax.Array, None]:
            return block(x, mask, _fold(keys, layer)), None

        layers = jnp.arange(self.config.vl_layers)
        features, _ = run_stack(head.features, body, features, layers, runtime=runtime, remat=runtime.remat_expert)
        return features

    def velocity(self, memory: Memory, x: jax.Array, time: jax.Array, keys: jax.Array | None) -> jax.Array:
        """x [b, K, t, a] float32, time [b, K] float (bucket), keys [b] or None -> velocity [b, K, t, a] float32."""
        runtime, head = self.runtime, self.head
        b, chunks, horizon, _ = x.shape
        keys = _per_chunk(_fold(keys, _VELOCITY), chunks)
        actions = runtime.gathered(head.action)(x, time, memory.embodiment) + head.positions(jnp.arange(horizon))
        state = jnp.broadcast_to(memory.state[:, None, None], (b, chunks, 1, memory.state.shape[-1]))
        tokens = runtime.pin(jnp.concatenate([state, actions], axis=2))
        time = jax.nn.silu(runtime.gathered(head.time)(time))

        def body(quad: Quad, x: jax.Array, layer) -> tuple[jax.Array, None]:
            index, (text_k, text_v), (image_k, image_v) = layer
            text = CrossMemory(text_k, text_v, memory.text.mask)
            image = CrossMemory(image_k, image_v, memory.image.mask)
            for place, (block, read) in enumerate(
                [(quad.text, text), (quad.self1, None), (quad.image, image), (quad.self2, None)]
            ):
                x = block(x, time, read, _fold(keys, 4 * index + place))
            return x, None

        layers = (jnp.arange(self.config.dit_layers // 4), memory.text[:2], memory.image[:2])
        tokens, _ = run_stack(head.quads, body, tokens, layers, runtime=runtime, remat=runtime.remat_expert)
        return runtime.gathered(head.decoder)(tokens[:, :, 1:], time, memory.embodiment)


def build(config: GrootConfig, runtime: Runtime) -> Groot:
    """The abstract policy: parameters without values."""
    return Groot(config, runtime)


def trainable_patterns(preset: str) -> tuple[str, ...]:
    """Full-match path patterns of what a preset trains.

    expert: the action head with its norm and self-attention over the features (upstream's default); full: everything;
    lora: the action head and the adapters of the text layers (ours). Raises ValueError for another name.
    """
    presets = {"expert": (r"head\..*",), "full": (r".*",), "lora": (r"head\..*", r"language\..*\.lora\..*")}
    if preset not in presets:
        raise ValueError(f"trainable preset {preset!r} of groot: expected one of {', '.join(presets)}")
    return presets[preset]


def no_decay(path: str) -> bool:
    """Whether upstream's optimiser exempts a parameter from weight decay: norms, and biases of ordinary linear layers.

    The offsets of the embodiments' layers and the position table are decayed.
    """
    return path.endswith((".bias", ".scale"))
