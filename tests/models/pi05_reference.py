"""The recorded run of LeRobot's π0.5 at a tiny size (tools/make_reference_pi05.py), and our policy of that size."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from parity import Recorded

from somaspeed_jax.flow import flow_loss, loss_value
from somaspeed_jax.models import pi05
from somaspeed_jax.models.base import Observation
from somaspeed_jax.models.language.gemma import GemmaConfig
from somaspeed_jax.models.layers.param import bind, param_specs
from somaspeed_jax.models.vision.siglip import SiglipConfig
from somaspeed_jax.models.weights.load import load_params
from somaspeed_jax.models.weights.pi05 import EXPORT_PREFIX, table
from somaspeed_jax.models.weights.table import prefixed

CONFIG = pi05.Pi05Config(
    vision=SiglipConfig(width=48, depth=2, mlp=96, heads=4, patch=14, image=(28, 28)),
    trunk=GemmaConfig(width=64, depth=3, mlp=128, head_width=16),
    expert=GemmaConfig(width=32, depth=3, mlp=64, head_width=16),
    vocabulary=160,
    action_dim=8,
    horizon=6,
    flow=dataclasses.replace(pi05.FLOW, steps=5),
)
POLICY = pi05.build(CONFIG)
SPECS = param_specs(POLICY)
TABLE = prefixed(table(CONFIG), EXPORT_PREFIX)

with np.load(Path(__file__).resolve().parents[1] / "fixtures" / "pi05_tiny.npz") as _file:
    REFERENCE = {name: _file[name] for name in _file.files}
META = json.loads(str(REFERENCE.pop("meta")))

BATCH, CAMERAS, PATCHES, PROMPT, REAL = 2, 2, 4, 9, 7
# LeRobot's prefix has the absent camera's tokens between the pictures and the prompt; ours does not have them at all.
PRESENT = np.r_[: CAMERAS * PATCHES, (CAMERAS + 1) * PATCHES : (CAMERAS + 1) * PATCHES + PROMPT]
VALID = REFERENCE["in/prefix_mask"][:, PRESENT]  # [b, p]

NOISE = jnp.asarray(REFERENCE["in/noise"])[:, None]  # [b, K, t, a] with K = 1
TIME = jnp.asarray(REFERENCE["in/time"])[:, None]
ACTIONS = jnp.pad(jnp.asarray(REFERENCE["in/action"]), [(0, 0), (0, 0), (0, CONFIG.action_dim - REAL)])
ACTION_MASK = jnp.broadcast_to(jnp.arange(CONFIG.action_dim) < REAL, ACTIONS.shape)


def group(name: str) -> dict[str, np.ndarray]:
    """The recorded tensors of a group by upstream name, float32."""
    found = {key.removeprefix(f"{name}/"): value for key, value in REFERENCE.items() if key.startswith(f"{name}/")}
    scales = META["scale"]
    return {
        key: value * np.float32(scales[f"{name}/{key}"] / 32767) if value.dtype == np.int16 else value
        for key, value in found.items()
    }


def reference_params() -> dict[str, jax.Array]:
    return load_params(Recorded(group("w"), TABLE), TABLE, SPECS)


def observation(**changes) -> Observation:
    """The recorded batch, without the absent camera."""
    return Observation(
        images=tuple(jnp.asarray(REFERENCE[f"in/image_{i}"]).transpose(0, 2, 3, 1) for i in range(CAMERAS)),
        image_mask=jnp.ones((BATCH, CAMERAS), bool),
        tokens=jnp.asarray(REFERENCE["in/tokens"]),
        token_mask=jnp.asarray(REFERENCE["in/token_mask"]),
        state=jnp.zeros((BATCH, CONFIG.action_dim)),
        embodiment=jnp.zeros(BATCH, jnp.int32),
    )._replace(**changes)


def loss_of(params: dict[str, jax.Array], noise: jax.Array = NOISE, time: jax.Array = TIME) -> jax.Array:
    """The training loss of the recorded batch; noise [b, K, t, a], time [b, K]."""
    policy = bind(POLICY, params)
    terms = flow_loss(policy, observation(), ACTIONS, ACTION_MASK, jnp.ones(BATCH), noise, time, None)
    return loss_value(policy.flow, terms)
