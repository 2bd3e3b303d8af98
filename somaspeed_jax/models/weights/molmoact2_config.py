"""A MolmoAct2 checkpoint's config.json: read and obeyed field by field, or refused by field; and written for export."""

import math
from collections.abc import Mapping
from typing import Any

from somaspeed_jax.flow_spec import FlowSpec
from somaspeed_jax.models.language.qwen3 import Qwen3Sizes
from somaspeed_jax.models.molmoact2 import EPS, Behaviour, ExpertSizes, MolmoAct2Config, PromptIds
from somaspeed_jax.models.vision.molmo import MolmoVisionSizes

TOP = "config.json"  # the name of the outermost section

# Fields that the network is made from. Upstream's class defaults are those of another model, so all must be there.
_READ: dict[str, dict[str, type]] = {
    TOP: {
        "vit_config": dict,
        "adapter_config": dict,
        "text_config": dict,
        "action_expert_config": dict,
        "action_mode": str,
        "max_action_dim": int,
        "max_action_horizon": int,
        "flow_matching_num_steps": int,
        "flow_matching_cutoff": float,
        "flow_matching_time_offset": float,
        "flow_matching_time_scale": float,
        "flow_matching_beta_alpha": float,
        "flow_matching_beta_beta": float,
        "image_patch_id": int,
        "image_start_token_id": int,
        "image_end_token_id": int,
        "image_col_id": int,
        "low_res_image_start_token_id": int,
        "image_low_res_id": int,
        "frame_start_token_id": int,
        "frame_end_token_id": int,
    },
    "vit_config": {
        "hidden_size": int,
        "intermediate_size": int,
        "num_hidden_layers": int,
        "num_attention_heads": int,
        "num_key_value_heads": int,
        "head_dim": int,
        "layer_norm_eps": float,
        "image_default_input_size": list,
        "image_patch_size": int,
        "image_num_pos": int,
    },
    "adapter_config": {
        "vit_layers": list,
        "pooling_attention_mask": bool,
        "hidden_size": int,
        "num_attention_heads": int,
        "num_key_value_heads": int,
        "head_dim": int,
        "intermediate_size": int,
        "text_hidden_size": int,
    },
    "text_config": {
        "hidden_size": int,
        "intermediate_size": int,
        "num_hidden_layers": int,
        "num_attention_heads": int,
        "num_key_value_heads": int,
        "head_dim": int,
        "layer_norm_eps": float,
        "vocab_size": int,
        "additional_vocab_size": int,
    },
    "action_expert_config": {
        "hidden_size": int,
        "num_layers": int,
        "num_heads": int,
        "mlp_ratio": float,
        "ffn_multiple_of": int,
        "timestep_embed_dim": int,
    },
}

# What the port does in one way only: the supported value. An absent field has upstream's default, which is the
# supported value but for those in _ABSENT.
_FIXED: dict[str, dict[str, Any]] = {
    TOP: {
        "model_type": "molmoact2",
        "add_action_expert": True,
        "state_format": "discrete",
        "mask_action_dim_padding": True,
        "enable_depth_reasoning": False,
        "action_expert_depth_gate": False,
        "action_expert_depth_gate_per_layer": False,
        "tie_word_embeddings": False,
    },
    "vit_config": {"hidden_act": "gelu_pytorch_tanh", "attention_dropout": 0.0, "residual_dropout": 0.0},
    "adapter_config": {
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "residual_dropout": 0.0,
        "image_feature_dropout": 0.0,
    },
    "text_config": {
        "hidden_act": "silu",
        "qkv_bias": False,
        "use_qk_norm": True,
        "qk_norm_type": "qwen3",
        "norm_after": False,
        "rope_scaling": None,
        "rope_scaling_layers": None,
        "tie_word_embeddings": False,
        "embedding_dropout": 0.0,
        "attention_dropout": 0.0,
        "residual_dropout": 0.0,
    },
    "action_expert_config": {
        "context_layer_norm": True,
        "qk_norm": True,
        "qk_norm_eps": EPS,
        "rope": True,
        "causal_attn": False,
        "dropout": 0.0,
        "attn_dropout": 0.0,
    },
}
_ABSENT = {"qkv_bias": True, "use_qk_norm": False, "qk_norm_type": "olmo"}

