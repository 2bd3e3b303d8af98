"""GR00T's meta/modality.json: names for parts of the flat state and action vectors, for cameras and for prompts."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from somaspeed_jax.data.errors import DataError


@dataclasses.dataclass(frozen=True)
class Part:
    """Columns `start:end` of the feature `key`."""

    key: str
    start: int
    end: int
    absolute: bool = True
    rotation_type: str | None = None

    @property
    def dims(self) -> int:
        return self.end - self.start


@dataclasses.dataclass(frozen=True)
class Modality:
    """Parts of state and action by name, camera names to features, annotation names to columns of task indices."""

    state: dict[str, Part]
    action: dict[str, Part]
    video: dict[str, str]
    annotation: dict[str, str]


def read_modality(path: Path, shapes: dict[str, tuple[int, ...]], notes: list[str]) -> Modality | None:
    """The modality map of a dataset, or None where it has none; `shapes` are the declared ones of its features.

    A part's `original_key` is followed, as GR00T N1 does. Raises DataError for a slice outside its feature.
    """
    if not path.exists():
        return None
    try:
        raw: dict[str, Any] = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise DataError(f"{path}: is not JSON ({error}).") from error
    parts = {}
    for group, default in (("state", "observation.state"), ("action", "action")):
        parts[group] = {
            name: _part(path, group, name, entry, default, shapes) for name, entry in raw.get(group, {}).items()
        }
    for name, part in parts["state"].items():
        if part.key == "action":
            notes.append(f"{path}: state.{name} is cut from 'action' (its original_key), not from the state.")
    return Modality(
        state=parts["state"],
        action=parts["action"],
        video={name: entry.get("original_key", name) for name, entry in raw.get("video", {}).items()},
        annotation={
            name: entry.get("original_key", f"annotation.{name}") for name, entry in raw.get("annotation", {}).items()
        },
    )


def _part(
    path: Path, group: str, name: str, entry: dict[str, Any], default: str, shapes: dict[str, tuple[int, ...]]
) -> Part:
    key = entry.get("original_key", default)
    try:
        part = Part(
            key, int(entry["start"]), int(entry["end"]), entry.get("absolute", True), entry.get("rotation_type")
        )
    except KeyError as error:
        raise DataError(f"{path}: {group}.{name} needs start and end; found {entry!r}.") from error
    size = shapes.get(key, (part.end,))[-1]
    if not 0 <= part.start < part.end <= size:
        raise DataError(
            f"{path}: {group}.{name} is the slice {part.start}:{part.end} of {key!r}, which has {size} dimensions."
        )
    return part
