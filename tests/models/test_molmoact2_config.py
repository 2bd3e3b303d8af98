"""MolmoAct2's config.json, presets, groups and sizes: nothing here runs the network."""

import copy
import dataclasses
import json
import math
import re

import pytest
from molmoact2_reference import read

from somaspeed_jax.data.demo import ensure_demo_tokenizer
from somaspeed_jax.data.tokenizers import load_tokenizer
from somaspeed_jax.models.layers.param import param_specs
from somaspeed_jax.models.molmoact2 import SIZES, build, parameter_groups, prompt_ids, trainable_patterns
from somaspeed_jax.models.vision.molmo import MolmoVisionSizes, pooling_windows
from somaspeed_jax.models.weights.molmoact2 import UPSTREAM_LORA, UPSTREAM_TRAINABLE, table
from somaspeed_jax.models.weights.molmoact2_config import config_from_json, config_to_json
from somaspeed_jax.models.weights.table import parameter_counts


@pytest.fixture
def upstream_json():
    """What LeRobot's class wrote for the tiny reference."""
    return copy.deepcopy(read("molmoact2_tiny.safetensors")[1]["hf_config"])


def count(sizes, patterns):
    return sum(n for path, n in sizes.items() if any(re.fullmatch(pattern, path) for pattern in patterns))


@pytest.fixture(scope="module")
def published():
    """Our path -> number of elements, at full size with adapters."""
    specs = param_specs(build(SIZES["published"].with_lora()))
    return {path: math.prod(spec.shape) for path, spec in specs.items()}


def test_config_json_is_obeyed(upstream_json):
    tiny = SIZES["tiny"]
    assert config_from_json(upstream_json) == dataclasses.replace(tiny, flow=dataclasses.replace(tiny.flow, steps=4))
    assert config_from_json(upstream_json, behaviour="head").behaviour == "head"
    upstream_json["action_mode"] = "continuous"
    upstream_json["flow_matching_cutoff"] = 0.8
    upstream_json["text_config"]["rope_theta"] = 1e6
    upstream_json["action_expert_config"]["mlp_ratio"] = 3.1  # 148.8, rounded up to a multiple of 16
    changed = config_from_json(upstream_json)
    assert (changed.hide_end, changed.rope_theta, changed.expert.hidden) == (False, 1e6, 160)
    assert changed.flow.time_scale == pytest.approx(0.799)
    del upstream_json["text_config"]["rope_theta"]  # the newer of its two names alone
    assert config_from_json(upstream_json).rope_theta == 5e6


@pytest.mark.parametrize("size", SIZES)
def test_config_json_comes_back(size):
    config = dataclasses.replace(SIZES[size], fresh_modulation=0.0)
    assert config_from_json(json.loads(json.dumps(config_to_json(config)))) == config


@pytest.mark.parametrize(
    ("section", "field", "value", "message"),
    [
        ("", "action_mode", "discrete", "action_mode: is 'discrete', expected both or continuous"),
        ("", "action_expert_depth_gate", True, "action_expert_depth_gate: is True; supported: False"),
        ("", "state_format", "continuous", "state_format: is 'continuous'; supported: 'discrete'"),
        ("", "brand_new", 1, "brand_new: unknown field"),
        ("", "image_patch_id", 7, "image token id: is 7, expected 128 to 143"),
        ("text_config", "qk_norm_type", "olmo", "text_config.qk_norm_type: is 'olmo'; supported: 'qwen3'"),
        ("text_config", "qk_norm_type", None, "text_config.qk_norm_type: is 'olmo'; supported: 'qwen3'"),
        ("text_config", "hidden_size", None, "text_config.hidden_size: is None, expected int"),
        ("text_config", "residual_dropout", 0.1, "text_config.residual_dropout: is 0.1; supported: 0.0"),
        ("vit_config", "num_key_value_heads", 1, "vit_config.num_key_value_heads: is 1, expected all 2 heads"),
        ("vit_config", "image_num_pos", 16, "16 positions do not fit a picture of (3, 3) patches"),
        ("action_expert_config", "num_layers", 2, "action_expert_config.num_layers: is 2, expected 3"),
        ("action_expert_config", "causal_attn", True, "action_expert_config.causal_attn: is True; supported: False"),
    ],
)
def test_config_json_refused_by_field(upstream_json, section, field, value, message):
    """None stands for a field that is not there: it has upstream's default."""
    target = upstream_json[section] if section else upstream_json
    if value is None:
        del target[field]
    else:
        target[field] = value
    with pytest.raises(ValueError, match=re.escape(message)):
        config_from_json(upstream_json)


def test_every_fault_at_once(upstream_json):
    upstream_json["state_format"] = "x"
    upstream_json["vit_config"]["hidden_act"] = "relu"
    with pytest.raises(ValueError, match=r"(?s)state_format.*vit_config\.hidden_act"):
        config_from_json(upstream_json)


