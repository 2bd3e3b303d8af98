"""MolmoAct2's wire format: task clean-up, state tokens, the prompt around them, and what a picture looks like in it.

The strings are read by a pretrained model, so every blank counts. Reference: LeRobot 0.6.1,
policies/molmoact2/processor_molmoact2.py and its molmoact2_hf_model/processing_molmoact2.py.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

IMAGE = "<|image|>"

_DELIMITERS = "\"'`\u201c\u201d\u2018\u2019[](){}"
_CLOSERS = "\"'\u201d\u2019)]}"
_PUNCTUATION = ".,!?;:,\u2026"
_PREFIXES = (
    re.compile(r"(?:task|instruction|language[_ ]instruction|goal)\s*[:\-]\s*", re.IGNORECASE),
    re.compile(r"(?:the|your)\s+task\s+is\s+to\s+", re.IGNORECASE),
)


def clean_task(text: str) -> str:
    """A task as the model saw tasks in training: one line, lower case, no wrapping, sentences joined by "; ".

    Blanks collapse; surrounding quotes and brackets, openings such as "Task:" or "The task is to", and trailing
    punctuation are taken off until nothing changes. A full stop inside a number splits too ("1.5" becomes "1; 5").
    """
    text = " ".join(text.split())
    before = None
    while text and text != before:
        before = text
        text = text.strip().strip(_DELIMITERS).strip()
        for prefix in _PREFIXES:
            opening = prefix.match(text)
            text = text[opening.end() :].strip() if opening else text.strip()
        for characters in (_PUNCTUATION, _CLOSERS, _PUNCTUATION):
            text = text.rstrip(characters).rstrip()
    sentences = [part.strip() for part in re.split(r"[.!?]+", text) if part.strip()]
    return ("; ".join(sentences) if len(sentences) > 1 else text).lower()


def state_bins(state: np.ndarray, count: int) -> np.ndarray:
    """Normalised state [s] float32 -> token number [s] in 0 … count-1: clipped to [-1, 1], rounded half to even.

    NaN counts as 0 and an infinity as the end it points to.
    """
    state = np.nan_to_num(np.asarray(state, np.float32), nan=0.0, posinf=1.0, neginf=-1.0).clip(-1.0, 1.0)
    return np.rint((state + np.float32(1)) / np.float32(2) * np.float32(count - 1)).astype(np.int64)


def state_text(state: np.ndarray, count: int) -> str:
    """Normalised state [s] as state tokens, wrapped."""
    return "<state_start>" + "".join(f"<state_{k}>" for k in state_bins(state, count)) + "<state_end>"


def _wrapped(text: str, kind: str, enabled: bool) -> str:
    start, end = f"<{kind}_start>", f"<{kind}_end>"
    if not text or not enabled or (text.startswith(start) and text.endswith(end)):
        return text
    return f"{start}{text}{end}"


@dataclasses.dataclass(frozen=True)
class PromptFormat:
    """What a run says to the model beside task and state.

    setup: the robot in words, for example "single franka robotic arm in libero".
    control: what an action is in words, for example "delta end-effector pose".
    wrap_setup, wrap_control: put the text between its own start and end token, as the checkpoint was trained.
    clean_language: pass tasks through `clean_task`.
    state_tokens: number of state tokens in the vocabulary.
    """

    setup: str = ""
    control: str = ""
    wrap_setup: bool = True
    wrap_control: bool = True
    clean_language: bool = True
    state_tokens: int = 256

    def text(self, task: str, state: np.ndarray, pictures: int) -> str:
        """The prompt for one sample: `task` as recorded, `state` [s] normalised, `pictures` placeholders in front."""
        if self.clean_language:
            task = clean_task(task)
        setup = _wrapped(self.setup, "setup", self.wrap_setup)
        control = _wrapped(self.control, "control", self.wrap_control)
        if pictures == 1:
            images = IMAGE
        else:
            images = "".join(f"Image {i + 1}{IMAGE}" for i in range(pictures))
        return (
            f"{images}<|im_start|>user\nThe task is to {task}. The setup is {setup}."
            f" The current state of the robot is {state_text(state, self.state_tokens)}."
            f" The expected control mode is {control}."
            " Given these, what action should the robot take to complete the task?<|im_end|>\n"
            "<|im_start|>assistant\n<action_output>"
        )


@dataclasses.dataclass(frozen=True)
class ImageLayout:
    """Geometry of one picture: `size` (height, width) pixels, square patches, pooling windows of `pool` x `pool`
    patches (the last row and column of windows may be partial), `column_token` after each row of windows."""

    size: tuple[int, int] = (378, 378)
    patch: int = 14
    pool: int = 2
    column_token: bool = False

    def __post_init__(self):
        if any(side % self.patch for side in self.size):
            raise ValueError(f"image size {self.size} is not a multiple of the patch size {self.patch}")

    @property
    def windows(self) -> tuple[int, int]:
        """Rows and columns of pooled vectors."""
        height, width = (-(-side // (self.patch * self.pool)) for side in self.size)
        return height, width

    @property
    def tokens(self) -> int:
        """Prompt tokens of one picture, start and end included."""
        rows, columns = self.windows
        return rows * (columns + self.column_token) + 2

    @property
    def text(self) -> str:
        """What the placeholder of a picture stands for in the prompt."""
        rows, columns = self.windows
        row = "<im_patch>" * columns + ("<im_col>" if self.column_token else "")
        return "<im_start>" + row * rows + "<im_end>"


def image_layout(config: Mapping[str, Any]) -> ImageLayout:
    """The geometry that a checkpoint's processor_config.json states.

    Raises ValueError naming the field for what this port does not do (tiling a picture, pixel statistics other than
    0.5, an interpolation other than bilinear).
    """
    image = {"crop_mode": "overlap-and-resize-c2", **(config.get("image_processor") or {})}  # upstream's own default
    for field, wanted in (
        ("crop_mode", "resize"),
        ("resample", 2),
        ("image_mean", [0.5] * 3),
        ("image_std", [0.5] * 3),
    ):
        found = image.get(field, wanted)
        if found != wanted:
            raise ValueError(f"processor_config.json: image_processor.{field} is {found!r}; supported: {wanted!r}")
    size, pool = image.get("size", {"height": 378, "width": 378}), image.get("pooling_size", [2, 2])
    if pool[0] != pool[1]:
        raise ValueError(f"processor_config.json: image_processor.pooling_size is {pool}; supported: square windows")
    column = config.get("use_single_crop_col_tokens")
    if column is None:
        column = config.get("image_use_col_tokens", True)
    return ImageLayout((size["height"], size["width"]), image.get("patch_size", 14), pool[0], bool(column))


def token_budget(layout: ImageLayout, pictures: int, state_size: int) -> int:
    """Longest prompt that upstream accepts in continuous mode, in tokens: the pooled vectors of each picture (196 at
    378 x 378), 80 for the fixed text, 32 for the task, one a state dimension, 32 to spare, rounded up to 64."""
    return -(-(pictures * (layout.tokens - 2) + 80 + 32 + state_size + 32) // 64) * 64
