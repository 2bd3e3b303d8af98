"""The files beside the weights with which LeRobot (0.6) runs an exported π0.5: its configuration and its processors."""

import dataclasses
import json
from typing import Any

import numpy as np

from somaspeed_jax.config import Config
from somaspeed_jax.data.stats import FIELDS
from somaspeed_jax.models.pi05 import Pi05Config
from somaspeed_jax.models.weights.safetensors_file import TensorToWrite, safetensors_bytes
from somaspeed_jax.recipes import Facts, Statistics

STATE, ACTION = "observation.state", "action"
MODES = {"": "QUANTILES", "quantiles": "QUANTILES", "min_max": "MIN_MAX", "mean_std": "MEAN_STD"}
TOKENIZER = "google/paligemma-3b-pt-224"
PRE_STATE = "policy_preprocessor_step_3_normalizer_processor.safetensors"
POST_STATE = "policy_postprocessor_step_0_unnormalizer_processor.safetensors"


@dataclasses.dataclass(frozen=True)
class SideFiles:
    """Content by name, and what a person must know of them."""

    content: dict[str, bytes]
    notes: list[str]


def lerobot_files(config: Config, model_config: Pi05Config, facts: Facts, statistics: Statistics) -> SideFiles:
    """config.json, and the processors where LeRobot's can do what the run did."""
    features = _features(model_config, facts)
    mode = MODES[config.data.normalization]
    content = {"config.json": json_bytes(_config(config, model_config, facts, features, mode))}
    if config.pi05.recipe != "lerobot" or not config.pi05.state_in_prompt:
        return SideFiles(content, [
            "no policy_preprocessor.json: LeRobot's processors cannot do openpi's normalisation or a prompt without the"
            " robot state; the run's own processing is in processor/",
        ])  # fmt: skip
    stored = _statistics(statistics)
    mapping = {"VISUAL": "IDENTITY", "STATE": mode, "ACTION": mode}
    exclude = list(config.data.relative_exclude)
    relative = {"enabled": config.data.relative_actions, "exclude_joints": exclude,
                "action_names": list(facts.action_names)}  # fmt: skip
    device = {"device": "cpu", "float_dtype": None}
    before = [
        _step("rename_observations_processor", rename_map={}),
        _step("to_batch_processor"),
        _step("relative_actions_processor", **relative),
        _step("normalizer_processor", eps=1e-8, features=features, norm_map=mapping) | {"state_file": PRE_STATE},
        _step("pi05_prepare_state_tokenizer_processor_step"),
        _step(
            "tokenizer_processor",
            max_length=facts.prompt_length,
            task_key="task",
            padding_side="right",
            padding="max_length",
            truncation=True,
            tokenizer_name=TOKENIZER,
        ),
        _step("device_processor", **device),
    ]
    after = [
        _step("unnormalizer_processor", eps=1e-8, features={ACTION: features[ACTION]}, norm_map=mapping)
        | {"state_file": POST_STATE},
        _step("absolute_actions_processor", enabled=config.data.relative_actions),
        _step("device_processor", **device),
    ]
    content |= {
        "policy_preprocessor.json": json_bytes({"name": "policy_preprocessor", "steps": before}),
        "policy_postprocessor.json": json_bytes({"name": "policy_postprocessor", "steps": after}),
        PRE_STATE: stored,
        POST_STATE: stored,
    }
    return SideFiles(content, [f"LeRobot takes the tokenizer from {TOKENIZER}, as its own checkpoints do"])


def _features(model_config: Pi05Config, facts: Facts) -> dict[str, Any]:
    shape = [3, *model_config.vision.image]
    cameras = {
        name if name.startswith("observation.images.") else f"observation.images.{name}": {
            "type": "VISUAL",
            "shape": shape,
        }
        for name in facts.cameras
    }
    return cameras | {
        STATE: {"type": "STATE", "shape": [len(facts.state_names)]},
        ACTION: {"type": "ACTION", "shape": [len(facts.action_names)]},
    }


def _config(
    config: Config, model_config: Pi05Config, facts: Facts, features: dict[str, Any], mode: str
) -> dict[str, Any]:
    flow = model_config.flow
    return {
        "type": "pi05",
        "n_obs_steps": 1,
        "input_features": {name: value for name, value in features.items() if name != ACTION},
        "output_features": {ACTION: features[ACTION]},
        "device": "cpu",
        "paligemma_variant": "gemma_2b",
        "action_expert_variant": "gemma_300m",
        "dtype": "float32",
        "chunk_size": model_config.horizon,
        "n_action_steps": model_config.horizon,
        "max_state_dim": max(32, len(facts.state_names)),
        "max_action_dim": model_config.action_dim,
        "num_inference_steps": flow.steps,
        "time_sampling_beta_alpha": flow.beta[0],
        "time_sampling_beta_beta": flow.beta[1],
        "time_sampling_scale": flow.time_scale,
        "time_sampling_offset": flow.time_offset,
        "image_resolution": list(model_config.vision.image),
        "tokenizer_max_length": facts.prompt_length,
        "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": mode, "ACTION": mode},
        "use_relative_actions": config.data.relative_actions,
        "relative_exclude_joints": list(config.data.relative_exclude),
        "action_feature_names": list(facts.action_names),
        "train_expert_only": config.tune.preset == "expert",
        "freeze_vision_encoder": config.tune.preset == "expert",
    }


def _statistics(statistics: Statistics) -> bytes:
    """LeRobot's normaliser state: `<feature>.<field>`, float32."""
    arrays = {
        f"{key}.{field}": np.asarray(getattr(statistics[name], field), np.float32)
        for name, key in (("state", STATE), ("action", ACTION))
        for field in FIELDS
        if getattr(statistics[name], field) is not None
    }
    return safetensors_bytes(
        [TensorToWrite(name, array.dtype, array.shape, lambda a=array: a) for name, array in arrays.items()]
    )


def _step(name: str, **settings: Any) -> dict[str, Any]:
    return {"registry_name": name, "config": settings}


def json_bytes(value: Any) -> bytes:
    """JSON for a person to read too."""
    return (json.dumps(value, indent=2, allow_nan=False) + "\n").encode()
