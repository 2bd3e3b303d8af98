"""MolmoAct2's transform: state in the prompt as tokens, pictures of 378 x 378, quantile-normalised actions.

Reference: LeRobot 0.6.1, policies/molmoact2/processor_molmoact2.py, continuous action mode. What differs between that
release and LeRobot's later head is chosen by `behaviour`.

Prompts have one fixed length, padded on the left. Upstream pads to the longest prompt of a batch; padded tokens are
never attended to, so only the positions that a model derives from them could differ (models/molmoact2.py).
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import cv2
import numpy as np

from somaspeed_jax.data.errors import DataError
from somaspeed_jax.data.images import check_picture
from somaspeed_jax.data.normalize import NormalizationError, Normalizer
from somaspeed_jax.data.stats import FeatureStatistics, StatisticsError
from somaspeed_jax.data.tokenizers import Tokenizer
from somaspeed_jax.data.transforms.base import Record, Sample
from somaspeed_jax.data.transforms.molmoact2_prompt import IMAGE, ImageLayout, PromptFormat, token_budget

Behaviour = Literal["lerobot_0_6", "head"]


def resize_bilinear(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """uint8 [h, w, 3] -> uint8 [H, W, 3]: bilinear without antialiasing, aspect ratio not kept.

    Equals torchvision's Resize(antialias=False) on uint8, except for the rounding of ties.
    """
    if image.shape[:2] == size:
        return image
    # cv2 interpolates uint8 with 11-bit weights; float32 keeps the exact ones.
    resized = cv2.resize(image.astype(np.float32), size[::-1], interpolation=cv2.INTER_LINEAR)
    return np.rint(resized).astype(np.uint8)


@dataclasses.dataclass(frozen=True)
class JointFrame:
    """Another convention for the first joints: model = signs * robot + offsets.

    For checkpoints that were trained before a change of calibration (SO-100 and SO-101: signs 1, -1, 1, 1, 1, 1 and
    offsets 0, 90, 90, 0, 0, 0 degrees). It applies to the state before normalisation and to the model's actions after
    un-normalisation; recorded actions and statistics stay as they are, so it is for running such a checkpoint, not for
    training on recordings of the other convention.
    """

    signs: tuple[float, ...]
    offsets: tuple[float, ...]

    def __post_init__(self):
        if len(self.signs) != len(self.offsets) or any(abs(s) != 1 for s in self.signs):
            raise ValueError(
                f"joint frame: signs {self.signs} and offsets {self.offsets}; expected ±1 and equal lengths"
            )

    def to_model(self, state: np.ndarray) -> np.ndarray:
        """[..., s] float32 -> [..., s] float32."""
        n = self._checked(state)
        joints = np.asarray(self.signs, np.float32) * state[..., :n] + np.asarray(self.offsets, np.float32)
        return np.concatenate([joints, state[..., n:]], axis=-1)

    def to_robot(self, actions: np.ndarray) -> np.ndarray:
        """[..., a] float32 -> [..., a] float32."""
        n = self._checked(actions)
        joints = np.asarray(self.signs, np.float32) * (actions[..., :n] - np.asarray(self.offsets, np.float32))
        return np.concatenate([joints, actions[..., n:]], axis=-1)

    def _checked(self, x: np.ndarray) -> int:
        if x.shape[-1] < len(self.signs):
            raise ValueError(f"joint frame of {len(self.signs)} joints for a vector of {x.shape[-1]} dimensions")
        return len(self.signs)


@dataclasses.dataclass(frozen=True)
class NormTag:
    """What a checkpoint's norm_stats.json says of one robot beside the statistics themselves.

    cameras: feature names in the model's order, empty where none are listed. state_mask, action_mask: false for
    dimensions that pass through un-normalised, or None where the file has no mask.
    """

    cameras: tuple[str, ...]
    setup: str
    control: str
    horizon: int | None
    state_mask: tuple[bool, ...] | None
    action_mask: tuple[bool, ...] | None


def read_norm_tag(path: str | Path, tag: str) -> NormTag:
    """Reads `tag` of a norm_stats.json. Raises StatisticsError naming the file, the tag and the tags it has."""
    path = Path(path)
    try:
        tags = json.loads(path.read_text(encoding="utf-8"))["metadata_by_tag"]
    except (OSError, ValueError, KeyError) as error:
        raise StatisticsError(f"{path}: not a readable MolmoAct2 norm_stats.json ({error!r})") from error
    if tag not in tags:
        raise StatisticsError(f"{path}: no norm tag {tag!r}; the file has {', '.join(sorted(tags))}")
    entry = tags[tag]

    def mask(field: str) -> tuple[bool, ...] | None:
        found = (entry.get(field) or {}).get("mask")
        return None if found is None else tuple(map(bool, found))

    return NormTag(
        cameras=tuple(entry.get("camera_keys") or ()),
        setup=entry.get("setup_type") or "",
        control=entry.get("control_mode") or "",
        horizon=entry.get("action_horizon"),
        state_mask=mask("state_stats"),
        action_mask=mask("action_stats"),
    )


def normalizer(
    statistics: FeatureStatistics,
    *,
    names: Sequence[str] | None = None,
    mask: Sequence[bool] | None = None,
    normalize_gripper: bool = False,
) -> Normalizer:
    """Quantile normalisation of state or actions by MolmoAct2's rules.

    Unless `normalize_gripper`, dimensions whose name in the dataset (`names`) contains "gripper" pass through as they
    are and must lie in [-1, 1]. Without names, `mask` decides (a NormTag's; false passes through); without either,
    every dimension is normalised.
    """
    if normalize_gripper:
        passes = np.zeros(statistics.size, bool)
    elif names is not None:
        passes = np.array(["gripper" in name.lower() for name in names])
    else:
        passes = np.zeros(statistics.size, bool) if mask is None else ~np.asarray(mask, bool)
    if passes.shape != (statistics.size,):
        raise NormalizationError(
            f"{statistics.feature}: {passes.size} dimension names or mask entries for statistics of {statistics.size}"
        )
    if statistics.min is not None and statistics.max is not None:
        outside = np.flatnonzero(passes & ((statistics.min < -1) | (statistics.max > 1)))
        if outside.size:
            i = int(outside[0])
            raise NormalizationError(
                f"{statistics.feature}: dimension {i} ({statistics.names[i]}) is not normalised and must lie in "
                f"[-1, 1], its statistics span [{statistics.min[i]:g}, {statistics.max[i]:g}]. Set "
                "normalize_gripper=true or rescale it in the dataset"
            )
    return Normalizer(statistics, "quantiles", "molmoact2", mask=~passes)


class MolmoAct2Transform:
    """A `somaspeed_jax.data.transforms.base.Transform`.

    Args:
      tokenizer: of kind "molmoact2".
      state, action: normalisers of the state [s] and of one action [a], as `normalizer` makes them.
      cameras: dataset features in the model's order; the prompt numbers them in this order.
      prompt: setup and control text and how the task is written.
      layout: picture geometry, the checkpoint's (`image_layout`).
      horizon, action_dim: t and A of what the model predicts; a must not exceed A.
      prompt_length: p, the fixed length of `tokens`; default: the longest prompt that upstream accepts
        (`token_budget`). `required_prompt_length` gives the shortest that holds a dataset's tasks.
      behaviour: `lerobot_0_6` leaves steps past the end of an episode out of the loss; `head` trains on the repeated
        last action.
      frame: see JointFrame.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        state: Normalizer,
        action: Normalizer,
        *,
        cameras: Sequence[str],
        prompt: PromptFormat,
        layout: ImageLayout,
        horizon: int,
        action_dim: int = 32,
        prompt_length: int | None = None,
        behaviour: Behaviour = "lerobot_0_6",
        frame: JointFrame | None = None,
    ):
        if not cameras:
            raise ValueError("molmoact2: no camera; the model needs at least one")
        if action.size > action_dim:
            raise ValueError(f"molmoact2: actions of {action.size} dimensions, the model has {action_dim}")
        if behaviour not in ("lerobot_0_6", "head"):
            raise ValueError(f"molmoact2: behaviour is {behaviour!r}; expected lerobot_0_6 or head")
        self.tokenizer, self.state, self.action = tokenizer, state, action
        self.cameras = tuple(cameras)
        self.horizon, self.action_dim = horizon, action_dim
        self.prompt, self.layout, self.behaviour, self.frame = prompt, layout, behaviour, frame
        self.prompt_length = prompt_length or token_budget(layout, len(cameras), state.size)
        height, width = layout.size
        self.image_recipe = f"molmoact2: bilinear {height}x{width}, no antialias"

    def prepare_image(self, image: np.ndarray) -> np.ndarray:
        """uint8 [h, w, 3] -> uint8 [H, W, 3] of the layout's size."""
        check_picture(image)
        return resize_bilinear(image, self.layout.size)

    def required_prompt_length(self, tasks: Iterable[str], episodes: Mapping[str, int] | None = None) -> int:
        """The shortest multiple of 8 that holds the prompt of each of `tasks` with every camera present.

        `episodes` gives an episode of each task, to name in a refusal. Raises DataError when the longest prompt is over
        `prompt_length`.
        """
        state = np.zeros(self.state.size, np.float32)  # a state token is one id whatever its number
        counts = {task: len(self._ids(task, state, len(self.cameras))) for task in tasks}
        if not counts:
            raise DataError("molmoact2: no task to find a prompt length for")
        longest = max(counts, key=lambda task: counts[task])
        try:
            self._check_length(longest, counts[longest])
        except DataError as error:
            raise DataError(f"episode {(episodes or {}).get(longest, '?')}: {error}") from error
        return min(-(-counts[longest] // 8) * 8, self.prompt_length)

    def __call__(self, record: Record) -> Sample:
        """A training sample: `observation` with `actions` [t, A] and `action_mask` [t, A].

        Raises DataError naming episode and frame for what cannot be used, as `observation` does.
        """
        actions, is_pad = record["actions"], record["action_is_pad"]
        expected = (self.horizon, self.action.size)
        if actions.shape != expected:
            raise DataError(f"{_where(record)}: actions of shape {actions.shape}; expected {expected}")
        sample = self.observation(record)
        padded = np.zeros((self.horizon, self.action_dim), np.float32)
        try:
            padded[:, : self.action.size] = self.action.normalise(actions)
        except NormalizationError as error:
            raise DataError(f"{_where(record)}: {error}") from error
        counted = np.ones(self.horizon, bool) if self.behaviour == "head" else ~is_pad
        sample["actions"] = padded
        sample["action_mask"] = counted[:, None] & (np.arange(self.action_dim) < self.action.size)
        return sample

    def observation(self, record: Record) -> Sample:
        """A sample without actions. A camera whose entry in `record["images"]` is None is absent from that sample."""
        try:
            state = record["state"] if self.frame is None else self.frame.to_model(record["state"])
            images, present = self._images(record["images"])
            ids = self._ids(record["task"], self.state.normalise(state), int(present.sum()))
            self._check_length(record["task"], len(ids))
        except ValueError as error:
            raise DataError(f"{_where(record)}: {error}") from error
        tokens = np.full(self.prompt_length, self.tokenizer.pad_id, np.int32)
        tokens[self.prompt_length - len(ids) :] = ids
        return {
            "images": images,
            "image_mask": present,
            "tokens": tokens,
            "token_mask": np.arange(self.prompt_length) >= self.prompt_length - len(ids),
            "state": np.zeros(self.state.size, np.float32),  # the state is in the prompt
            "embodiment": np.int32(0),
            "index": np.int32(record["index"]),
        }

    def actions(self, normalised: np.ndarray, state: np.ndarray) -> np.ndarray:
        """[..., t, A] float32 model output -> [..., t, a] in robot units, clipped to the trained range."""
        actions = self.action.unnormalise(normalised[..., : self.action.size])
        return actions if self.frame is None else self.frame.to_robot(actions)

    def _images(self, images: dict[str, Any]) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
        missing = [camera for camera in self.cameras if camera not in images]
        if missing:
            raise DataError(f"no camera {', '.join(missing)}; the record has {', '.join(sorted(images))}")
        pictures = []
        for camera in self.cameras:
            picture = images[camera]
            if picture is None:
                picture = np.zeros((*self.layout.size, 3), np.uint8)
            check_picture(picture, camera)
            if picture.shape[:2] != self.layout.size:
                raise DataError(
                    f"camera {camera}: picture of {picture.shape[:2]}, prepare_image makes {self.layout.size}"
                )
            pictures.append(picture)
        return tuple(pictures), np.array([images[camera] is not None for camera in self.cameras])

    def _ids(self, task: str, state: np.ndarray, pictures: int) -> list[int]:
        text = self.prompt.text(task, state, pictures).replace(IMAGE, self.layout.text, pictures)
        return self.tokenizer.encode(text, bos=True)

    def _check_length(self, task: str, count: int) -> None:
        if count > self.prompt_length:
            shown = task if len(task) <= 80 else f"{task[:77]}..."
            raise DataError(
                f"the prompt of task {shown!r} has {count} tokens, the limit is {self.prompt_length}; shorten the task "
                "or raise data.prompt_length"
            )


def _where(record: Record) -> str:
    return f"episode {record.get('episode_index', '?')}, frame {record.get('frame_index', '?')}"