def test_counts_of_what_trains(published):
    """As upstream counts them; full is upstream's less the vocabulary head, the last norm and what is not read of the
    last layer, none of which gets a gradient."""
    upstream = parameter_counts(table(SIZES["published"]))
    full = count(upstream, UPSTREAM_TRAINABLE["full"])
    text = SIZES["published"].text
    unread = (
        count(upstream, (r"lm_head\.weight", r"model\.transformer\.ln_f\.weight"))
        + count(upstream, (r"model\.transformer\.blocks\.35\..*",))
        - (2 * text.kv_heads * text.head_width * text.width + text.width + text.head_width)
    )
    plain = {path: n for path, n in published.items() if ".lora." not in path}
    assert count(plain, trainable_patterns("expert")) == 577_564_448
    assert count(plain, trainable_patterns("full")) == full - unread == 4_554_505_840
    assert count(plain, trainable_patterns("full", "head")) == full - unread + 128 * 2560


def test_adapters_as_upstream_has_them(published):
    """302 linears of LeRobot 0.6.1 (its main branch also adapts the vocabulary head: 303), rank 64; ours leave out the
    three of the last layer that nothing reads, and its queries."""
    upstream = parameter_counts(table(SIZES["published"]))
    shapes = {
        row_name.removesuffix(".weight"): row.shape
        for row in table(SIZES["published"])
        for row_name, _ in row.names()
        if row_name in upstream and row_name.endswith(".weight")
    }
    adapted = {name: shape for name, shape in shapes.items() if re.fullmatch(UPSTREAM_LORA, name)}
    assert len(adapted) == 302
    unread = {name for name in adapted if re.search(r"blocks\.35\.(mlp|self_attn\.attn_out)", name)}
    assert len(unread) == 3
    adapters = sum(64 * sum(shape) for name, shape in adapted.items() if name not in unread)
    queries = SIZES["published"].text.heads * SIZES["published"].text.head_width
    patterns = trainable_patterns("lora")
    assert count(published, patterns) - 577_564_448 == adapters - 64 * queries


@pytest.mark.parametrize("behaviour", ["lerobot_0_6", "head"])
@pytest.mark.parametrize("preset", ["expert", "full", "lora"])
def test_groups_hold_what_a_preset_trains(published, preset, behaviour):
    groups = {group.name: group for group in parameter_groups(preset, behaviour)}
    trained = [p for p in published if any(re.fullmatch(q, p) for q in trainable_patterns(preset, behaviour))]

    def group_of(path):
        return next(name for name, g in groups.items() if any(re.fullmatch(q, path) for q in g.patterns))

    found = {group_of(path) for path in trained}
    assert found == ({"expert"} if preset == "expert" else {"expert", "connector", "vit", "llm"})
    assert group_of("vision.projector.up.kernel") == group_of("vision.pooling.k.bias") == "connector"
    assert group_of("vision.segments.1.fc1.kernel") == group_of("vision.position") == "vit"
    rates = {name: 5e-5 * group.lr_scale for name, group in groups.items()}
    expected = {"expert": 5e-5, "connector": 5e-6, "vit": 5e-6, "llm": 1e-5}
    assert rates == pytest.approx(dict.fromkeys(rates, 5e-5) if preset == "lora" else expected)
    assert len({group.clip_group for group in groups.values()}) == (4 if behaviour == "head" else 1)


def test_unknown_preset():
    with pytest.raises(ValueError, match="unknown preset 'all'; known: expert, full, lora"):
        trainable_patterns("all")


def test_demo_knows_the_demo_tokenizer(tmp_path):
    tokenizer = load_tokenizer(ensure_demo_tokenizer(tmp_path, "molmoact2"), "molmoact2")
    demo = SIZES["demo"]
    assert prompt_ids(tokenizer.id) == demo.ids
    assert demo.vocabulary <= min(demo.ids.image)
    assert tokenizer.vocab_size <= demo.vocabulary + demo.extra_vocabulary
    assert 500_000 < sum(math.prod(s.shape) for s in param_specs(build(demo)).values()) < 1_000_000


def test_published_geometry():
    vision = MolmoVisionSizes()
    assert (vision.grid, vision.windows) == ((27, 27), 196)
    assert [len(blocks) for blocks in vision.segments] == [19, 6]
    windows = pooling_windows(vision.grid, 2)
    assert (windows[13] >= 0).sum() == 2 and (windows[-1] >= 0).sum() == 1  # cut at the right and at the bottom
    with pytest.raises(ValueError, match="not a multiple of the patch size"):
        MolmoVisionSizes(image=(380, 378))


def test_contradictory_config():
    with pytest.raises(ValueError, match=r"batch_positions is LeRobot 0\.6\.1's"):
        dataclasses.replace(SIZES["tiny"], behaviour="head", batch_positions=True)
    with pytest.raises(ValueError, match=r"vision\.out is 64, text\.width 96"):
        dataclasses.replace(SIZES["tiny"], text=SIZES["demo"].text)
