"""GR00T N1.7's tensors as NVIDIA and LeRobot store them, and where each lives in our parameters.

1030 tensors at the published size, and a vocabulary head that some files have and that equals the embedding.
"""

from itertools import pairwise
from typing import Any

from somaspeed_jax.models.groot import GrootConfig
from somaspeed_jax.models.weights.table import Row, Table

# NVIDIA's own directory has bare names; what LeRobot fine-tunes and saves has one more level.
PREFIXES = ("", "_groot_model.")
EXPORT_PREFIX = "_groot_model."

EMBEDDING = "backbone.model.model.language_model.embed_tokens.weight"
VOCABULARY_HEAD = "backbone.model.lm_head.weight"

# Upstream names with a gradient flag, by preset (full-match patterns). `lora` is ours and has no upstream counterpart.
UPSTREAM_TRAINABLE = {"expert": (r"action_head\..*",), "full": (r".*",)}


def table(config: GrootConfig) -> Table:
    """Every tensor of the layout. The text's last norm is not read, nor are the rows of embodiments not held."""
    return [*_vision(config), *_language(config), *_features(config), *_expert(config), *_categories(config)]


def _layers(numbers: range) -> dict[str, Any]:
    return {"layers": tuple(numbers)}


def _linear(name: str, path: str, d_in: int, d_out: int, *, bias: bool = True, **where: Any) -> Table:
    """A torch linear, whose weight is [out, in]."""
    rows = [Row(f"{name}.weight", (d_out, d_in), f"{path}.kernel", transpose=(1, 0), **where)]
    return rows + ([Row(f"{name}.bias", (d_out,), f"{path}.bias", **where)] if bias else [])


def _fused(names: list[str], path: str, d_in: int, widths: list[int], *, bias: bool = True, **where: Any) -> Table:
    """Several torch linears side by side in the output axis of one kernel."""
    rows, start = [], 0
    for name, width in zip(names, widths, strict=True):
        stop = start + width
        part = {"part": (1, start, stop)}
        rows.append(Row(f"{name}.weight", (width, d_in), f"{path}.kernel", transpose=(1, 0), **part, **where))
        if bias:
            rows.append(Row(f"{name}.bias", (width,), f"{path}.bias", part=(0, start, stop), **where))
        start = stop
    return rows


def _norm(name: str, path: str, width: int, **where: Any) -> Table:
    return [
        Row(f"{name}.weight", (width,), f"{path}.scale", **where),
        Row(f"{name}.bias", (width,), f"{path}.bias", **where),
    ]


def _vision(config: GrootConfig) -> Table:
    sizes = config.vision
    d, joined = sizes.width, sizes.width * sizes.merge**2
    tower = "backbone.model.model.visual"
    patch = 3 * 2 * sizes.patch**2

    def merger(name: str, path: str, norm: int) -> Table:
        return [
            *_norm(f"{name}.norm", f"{path}.norm", norm),
            *_linear(f"{name}.linear_fc1", f"{path}.fc1", joined, joined),
            *_linear(f"{name}.linear_fc2", f"{path}.fc2", joined, sizes.out),
        ]

    rows = [
        # [out, channel, frame, y, x] -> a patch in (channel, frame, y, x) order
        Row(
            f"{tower}.patch_embed.proj.weight",
            (d, 3, 2, sizes.patch, sizes.patch),
            "vision.patch.kernel",
            view=(d, patch),
            transpose=(1, 0),
        ),
        Row(f"{tower}.patch_embed.proj.bias", (d,), "vision.patch.bias"),
        Row(f"{tower}.pos_embed.weight", (sizes.positions, d), "vision.positions.table"),
    ]
    block = f"{tower}.blocks.{{i}}"
    for index, (start, end) in enumerate(sizes.segments):
        path, stacked = f"vision.segments.{index}", _layers(range(start, end))
        rows += [
            *_norm(f"{block}.norm1", f"{path}.norm1", d, **stacked),
            *_linear(f"{block}.attn.qkv", f"{path}.qkv", d, 3 * d, **stacked),
            *_linear(f"{block}.attn.proj", f"{path}.proj", d, d, **stacked),
            *_norm(f"{block}.norm2", f"{path}.norm2", d, **stacked),
            *_linear(f"{block}.mlp.linear_fc1", f"{path}.mlp.fc1", d, sizes.hidden, **stacked),
            *_linear(f"{block}.mlp.linear_fc2", f"{path}.mlp.fc2", sizes.hidden, d, **stacked),
        ]
    for index in range(len(sizes.taps)):
        rows += merger(f"{tower}.deepstack_merger_list.{index}", f"vision.taps.{index}", joined)
    return rows + merger(f"{tower}.merger", "vision.merger", d)


def _language(config: GrootConfig) -> Table:
    sizes, taps = config.text, len(config.vision.taps)
    language = "backbone.model.model.language_model"
    vocabulary = (config.vocabulary, sizes.width)
    rows = [
        Row(EMBEDDING, vocabulary, "language.embed.table"),
        Row(VOCABULARY_HEAD, vocabulary, None, alias_of=EMBEDDING, optional=True),
        Row(f"{language}.norm.weight", (sizes.width,), None),
    ]
    for path, layers in (("tapped", range(taps)), ("rest", range(taps, config.text_layers))):
        if layers:
            rows += _text_layers(config, f"{language}.layers.{{i}}", f"language.{path}", layers)
    return rows


