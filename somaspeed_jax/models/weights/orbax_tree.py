"""Trees of arrays that orbax wrote, read one array at a time."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from somaspeed_jax.models.weights.safetensors_file import WeightsError

Keys = tuple[str, ...]
Form = tuple[tuple[int, ...], np.dtype]  # shape, type


def list_arrays(directory: Path) -> dict[Keys, Form]:
    """Keys from the root to each array -> shape and type. Raises WeightsError where orbax cannot read the directory."""
    try:
        with ocp.PyTreeCheckpointer() as checkpointer:
            metadata: Any = checkpointer.metadata(directory.absolute())
        tree = metadata.item_metadata.tree
    except Exception as error:  # orbax and tensorstore raise many unrelated types
        raise WeightsError(f"{directory}: orbax cannot read it: {error}") from error
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda leaf: hasattr(leaf, "shape"))
    return {
        tuple(str(getattr(key, "key", key)) for key in path): (tuple(leaf.shape), np.dtype(leaf.dtype))
        for path, leaf in leaves
        if hasattr(leaf, "shape")
    }


def read_array(directory: Path, keys: Keys) -> np.ndarray:
    """One array of the tree, on the host."""
    item: Any = 0
    for key in reversed(keys):
        item = {key: item}
    restore = ocp.args.PyTreeRestore(
        item=item,
        restore_args=jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item),
        partial_restore=True,
    )
    with ocp.PyTreeCheckpointer() as checkpointer:
        return np.asarray(jax.tree.leaves(checkpointer.restore(directory.absolute(), args=restore))[0])
