"""Arrays of a checkpoint that stay on disk until they are asked for."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from somaspeed_jax.models.weights.orbax_tree import Form, list_arrays, read_array


class SavedArray:
    """An array of a checkpoint: shape and type at once, values when numpy asks for them."""

    def __init__(self, directory: Path, keys: tuple[str, ...], form: Form):
        self._directory, self._keys = directory, keys
        self.shape, self.dtype = form

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return read_array(self._directory, self._keys).astype(dtype or self.dtype, copy=False)


class SavedArrays(Mapping[str, SavedArray]):
    """One group of a checkpoint's state ("trainable", "ema", "frozen") by parameter path. Empty where it has none.

    directory: `<workdir>/checkpoints/<step>/state`. Raises WeightsError where it cannot be read.
    """

    def __init__(self, directory: Path, group: str):
        self._arrays = {
            keys[1]: SavedArray(directory, keys, form)
            for keys, form in list_arrays(directory).items()
            if keys[0] == group
        }

    def __getitem__(self, path: str) -> SavedArray:
        return self._arrays[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)