# What does not bear on continuous fine-tuning: discrete and depth tokens (their tensors are kept for export), settings
# of the transform, initialisation, and what a file says of the software that wrote it.
_ACCEPTED: dict[str, str] = {
    TOP: "action_expert_depth_gate_init_bias action_end_token_id action_output_token_id action_start_token_id "
    "action_token_start_id add_control_tokens add_setup_tokens depth_end_token_id depth_mode depth_output_token_id "
    "depth_start_token_id depth_token_start_id image_high_res_id n_obs_steps norm_stats_filename num_action_tokens "
    "num_depth_codes num_depth_tokens num_state_tokens state_end_token_id state_start_token_id state_token_start_id "
    "use_frame_special_tokens eos_token_id",  # eos_token_id is read by `_ids`
    "vit_config": "float32_attention",
    "adapter_config": "float32_attention",
    "text_config": "max_position_embeddings rope_theta rope_parameters",  # the last two are read by `_rope_theta`
    "action_expert_config": "max_action_dim max_action_horizon",
}
_SOFTWARE = (
    "_attn_implementation_autoset _name_or_path add_cross_attention architectures attn_implementation auto_map "
    "bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward cross_attention_hidden_size "
    "decoder_start_token_id diversity_penalty do_sample dtype early_stopping encoder_no_repeat_ngram_size "
    "exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id id2label "
    "initializer_range is_decoder is_encoder_decoder label2id length_penalty max_length min_length model_type "
    "no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions output_hidden_states "
    "output_scores pad_token_id prefix problem_type pruned_heads remove_invalid_values repetition_penalty return_dict "
    "return_dict_in_generate sep_token_id suppress_tokens task_specific_params temperature tf_legacy_loss "
    "tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript transformers_version typical_p "
    "use_bfloat16 use_cache"
)


def config_from_json(values: Mapping[str, Any], *, behaviour: Behaviour = "lerobot_0_6") -> MolmoAct2Config:
    """The network that a checkpoint's config.json describes.

    values: the parsed file. Sizes, token numbers, flow matching and the published horizon come from it alone.
    `attn_implementation` is accepted whatever it says: upstream's sdpa is what this port computes, and its eager
    pooling attention differs only in that it leaves out the mask of partial windows.
    Raises ValueError that lists every field that is missing, unknown, or asks for what this port does not do.
    """
    faults = [fault for name in _READ for fault in _faults(name, values if name == TOP else values.get(name))]
    if not faults:
        faults = _contradictions(values)
    if faults:
        raise ValueError("config.json of MolmoAct2 cannot be used:\n  " + "\n  ".join(faults))
    vit, adapter, text = values["vit_config"], values["adapter_config"], values["text_config"]
    depth, image = vit["num_hidden_layers"], vit["image_default_input_size"]
    return MolmoAct2Config(
        vision=MolmoVisionSizes(
            image=(image[0], image[1]),
            patch=vit["image_patch_size"],
            positions=vit["image_num_pos"],
            width=vit["hidden_size"],
            hidden=vit["intermediate_size"],
            heads=vit["num_attention_heads"],
            head_width=vit["head_dim"],
            eps=vit["layer_norm_eps"],
            taps=tuple(tap + depth if tap < 0 else tap for tap in adapter["vit_layers"]),
            pool_width=adapter["hidden_size"],
            pool_heads=adapter["num_attention_heads"],
            pool_head_width=adapter["head_dim"],
            masked_pooling=adapter["pooling_attention_mask"],
            projector=adapter["intermediate_size"],
            out=adapter["text_hidden_size"],
        ),
        text=Qwen3Sizes(
            width=text["hidden_size"],
            hidden=text["intermediate_size"],
            heads=text["num_attention_heads"],
            kv_heads=text["num_key_value_heads"],
            head_width=text["head_dim"],
            eps=text["layer_norm_eps"],
            cast_first=False,
        ),
        layers=text["num_hidden_layers"],
        vocabulary=text["vocab_size"],
        extra_vocabulary=text["additional_vocab_size"],
        rope_theta=float(_rope_theta(text) or 0.0),
        expert=_expert(values["action_expert_config"]),
        action_dim=values["max_action_dim"],
        horizon=values["max_action_horizon"],
        flow=_flow(values),
        ids=_ids(values),
        behaviour=behaviour,
        hide_end=values["action_mode"] == "both" and values.get("eos_token_id") is not None,
    )


