"""One door to the weights of any model."""

from pathlib import Path
from typing import Any

from somaspeed_jax.models.pi05 import Pi05Config
from somaspeed_jax.models.weights.openpi import open_pi05
from somaspeed_jax.models.weights.source import Source, open_source


def open_weights(path_or_repository: str | Path, model_config: Any) -> Source:
    """The weights of a directory, a file or a Hugging Face repository; for π0.5 also openpi's JAX checkpoints.

    Raises WeightsError where there are none, or none that are sound.
    """
    if isinstance(model_config, Pi05Config):
        return open_pi05(path_or_repository, model_config)
    return open_source(path_or_repository)
