"""GR00T N1.7.

    python -m somaspeed_jax.main --config configs/groot.py:demo
        Trains a small model of the real classes from nothing on the demo tabletop and plays it at the end.

    python -m somaspeed_jax.main --config configs/groot.py \
        --config.weights.path=nvidia/GR00T-N1.7-3B --config.data.tokenizer=nvidia/Cosmos-Reason2-2B \
        --config.data.path=<dataset> --config.model.horizon=16
        Fine-tunes the action head under the frozen backbone with SomaSpeed's published settings: 80 samples a device,
        learning rate 1e-4, 20,000 steps, warm-up 1,000, colour jitter, state dropout 0.2. `model.horizon` is the chunk
        of this robot, up to the model's 40.

Variants:
    (none)  SomaSpeed's recipe: action head, its norm and self-attention over the features.
    lora    The same with adapters on the text layers (ours: upstream has none).
    full    Everything.
    demo    The demo tabletop, minutes on a CPU.
"""

import ml_collections

from configs.base import change, get_base


def get_config(variant: str = "") -> ml_collections.ConfigDict:
    config = get_base(
        model=dict(name="groot"),
        steps=20_000,
        batch=dict(per_device=80),
        optim=dict(
            schedule="groot", lr=1e-4, floor=0.0, warmup=1000, decay_steps=20_000, weight_decay=1e-5, betas=(0.9, 0.999)
        ),
    )
    if variant in ("lora", "full"):
        change(config, tune=dict(preset=variant))
    elif variant == "demo":
        change(
            config,
            model=dict(size="demo", horizon=8),
            tune=dict(preset="full"),
            groot=dict(
                embodiment="simpler_env_widowx", dropout=False, state_dropout=0.0, crop_fraction=1.0, colour_jitter=()
            ),  # row 1 of the small model's four
            steps=1000,
            batch=dict(per_device=64),
            flow=dict(times=4),
            optim=dict(schedule="openpi", lr=2e-3, floor=2e-5, warmup=50, decay_steps=1000, weight_decay=1e-4),
            dtype=dict(compute="float32", frozen="float32"),
            data=dict(
                path="demo", tokenizer="demo", holdout=0.02, tail="repeat", relative_actions=True, relative_exclude=()
            ),
            evaluation=dict(closed_loop_starts=200),
            log=dict(every=20),
            checkpoint=dict(every=500),
        )
    elif variant:
        raise ValueError(f"unknown variant {variant!r} of configs/groot.py; known: lora, full, demo")
    return config
