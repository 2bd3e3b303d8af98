"""An SO-101 arm (or SO-100): six joints, a picture of the table and one from the wrist, recorded with LeRobot.

    python -m somaspeed_jax.main --config configs/so101.py \
        --config.weights.path=lerobot/pi05_base --config.data.tokenizer=google/paligemma-3b-pt-224 \
        --config.data.path=<dataset>
        configs/pi05.py, its variants included (configs/so101.py:lora), with what is said of the robot below.

A robot is a few fields: which cameras in which order, what actions are relative to, what stays absolute. Names and
sizes of state and action come from the dataset, which is refused where they do not match. docs/robots.md explains.
"""

import ml_collections

from configs import pi05
from configs.base import change

# The dataset's names: see `python tools/inspect_dataset.py <dataset>`. The table first, the wrist after it.
CAMERAS = ("observation.images.front", "observation.images.wrist")


def get_config(variant: str = "") -> ml_collections.ConfigDict:
    config = pi05.get_config(variant)
    change(
        config,
        data=dict(
            cameras=CAMERAS,
            # Joints as steps away from where the arm is when the chunk starts; "gripper.pos" as it was recorded.
            relative_actions=True,
            relative_exclude=("gripper",),
            holdout=0.1,
        ),
    )
    return config
