"""MolmoAct2's tensors as its Hugging Face release and LeRobot store them, and where each lives in our parameters."""

from typing import Any

from somaspeed_jax.models.molmoact2 import MolmoAct2Config
from somaspeed_jax.models.weights.table import Row, Table

# The release has these names; a policy that LeRobot saved has one more level.
PREFIXES = ("", "model.")
EXPORT_PREFIX = "model."

# Upstream names that a preset trains (full-match patterns), LeRobot 0.6.1. `full` trains the vocabulary head, the last
# norm and the rest of the last layer too, which never get a gradient from actions.
UPSTREAM_TRAINABLE = {
    "expert": (r".*action_expert.*",),
    "full": (r"(?!.*wte\.).*",),
}
# Upstream modules that get an adapter with the preset `lora`.
UPSTREAM_LORA = (
    r"model\.(transformer|vision_backbone)\.(?:.*\.)?"
    r"(w1|w2|w3|wq|wk|wv|wo|att_proj|attn_out|ff_proj|ff_out|patch_embedding)"
)


def table(config: MolmoAct2Config) -> Table:
    """Every tensor of the layout. The vocabulary head, the last norm and most of the last layer are not read."""
    return [*_vision(config), *_language(config), *_expert(config)]


def _stacked(layers: tuple[int, ...]) -> dict[str, Any]:
    return {"layers": layers}


def _linear(name: str, path: str, d_in: int, d_out: int, *, bias: bool, **where) -> Table:
    """A torch linear, whose weight is [out, in]."""
    rows = [Row(f"{name}.weight", (d_out, d_in), f"{path}.kernel", transpose=(1, 0), **where)]
    return rows + ([Row(f"{name}.bias", (d_out,), f"{path}.bias", **where)] if bias else [])


def _attention(name: str, path: str, d_in: int, inner: int, width: int, **where) -> Table:
    rows = []
    for ours in ("q", "k", "v"):
        rows += _linear(f"{name}.w{ours}", f"{path}.{ours}", d_in, inner, bias=True, **where)
    return rows + _linear(f"{name}.wo", f"{path}.o", inner, width, bias=True, **where)


def _vision(config: MolmoAct2Config) -> Table:
    sizes, d = config.vision, config.vision.width
    backbone = "model.vision_backbone"
    vit, block = f"{backbone}.image_vit", f"{backbone}.image_vit.transformer.resblocks.{{i}}"
    rows = [
        *_linear(f"{vit}.patch_embedding", "vision.patch", 3 * sizes.patch**2, d, bias=True),
        Row(f"{vit}.positional_embedding", (sizes.positions, d), "vision.position"),
    ]
    for number, blocks in enumerate(sizes.segments):
        path, where = f"vision.segments.{number}", _stacked(blocks)
        for theirs, ours in (("attention_norm", "norm1"), ("ffn_norm", "norm2")):
            rows.append(Row(f"{block}.{theirs}.weight", (d,), f"{path}.{ours}.scale", **where))
            rows.append(Row(f"{block}.{theirs}.bias", (d,), f"{path}.{ours}.bias", **where))
        rows += _attention(f"{block}.attention", f"{path}.attn", d, sizes.heads * sizes.head_width, d, **where)
        rows += _linear(f"{block}.feed_forward.w1", f"{path}.fc1", d, sizes.hidden, bias=True, **where)
        rows += _linear(f"{block}.feed_forward.w2", f"{path}.fc2", sizes.hidden, d, bias=True, **where)
    inner, width = sizes.pool_heads * sizes.pool_head_width, sizes.pool_width
    rows += _attention(f"{backbone}.image_pooling_2d", "vision.pooling", d * len(sizes.taps), inner, width)
    projector, path = f"{backbone}.image_projector", "vision.projector"
    rows += _linear(f"{projector}.w1", f"{path}.gate", width, sizes.projector, bias=False)
    rows += _linear(f"{projector}.w3", f"{path}.up", width, sizes.projector, bias=False)
    rows += _linear(f"{projector}.w2", f"{path}.down", sizes.projector, sizes.out, bias=False)
    return rows


