"""π0.5.

    python -m somaspeed_jax.main --config configs/pi05.py:demo
        Trains a small model of the real classes from nothing on the demo tabletop and plays it at the end.

    python -m somaspeed_jax.main --config configs/pi05.py \
        --config.weights.path=lerobot/pi05_base --config.data.path=<dataset> --config.data.tokenizer=<tokenizer>
        Fine-tunes the action expert under the frozen vision-language model with SomaSpeed's published settings:
        8 samples a device, learning rate 2.5e-5, weight decay 0.01, 30,000 steps.

Variants:
    (none)    SomaSpeed's recipe on LeRobot's weights: state in the prompt, action expert only.
    lerobot   LeRobot's preset: everything trains.
    libero    openpi's pi05_libero: no state in the prompt, horizon 10, everything trains, EMA 0.999, batch 256.
    lora      openpi's LoRA: rank 16 in the trunk, 32 in the expert.
    small     A small model from nothing on a real recording, on a CPU (docs: own data).
    demo      The demo tabletop, minutes on a CPU.
"""

import ml_collections

from configs.base import change, get_base


def get_config(variant: str = "") -> ml_collections.ConfigDict:
    config = get_base(model=dict(name="pi05"))
    if variant == "":
        pass
    elif variant == "lerobot":
        change(config, tune=dict(preset="full"))
    elif variant == "libero":
        change(
            config,
            model=dict(horizon=10),
            pi05=dict(state_in_prompt=False, recipe="openpi"),
            tune=dict(preset="full"),
            optim=dict(
                schedule="openpi", lr=5e-5, floor=5e-5, warmup=10_000, decay_steps=1_000_000, weight_decay=1e-10
            ),
            ema=dict(decay=0.999),
            batch=dict(global_batch=256),
        )
    elif variant == "lora":
        change(config, tune=dict(preset="lora"), pi05=dict(recipe="openpi"), optim=dict(weight_decay=1e-10))
    elif variant == "small":
        change(config, **_from_nothing("small"), steps=300, batch=dict(per_device=16))
        change(config, optim=dict(decay_steps=300))
        change(config, data=dict(holdout=0.25, cache="frames"), evaluation=dict(every=100), log=dict(every=20))
    elif variant == "demo":
        # The wrist camera moves with the tip, so where to go next is in the pictures: actions are relative to the
        # state and the prompt holds the task alone, which a small model reads sooner.
        change(config, **_from_nothing("demo"), steps=1800, batch=dict(per_device=64), flow=dict(times=4))
        change(config, pi05=dict(state_in_prompt=False))
        change(config, data=dict(path="demo", holdout=0.02, relative_actions=True, relative_exclude=(), cache="frames"))
        change(config, optim=dict(decay_steps=1800), evaluation=dict(closed_loop_starts=200))
        change(config, log=dict(every=20), checkpoint=dict(every=600))
    else:
        raise ValueError(f"unknown variant {variant!r} of configs/pi05.py; known: lerobot, libero, lora, small, demo")
    return config


def _from_nothing(size: str) -> dict:
    """A small model with random weights: everything trains, in float32, at a rate for new networks."""
    return dict(
        model=dict(name="pi05", size=size),
        tune=dict(preset="full"),
        data=dict(tokenizer="demo"),
        optim=dict(schedule="openpi", lr=2e-3, floor=2e-5, warmup=50, decay_steps=1000, weight_decay=1e-4),
        dtype=dict(compute="float32", frozen="float32"),
    )