def _faults(name: str, section: Any) -> list[str]:
    """What is wrong with one section, field by field."""
    if not isinstance(section, Mapping):
        return [f"{name}: is {section!r}, expected a section"]

    def field(key: str) -> str:
        return key if name == TOP else f"{name}.{key}"

    faults = []
    for key, kind in _READ[name].items():
        value = section.get(key)
        number = isinstance(value, int) and not isinstance(value, bool)
        if not (number if kind is int else isinstance(value, kind) or (kind is float and number)):
            faults.append(f"{field(key)}: is {value!r}, expected {kind.__name__}")
    for key, supported in _FIXED[name].items():
        value = section.get(key, _ABSENT.get(key, supported))
        if value != supported:
            faults.append(f"{field(key)}: is {value!r}; supported: {supported!r}")
    known = {*_READ[name], *_FIXED[name], *_ACCEPTED[name].split(), *_SOFTWARE.split()}
    return faults + [f"{field(key)}: unknown field" for key in section if key not in known]


def _contradictions(values: Mapping[str, Any]) -> list[str]:
    """Fields that are fine on their own but not together."""
    text, expert, eos = values["text_config"], values["action_expert_config"], values.get("eos_token_id")
    vocabulary, added = text["vocab_size"], text["additional_vocab_size"]
    faults = []

    def require(holds: bool, field: str, found: Any, expected: str) -> None:
        if not holds:
            faults.append(f"{field}: is {found!r}, expected {expected}")

    require(values["action_mode"] in ("both", "continuous"), "action_mode", values["action_mode"], "both or continuous")
    require(eos is None or isinstance(eos, int), "eos_token_id", eos, "one number or null")
    for name in ("vit_config", "adapter_config"):
        heads, keys = values[name]["num_attention_heads"], values[name]["num_key_value_heads"]
        require(heads == keys, f"{name}.num_key_value_heads", keys, f"all {heads} heads")
    layers = text["num_hidden_layers"]
    require(expert["num_layers"] == layers, "action_expert_config.num_layers", expert["num_layers"], f"{layers}")
    for i in _ids(values).image:
        require(vocabulary <= i < vocabulary + added, "image token id", i, f"{vocabulary} to {vocabulary + added - 1}")
    require(_rope_theta(text) is not None, "text_config.rope_theta", None, "a number")
    scaling = (text.get("rope_parameters") or {}).get("rope_type", "default")
    require(scaling == "default", "text_config.rope_parameters.rope_type", scaling, "default")
    return faults


def _rope_theta(text: Mapping[str, Any]) -> float | None:
    """Under either of the two names that transformers has had for it."""
    return text.get("rope_theta", (text.get("rope_parameters") or {}).get("rope_theta"))


def _expert(expert: Mapping[str, Any]) -> ExpertSizes:
    unit = expert["ffn_multiple_of"]
    hidden = math.ceil(int(expert["hidden_size"] * expert["mlp_ratio"]) / unit) * unit
    return ExpertSizes(expert["hidden_size"], hidden, expert["num_heads"], expert["timestep_embed_dim"])


