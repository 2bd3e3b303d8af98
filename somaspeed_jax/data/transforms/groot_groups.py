"""GR00T's groups: named parts of the state and action vectors, each with its own statistics; embodiments; poses.

Formulas: LeRobot 0.6.1, policies/groot/processor_groot.py; Isaac-GR00T, gr00t/data/state_action.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from somaspeed_jax.data.errors import DataError
from somaspeed_jax.data.modality import Modality, Part
from somaspeed_jax.data.normalize import Mode, Normalizer
from somaspeed_jax.data.stats import FIELDS, FeatureStatistics

# Rows of the published embodiment-indexed layers, by tag. A checkpoint's embodiment_id.json comes before it.
EMBODIMENTS = {
    "simpler_env_google": 0,
    "simpler_env_widowx": 1,
    "libero_sim": 2,
    "new_embodiment": 10,
    "robocasa_panda_omron": 10,
    "robocasa_gr1_tabletop": 10,
    "unitree_g1_sonic": 11,
    "oxe_droid_relative_eef_relative_joint": 24,
    "real_g1_relative_eef_relative_joints": 25,
    "unitree_g1_full_body_with_waist_height_nav_cmd": 25,
    "real_r1_pro_sharpa_relative_eef": 26,
    "xdof_relative_eef_relative_joint": 27,
}

_POSE = 9  # x, y, z and the first two rows of the rotation


def embodiment_id(tag: str, known: Mapping[str, int] = EMBODIMENTS) -> int:
    """Row of an embodiment's weights. Raises DataError for an unknown tag (LeRobot takes row 0 in silence)."""
    if tag not in known:
        raise DataError(
            f"groot embodiment {tag!r}: expected one of {', '.join(sorted(known))}; new_embodiment is for robots that "
            "the checkpoint was not trained on"
        )
    return known[tag]


@dataclasses.dataclass(frozen=True)
class Group:
    """A named part of the state or action vector: `columns` of the robot's vector, in the model's order."""

    name: str
    columns: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class ActionGroup(Group):
    """relative_to: columns of the state that a relative group is relative to, or (). pose: they are poses (position
    and the first two rows of the rotation), not numbers to subtract."""

    relative_to: tuple[int, ...] = ()
    pose: bool = False

    def __post_init__(self):
        if self.relative_to and len(self.relative_to) != len(self.columns):
            raise DataError(
                f"relative action group {self.name}: {len(self.columns)} dimensions, but {len(self.relative_to)} "
                "dimensions of state to be relative to; they must be equally many"
            )
        if self.pose and (not self.relative_to or len(self.columns) != _POSE):
            raise DataError(f"pose group {self.name}: needs {_POSE} dimensions and a state pose to be relative to")


def groups_by_name(names: Sequence[str], state_size: int, exclude: Sequence[str] | None) -> tuple[ActionGroup, ...]:
    """The groups of a robot without a modality file.

    exclude: None: one absolute group. Otherwise actions are relative to the state dimension of the same number, except
    those whose name has a part in `exclude`; neighbours of one kind form a group (LeRobot: `relative_exclude_joints`).
    Raises DataError for a part that no name has, or a relative dimension without a state.
    """
    if exclude is None:
        return (ActionGroup("action", tuple(range(len(names)))),)
    unmatched = [part for part in exclude if not any(part.lower() in name.lower() for name in names)]
    if unmatched:
        raise DataError(f"relative_exclude names {unmatched}, which no action dimension has; they are {list(names)}")
    kept = [any(part.lower() in name.lower() for part in exclude) for name in names]
    alone = [name for name, absolute in list(zip(names, kept, strict=True))[state_size:] if not absolute]
    if alone:
        raise DataError(
            f"relative actions: the state has {state_size} dimensions, none for action dimensions {alone} to be "
            "relative to; add them to relative_exclude"
        )
    starts = [i for i in range(len(names)) if i == 0 or kept[i] != kept[i - 1]]
    groups = []
    for start, stop in zip(starts, [*starts[1:], len(names)], strict=True):
        columns = tuple(range(start, stop))
        name = f"{'absolute' if kept[start] else 'relative'}{start}"
        groups.append(ActionGroup(name, columns, () if kept[start] else columns))
    return tuple(groups)


