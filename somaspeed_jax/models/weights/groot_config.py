"""GR00T N1.7's config.json: read and obeyed, refused by field where it asks for what is not implemented; written."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from somaspeed_jax.models.groot import SIZES, GrootConfig
from somaspeed_jax.models.language.qwen3 import Qwen3Sizes
from somaspeed_jax.models.vision.qwen3_vl import VisionSizes

MODEL_TYPE = "Gr00tN1d7"
BACKBONE = "nvidia/Cosmos-Reason2-2B"
# Upstream's config.json names its vision-language model and states none of its sizes. Models of other sizes, such as
# the demo's, state them here; upstream keeps fields that it does not know.
BACKBONE_SIZES = "somaspeed_backbone"

# Fields that choose something else than what is implemented, with the values that are.
_ONLY: dict[str, tuple[Any, ...]] = {
    "model_type": (MODEL_TYPE,),
    "add_pos_embed": (True,),
    "apply_sincos_state_encoding": (False,),
    "attend_text_every_n_blocks": (2,),
    "backbone_model_type": ("qwen",),
    "exclude_state": (False,),
    "reproject_vision": (False,),
    "state_history_length": (1,),
    "use_alternate_vl_dit": (True,),
    "use_vlln": (True,),
}
_BLOCKS_ONLY: dict[str, tuple[Any, ...]] = {
    "activation_fn": ("gelu-approximate",),
    "attention_bias": (True,),
    "final_dropout": (True,),
    "interleave_self_attention": (True,),
    "norm_elementwise_affine": (False,),
    "norm_eps": (1e-5,),
    "norm_type": ("ada_norm",),
    "positional_embeddings": (None,),
    "upcast_attention": (False,),
}
_BLOCKS_SIZES = {"num_layers", "num_attention_heads", "attention_head_dim", "dropout", "output_dim"}
# Parts of a block's configuration that upstream's code never reads at these settings.
_BLOCKS_UNUSED = {"compute_dtype", "max_num_positional_embeddings", "num_embeds_ada_norm"}
_SIZES = {
    "action_horizon",
    "backbone_embedding_dim",
    "diffusion_model_cfg",
    "hidden_size",
    "input_embedding_dim",
    "max_action_dim",
    "max_num_embodiments",
    "max_seq_len",
    "max_state_dim",
    "model_name",
    "noise_beta_alpha",
    "noise_beta_beta",
    "noise_s",
    "num_inference_timesteps",
    "num_timestep_buckets",
    "select_layer",
    "state_dropout_prob",
    "vl_self_attention_cfg",
    BACKBONE_SIZES,
}
# Fields that say nothing about the network's arithmetic: precision and training of upstream's run (ours are in its own
# configuration), settings of its processor (read from processor_config.json), real-time chunking, bookkeeping.
# `attn_dropout` is never used upstream.
_IGNORED = {
    "_name_or_path",
    "architectures",
    "attn_dropout",
    "auto_map",
    "backbone_trainable_params_fp32",
    "chunk_size_feed_forward",
    "color_jitter_params",
    "crop_fraction",
    "dtype",
    "extra_augmentation_config",
    "formalize_language",
    "id2label",
    "image_crop_size",
    "image_target_size",
    "is_encoder_decoder",
    "label2id",
    "letter_box_transform",
    "load_bf16",
    "model_dtype",
    "model_revision",
    "output_attentions",
    "output_hidden_states",
    "problem_type",
    "random_rotation_angle",
    "return_dict",
    "rtc_ramp_rate",
    "shortest_image_edge",
    "torch_dtype",
    "transformers_version",
    "tune_diffusion_model",
    "tune_llm",
    "tune_projector",
    "tune_top_llm_layers",
    "tune_visual",
    "tune_vlln",
    "use_albumentations_transforms",
    "use_flash_attention",
    "use_mean_std",
    "use_percentiles",
    "use_relative_action",
}
_REQUIRED = _SIZES - {"model_name", "vl_self_attention_cfg", BACKBONE_SIZES}


class GrootConfigError(ValueError):
    """A config.json that this port does not support; the message names every field concerned."""


def config_from_json(
    fields: Mapping[str, Any], embodiments: tuple[int, ...], where: str = "config.json"
) -> GrootConfig:
    """The model that a checkpoint's config.json describes, holding the rows of `embodiments`.

    Raises GrootConfigError with every field that is missing, unknown, or asks for what is not implemented.
    """
    faults = [f"{name} is missing" for name in sorted(_REQUIRED - fields.keys())]
    faults += _unsupported(fields, _ONLY, "")
    # What is unknown and set may change the network; what is unknown and off cannot.
    unknown = sorted(fields.keys() - _ONLY.keys() - _SIZES - _IGNORED)
    faults += [f"{name} = {fields[name]!r} is not known" for name in unknown if fields[name]]
    blocks = {name: fields.get(name) or {} for name in ("diffusion_model_cfg", "vl_self_attention_cfg")}
    for name, block in blocks.items():
        # The self-attention over the features is built with its own norms, whatever these two say.
        allowed = {k: v for k, v in _BLOCKS_ONLY.items() if name == "diffusion_model_cfg" or "norm" not in k}
        faults += _unsupported(block, allowed, f"{name}.")
        known = _BLOCKS_ONLY.keys() | _BLOCKS_SIZES | _BLOCKS_UNUSED
        faults += [f"{name}.{key} = {block[key]!r} is not known" for key in sorted(block.keys() - known)]
    if not blocks["diffusion_model_cfg"].keys() >= _BLOCKS_SIZES:
        faults.append(f"diffusion_model_cfg lacks {sorted(_BLOCKS_SIZES - blocks['diffusion_model_cfg'].keys())}")
    if BACKBONE_SIZES not in fields and fields.get("model_name") != BACKBONE:
        faults.append(f"model_name = {fields.get('model_name')!r} is not supported (only {BACKBONE!r})")
    if faults:
        raise GrootConfigError(f"{where}: " + "; ".join(faults))

    backbone = _backbone(fields.get(BACKBONE_SIZES))
    expert, features = blocks["diffusion_model_cfg"], blocks["vl_self_attention_cfg"]
    _check_widths(fields, backbone["text"].width, expert, features, where)
    return GrootConfig(
        **backbone,
        text_layers=fields["select_layer"],
        vl_layers=features.get("num_layers", 0),
        vl_heads=features.get("num_attention_heads", 1),
        dit_layers=expert["num_layers"],
        dit_heads=expert["num_attention_heads"],
        dit_head_width=expert["attention_head_dim"],
        category_width=fields["hidden_size"],
        state_dim=fields["max_state_dim"],
        action_dim=fields["max_action_dim"],
        horizon=fields["action_horizon"],
        positions=fields["max_seq_len"],
        embodiment_slots=fields["max_num_embodiments"],
        embodiments=embodiments,
        dropout=expert["dropout"],
        vl_dropout=features.get("dropout", 0.0),
        state_dropout=fields["state_dropout_prob"],
        beta=(fields["noise_beta_alpha"], fields["noise_beta_beta"]),
        time_scale=fields["noise_s"],
        buckets=fields["num_timestep_buckets"],
        steps=fields["num_inference_timesteps"],
    )


def config_to_json(config: GrootConfig) -> dict[str, Any]:
    """The config.json of an export: what `config_from_json` reads and upstream's own class loads."""
    published = SIZES["published"]
    fields: dict[str, Any] = {
        "model_type": MODEL_TYPE,
        "architectures": ["GR00TN17"],
        "model_name": BACKBONE,
        "backbone_model_type": "qwen",
        "model_dtype": "float32",
        "dtype": "float32",
        "select_layer": config.text_layers,
        "backbone_embedding_dim": config.text.width,
        "hidden_size": config.category_width,
        "input_embedding_dim": config.width,
        "max_state_dim": config.state_dim,
        "max_action_dim": config.action_dim,
        "action_horizon": config.horizon,
        "max_seq_len": config.positions,
        "max_num_embodiments": config.embodiment_slots,
        "state_dropout_prob": config.state_dropout,
        "noise_beta_alpha": config.beta[0],
        "noise_beta_beta": config.beta[1],
        "noise_s": config.time_scale,
        "num_timestep_buckets": config.buckets,
        "num_inference_timesteps": config.steps,
        "add_pos_embed": True,
        "use_vlln": True,
        "use_alternate_vl_dit": True,
        "attend_text_every_n_blocks": 2,
        "state_history_length": 1,
        "diffusion_model_cfg": {
            "num_layers": config.dit_layers,
            "num_attention_heads": config.dit_heads,
            "attention_head_dim": config.dit_head_width,
            "dropout": config.dropout,
            "output_dim": config.category_width,
            "norm_type": "ada_norm",
            "final_dropout": True,
            "interleave_self_attention": True,
            "positional_embeddings": None,
        },
        "vl_self_attention_cfg": {
            "num_layers": config.vl_layers,
            "num_attention_heads": config.vl_heads,
            "attention_head_dim": config.text.width // config.vl_heads,
            "dropout": config.vl_dropout,
            "final_dropout": True,
            "positional_embeddings": None,
        },
    }
    if _backbone_fields(config) != _backbone_fields(published):
        fields[BACKBONE_SIZES] = _backbone_fields(config)
    return fields


