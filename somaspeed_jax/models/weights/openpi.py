"""openpi's own JAX checkpoints of π0.5, seen as LeRobot's tensors, so that one table serves both.

openpi (models/pi0.py, gemma.py, siglip.py) keeps a tree of arrays with the layers stacked on axis 0 and kernels as its
einsums want them; training/checkpoints.py writes it with orbax under `params`.
"""

import dataclasses
import math
import re
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from somaspeed_jax.models.language.gemma import GemmaConfig
from somaspeed_jax.models.pi05 import Pi05Config
from somaspeed_jax.models.weights.orbax_tree import Keys, list_arrays, read_array
from somaspeed_jax.models.weights.pi05 import EMBEDDING
from somaspeed_jax.models.weights.safetensors_file import WeightsError
from somaspeed_jax.models.weights.source import Source, find_directory, open_source

IMAGES, LANGUAGE = "PaliGemma/img", "PaliGemma/llm"


@dataclasses.dataclass(frozen=True)
class Leaf:
    """An array of openpi's tree, and LeRobot's tensors in it.

    shape: of the whole array. tensors: LeRobot name -> function of the array that gives the tensor.
    """

    shape: tuple[int, ...]
    tensors: dict[str, Callable[[np.ndarray], np.ndarray]]


class OpenpiSource:
    """A `Source` over an orbax checkpoint of openpi. Host memory holds one array of the tree at a time.

    Raises WeightsError that lists every array that is missing, unexpected or of another shape.
    """

    def __init__(self, directory: Path, config: Pi05Config):
        self.directory = params_directory(directory)
        self._leaves = leaves(config)
        self._keys, shapes, self._dtypes = _read_tree(self.directory)
        faults = [f"unexpected: {name} {list(shapes[name])}" for name in sorted(shapes.keys() - self._leaves.keys())]
        for name, leaf in self._leaves.items():
            if name not in shapes:
                faults.append(f"missing: {name} {list(leaf.shape)}")
            elif shapes[name] != leaf.shape:
                faults.append(f"wrong shape: {name} is {list(shapes[name])}, expected {list(leaf.shape)}")
        if faults:
            raise WeightsError(
                f"{self.directory}: not π0.5 of these sizes ({len(faults)} faults):\n  " + "\n  ".join(faults)
            )
        self._leaf_of = {name: leaf for leaf, value in self._leaves.items() for name in value.tensors}
        self._held: tuple[str, np.ndarray] | None = None
        self._lock = threading.Lock()

    def names(self) -> Iterable[str]:
        return self._leaf_of.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        leaf = self._leaves[self._leaf_of[name]]
        return leaf.tensors[name](np.empty(leaf.shape, "V0")).shape  # a type without bytes: shapes for nothing

    def dtype(self, name: str) -> np.dtype:
        return self._dtypes[self._leaf_of[name]]

    def tensor(self, name: str) -> np.ndarray:
        leaf = self._leaf_of[name]
        with self._lock:
            if self._held is None or self._held[0] != leaf:
                self._held = None  # let go of one array before reading the next
                self._held = (leaf, read_array(self.directory, self._keys[leaf]))
            return self._leaves[leaf].tensors[name](self._held[1])

    def where(self, name: str) -> str:
        return self._leaf_of[name]


def params_directory(directory: Path) -> Path:
    """The orbax directory of the parameters: openpi's step directory has it as `params`."""
    for candidate in (directory / "params", directory):
        if (candidate / "_METADATA").is_file():
            return candidate
    raise WeightsError(f"{directory}: neither it nor its `params` has orbax's _METADATA; not a checkpoint of openpi")


def open_pi05(path_or_repository: str | Path, config: Pi05Config) -> Source:
    """π0.5's weights in LeRobot's layout, or as openpi's JAX trainer writes them."""
    directory = find_directory(path_or_repository)
    if any((candidate / "_METADATA").is_file() for candidate in (directory / "params", directory)):
        return OpenpiSource(directory, config)
    return open_source(path_or_repository)


def _read_tree(directory: Path) -> tuple[dict[str, Keys], dict[str, tuple[int, ...]], dict[str, np.dtype]]:
    """Leaf name -> keys in the file, shape, type. Names lack the outer `params` and, where all have it, `value`."""
    found = list_arrays(directory)
    wrapped = bool(found) and all(keys[-1] == "value" for keys in found)
    keys_of = {}
    for keys in found:
        inner = keys[1:] if keys[0] == "params" else keys
        keys_of["/".join(inner[:-1] if wrapped else inner)] = keys
    return (
        keys_of,
        {name: found[keys][0] for name, keys in keys_of.items()},
        {name: found[keys][1] for name, keys in keys_of.items()},
    )


