"""Random weights in the full layout of a table, for tests that need a file."""

from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np

from somaspeed_jax.models.weights.safetensors_file import TensorToWrite, write_sharded
from somaspeed_jax.models.weights.table import Table, shapes

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
Tensors = dict[str, np.ndarray]


def random_tensors(table: Table, seed: int = 0, dtype_of: Callable[[str], np.dtype] | None = None) -> Tensors:
    """Every tensor of the table, each from its own numbers; aliases hold the bytes that they must."""
    rng = np.random.default_rng(seed)
    tensors = {
        name: rng.standard_normal(shape, np.float32).astype(np.float32 if dtype_of is None else dtype_of(name))
        for name, shape in shapes(table).items()
    }
    for row in table:
        if row.alias_of is not None:
            tensors[row.name] = tensors[row.alias_of]
    return tensors


def write_tensors(directory: Path, tensors: Tensors, shard_bytes: int | None = None) -> list[str]:
    directory.mkdir(parents=True, exist_ok=True)
    listed = [TensorToWrite(name, array.dtype, array.shape, lambda a=array: a) for name, array in tensors.items()]
    return write_sharded(directory, listed, {"format": "pt"}, shard_bytes)