def groups_from_modality(
    modality: Modality,
    state_key: str,
    action_key: str,
    *,
    state: Sequence[str] = (),
    action: Sequence[str] = (),
    relative: Mapping[str, str] | None = None,
) -> tuple[tuple[Group, ...], tuple[ActionGroup, ...]]:
    """State and action groups of a dataset with meta/modality.json.

    state_key, action_key: the features that records hold. state, action: groups to take, in the model's order; (): all,
    in the file's. relative: action group -> the state group it is relative to. Raises DataError for a group that the
    file lacks, or that lies in another feature.
    """

    def columns(kind: str, parts: Mapping[str, Part], name: str, key: str) -> tuple[int, ...]:
        if name not in parts:
            raise DataError(f"modality.json has no {kind}.{name}; it has {', '.join(parts) or 'none'}")
        if parts[name].key != key:
            raise DataError(f"modality.json: {kind}.{name} is cut from {parts[name].key!r}, the run reads {key!r}")
        return tuple(range(parts[name].start, parts[name].end))

    states = {name: columns("state", modality.state, name, state_key) for name in state or modality.state}
    relative = relative or {}
    actions = []
    for name in action or modality.action:
        reference = relative.get(name)
        if reference is not None and reference not in states:
            raise DataError(f"action group {name} is relative to state group {reference}, which is not read")
        to = () if reference is None else states[reference]
        actions.append(ActionGroup(name, columns("action", modality.action, name, action_key), to))
    return tuple(Group(name, where) for name, where in states.items()), tuple(actions)


def take_columns(statistics: FeatureStatistics, columns: Sequence[int], feature: str) -> FeatureStatistics:
    """The statistics of some dimensions, in the order given."""
    chosen = list(columns)
    arrays = {f: None if (v := getattr(statistics, f)) is None else v[..., chosen] for f in FIELDS}
    names = tuple(statistics.names[i] for i in chosen)
    return FeatureStatistics(feature, names, statistics.count, space=statistics.space, **arrays)


def normalizers(
    groups: Sequence[Group], absolute: FeatureStatistics, relative: FeatureStatistics | None, mode: Mode
) -> tuple[Normalizer, ...]:
    """One a group, from statistics of whole vectors.

    relative: per-step statistics of relative actions ([t, a], see `stats.compute_relative`), whose minimum and maximum
    scale the relative groups whatever `mode` is, as upstream. Raises DataError where they are needed and absent.
    """
    out = []
    for group in groups:
        feature = f"{absolute.feature}.{group.name}"
        if getattr(group, "relative_to", ()):
            if relative is None:
                raise DataError(f"{feature} is relative: it needs statistics of relative actions, and there are none")
            out.append(Normalizer(take_columns(relative, group.columns, feature), "min_max", "groot"))
        else:
            out.append(Normalizer(take_columns(absolute, group.columns, feature), mode, "groot"))
    return tuple(out)


def _matrices(pose: np.ndarray) -> np.ndarray:
    """[..., 9] -> homogeneous float64 [..., 4, 4]. The second rotation row is made orthogonal to the first."""
    pose = np.asarray(pose, np.float64)
    first = pose[..., 3:6] / np.linalg.norm(pose[..., 3:6], axis=-1, keepdims=True)
    second = pose[..., 6:9] - first * np.sum(first * pose[..., 6:9], axis=-1, keepdims=True)
    second /= np.linalg.norm(second, axis=-1, keepdims=True)
    out = np.zeros((*pose.shape[:-1], 4, 4))
    out[..., :3, :3] = np.stack([first, second, np.cross(first, second)], axis=-2)
    out[..., :3, 3] = pose[..., :3]
    out[..., 3, 3] = 1
    return out


def _pose(matrices: np.ndarray) -> np.ndarray:
    """The inverse of `_matrices`, float32."""
    rotation = matrices[..., :2, :3].reshape(*matrices.shape[:-2], 6)
    return np.concatenate([matrices[..., :3, 3], rotation], axis=-1).astype(np.float32)


def compose_pose(reference: np.ndarray, relative: np.ndarray) -> np.ndarray:
    """Poses [..., 9] (position, first two rows of the rotation): T_reference T_relative."""
    return _pose(_matrices(reference) @ _matrices(relative))


def relative_pose(reference: np.ndarray, absolute: np.ndarray) -> np.ndarray:
    """Inverse of `compose_pose`: T_reference⁻¹ T_absolute."""
    return _pose(np.linalg.inv(_matrices(reference)) @ _matrices(absolute))