def leaves(config: Pi05Config) -> dict[str, Leaf]:
    """openpi's tree: array name ("/" between levels) -> shape and the LeRobot tensors that it holds."""
    d = config.expert.width
    found = {**_vision(config), **_gemma(config.trunk, ""), **_gemma(config.expert, "_1")}
    found[f"{LANGUAGE}/embedder/input_embedding"] = Leaf(
        (config.vocabulary, config.trunk.width), {EMBEDDING: lambda x: x}
    )
    for name, d_in, d_out in (
        ("action_in_proj", config.action_dim, d),
        ("action_out_proj", d, config.action_dim),
        ("time_mlp_in", d, d),
        ("time_mlp_out", d, d),
    ):
        found[f"{name}/kernel"] = Leaf((d_in, d_out), {f"{name}.weight": np.transpose})
        found[f"{name}/bias"] = Leaf((d_out,), {f"{name}.bias": lambda x: x})
    return found


def _layers(depth: int, name: str, pick: Callable[[np.ndarray], np.ndarray]) -> dict[str, Callable]:
    """`name` of each layer -> `pick` of that layer of a stacked array."""
    return {name.format(i=i): lambda x, i=i: pick(x[i]) for i in range(depth)}


def _vision(config: Pi05Config) -> dict[str, Leaf]:
    siglip, d = config.vision, config.vision.width
    depth, heads = siglip.depth, (siglip.heads, d // siglip.heads)
    model = "paligemma_with_expert.paligemma.model"
    tower = f"{model}.vision_tower.vision_model"
    layer, block = f"{tower}.encoder.layers.{{i}}", f"{IMAGES}/Transformer/encoderblock"
    patch = (siglip.patch, siglip.patch, 3, d)
    found = {
        f"{IMAGES}/embedding/kernel": Leaf(
            patch, {f"{tower}.embeddings.patch_embedding.weight": lambda x: x.transpose(3, 2, 0, 1)}
        ),
        f"{IMAGES}/embedding/bias": Leaf((d,), {f"{tower}.embeddings.patch_embedding.bias": lambda x: x}),
        f"{IMAGES}/pos_embedding": Leaf(
            (1, siglip.tokens, d), {f"{tower}.embeddings.position_embedding.weight": lambda x: x[0]}
        ),
        f"{IMAGES}/head/kernel": Leaf(
            (d, config.trunk.width), {f"{model}.multi_modal_projector.linear.weight": np.transpose}
        ),
        f"{IMAGES}/head/bias": Leaf((config.trunk.width,), {f"{model}.multi_modal_projector.linear.bias": lambda x: x}),
    }
    for ours, theirs in (("scale", "weight"), ("bias", "bias")):
        found[f"{IMAGES}/Transformer/encoder_norm/{ours}"] = Leaf(
            (d,), {f"{tower}.post_layernorm.{theirs}": lambda x: x}
        )
        for number in (0, 1):
            found[f"{block}/LayerNorm_{number}/{ours}"] = Leaf(
                (depth, d), _layers(depth, f"{layer}.layer_norm{number + 1}.{theirs}", lambda x: x)
            )
    attention = f"{block}/MultiHeadDotProductAttention_0"
    for ours, theirs in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj")):
        found[f"{attention}/{ours}/kernel"] = Leaf(
            (depth, d, *heads), _layers(depth, f"{layer}.self_attn.{theirs}.weight", lambda x: x.reshape(d, d).T)
        )
        found[f"{attention}/{ours}/bias"] = Leaf(
            (depth, *heads), _layers(depth, f"{layer}.self_attn.{theirs}.bias", lambda x: x.reshape(d))
        )
    found[f"{attention}/out/kernel"] = Leaf(
        (depth, *heads, d), _layers(depth, f"{layer}.self_attn.out_proj.weight", lambda x: x.reshape(d, d).T)
    )
    found[f"{attention}/out/bias"] = Leaf((depth, d), _layers(depth, f"{layer}.self_attn.out_proj.bias", lambda x: x))
    for number, (d_in, d_out) in enumerate(((d, siglip.mlp), (siglip.mlp, d))):
        dense, name = f"{block}/MlpBlock_0/Dense_{number}", f"{layer}.mlp.fc{number + 1}"
        found[f"{dense}/kernel"] = Leaf((depth, d_in, d_out), _layers(depth, f"{name}.weight", np.transpose))
        found[f"{dense}/bias"] = Leaf((depth, d_out), _layers(depth, f"{name}.bias", lambda x: x))
    return found


def _gemma(config: GemmaConfig, suffix: str) -> dict[str, Leaf]:
    """The trunk (suffix "") or the action expert ("_1"), whose norms are modulated."""
    depth, d, f = config.depth, config.width, config.mlp
    n, k, h = config.heads, config.kv_heads, config.head_width
    expert = "paligemma_with_expert.gemma_expert.model"
    model = expert if suffix else "paligemma_with_expert.paligemma.model.language_model"
    layer, stack = f"{model}.layers.{{i}}", f"{LANGUAGE}/layers"

    def per_layer(name: str, pick: Callable[[np.ndarray], np.ndarray]) -> dict[str, Callable]:
        return _layers(depth, f"{layer}.{name}.weight", pick)

    found = {
        f"{stack}/attn/q_einsum{suffix}/w": Leaf(
            (depth, n, d, h), per_layer("self_attn.q_proj", lambda x: x.transpose(0, 2, 1).reshape(n * h, d))
        ),
        f"{stack}/attn/kv_einsum{suffix}/w": Leaf(
            (depth, 2, k, d, h),
            per_layer("self_attn.k_proj", lambda x: x[0].transpose(0, 2, 1).reshape(k * h, d))
            | per_layer("self_attn.v_proj", lambda x: x[1].transpose(0, 2, 1).reshape(k * h, d)),
        ),
        f"{stack}/attn/attn_vec_einsum{suffix}/w": Leaf(
            (depth, n, h, d), per_layer("self_attn.o_proj", lambda x: x.reshape(n * h, d).T)
        ),
        f"{stack}/mlp{suffix}/gating_einsum": Leaf(
            (depth, 2, d, f),
            per_layer("mlp.gate_proj", lambda x: x[0].T) | per_layer("mlp.up_proj", lambda x: x[1].T),
        ),
        f"{stack}/mlp{suffix}/linear": Leaf((depth, f, d), per_layer("mlp.down_proj", np.transpose)),
    }
    norms = {"pre_attention_norm": "input_layernorm", "pre_ffw_norm": "post_attention_layernorm"}
    for ours, theirs in norms.items():
        if suffix:
            dense = f"{stack}/{ours}{suffix}/Dense_0"
            found[f"{dense}/kernel"] = Leaf((depth, d, 3 * d), per_layer(f"{theirs}.dense", np.transpose))
            found[f"{dense}/bias"] = Leaf((depth, 3 * d), _layers(depth, f"{layer}.{theirs}.dense.bias", lambda x: x))
        else:
            found[f"{stack}/{ours}/scale"] = Leaf((depth, d), per_layer(theirs, lambda x: x))
    if suffix:
        dense = f"{LANGUAGE}/final_norm{suffix}/Dense_0"
        found[f"{dense}/kernel"] = Leaf((d, 3 * d), {f"{model}.norm.dense.weight": np.transpose})
        found[f"{dense}/bias"] = Leaf((3 * d,), {f"{model}.norm.dense.bias": lambda x: x})
    else:
        found[f"{LANGUAGE}/final_norm/scale"] = Leaf((d,), {f"{model}.norm.weight": lambda x: x})
    return found


def adapter_shapes(config: Pi05Config) -> dict[str, tuple[int, ...]]:
    """openpi's LoRA arrays (models/lora.py) for the adapters that the configuration asks for."""
    found: dict[str, tuple[int, ...]] = {}
    for gemma, suffix in ((config.trunk, ""), (config.expert, "_1")):
        if gemma.lora is None:
            continue
        rank, depth, d, f = gemma.lora.rank, gemma.depth, gemma.width, gemma.mlp
        n, k, h = gemma.heads, gemma.kv_heads, gemma.head_width
        stack = f"{LANGUAGE}/layers"
        for name, lead, d_in, d_out in (
            (f"attn/q_einsum{suffix}/lora_", (n,), d, h),
            (f"attn/kv_einsum{suffix}/lora_", (2, k), d, h),
            (f"attn/attn_vec_einsum{suffix}/lora_", (n,), h, d),
            (f"mlp{suffix}/gating_einsum_lora_", (2,), d, f),
            (f"mlp{suffix}/linear_lora_", (), f, d),
        ):
            found[f"{stack}/{name}a"] = (depth, *lead, d_in, rank)
            found[f"{stack}/{name}b"] = (depth, *lead, rank, d_out)
    return found


def trainable_count(config: Pi05Config) -> int:
    """Parameters that openpi trains under its freeze filter (models/pi0_config.py) for these adapters; all without."""
    shapes = {name: leaf.shape for name, leaf in leaves(config).items()} | adapter_shapes(config)
    trunk, expert = config.trunk.lora is not None, config.expert.lora is not None

    def frozen(name: str) -> bool:
        if re.fullmatch(".*lora.*", name):
            return False
        of_expert = re.fullmatch(".*llm.*_1.*", name) is not None
        if trunk:
            return re.fullmatch(".*llm.*", name) is not None and (expert or not of_expert)
        return expert and of_expert

    return sum(math.prod(shape) for name, shape in shapes.items() if not frozen(name))
