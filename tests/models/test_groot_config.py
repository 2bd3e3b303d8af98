"""GR00T's config.json: obeyed, refused by field, written back; and upstream's counts by optimiser group."""

import dataclasses
import json

import pytest

from somaspeed_jax.models import groot
from somaspeed_jax.models.weights.groot import table
from somaspeed_jax.models.weights.groot_config import (
    BACKBONE,
    BACKBONE_SIZES,
    GrootConfigError,
    config_from_json,
    config_to_json,
)
from somaspeed_jax.models.weights.table import parameter_counts

# What transformers 5.5 and LeRobot 0.6.1 write beside what the network needs.
BESIDE = {
    "_name_or_path": "nvidia/GR00T-N1.7-3B",
    "transformers_version": "5.5.4",
    "id2label": {"0": "LABEL_0"},
    "problem_type": None,
    "tune_visual": True,
    "tune_llm": False,
    "attn_dropout": 0.2,
    "image_crop_size": [230, 230],
    "use_percentiles": True,
    "rtc_ramp_rate": 6.0,
    "a_field_of_the_future": None,
}


def published(**changes) -> dict:
    return config_to_json(groot.SIZES["published"]) | BESIDE | changes


@pytest.mark.parametrize("size", groot.SIZES)
def test_written_and_read_back(size):
    config = groot.SIZES[size]
    fields = json.loads(json.dumps(config_to_json(config), allow_nan=False))
    assert config_from_json(fields, config.embodiments) == config
    assert (BACKBONE_SIZES in fields) == (size != "published")
    assert fields["model_name"] == BACKBONE


def test_fields_are_obeyed():
    fields = published(select_layer=12, state_dropout_prob=0.8, num_inference_timesteps=8, action_horizon=50)
    fields["diffusion_model_cfg"] = fields["diffusion_model_cfg"] | {"num_layers": 16, "dropout": 0.1}
    del fields["vl_self_attention_cfg"]
    config = config_from_json(fields, (2, 10))
    expected = dataclasses.replace(
        groot.SIZES["published"], text_layers=12, state_dropout=0.8, steps=8, horizon=50, dit_layers=16, dropout=0.1,
        vl_layers=0, vl_heads=1, vl_dropout=0.0, embodiments=(2, 10),
    )  # fmt: skip
    assert config == expected
    # What NVIDIA's own defaults of that kind hold, by the arithmetic of the counts.
    counts = parameter_counts(table(config))
    assert sum(n for name, n in counts.items() if name.startswith("action_head.")) == 877_747_328


@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        ({"use_alternate_vl_dit": False}, ["use_alternate_vl_dit = False is not supported (only True)"]),
        ({"model_name": "other/backbone"}, ["model_name = 'other/backbone' is not supported"]),
        ({"state_history_length": 2}, ["state_history_length = 2 is not supported (only 1)"]),
        ({"new_feature": 3, "use_vlln": False}, ["new_feature = 3 is not known", "use_vlln = False"]),
        ({"hidden_size": 512}, ["hidden_size is 512, but diffusion_model_cfg.output_dim gives 1024"]),
        ({"input_embedding_dim": 1024}, ["input_embedding_dim is 1024, but diffusion_model_cfg gives 1536"]),
        ({"model_type": "Gr00tN1d6"}, ["model_type = 'Gr00tN1d6' is not supported (only 'Gr00tN1d7')"]),
    ],
)
def test_what_is_not_supported_is_refused_by_field(changes, messages):
    with pytest.raises(GrootConfigError) as error:
        config_from_json(published(**changes), (10,), "somewhere/config.json")
    assert str(error.value).startswith("somewhere/config.json: ")
    assert [message for message in messages if message not in str(error.value)] == []


def test_blocks_are_checked_too():
    fields = published()
    fields["diffusion_model_cfg"] = fields["diffusion_model_cfg"] | {"norm_type": "layer_norm", "novelty": 1}
    fields["vl_self_attention_cfg"] = fields["vl_self_attention_cfg"] | {"positional_embeddings": "sinusoidal"}
    with pytest.raises(GrootConfigError) as error:
        config_from_json(fields, (10,))
    for message in (
        "diffusion_model_cfg.norm_type = 'layer_norm' is not supported (only 'ada_norm')",
        "diffusion_model_cfg.novelty = 1 is not known",
        "vl_self_attention_cfg.positional_embeddings = 'sinusoidal' is not supported",
    ):
        assert message in str(error.value)


def test_missing_fields_are_all_named():
    with pytest.raises(GrootConfigError, match=r"action_horizon is missing; .*select_layer is missing"):
        config_from_json({"model_name": BACKBONE}, (10,))


def test_weight_decay_by_upstreams_count():
    """1,620,515,968 trained parameters, of which 658,432 are not decayed (LeRobot's optimiser groups)."""
    rows = table(groot.SIZES["published"])
    path_of = {name: row.path for row in rows if row.path is not None for name, _ in row.names()}
    trained = {name: n for name, n in parameter_counts(rows).items() if name.startswith("action_head.")}
    spared = sum(n for name, n in trained.items() if groot.no_decay(path_of[name]))
    assert (sum(trained.values()) - spared, spared) == (1_619_857_536, 658_432)
