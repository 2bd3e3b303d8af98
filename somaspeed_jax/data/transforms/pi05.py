"""π0.5: the state as words in the prompt, letter-boxed pictures, padded actions, and the way back to the robot.

Two published recipes differ in what a picture and a prompt are. LeRobot's interpolates without antialiasing and writes
the state into the prompt; openpi's uses Pillow's filter, and its `pi05_libero` leaves the state out.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import numpy as np

from somaspeed_jax.data.errors import DataError
from somaspeed_jax.data.images import check_picture, resize_with_pad, resize_with_pad_antialias
from somaspeed_jax.data.normalize import Normalizer
from somaspeed_jax.data.tokenizers import Tokenizer
from somaspeed_jax.data.transforms.base import Record, Sample

_EDGES = np.linspace(-1, 1, 257)[:-1]
_RESIZE = {"lerobot": resize_with_pad, "openpi": resize_with_pad_antialias}
_OPENPI_SLOTS = 3  # base, left wrist, right wrist
_BUCKET = 8  # prompt lengths are multiples of this


@dataclasses.dataclass(frozen=True)
class Pi05TransformConfig:
    """What shapes a π0.5 sample. Normalisers and tokenizer are given to the transform itself.

    cameras: dataset features in the model's order (base, left wrist, right wrist for the published weights).
    absent_cameras: how many of the model's views the dataset does not have. They have no picture, no tokens and no
      encoder work, which gives what upstream gets from masking them. openpi's recipe has three views in all.
    horizon: t, actions in a chunk. action_dim: the width that actions are padded to.
    image_size: (height, width) of the model's pictures.
    prompt_length: tokens in a prompt, padding included. Both upstreams have 200, and cut what is longer; here it is
      refused. `Pi05Transform.required_prompt_length` finds how short it may be.
    state_in_prompt: false for checkpoints such as pi05_libero, which are not told the state.
    recipe: whose picture geometry and normalisation formula.
    relative_actions: actions are differences to the state at the chunk's start, dimension i to state dimension i,
      except where `relative_exclude` has a part of the action dimension's name (in any case).
    """

    cameras: tuple[str, ...]
    horizon: int
    absent_cameras: int = 0
    image_size: tuple[int, int] = (224, 224)
    action_dim: int = 32
    prompt_length: int = 200
    state_in_prompt: bool = True
    recipe: Literal["lerobot", "openpi"] = "lerobot"
    relative_actions: bool = False
    relative_exclude: tuple[str, ...] = ("gripper",)

    def __post_init__(self):
        if self.recipe not in _RESIZE:
            raise DataError(f"recipe is {self.recipe!r}; expected one of {', '.join(_RESIZE)}")
        if not self.cameras or len(set(self.cameras)) != len(self.cameras):
            raise DataError(f"cameras are {list(self.cameras)}; expected at least one, each once")
        for field in ("horizon", "action_dim", "prompt_length"):
            if getattr(self, field) < 1:
                raise DataError(f"{field} is {getattr(self, field)}; expected at least 1")
        views = len(self.cameras) + self.absent_cameras
        if self.absent_cameras < 0 or (self.recipe == "openpi" and views != _OPENPI_SLOTS):
            raise DataError(
                f"cameras {list(self.cameras)} with absent_cameras={self.absent_cameras}: openpi's π0.5 has "
                f"{_OPENPI_SLOTS} views, so absent_cameras must be {_OPENPI_SLOTS} less the cameras, and never negative"
            )


def state_bins(normalised: np.ndarray) -> np.ndarray:
    """float32 [s] -> int [s]: which of 256 equal parts of [-1, 1) each value is in; -1 below, 255 above.

    openpi `models/tokenizer.py` and lerobot `processor_pi05.py`. Neither clips, so "-1" does occur in prompts.
    """
    return np.digitize(normalised, _EDGES) - 1


def prompt_text(task: str, bins: Sequence[int] | np.ndarray | None) -> str:
    """The words before the action; `bins` None leaves the state out (π0's prompt, whose newline is its own token)."""
    words = task.strip().replace("_", " ").replace("\n", " ")
    if bins is None:
        return words
    return f"Task: {words}, State: {' '.join(str(b) for b in bins)};\nAction: "


def relative_mask(names: Sequence[str], exclude: Sequence[str]) -> np.ndarray:
    """bool [a]: which action dimensions are relative, by name. Raises DataError for a part that no name has."""
    parts, lowered = [part.lower() for part in exclude], [name.lower() for name in names]
    unmatched = [part for part in parts if not any(part in name for name in lowered)]
    if unmatched:
        raise DataError(
            f"relative_exclude names {unmatched}, which no action dimension has; they are {list(names)}. Name the "
            "dimensions that stay absolute, or set relative_exclude=() if there are none"
        )
    return np.array([not any(part in name for part in parts) for name in lowered])


class Pi05Transform:
    """Record to sample and model output to robot units, for π0.5 (see `transforms/base.py` for both).

    Attributes: `cameras`, `image_recipe`, `state_names`, `action_names` (of the real dimensions), `relative` bool [a].
    Raises DataError when the normalisers do not belong to the recipe, their statistics are of the wrong kind of
    actions, or the robot has more action dimensions than the model.
    """

    def __init__(self, config: Pi05TransformConfig, tokenizer: Tokenizer, state: Normalizer, action: Normalizer):
        self.config, self.tokenizer = config, tokenizer
        self.state_normalizer, self.action_normalizer = state, action
        self.state_names, self.action_names = state.statistics.names, action.statistics.names
        self.cameras = config.cameras
        height, width = config.image_size
        self.image_recipe = f"{_RESIZE[config.recipe].__name__}({height}x{width})"
        if action.size > config.action_dim:
            raise DataError(
                f"{action.feature} has {action.size} dimensions, π0.5 has {config.action_dim}: "
                "leave dimensions out of the dataset's actions"
            )
        for normalizer in (state, action):
            if normalizer.convention != config.recipe:
                raise DataError(
                    f"{normalizer.feature} is normalised as {normalizer.convention} does, the recipe is {config.recipe}"
                )
        state.statistics.require_space("absolute")
        action.statistics.require_space("relative" if config.relative_actions else "absolute")
        self.relative = np.zeros(action.size, bool)
        if config.relative_actions:
            self.relative = relative_mask(self.action_names, config.relative_exclude)
            alone = [
                name
                for name, relative in list(zip(self.action_names, self.relative, strict=True))[state.size :]
                if relative
            ]
            if alone:
                raise DataError(
                    f"relative actions: {state.feature} has only {state.size} dimensions, none for action dimensions "
                    f"{alone} to be relative to; add them to relative_exclude"
                )

    def prepare_image(self, image: np.ndarray) -> np.ndarray:
        """uint8 [h, w, 3] -> uint8 [H, W, 3], scaled to fit and centred on black."""
        return _RESIZE[self.config.recipe](image, self.config.image_size)

    def __call__(self, record: Record) -> Sample:
        sample = self.observation(record)
        try:
            actions = self._normalised_actions(record["state"], record["actions"])
        except ValueError as error:
            raise DataError(f"{_where(record)}: {error}") from error
        # openpi's loss counts the padded dimensions, lerobot's the robot's own; both count a repeated last action.
        counted = np.arange(self.config.action_dim) < (
            self.config.action_dim if self.config.recipe == "openpi" else self.action_normalizer.size
        )
        sample["actions"] = actions
        sample["action_mask"] = np.broadcast_to(counted, actions.shape).copy()
        return sample

    def observation(self, record: Record) -> Sample:
        try:
            tokens = self.prompt_tokens(record["task"], record["state"])
            images = self._images(record["images"])
        except ValueError as error:
            raise DataError(f"{_where(record)}: {error}") from error
        row = np.full(self.config.prompt_length, self.tokenizer.pad_id, np.int32)
        row[: len(tokens)] = tokens
        return {
            "images": images,
            "image_mask": np.ones(len(images), bool),
            "tokens": row,
            "token_mask": np.arange(len(row)) < len(tokens),
            "state": np.zeros(self.config.action_dim, np.float32),  # the state is text, or nothing
            "embodiment": np.int32(0),
            "index": np.int32(record["index"]),
        }

    def actions(self, normalised: np.ndarray, state: np.ndarray) -> np.ndarray:
        """[..., t, A] float32 model output, [..., s] float32 state in robot units -> [..., t, a] in robot units.

        Like upstream, values beyond [-1, 1] are extrapolated, not clipped.
        """
        normalised = np.asarray(normalised)
        if normalised.shape[-1] != self.config.action_dim:
            raise DataError(f"model output {normalised.shape} does not have {self.config.action_dim} dimensions")
        actions = self.action_normalizer.unnormalise(normalised[..., : self.action_normalizer.size])
        return actions + self._offset(state)[..., None, :]

    def prompt_tokens(self, task: str, state: np.ndarray) -> list[int]:
        """The prompt's ids for a state [s] float32 in robot units, without padding.

        Raises DataError naming the task, its token count and the limit when there are more than `prompt_length`.
        """
        bins = state_bins(self.state_normalizer.normalise(state)) if self.config.state_in_prompt else None
        ids = self._encode(task, bins)
        self._check_length(task, len(ids))
        return ids

    def required_prompt_length(self, tasks: Iterable[str], episodes: Mapping[str, int] | None = None) -> int:
        """A prompt length, a multiple of 8, that all these tasks fit in with any state the robot could have.

        It holds for tokenizers that cut numbers into digits, as PaliGemma's does: the longest prompt of a task is then
        the one that repeats the longest bin. `episodes` gives an episode of each task, to name in a refusal. Raises
        DataError when the longest prompt is over the configuration's `prompt_length`.
        """
        bins = None
        if self.config.state_in_prompt:
            longest = max(range(-1, 256), key=lambda b: len(self._encode("", [b] * self.state_normalizer.size)))
            bins = [longest] * self.state_normalizer.size
        counts = {task: len(self._encode(task, bins)) for task in tasks}
        if not counts:
            raise DataError("no tasks: the dataset has no episode to take a prompt from")
        task = max(counts, key=lambda t: counts[t])
        try:
            self._check_length(task, counts[task])
        except DataError as error:
            raise DataError(f"episode {episodes[task]}: {error}" if episodes else str(error)) from None
        return min(-(-counts[task] // _BUCKET) * _BUCKET, self.config.prompt_length)

    def _encode(self, task: str, bins: Sequence[int] | np.ndarray | None) -> list[int]:
        ids = self.tokenizer.encode(prompt_text(task, bins), bos=True)
        return ids if bins is not None else ids + self.tokenizer.encode("\n", bos=False)

    def _check_length(self, task: str, tokens: int) -> None:
        if tokens > self.config.prompt_length:
            shown = task if len(task) <= 80 else f"{task[:77]}..."
            raise DataError(
                f"task {shown!r}: the prompt has {tokens} tokens, the limit is {self.config.prompt_length} "
                "(prompt_length); shorten the task in the dataset, or raise prompt_length"
            )

    def _images(self, images: Mapping[str, np.ndarray]) -> tuple[np.ndarray, ...]:
        missing = [camera for camera in self.cameras if camera not in images]
        if missing:
            raise DataError(
                f"no picture of {missing}; the record has {sorted(images)}, the model reads {list(self.cameras)}: name "
                "the dataset's features in `cameras`, and count the views that it lacks in `absent_cameras`"
            )
        for camera in self.cameras:
            check_picture(images[camera], camera)
            if images[camera].shape[:2] != self.config.image_size:
                raise DataError(
                    f"camera {camera}: {images[camera].shape[:2]} pixels, expected {self.config.image_size}; "
                    "pass the picture through prepare_image first"
                )
        return tuple(images[camera] for camera in self.cameras)

    def _normalised_actions(self, state: np.ndarray, actions: np.ndarray) -> np.ndarray:
        """float32 [t, a] in robot units -> [t, A]: relative where so configured, normalised, padded with zeros."""
        expected = (self.config.horizon, self.action_normalizer.size)
        if actions.shape != expected:
            raise DataError(f"actions have shape {actions.shape}, expected {expected} (horizon, statistics)")
        normalised = self.action_normalizer.normalise(actions - self._offset(state))
        return np.pad(normalised, ((0, 0), (0, self.config.action_dim - expected[1])))

    def _offset(self, state: np.ndarray) -> np.ndarray:
        """[..., s] -> [..., a]: what relative actions are relative to, 0 for absolute dimensions."""
        state = np.asarray(state)
        if state.shape[-1] != self.state_normalizer.size:
            raise DataError(f"state has {state.shape[-1]} dimensions, the statistics have {self.state_normalizer.size}")
        offset = np.zeros((*state.shape[:-1], len(self.relative)), np.float32)
        indices = np.flatnonzero(self.relative)
        offset[..., indices] = state[..., indices]
        return offset


def _where(record: Record) -> str:
    return f"episode {record.get('episode_index', '?')}, frame {record.get('frame_index', '?')}"
