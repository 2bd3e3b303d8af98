"""What a checkpoint remembers of the weights that it does not hold: enough to refuse others in their place."""

import hashlib
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from somaspeed_jax.models.weights.load import stored_names
from somaspeed_jax.models.weights.safetensors_file import CODES, WeightsError
from somaspeed_jax.models.weights.source import Source
from somaspeed_jax.models.weights.table import Table, prefixed

PAGE = 4096  # bytes
PAGES = 16  # a tensor of up to 64 KiB is digested whole
Fingerprint = dict[str, dict[str, Any]]  # bare upstream name -> dtype, shape, digest


def fingerprint(source: Source, table: Table, trained: Collection[str], *, prefix: str = "") -> Fingerprint:
    """Name, type, shape and sampled digest of every upstream tensor that training left alone.

    trained: our paths that were trained. Tensors that the port does not read are included: an export copies them.
    A tied tensor has one entry, under its first name. prefix: what the source's names begin with.
    """
    names = stored_names(source, prefixed(table, prefix))
    frozen: dict[str, str] = {}
    for row in table:
        if row.path in trained or (row.alias_of is not None and not row.untied):
            continue
        for name, _ in row.names():
            held = names.get(prefix + name)
            if held is not None:
                frozen[name] = held
    return {
        name: {
            "dtype": CODES[np.dtype(source.dtype(held))],
            "shape": list(source.shape(held)),
            "digest": sampled_digest(source.tensor(held)),
        }
        for name, held in frozen.items()
    }


def sampled_digest(tensor: np.ndarray) -> str:
    """BLAKE2b of up to `PAGES` pages of a tensor's bytes, evenly spaced, the first and the last among them."""
    digest = hashlib.blake2b(digest_size=16)
    data = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)  # no copy of a view of a file
    if data.size <= PAGE * PAGES:
        digest.update(data.data)
    else:
        for start in np.linspace(0, data.size - PAGE, PAGES).astype(np.int64):
            digest.update(data[start : start + PAGE].data)
    return digest.hexdigest()


def compare(expected: Fingerprint, found: Fingerprint, where: str) -> None:
    """Raises WeightsError that lists every tensor of `where` that is not what the checkpoint was trained on."""
    faults = [f"missing: {name} {entry['dtype']} {entry['shape']}" for name, entry in expected.items()
              if name not in found]  # fmt: skip
    faults += [f"not in the checkpoint's list: {name}" for name in found if name not in expected]
    for name in expected.keys() & found.keys():
        changed = [key for key in ("dtype", "shape", "digest") if expected[name].get(key) != found[name][key]]
        faults += [f"{name}: {key} is {found[name][key]}, was {expected[name].get(key)}" for key in changed]
    if faults:
        raise WeightsError(
            f"{where}: not the weights that the checkpoint was trained on ({len(faults)} differences);"
            " point weights.path at those:\n  " + "\n  ".join(sorted(faults))
        )


def read_fingerprint(value: Mapping[str, Any], where: str) -> Fingerprint:
    """Checks a fingerprint that was read from JSON. Raises WeightsError that begins with `where`."""
    for name, entry in value.items():
        if not isinstance(entry, dict) or not entry.keys() >= {"dtype", "shape", "digest"}:
            raise WeightsError(f"{where}: tensor {name!r} must have dtype, shape and digest, found {entry!r}")
    return dict(value)
