"""π0.5's tensors as LeRobot stores them (lerobot 0.6, policies/pi05), and where each lives in our parameters."""

from somaspeed_jax.models.pi05 import Pi05Config
from somaspeed_jax.models.weights.table import Row, Table

# The published base has bare names; what LeRobot trains and saves has one more level. It loads both.
PREFIXES = ("", "model.")
EXPORT_PREFIX = "model."

TRUNK_HEAD = "paligemma_with_expert.paligemma.lm_head.weight"
EXPERT_HEAD = "paligemma_with_expert.gemma_expert.lm_head.weight"
EMBEDDING = "paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"

# Upstream names with a gradient flag, by preset (full-match patterns). The expert's unused head carries the flag and
# never gets a gradient. `lora` is openpi's: see `openpi.trainable_counts`.
UPSTREAM_TRAINABLE = {
    "expert": (r"paligemma_with_expert\.gemma_expert\..*", r"action_(in|out)_proj\..*", r"time_mlp_(in|out)\..*"),
    "full": (r".*",),
}


def table(config: Pi05Config) -> Table:
    """Every tensor of the layout. Two vocabulary heads and most of the last trunk layer are not read."""
    return [*_vision(config), *_trunk(config), *_expert(config), *_projections(config)]


def _linear(name: str, path: str, d_in: int, d_out: int, *, bias: bool, **where) -> Table:
    """A torch linear, whose weight is [out, in]."""
    rows = [Row(f"{name}.weight", (d_out, d_in), f"{path}.kernel", transpose=(1, 0), **where)]
    return rows + ([Row(f"{name}.bias", (d_out,), f"{path}.bias", **where)] if bias else [])


def _unread(rows: Table) -> Table:
    return [Row(row.name, row.shape, None, layers=row.layers, stacked=row.stacked) for row in rows]


def _vision(config: Pi05Config) -> Table:
    siglip, d = config.vision, config.vision.width
    model = "paligemma_with_expert.paligemma.model"
    tower = f"{model}.vision_tower.vision_model"
    layer = f"{tower}.encoder.layers.{{i}}"
    stacked = {"layers": tuple(range(siglip.depth))}

    def norm(name: str, path: str, **where) -> Table:
        return [
            Row(f"{name}.weight", (d,), f"{path}.scale", **where),
            Row(f"{name}.bias", (d,), f"{path}.bias", **where),
        ]

    rows = [
        Row(
            f"{tower}.embeddings.patch_embedding.weight",
            (d, 3, siglip.patch, siglip.patch),
            "vision.patch.kernel",
            transpose=(2, 3, 1, 0),  # [out, channel, y, x] -> a patch in (y, x, channel) order
            reshape=(3 * siglip.patch**2, d),
        ),
        Row(f"{tower}.embeddings.patch_embedding.bias", (d,), "vision.patch.bias"),
        Row(f"{tower}.embeddings.position_embedding.weight", (siglip.tokens, d), "vision.position"),
        *norm(f"{layer}.layer_norm1", "vision.layers.norm1", **stacked),
        *norm(f"{layer}.layer_norm2", "vision.layers.norm2", **stacked),
        *norm(f"{tower}.post_layernorm", "vision.norm"),
    ]
    for name, path in (("q_proj", "q"), ("k_proj", "k"), ("v_proj", "v"), ("out_proj", "out")):
        rows += _linear(f"{layer}.self_attn.{name}", f"vision.layers.attn.{path}", d, d, bias=True, **stacked)
    rows += _linear(f"{layer}.mlp.fc1", "vision.layers.mlp.fc1", d, siglip.mlp, bias=True, **stacked)
    rows += _linear(f"{layer}.mlp.fc2", "vision.layers.mlp.fc2", siglip.mlp, d, bias=True, **stacked)
    rows += _linear(f"{model}.multi_modal_projector.linear", "projector", d, config.trunk.width, bias=True)
    return rows