def _unsupported(fields: Mapping[str, Any], only: Mapping[str, tuple[Any, ...]], prefix: str) -> list[str]:
    return [
        f"{prefix}{name} = {fields[name]!r} is not supported (only {allowed[0]!r})"
        for name, allowed in only.items()
        if name in fields and fields[name] not in allowed
    ]


def _check_widths(
    fields: Mapping[str, Any], text: int, expert: Mapping[str, Any], features: Mapping[str, Any], where: str
) -> None:
    """Widths that config.json states twice must agree."""
    width = expert["num_attention_heads"] * expert["attention_head_dim"]
    twice = [
        ("input_embedding_dim", fields["input_embedding_dim"], "diffusion_model_cfg", width),
        ("backbone_embedding_dim", fields["backbone_embedding_dim"], "the text's width", text),
        ("hidden_size", fields["hidden_size"], "diffusion_model_cfg.output_dim", expert["output_dim"]),
    ]
    if features.get("num_layers", 0):
        heads = features["num_attention_heads"] * features["attention_head_dim"]
        twice.append(("backbone_embedding_dim", fields["backbone_embedding_dim"], "vl_self_attention_cfg", heads))
    faults = [f"{a} is {x}, but {b} gives {y}" for a, x, b, y in twice if x != y]
    if faults:
        raise GrootConfigError(f"{where}: " + "; ".join(faults))


def _backbone_fields(config: GrootConfig) -> dict[str, Any]:
    return {
        "vision": dataclasses.asdict(config.vision) | {"taps": list(config.vision.taps)},
        "text": dataclasses.asdict(config.text),
        "vocabulary": config.vocabulary,
        "rope_theta": config.rope_theta,
        "mrope_section": list(config.mrope_section),
        "image_token": config.image_token,
    }


def _backbone(given: Mapping[str, Any] | None) -> dict[str, Any]:
    fields = dict(_backbone_fields(SIZES["published"]) if given is None else given)
    vision: dict[str, Any] = {**fields["vision"], "taps": tuple(fields["vision"]["taps"])}
    fields["vision"] = VisionSizes(**vision)
    fields["text"] = Qwen3Sizes(**fields["text"])
    fields["mrope_section"] = tuple(fields["mrope_section"])
    return fields