def _flow(values: Mapping[str, Any]) -> FlowSpec:
    """t = offset + (min(cutoff, offset + scale) - offset) s, s of the Beta distribution."""
    offset, scale = values["flow_matching_time_offset"], values["flow_matching_time_scale"]
    return FlowSpec(
        noise_at=0,
        beta=(float(values["flow_matching_beta_alpha"]), float(values["flow_matching_beta_beta"])),
        time_scale=min(values["flow_matching_cutoff"], offset + scale) - offset,
        time_offset=offset,
        steps=values["flow_matching_num_steps"],
        zero_padding=True,
        reduction="rows",
    )


_IMAGE_IDS = (
    "image_start_token_id",
    "image_end_token_id",
    "image_patch_id",
    "image_col_id",
    "low_res_image_start_token_id",
    "image_low_res_id",
    "frame_start_token_id",
    "frame_end_token_id",
)


def _ids(values: Mapping[str, Any]) -> PromptIds:
    end = values.get("eos_token_id")
    return PromptIds(values["image_patch_id"], tuple(values[name] for name in _IMAGE_IDS), -1 if end is None else end)


# The one of upstream's implementations that equals this port, see `config_from_json`.
_SDPA = {"attn_implementation": "sdpa"}


def config_to_json(config: MolmoAct2Config) -> dict[str, Any]:
    """The config.json of a network that was not read from one, for export: `config_from_json` gives it back.

    Tokens of the discrete action and depth modes, which this port does not use, are left out.
    """
    vision, text, expert, flow = config.vision, config.text, config.expert, config.flow
    depth = max(vision.taps) + 1
    heads = {"num_attention_heads": vision.heads, "num_key_value_heads": vision.heads, "head_dim": vision.head_width}
    pool_heads = {
        "num_attention_heads": vision.pool_heads,
        "num_key_value_heads": vision.pool_heads,
        "head_dim": vision.pool_head_width,
    }
    return {
        **_FIXED[TOP],
        "architectures": ["MolmoAct2ForConditionalGeneration"],
        "vit_config": {
            **_FIXED["vit_config"],
            **_SDPA,
            **heads,
            "hidden_size": vision.width,
            "intermediate_size": vision.hidden,
            "num_hidden_layers": depth,
            "layer_norm_eps": vision.eps,
            "image_default_input_size": list(vision.image),
            "image_patch_size": vision.patch,
            "image_num_pos": vision.positions,
        },
        "adapter_config": {
            **_FIXED["adapter_config"],
            **_SDPA,
            **pool_heads,
            "vit_layers": list(vision.taps),
            "pooling_attention_mask": vision.masked_pooling,
            "hidden_size": vision.pool_width,
            "intermediate_size": vision.projector,
            "text_hidden_size": vision.out,
        },
        "text_config": {
            **_FIXED["text_config"],
            **_SDPA,
            "hidden_size": text.width,
            "intermediate_size": text.hidden,
            "num_hidden_layers": config.layers,
            "num_attention_heads": text.heads,
            "num_key_value_heads": text.kv_heads,
            "head_dim": text.head_width,
            "layer_norm_eps": text.eps,
            "vocab_size": config.vocabulary,
            "additional_vocab_size": config.extra_vocabulary,
            "rope_theta": config.rope_theta,
        },
        "action_expert_config": {
            **_FIXED["action_expert_config"],
            "hidden_size": expert.width,
            "num_layers": config.layers,
            "num_heads": expert.heads,
            "mlp_ratio": expert.hidden / expert.width,
            "ffn_multiple_of": expert.hidden,
            "timestep_embed_dim": expert.time_width,
        },
        "action_mode": "both" if config.hide_end else "continuous",
        "eos_token_id": config.ids.end,
        "max_action_dim": config.action_dim,
        "max_action_horizon": config.horizon,
        "flow_matching_num_steps": flow.steps,
        "flow_matching_cutoff": 1.0,
        "flow_matching_time_offset": flow.time_offset,
        "flow_matching_time_scale": flow.time_scale,
        "flow_matching_beta_alpha": flow.beta[0],
        "flow_matching_beta_beta": flow.beta[1],
        **dict(zip(_IMAGE_IDS, config.ids.image, strict=True)),
    }