def _attention(config, name: str, path: str, **where) -> dict[str, Table]:
    """The four projections of a Gemma layer, by our name."""
    d, query, key = config.width, config.heads * config.head_width, config.kv_heads * config.head_width
    sizes = {"q": (d, query), "k": (d, key), "v": (d, key), "out": (query, d)}
    upstream = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "out": "o_proj"}
    return {
        ours: _linear(f"{name}.self_attn.{upstream[ours]}", f"{path}.attn.{ours}", *sizes[ours], bias=False, **where)
        for ours in sizes
    }


def _mlp(config, name: str, path: str, **where) -> Table:
    d, f = config.width, config.mlp
    return [
        *_linear(f"{name}.mlp.gate_proj", f"{path}.mlp.gate", d, f, bias=False, **where),
        *_linear(f"{name}.mlp.up_proj", f"{path}.mlp.up", d, f, bias=False, **where),
        *_linear(f"{name}.mlp.down_proj", f"{path}.mlp.down", f, d, bias=False, **where),
    ]


def _trunk(config: Pi05Config) -> Table:
    """All layers but the last whole; of the last, its first norm, keys and values. Norm weights are w in 1 + w."""
    gemma, d = config.trunk, config.trunk.width
    language = "paligemma_with_expert.paligemma.model.language_model"
    layer = f"{language}.layers.{{i}}"

    def norms(path: str, **where) -> Table:
        return [
            Row(f"{layer}.input_layernorm.weight", (d,), f"{path}.norm1.scale", **where),
            Row(f"{layer}.post_attention_layernorm.weight", (d,), f"{path}.norm2.scale", **where),
        ]

    whole = {"layers": tuple(range(gemma.depth - 1))}
    last = {"layers": (gemma.depth - 1,), "stacked": False}
    attention = _attention(gemma, layer, "trunk.last", **last)
    first_norm, second_norm = norms("trunk.last", **last)
    vocabulary = (config.vocabulary, d)
    return [
        Row(EMBEDDING, vocabulary, "embed.table"),
        # LeRobot's base stores the embedding under the head's name alone. What it trains has both: the head is then a
        # copy that gets no gradient, so after full fine-tuning it is the embedding of before.
        Row(TRUNK_HEAD, vocabulary, None, alias_of=EMBEDDING, untied=True),
        *norms("trunk.layers", **whole),
        *(row for rows in _attention(gemma, layer, "trunk.layers", **whole).values() for row in rows),
        *_mlp(gemma, layer, "trunk.layers", **whole),
        first_norm,
        *attention["k"],
        *attention["v"],
        *_unread([second_norm, *attention["q"], *attention["out"], *_mlp(gemma, layer, "trunk.last", **last)]),
        Row(f"{language}.norm.weight", (d,), None),
    ]


def _expert(config: Pi05Config) -> Table:
    """The action layers. Their norms are modulated: a linear to (scale, shift, gate) in place of a weight."""
    gemma, d = config.expert, config.expert.width
    expert = "paligemma_with_expert.gemma_expert"
    layer = f"{expert}.model.layers.{{i}}"
    stacked = {"layers": tuple(range(gemma.depth))}

    def modulation(name: str, path: str, **where) -> Table:
        return _linear(f"{name}.dense", f"{path}.dense", d, 3 * d, bias=True, **where)

    return [
        *modulation(f"{layer}.input_layernorm", "expert.layers.norm1", **stacked),
        *modulation(f"{layer}.post_attention_layernorm", "expert.layers.norm2", **stacked),
        *(row for rows in _attention(gemma, layer, "expert.layers", **stacked).values() for row in rows),
        *_mlp(gemma, layer, "expert.layers", **stacked),
        *modulation(f"{expert}.model.norm", "expert.norm"),
        # Left over from the language model that the expert is built from: openpi does not have it.
        Row(EXPERT_HEAD, (config.vocabulary, d), None, optional=True, zeros=True),
    ]


def _projections(config: Pi05Config) -> Table:
    d, a = config.expert.width, config.action_dim
    return [
        *_linear("action_in_proj", "action_in", a, d, bias=True),
        *_linear("action_out_proj", "action_out", d, a, bias=True),
        *_linear("time_mlp_in", "time_in", d, d, bias=True),
        *_linear("time_mlp_out", "time_out", d, d, bias=True),
    ]