def _language(config: MolmoAct2Config) -> Table:
    """All layers but the last whole; of the last, its first norm, keys and values."""
    text, d = config.text, config.text.width
    queries, heads = text.heads * text.head_width, (text.heads + 2 * text.kv_heads) * text.head_width
    block = "model.transformer.blocks.{i}"

    def norms(path: str, **where) -> dict[str, Row]:
        names = {
            "norm1": ("attn_norm", d),
            "norm2": ("ff_norm", d),
            "q_norm": ("self_attn.q_norm", text.head_width),
            "k_norm": ("self_attn.k_norm", text.head_width),
        }
        return {
            ours: Row(f"{block}.{theirs}.weight", (width,), f"{path}.{ours}.scale", **where)
            for ours, (theirs, width) in names.items()
        }

    whole = _stacked(tuple(range(config.layers - 1)))
    last: dict[str, Any] = {"layers": (config.layers - 1,), "stacked": False}
    last_norms = norms("llm.last", **last)
    attention, attention_shape = f"{block}.self_attn.att_proj.weight", (heads, d)
    return [
        Row("model.transformer.wte.embedding", (config.vocabulary, d), "embed.base.table"),
        Row("model.transformer.wte.new_embedding", (config.extra_vocabulary, d), "embed.extra.table"),
        # Upstream's strict loading asks for it and then computes it anew.
        Row(
            "model.transformer.rotary_emb.inv_freq",
            (text.head_width // 2,),
            None,
            optional=True,
            buffer=True,
            zeros=True,
        ),
        *norms("llm.layers", **whole).values(),
        Row(attention, attention_shape, "llm.layers.qkv.kernel", transpose=(1, 0), **whole),
        *_linear(f"{block}.self_attn.attn_out", "llm.layers.out", queries, d, bias=False, **whole),
        *_linear(f"{block}.mlp.ff_proj", "llm.layers.up_gate", d, 2 * text.hidden, bias=False, **whole),
        *_linear(f"{block}.mlp.ff_out", "llm.layers.down", text.hidden, d, bias=False, **whole),
        Row(last_norms["norm1"].name, (d,), "llm.last.norm.scale", **last),
        last_norms["k_norm"],
        Row(attention, attention_shape, "llm.last.kv.kernel", take=(0, queries, heads), transpose=(1, 0), **last),
        Row(attention, attention_shape, None, take=(0, 0, queries), **last),
        *(Row(last_norms[name].name, last_norms[name].shape, None, **last) for name in ("norm2", "q_norm")),
        Row(f"{block}.self_attn.attn_out.weight", (d, queries), None, **last),
        Row(f"{block}.mlp.ff_proj.weight", (2 * text.hidden, d), None, **last),
        Row(f"{block}.mlp.ff_out.weight", (d, text.hidden), None, **last),
        Row("model.transformer.ln_f.weight", (d,), None),
        Row("lm_head.weight", (config.vocabulary, d), None),
    ]


def _expert(config: MolmoAct2Config) -> Table:
    """Its norms have no weights."""
    sizes, d, a = config.expert, config.expert.width, config.action_dim
    context = config.text.kv_heads * config.text.head_width
    expert, path = "model.action_expert", "expert"
    block, where = f"{expert}.blocks.{{i}}", _stacked(tuple(range(config.layers)))
    rows = [
        *_linear(f"{expert}.time_embed.1", f"{path}.time_in", sizes.time_width, d, bias=True),
        *_linear(f"{expert}.time_embed.3", f"{path}.time_out", d, d, bias=True),
        *_linear(f"{expert}.action_embed", f"{path}.action_in", a, d, bias=True),
        *_linear(f"{expert}.context_k_proj", f"{path}.context_k", context, d, bias=False),
        *_linear(f"{expert}.context_v_proj", f"{path}.context_v", context, d, bias=False),
        *_linear(f"{expert}.final_layer.modulation.linear", f"{path}.modulation", d, 2 * d, bias=True),
        *_linear(f"{expert}.final_layer.linear", f"{path}.action_out", d, a, bias=True),
    ]
    for theirs, ours, d_in, d_out in (
        ("self_attn.qkv", "qkv", d, 3 * d),
        ("self_attn.out_proj", "self_out", d, d),
        ("cross_attn.q_proj", "cross_q", d, d),
        ("cross_attn.out_proj", "cross_out", d, d),
        ("mlp.up_proj", "mlp.up", d, sizes.hidden),
        ("mlp.gate_proj", "mlp.gate", d, sizes.hidden),
        ("mlp.down_proj", "mlp.down", sizes.hidden, d),
        ("modulation.linear", "modulation", d, 9 * d),
    ):
        rows += _linear(f"{block}.{theirs}", f"{path}.blocks.{ours}", d_in, d_out, bias=True, **where)
    return rows
