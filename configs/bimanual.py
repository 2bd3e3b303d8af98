"""Two arms with a camera on each wrist and one above: ALOHA, or a pair of SO-101.

    python -m somaspeed_jax.main --config configs/bimanual.py \
        --config.weights.path=lerobot/pi05_base --config.data.tokenizer=google/paligemma-3b-pt-224 \
        --config.data.path=<dataset>
        configs/pi05.py, its variants included (configs/bimanual.py:lora), with what is said of the robot below.

State and action hold the left arm's joints and gripper, then the right arm's (14 numbers for ALOHA): the dataset says
how many and what they are called.
"""

import ml_collections

from configs import pi05
from configs.base import change

# In the order in which π0.5 was pretrained: the overview, the left wrist, the right wrist.
CAMERAS = (
    "observation.images.cam_high",
    "observation.images.cam_left_wrist",
    "observation.images.cam_right_wrist",
)


def get_config(variant: str = "") -> ml_collections.ConfigDict:
    config = pi05.get_config(variant)
    change(
        config,
        data=dict(
            cameras=CAMERAS,
            # "gripper" is a part of both grippers' names (left_gripper, right_gripper): one word excludes the two.
            relative_actions=True,
            relative_exclude=("gripper",),
            holdout=0.1,
        ),
    )
    return config
