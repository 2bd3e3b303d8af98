"""The processor files of an Isaac-GR00T checkpoint: processor_config.json, statistics.json and embodiment_id.json."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from somaspeed_jax.data import stats
from somaspeed_jax.data.errors import DataError
from somaspeed_jax.data.normalize import Normalizer
from somaspeed_jax.data.transforms.groot_groups import EMBODIMENTS, ActionGroup, Group, embodiment_id
from somaspeed_jax.data.transforms.groot_images import Geometry, GrootPictures

# Fields that change nothing here: sizes that config.json states too, or names for other parts of Isaac-GR00T.
_IGNORED = {
    "embodiment_id_mapping",
    "image_crop_size",  # read together with image_target_size
    "max_action_dim",
    "max_action_horizon",
    "max_state_dim",
    "model_name",
    "model_type",
    "transformers_loading_kwargs",
    "use_relative_action",  # read together with the action groups
}
_READ = {
    "clip_outliers",
    "color_jitter_params",
    "crop_fraction",
    "formalize_language",
    "image_target_size",
    "letter_box_transform",
    "modality_configs",
    "shortest_image_edge",
    "state_dropout_prob",
    "use_albumentations",
    "use_mean_std",
    "use_percentiles",
}
# Fields whose other values change a sample in a way that is not implemented.
_ONLY = {
    "apply_sincos_state_encoding": (False, None),
    "exclude_state": (False, None),
    "extra_augmentation_config": (None, {}),
    "random_rotation_angle": (None, 0),
}


@dataclasses.dataclass(frozen=True)
class GrootProcessor:
    """What a checkpoint's processor files say about one embodiment.

    embodiment: row of the embodiment-indexed layers. video: camera names, in the model's order. chunk: actions that
    count. state, action: groups with one normaliser each; columns follow one another in the file's order.
    colour_jitter: bounds by name, or None. state_dropout: probability of zeroing the normalised state in training.
    """

    embodiment: int
    video: tuple[str, ...]
    chunk: int
    state_groups: tuple[Group, ...]
    action_groups: tuple[ActionGroup, ...]
    state_normalizers: tuple[Normalizer, ...]
    action_normalizers: tuple[Normalizer, ...]
    pictures: GrootPictures
    colour_jitter: dict[str, float] | None
    formalize_language: bool
    state_dropout: float


def read_processor(directory: str | Path, tag: str) -> GrootProcessor:
    """Reads a checkpoint's processor files for the embodiment `tag`.

    Raises DataError naming file and field for what is missing, unknown or not supported.
    """
    folder = Path(directory)
    path = folder / "processor_config.json"
    fields = _json(path).get("processor_kwargs")
    if not isinstance(fields, dict):
        raise DataError(f"{path}: no processor_kwargs")
    _check_fields(path, fields)
    ids = folder / "embodiment_id.json"
    known = _json(ids) if ids.exists() else EMBODIMENTS
    configs = fields.get("modality_configs", {})
    if tag not in configs:
        raise DataError(f"{path}: no modality_configs for {tag!r}; it has {', '.join(configs) or 'none'}")
    modality = configs[tag]
    for kind in ("video", "state"):
        if modality[kind].get("delta_indices", [0]) != [0]:
            raise DataError(
                f"{path}: {tag} {kind} delta_indices {modality[kind]['delta_indices']}; only the present frame, [0]"
            )
    found = stats.load(folder / "statistics.json", tag=tag)
    state_groups, state_normalizers = _state(path, fields, modality["state"], found)
    action_groups, action_normalizers = _action(path, fields, modality["action"], found, state_groups)
    jitter = fields.get("color_jitter_params")
    return GrootProcessor(
        embodiment=embodiment_id(tag, known),
        video=tuple(modality["video"]["modality_keys"]),
        chunk=len(modality["action"]["delta_indices"]),
        state_groups=state_groups,
        action_groups=action_groups,
        state_normalizers=state_normalizers,
        action_normalizers=action_normalizers,
        pictures=_pictures(fields),
        colour_jitter=dict(jitter) if jitter else None,
        formalize_language=fields.get("formalize_language", True),
        state_dropout=fields.get("state_dropout_prob") or 0.0,
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise DataError(f"{path}: cannot be read as JSON ({error}); it belongs to the checkpoint's files") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: holds a {type(content).__name__}, expected an object")
    return content


def _check_fields(path: Path, fields: Mapping[str, Any]) -> None:
    faults = [
        f"{name} = {fields[name]!r} is not supported (only {allowed[0]!r})"
        for name, allowed in _ONLY.items()
        if name in fields and fields[name] not in allowed
    ]
    faults += [f"{name} is not known" for name in sorted(fields.keys() - _IGNORED - _READ - _ONLY.keys())]
    if faults:
        raise DataError(f"{path}: processor_kwargs: " + "; ".join(faults))


def _pictures(fields: Mapping[str, Any]) -> GrootPictures:
    height, width = fields.get("image_target_size") or (256, 256)
    crop = fields.get("crop_fraction")
    if crop is None:
        size = fields.get("image_crop_size")
        crop = size[0] / height if size else 1.0
    edge = fields.get("shortest_image_edge")
    geometry: Geometry = "lerobot"
    if fields.get("use_albumentations", False):
        geometry = "square" if edge is None else "aspect"
    return GrootPictures(geometry, (height, width), edge, crop, bool(fields.get("letter_box_transform", False)))


def _state(
    path: Path, fields: Mapping[str, Any], modality: Mapping[str, Any], found: Mapping[str, stats.FeatureStatistics]
) -> tuple[tuple[Group, ...], tuple[Normalizer, ...]]:
    groups, out, start = [], [], 0
    by_mean = set(modality.get("mean_std_embedding_keys") or ())
    for name in modality["modality_keys"]:
        statistics = _statistics(path, f"state.{name}", found)
        groups.append(Group(name, tuple(range(start, start + statistics.size))))
        start += statistics.size
        if name in by_mean or fields.get("use_mean_std", False):
            out.append(Normalizer(statistics, "mean_std", "groot", clip=False))
        else:
            out.append(Normalizer(statistics, _range_mode(fields), "groot", clip=fields.get("clip_outliers", True)))
    return tuple(groups), tuple(out)


def _action(
    path: Path,
    fields: Mapping[str, Any],
    modality: Mapping[str, Any],
    found: Mapping[str, stats.FeatureStatistics],
    state_groups: tuple[Group, ...],
) -> tuple[tuple[ActionGroup, ...], tuple[Normalizer, ...]]:
    names = modality["modality_keys"]
    given = modality.get("action_configs") or [{}] * len(names)
    if len(given) != len(names):
        raise DataError(f"{path}: {len(given)} action_configs for {len(names)} action groups")
    states = {group.name: group.columns for group in state_groups}
    by_mean = set(modality.get("mean_std_embedding_keys") or ())
    groups, out, start = [], [], 0
    for name, entry in zip(names, given, strict=True):
        kinds = {key: str(entry.get(key, default)).lower() for key, default in _ACTION_DEFAULTS.items()}
        relative = kinds["rep"] == "relative" and fields.get("use_relative_action", False)
        pose = kinds["type"] == "eef"
        if kinds["rep"] not in ("absolute", "relative") or (relative and pose and kinds["format"] != "xyz_rot6d"):
            raise DataError(f"{path}: action group {name}: {entry} is not supported")
        reference = entry.get("state_key") or name
        if relative and reference not in states:
            raise DataError(f"{path}: action group {name} is relative to state group {reference}, which is not read")
        statistics = _statistics(path, f"{'relative_action' if relative else 'action'}.{name}", found)
        columns = tuple(range(start, start + statistics.size))
        start += statistics.size
        groups.append(ActionGroup(name, columns, states[reference] if relative else (), relative and pose))
        if relative:
            mode = "min_max"
        else:
            mode = "mean_std" if name in by_mean or fields.get("use_mean_std", False) else _range_mode(fields)
        out.append(Normalizer(statistics, mode, "groot", clip=fields.get("clip_outliers", True)))
    return tuple(groups), tuple(out)


_ACTION_DEFAULTS = {"rep": "ABSOLUTE", "type": "NON_EEF", "format": "DEFAULT"}


def _range_mode(fields: Mapping[str, Any]):
    return "quantiles" if fields.get("use_percentiles", False) else "min_max"


def _statistics(path: Path, key: str, found: Mapping[str, stats.FeatureStatistics]) -> stats.FeatureStatistics:
    if key not in found:
        raise DataError(f"{path.parent / 'statistics.json'}: no {key}; it has {', '.join(found)}")
    return found[key]
