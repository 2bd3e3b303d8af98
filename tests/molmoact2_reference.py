"""The recorded reference of MolmoAct2, and our policy with the same weights and inputs."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import safe_open

from somaspeed_jax.models.base import Observation
from somaspeed_jax.models.layers.param import param_specs
from somaspeed_jax.models.molmoact2 import SIZES, build
from somaspeed_jax.models.weights.molmoact2 import table
from somaspeed_jax.models.weights.table import place

FIXTURES = Path(__file__).parent / "fixtures"
CONFIG = dataclasses.replace(SIZES["tiny"], batch_positions=True)  # the reference's batch has two prompt lengths


def read(name):
    """Tensors and metadata of a fixture."""
    with safe_open(FIXTURES / name, "np") as f:
        return {key: f.get_tensor(key) for key in f.keys()}, json.loads(f.metadata()["json"])  # noqa: SIM118


def from_upstream(tensors, config=CONFIG, missing=None):
    """Upstream tensors by name -> our parameters. A tensor that is not there fills with `missing`, if given."""
    specs = param_specs(build(config))
    params = {}
    for path, pieces in place(table(config), specs).items():
        params[path] = np.zeros(specs[path].shape, np.float32)
        for piece in pieces:
            if missing is None or piece.name in tensors:
                params[path][piece.box] = piece.section(tensors[piece.name])
            else:
                params[path][piece.box] = missing
    return {path: jnp.asarray(value) for path, value in params.items()}


def pictures(patches, cameras):
    """Upstream's patches [b * c, s, patch * patch * 3] -> c arrays [b, h, w, 3]."""
    side, patch = round(patches.shape[1] ** 0.5), round((patches.shape[2] / 3) ** 0.5)
    images = patches.reshape(-1, side, side, patch, patch, 3).transpose(0, 1, 3, 2, 4, 5)
    images = images.reshape(-1, cameras, side * patch, side * patch, 3)
    return tuple(jnp.asarray(images[:, i]) for i in range(cameras))


def observation(inputs, prefix="in/", cameras=2, image_mask=None):
    tokens = jnp.asarray(inputs[f"{prefix}input_ids"])
    b = tokens.shape[0]
    return Observation(
        images=pictures(inputs[f"{prefix}pixel_values"], cameras),
        image_mask=jnp.ones((b, cameras), bool) if image_mask is None else jnp.asarray(image_mask),
        tokens=tokens,
        token_mask=jnp.asarray(inputs[f"{prefix}attention_mask"]).astype(bool),
        state=jnp.zeros((b, 1), jnp.float32),
        embodiment=jnp.zeros((b,), jnp.int32),
    )


def layer(stacked, index):
    """One layer of a stack."""
    graph, state = nnx.split(stacked)
    take = lambda v: v.replace(v.get_value()[index])  # noqa: E731
    return nnx.merge(graph, jax.tree.map(take, state, is_leaf=lambda x: isinstance(x, nnx.Variable)))


def error(found, expected):
    """Largest difference as a share of the largest expected magnitude."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert found.shape == expected.shape, (found.shape, expected.shape)
    return np.abs(found - expected).max() / np.abs(expected).max()