def _text_layers(config: GrootConfig, layer: str, path: str, layers: range) -> Table:
    sizes, stacked = config.text, _layers(layers)
    d, f, e = sizes.width, sizes.hidden, sizes.head_width
    query, key = sizes.heads * e, sizes.kv_heads * e
    attention = f"{layer}.self_attn"
    return [
        Row(f"{layer}.input_layernorm.weight", (d,), f"{path}.norm1.scale", **stacked),
        *_fused(
            [f"{attention}.{name}_proj" for name in "qkv"], f"{path}.qkv", d, [query, key, key], bias=False, **stacked
        ),
        Row(f"{attention}.q_norm.weight", (e,), f"{path}.q_norm.scale", **stacked),
        Row(f"{attention}.k_norm.weight", (e,), f"{path}.k_norm.scale", **stacked),
        *_linear(f"{attention}.o_proj", f"{path}.out", query, d, bias=False, **stacked),
        Row(f"{layer}.post_attention_layernorm.weight", (d,), f"{path}.norm2.scale", **stacked),
        *_fused(
            [f"{layer}.mlp.up_proj", f"{layer}.mlp.gate_proj"], f"{path}.up_gate", d, [f, f], bias=False, **stacked
        ),
        *_linear(f"{layer}.mlp.down_proj", f"{path}.down", f, d, bias=False, **stacked),
    ]


def _feed_forward(block: str, path: str, d: int, **stacked: Any) -> Table:
    """diffusers' FeedForward, of four times the width."""
    return [
        *_linear(f"{block}.ff.net.0.proj", f"{path}.mlp.fc1", d, 4 * d, **stacked),
        *_linear(f"{block}.ff.net.2", f"{path}.mlp.fc2", 4 * d, d, **stacked),
    ]


def _features(config: GrootConfig) -> Table:
    d, path = config.text.width, "head.features"
    block = "action_head.vl_self_attention.transformer_blocks.{i}"
    rows = _norm("action_head.vlln", "head.vlln", d)
    if config.vl_layers == 0:
        return rows
    stacked = _layers(range(config.vl_layers))
    return [
        *rows,
        *_norm(f"{block}.norm1", f"{path}.norm1", d, **stacked),
        *_fused([f"{block}.attn1.to_{name}" for name in "qkv"], f"{path}.qkv", d, [d, d, d], **stacked),
        *_linear(f"{block}.attn1.to_out.0", f"{path}.out", d, d, **stacked),
        *_norm(f"{block}.norm3", f"{path}.norm3", d, **stacked),
        *_feed_forward(block, path, d, **stacked),
    ]


def _expert(config: GrootConfig) -> Table:
    """Blocks 4q … 4q + 3 are a quad; block 4q reads text, block 4q + 2 pictures, the others themselves."""
    d, text = config.width, config.text.width
    model, block = "action_head.model", "action_head.model.transformer_blocks.{i}"
    time = f"{model}.timestep_encoder.timestep_embedder"
    rows = [
        *_linear(f"{time}.linear_1", "head.time.fc1", 256, d),
        *_linear(f"{time}.linear_2", "head.time.fc2", d, d),
        *_linear(f"{model}.proj_out_1", "head.decoder.modulation", d, 2 * d),
        *_linear(f"{model}.proj_out_2", "head.decoder.proj", d, config.category_width),
        Row("action_head.position_embedding.weight", (config.positions, d), "head.positions.table"),
    ]
    for place, name in enumerate(("text", "self1", "image", "self2")):
        path, stacked = f"head.quads.{name}", _layers(range(place, config.dit_layers, 4))
        projections = [f"{block}.attn1.to_{kind}" for kind in "qkv"]
        rows += _linear(f"{block}.norm1.linear", f"{path}.modulation", d, 2 * d, **stacked)
        if name in ("text", "image"):
            rows += _linear(projections[0], f"{path}.q", d, d, **stacked)
            rows += _fused(projections[1:], f"head.{name}_kv", text, [d, d], **stacked)
        else:
            rows += _fused(projections, f"{path}.qkv", d, [d, d, d], **stacked)
        rows += _linear(f"{block}.attn1.to_out.0", f"{path}.out", d, d, **stacked)
        rows += _feed_forward(block, path, d, **stacked)
    return rows


def _categories(config: GrootConfig) -> Table:
    d, hidden, state, action = config.width, config.category_width, config.state_dim, config.action_dim
    return [
        *_category(config, "action_head.state_encoder.layer1", "head.state.fc1", state, hidden),
        *_category(config, "action_head.state_encoder.layer2", "head.state.fc2", hidden, d),
        *_category(config, "action_head.action_encoder.W1", "head.action.w1", action, d),
        *_category(config, "action_head.action_encoder.W2", "head.action.w2", 2 * d, d),
        *_category(config, "action_head.action_encoder.W3", "head.action.w3", d, d),
        *_category(config, "action_head.action_decoder.layer1", "head.decoder.mlp.fc1", hidden, hidden),
        *_category(config, "action_head.action_decoder.layer2", "head.decoder.mlp.fc2", hidden, action),
    ]


def _category(config: GrootConfig, name: str, path: str, d_in: int, d_out: int) -> Table:
    """Weights of all embodiments, [slots, in, out], of which we hold some rows; the others are not read."""
    slots, held = config.embodiment_slots, config.embodiments
    rows = []
    for suffix, shape, ours in (("W", (slots, d_in, d_out), "kernel"), ("b", (slots, d_out), "offset")):
        for index, row in enumerate(held):
            part = (0, index, index + 1)
            rows.append(Row(f"{name}.{suffix}", shape, f"{path}.{ours}", take=(0, row, row + 1), part=part))
        for before, after in pairwise([-1, *sorted(held), slots]):
            if before + 1 < after:
                rows.append(Row(f"{name}.{suffix}", shape, None, take=(0, before + 1, after)))
    return rows
