"""MolmoAct2.

    python -m somaspeed_jax.main --config configs/molmoact2.py:demo
        Trains a small model of the real classes from nothing on the demo tabletop and plays it at the end.

    python -m somaspeed_jax.main --config configs/molmoact2.py \
        --config.weights.path=<MolmoAct2 directory or repo id> --config.data.path=<dataset> \
        --config.molmoact2.setup="single franka robotic arm in libero" \
        --config.molmoact2.control="delta end-effector pose"
        Fine-tunes the action expert under the frozen vision-language model with SomaSpeed's published settings: 24
        samples a device, 8 flow times, learning rate 5e-5 down to 1e-6, 10,000 steps.

Variants:
    (none)  SomaSpeed's recipe: action expert only.
    lora    LeRobot's LoRA of the vision-language model (rank 64) with the full action expert.
    full    Everything but the word embeddings.
    demo    The demo tabletop, minutes on a CPU.
"""

import ml_collections

from configs.base import change, get_base


def get_config(variant: str = "") -> ml_collections.ConfigDict:
    config = get_base(
        model=dict(name="molmoact2"),
        steps=10_000,
        batch=dict(per_device=24),
        flow=dict(times=8),
        optim=dict(
            schedule="molmoact2", lr=5e-5, floor=1e-6, warmup=200, decay_steps=10_000, weight_decay=0.0, eps=1e-6
        ),
    )
    if variant in ("lora", "full"):
        change(config, tune=dict(preset=variant))
    elif variant == "demo":
        change(
            config,
            model=dict(size="demo"),
            tune=dict(preset="full", trainable=(r".*",)),
            steps=1000,
            batch=dict(per_device=64),
            flow=dict(times=4),
            optim=dict(schedule="openpi", lr=2e-3, floor=2e-5, warmup=50, decay_steps=1000, weight_decay=1e-4),
            dtype=dict(compute="float32", frozen="float32"),
            data=dict(path="demo", tokenizer="demo", holdout=0.02),
            molmoact2=dict(setup="tabletop arm", control="absolute position"),
            evaluation=dict(closed_loop_starts=200),
            log=dict(every=20),
            checkpoint=dict(every=500),
        )
    elif variant:
        raise ValueError(f"unknown variant {variant!r} of configs/molmoact2.py; known: lora, full, demo")
    return config
