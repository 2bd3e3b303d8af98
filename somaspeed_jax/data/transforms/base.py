"""What a model's transform is: numpy in, numpy out, fixed shapes. Nothing here imports jax."""

from typing import Any, Protocol

import numpy as np

Record = dict[str, Any]
Sample = dict[str, Any]


class Transform(Protocol):
    """From a record of a dataset to a sample of a model, and from a model's actions back to the robot.

    A record holds `index`, `episode_index`, `frame_index` (int), `task` (str), `images` ({camera: uint8 [h, w, 3]},
    already passed through `prepare_image`), `state` float32 [s], `actions` float32 [t, a] and `action_is_pad` bool [t].

    A sample holds `images` (tuple of uint8 [H, W, 3] in the model's camera order), `image_mask` bool [c], `tokens`
    int32 [p], `token_mask` bool [p], `state` float32 [S], `actions` float32 [t, A] (normalised, padded),
    `action_mask` bool [t, A], `embodiment` int32 and `index` int32. Shapes never change within a run.
    """

    cameras: tuple[str, ...]  # dataset features read, in the model's camera order
    image_recipe: str  # names the fixed image operations and their parameters, for the frame cache's key

    def prepare_image(self, image: np.ndarray) -> np.ndarray:
        """uint8 [h, w, 3] of any size -> uint8 [H, W, 3]: the recipe's fixed operations."""
        ...

    def __call__(self, record: Record) -> Sample: ...

    def observation(self, record: Record) -> Sample:
        """The sample without `actions` and `action_mask`; the record needs no actions."""
        ...

    def actions(self, normalised: np.ndarray, state: np.ndarray) -> np.ndarray:
        """[..., t, A] float32 model output -> [..., t, a] in robot units; `state` [..., s] in robot units."""
        ...
