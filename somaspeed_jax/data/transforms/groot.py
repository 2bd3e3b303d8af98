"""GR00T N1.7: chat prompt with picture placeholders, groups of state and action, padding, and the way back.

Formulas: LeRobot 0.6.1, policies/groot/processor_groot.py; Isaac-GR00T, gr00t/data/state_action. State and action are
vectors of groups (arm, gripper, …), each normalised by its own statistics. A relative group is what remains of an
action after the state at the chunk's start is taken away: a difference, or for a pose T_state⁻¹ T_action.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from somaspeed_jax.data.errors import DataError
from somaspeed_jax.data.images import Size, check_picture
from somaspeed_jax.data.normalize import Normalizer
from somaspeed_jax.data.tokenizers import Tokenizer
from somaspeed_jax.data.transforms.base import Record, Sample
from somaspeed_jax.data.transforms.groot_groups import ActionGroup, Group, compose_pose, relative_pose
from somaspeed_jax.data.transforms.groot_images import GrootPictures

EMPTY_TASK = "Perform the task."

_BUCKET = 8  # prompt lengths are multiples of this
_PATCHES_PER_TOKEN = 4


@dataclasses.dataclass(frozen=True)
class GrootTransformConfig:
    """What shapes a GR00T sample. Normalisers, one a group, and the tokenizer are given to the transform itself.

    cameras: dataset features in the model's order. chunk: actions in a record; horizon: t, to which they are padded.
    state_dim, action_dim: padded widths. state_groups, action_groups: in the model's order.
    patch: pixels a side of the tower's patches. prompt_length: tokens in a prompt, padding included.
    embodiment: the model's row for this robot: position in `GrootConfig.embodiments`.
    formalize_language: lower case without punctuation (upstream's default).
    libero_gripper: send -sign(2 g - 1) of the last action dimension to the robot (LIBERO's simulator).
    """

    cameras: tuple[str, ...]
    chunk: int
    state_groups: tuple[Group, ...]
    action_groups: tuple[ActionGroup, ...]
    horizon: int = 40
    state_dim: int = 132
    action_dim: int = 132
    pictures: GrootPictures = GrootPictures()
    patch: int = 16
    prompt_length: int = 1024
    embodiment: int = 0
    formalize_language: bool = True
    libero_gripper: bool = False

    def __post_init__(self):
        if not self.cameras or len(set(self.cameras)) != len(self.cameras):
            raise DataError(f"cameras are {list(self.cameras)}; expected at least one, each once")
        if not 0 < self.chunk <= self.horizon:
            raise DataError(f"groot: chunks of {self.chunk} actions, the model's horizon is {self.horizon}")
        for kind, groups, limit in (
            ("state", self.state_groups, self.state_dim),
            ("action", self.action_groups, self.action_dim),
        ):
            columns = [column for group in groups for column in group.columns]
            if not columns or len(columns) > limit:
                raise DataError(
                    f"the robot's {kind} has {len(columns)} dimensions, GR00T takes 1 to {limit}: leave dimensions out"
                )
        actions = sorted(column for group in self.action_groups for column in group.columns)
        if actions != list(range(len(actions))):
            raise DataError(f"action groups must take each action dimension once; they take {actions}")


def formalise(task: str | None) -> str:
    """Lower case; of other characters than letters, digits, blanks and underscores nothing stays.

    A missing or empty task becomes upstream's placeholder.
    """
    return "".join(c for c in (task or EMPTY_TASK).lower() if c.isalnum() or c.isspace() or c == "_")


def prompt_text(task: str, tokens: Sequence[int]) -> str:
    """Qwen's chat with one user turn, all pictures first; tokens: placeholders of each picture."""
    pictures = "".join(f"<|vision_start|>{'<|image_pad|>' * count}<|vision_end|>" for count in tokens)
    return f"<|im_start|>user\n{pictures}{task}<|im_end|>\n"


class GrootTransform:
    """Record to sample and model output to robot units, for GR00T (see `transforms/base.py` for both).

    Attributes: `cameras`, `image_recipe`, `image_token` (the placeholder's id, to be the model's as well).
    Raises DataError where groups and normalisers do not belong together.
    """

    def __init__(
        self,
        config: GrootTransformConfig,
        tokenizer: Tokenizer,
        state: Sequence[Normalizer],
        action: Sequence[Normalizer],
    ):
        self.config, self.tokenizer = config, tokenizer
        self.cameras, self.image_recipe = config.cameras, config.pictures.recipe
        self.image_token = tokenizer.id("<|image_pad|>")
        self.state_normalizers, self.action_normalizers = tuple(state), tuple(action)
        for kind, groups, given in (
            ("state", config.state_groups, self.state_normalizers),
            ("action", config.action_groups, self.action_normalizers),
        ):
            sizes = [(group.name, len(group.columns)) for group in groups]
            found = [normalizer.size for normalizer in given]
            if found != [size for _, size in sizes]:
                raise DataError(f"groot {kind}: groups {sizes} with statistics of {found} dimensions")
            wrong = [n.feature for n in given if n.convention != "groot"]
            if wrong:
                raise DataError(f"groot {kind}: {wrong} must be normalised by the groot convention")
        for normalizer in self.state_normalizers:
            normalizer.statistics.require_space("absolute")
        for group, normalizer in zip(config.action_groups, self.action_normalizers, strict=True):
            normalizer.statistics.require_space("relative" if group.relative_to else "absolute")

    def prepare_image(self, image: np.ndarray) -> np.ndarray:
        """uint8 [h, w, 3] -> uint8 [H, W, 3]: the fixed operations, see `GrootPictures.prepare`."""
        return self.config.pictures.prepare(image)

    def __call__(self, record: Record) -> Sample:
        sample = self.observation(record)
        try:
            actions = self._normalised_actions(record["state"], record["actions"])
        except ValueError as error:
            raise DataError(f"{_where(record)}: {error}") from error
        size = actions.shape[1]
        counted = ~np.asarray(record["action_is_pad"], bool)
        sample["actions"] = np.zeros((self.config.horizon, self.config.action_dim), np.float32)
        sample["actions"][: self.config.chunk, :size] = np.where(counted[:, None], actions, np.float32(0))
        sample["action_mask"] = np.zeros(sample["actions"].shape, bool)
        sample["action_mask"][: self.config.chunk, :size] = counted[:, None]
        return sample

    def observation(self, record: Record) -> Sample:
        try:
            images = self._images(record["images"])
            tokens = self.prompt_tokens(record["task"], [image.shape[:2] for image in images])
            state = self._normalised_state(record["state"])
        except ValueError as error:
            raise DataError(f"{_where(record)}: {error}") from error
        row = np.full(self.config.prompt_length, self.tokenizer.pad_id, np.int32)
        row[len(row) - len(tokens) :] = tokens
        padded = np.zeros(self.config.state_dim, np.float32)
        padded[: len(state)] = state
        return {
            "images": images,
            "image_mask": np.ones(len(images), bool),
            "tokens": row,
            "token_mask": np.arange(len(row)) >= len(row) - len(tokens),
            "state": padded,
            "embodiment": np.int32(self.config.embodiment),
            "index": np.int32(record["index"]),
        }

    def actions(self, normalised: np.ndarray, state: np.ndarray) -> np.ndarray:
        """[..., t, A] float32 model output, [..., s] float32 state in robot units -> [..., chunk, a] in robot units.

        Values are clipped to [-1, 1] first, as upstream. Steps beyond the chunk are left out.
        """
        normalised, state = np.asarray(normalised), np.asarray(state)
        if normalised.shape[-1] != self.config.action_dim or normalised.shape[-2] < self.config.chunk:
            raise DataError(
                f"model output {normalised.shape}, expected at least {self.config.chunk} steps of "
                f"{self.config.action_dim} dimensions"
            )
        normalised, start = normalised[..., : self.config.chunk, :], 0
        size = sum(len(group.columns) for group in self.config.action_groups)
        out = np.empty((*normalised.shape[:-1], size), np.float32)
        for group, normalizer in zip(self.config.action_groups, self.action_normalizers, strict=True):
            stop = start + len(group.columns)
            values = normalizer.unnormalise(normalised[..., start:stop])
            if group.relative_to:
                reference = state[..., None, list(group.relative_to)]
                values = compose_pose(reference, values) if group.pose else values + reference
            out[..., list(group.columns)] = values
            start = stop
        if self.config.libero_gripper:
            out[..., -1] = -np.sign(2 * out[..., -1] - 1)
        return out

    def prompt_tokens(self, task: str | None, prepared: Sequence[Size]) -> list[int]:
        """The prompt's ids without padding; prepared: sizes of the pictures after `prepare_image`.

        Raises DataError naming the task, its token count and the limit when there are more than `prompt_length`.
        """
        text = formalise(task) if self.config.formalize_language else task or EMPTY_TASK
        ids = self.tokenizer.encode(prompt_text(text, [self._image_tokens(size) for size in prepared]), bos=False)
        if len(ids) > self.config.prompt_length:
            shown = text if len(text) <= 80 else f"{text[:77]}..."
            raise DataError(
                f"task {shown!r}: the prompt has {len(ids)} tokens with its pictures, the limit is "
                f"{self.config.prompt_length} (prompt_length); shorten the task in the dataset, or raise prompt_length"
            )
        return ids

    def required_prompt_length(
        self, tasks: Iterable[str], sources: Sequence[Size], episodes: Mapping[str, int] | None = None
    ) -> int:
        """A prompt length, a multiple of 8, that all these tasks fit in.

        sources: sizes of the cameras' recorded pictures, in the model's order. episodes: an episode of each task, to
        name in a refusal. Raises DataError when the longest prompt is over the configuration's `prompt_length`.
        """
        prepared = [self.config.pictures.prepared_size(size) for size in sources]
        longest = 0
        for task in tasks:
            try:
                longest = max(longest, len(self.prompt_tokens(task, prepared)))
            except DataError as error:
                raise DataError(f"episode {episodes[task]}: {error}" if episodes else str(error)) from None
        if not longest:
            raise DataError("no tasks: the dataset has no episode to take a prompt from")
        return min(-(-longest // _BUCKET) * _BUCKET, self.config.prompt_length)

    def _image_tokens(self, prepared: Size) -> int:
        height, width = self.config.pictures.plan(prepared).final
        return height * width // (_PATCHES_PER_TOKEN * self.config.patch**2)

    def _images(self, images: Mapping[str, np.ndarray]) -> tuple[np.ndarray, ...]:
        missing = [camera for camera in self.cameras if camera not in images]
        if missing:
            raise DataError(
                f"no picture of {missing}; the record has {sorted(images)}, the model reads {list(self.cameras)}: name "
                "the dataset's features in `cameras`"
            )
        for camera in self.cameras:
            check_picture(images[camera], camera)
            size = images[camera].shape[:2]
            if self.config.pictures.prepared_size(size) != size:
                raise DataError(
                    f"camera {camera}: {size} pixels, expected {self.config.pictures.prepared_size(size)}; pass the "
                    "picture through prepare_image first"
                )
        return tuple(images[camera] for camera in self.cameras)

    def _normalised_state(self, state: np.ndarray) -> np.ndarray:
        """float32 [s] in robot units -> the groups' values, normalised, one after the other."""
        state = np.asarray(state)
        last = max(column for group in self.config.state_groups for column in group.columns)
        if state.ndim != 1 or last >= len(state):
            raise DataError(f"state has shape {state.shape}, its groups read dimension {last}")
        parts = zip(self.config.state_groups, self.state_normalizers, strict=True)
        return np.concatenate([normalizer.normalise(state[list(group.columns)]) for group, normalizer in parts])

    def _normalised_actions(self, state: np.ndarray, actions: np.ndarray) -> np.ndarray:
        """float32 [chunk, a] in robot units -> the groups' values, relative where so configured, normalised."""
        state, actions = np.asarray(state), np.asarray(actions)
        size = sum(len(group.columns) for group in self.config.action_groups)
        if actions.shape != (self.config.chunk, size):
            raise DataError(f"actions have shape {actions.shape}, expected {(self.config.chunk, size)} (chunk, groups)")
        parts = []
        for group, normalizer in zip(self.config.action_groups, self.action_normalizers, strict=True):
            values = actions[:, list(group.columns)]
            if group.relative_to:
                reference = state[list(group.relative_to)]
                values = relative_pose(reference, values) if group.pose else values - reference
            parts.append(normalizer.normalise(values))
        return np.concatenate(parts, axis=-1)


def _where(record: Record) -> str:
    return f"episode {record.get('episode_index', '?')}, frame {record.get('frame_index', '?')}"
