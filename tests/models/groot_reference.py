"""The recorded run of LeRobot's GR00T N1.7 at a tiny size: one batch, its weights, activations and gradients.

Two samples, of embodiments 1 and 3 in one batch, the second padded on the left by three tokens; two cameras of unequal
size; dropouts off. The two frames of each recorded patch differ.
"""

from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from somaspeed_jax.models import groot
from somaspeed_jax.models.base import Observation
from somaspeed_jax.models.layers.param import Runtime, param_specs
from somaspeed_jax.models.weights.groot import table
from somaspeed_jax.models.weights.load import load_params

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
REFERENCE = load_file(FIXTURES / "groot_tiny.safetensors")
CONFIG = groot.SIZES["tiny"]
GRIDS = ((4, 6), (4, 4))
BATCH = 2


def _patches() -> list[jax.Array]:
    """[b, patches, 96] per camera; the recording has them below one another, by sample, then camera."""
    sizes = [rows * columns for rows, columns in GRIDS]
    pieces = np.split(REFERENCE["in/pixel_values"], np.cumsum(sizes * BATCH)[:-1])
    return [jnp.stack([jnp.asarray(pieces[b * len(sizes) + c]) for b in range(BATCH)]) for c in range(len(sizes))]


PATCHES = _patches()


def observation(**changes) -> Observation:
    """The recorded batch. Pictures are blank: only their sizes are read when the patches are given."""
    side = CONFIG.vision.patch
    return Observation(
        images=tuple(jnp.zeros((BATCH, rows * side, columns * side, 3)) for rows, columns in GRIDS),
        image_mask=jnp.ones((BATCH, len(GRIDS)), bool),
        tokens=jnp.asarray(REFERENCE["in/input_ids"], jnp.int32),
        token_mask=jnp.asarray(REFERENCE["in/attention_mask"] > 0),
        state=jnp.asarray(REFERENCE["in/state"][:, 0]),
        embodiment=jnp.asarray(REFERENCE["in/embodiment_id"], jnp.int32),
    )._replace(**changes)


class Recorded:
    """The recorded weights as a source of weights, with or without changes to some of them."""

    def __init__(self, tensors: Mapping[str, np.ndarray]):
        self._tensors = dict(tensors)

    def names(self):
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def dtype(self, name: str) -> np.dtype:
        return self._tensors[name].dtype

    def tensor(self, name: str) -> np.ndarray:
        return self._tensors[name]

    def where(self, name: str) -> str:
        return "groot_tiny.safetensors"


SOURCE = Recorded({key[2:]: value for key, value in REFERENCE.items() if key.startswith("w/")})


def reference_params(config: groot.GrootConfig) -> dict[str, jax.Array]:
    return load_params(SOURCE, table(config), param_specs(groot.build(config, Runtime())))


def relative_error(ours, reference) -> float:
    """Largest difference over the largest magnitude of the reference."""
    ours, reference = np.asarray(ours, np.float64), np.asarray(reference, np.float64)
    assert ours.shape == reference.shape, (ours.shape, reference.shape)
    return float(np.max(np.abs(ours - reference)) / np.max(np.abs(reference)))
