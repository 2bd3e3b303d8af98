"""The device mesh (replica, fsdp) and where everything lives on it.

A parameter is split over `fsdp` on its largest divisible axis, never on the layer axis; small ones are replicated. The
batch is split over both axes. Layers are made whole one at a time, inside the scanned body, by `gather`: left to the
partitioner, XLA would invent tensor-parallel products instead.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from somaspeed_jax.models.layers.param import ParamSpec, Runtime
from somaspeed_jax.models.layers.stack import GATHERED

BATCH = ("replica", "fsdp")
SMALL = 2**14  # elements below which splitting a parameter costs more than it saves


def make_mesh(replica: int, fsdp: int, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of replica x fsdp devices; 0 means "what is left" (fsdp before replica).

    Raises ValueError when the devices do not divide.
    """
    devices = jax.devices() if devices is None else list(devices)
    count = len(devices)
    if replica == 0 and fsdp == 0:
        replica, fsdp = 1, count
    elif replica == 0:
        replica = count // fsdp
    elif fsdp == 0:
        fsdp = count // replica
    if replica * fsdp != count:
        raise ValueError(
            f"mesh.replica x mesh.fsdp is {replica} x {fsdp} = {replica * fsdp}, but {count} devices are to be used; "
            "set mesh.devices, or choose factors whose product is the number of devices"
        )
    return Mesh(np.asarray(devices).reshape(replica, fsdp), BATCH, axis_types=(AxisType.Auto, AxisType.Auto))


def split_axis(shape: tuple[int, ...], fsdp: int) -> int | None:
    """The axis of one layer's parameter that is split: the largest divisible one; None replicates."""
    if fsdp == 1 or np.prod(shape, dtype=np.int64) < SMALL:
        return None
    divisible = [axis for axis, size in enumerate(shape) if size % fsdp == 0]
    return max(divisible, key=lambda axis: shape[axis], default=None)


def _spec(shape: tuple[int, ...], fsdp: int, stacked: bool) -> P:
    axis = split_axis(shape[1:] if stacked else shape, fsdp)
    if axis is None:
        return P()
    return P(*([None] * (axis + stacked)), "fsdp")


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _gather(w, compute, whole, split, reduce_dtype):
    """One weight in the compute type on every device; its gradient summed and scattered to the shards."""
    return jax.lax.with_sharding_constraint(w.astype(compute), whole)


def _gather_forward(w, compute, whole, split, reduce_dtype):
    return _gather(w, compute, whole, split, reduce_dtype), None


def _gather_backward(compute, whole, split, reduce_dtype, _, gradient):
    # Upcast before the constraint: the sum over devices happens there.
    gradient = jax.lax.with_sharding_constraint(gradient.astype(reduce_dtype), split)
    return (gradient.astype(jnp.float32),)


_gather.defvjp(_gather_forward, _gather_backward)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where parameters, batch and activations live on a mesh.

    frozen: `replicate` keeps frozen parameters whole on each device; `shard` splits them like trainable ones and
      gathers them layer by layer.
    """

    mesh: Mesh
    frozen: str = "replicate"
    compute: Any = jnp.float32
    reduce_dtype: Any = jnp.float32

    @property
    def fsdp(self) -> int:
        return self.mesh.shape["fsdp"]

    def param(self, spec: ParamSpec, trainable: bool) -> NamedSharding:
        """Where a parameter is stored."""
        if not trainable and self.frozen == "replicate":
            return NamedSharding(self.mesh, P())
        return NamedSharding(self.mesh, _spec(spec.shape, self.fsdp, spec.stacked))

    def params(self, specs: Mapping[str, ParamSpec], trainable: bool) -> dict[str, NamedSharding]:
        return {path: self.param(spec, trainable) for path, spec in specs.items()}

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, P())

    def batch(self, accumulated: bool = False) -> NamedSharding:
        """Rows of a batch; with accumulation axis 0 counts microbatches."""
        return NamedSharding(self.mesh, P(None, BATCH) if accumulated else P(BATCH))

    def pin(self, x: jax.Array) -> jax.Array:
        """Keeps an activation split over its leading axis."""
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, P(BATCH)))

    def runtime(self, remat_context: str = "none", remat_expert: str = "none") -> Runtime:
        """What a model on this layout needs to know. One device has nothing to gather and nothing to keep split."""
        if self.mesh.size == 1:
            return Runtime(self.compute, remat_context=remat_context, remat_expert=remat_expert)
        return Runtime(self.compute, self.gather, self.pin, remat_context, remat_expert)

    def gather(self, variable: nnx.Variable) -> jax.Array:
        """One (unstacked) parameter made whole: matrices in the compute type, others as stored."""
        w = variable.get_value()
        kind = variable.get_metadata()["kind"]
        if kind == "table":
            return w
        compute = self.compute if kind == "matrix" else w.dtype
        axis = split_axis(w.shape, self.fsdp)
        if axis is None:
            return w.astype(compute)
        split = NamedSharding(self.mesh, P(*([None] * axis), "fsdp"))
        return checkpoint_name(_gather(w, compute, self.replicated, split, self.reduce_dtype), GATHERED)


def global_batch_arrays(batch: Any, layout: Layout, accumulation: int) -> Any:
    """This process's rows of a batch (numpy pytree) -> global device arrays.

    Every leaf [n, ...] becomes [n_global, ...], or [accumulation, n_global / accumulation, ...].
    """

    def place(x):
        x = np.asarray(x)
        if accumulation > 1:
            x = x.reshape(accumulation, x.shape[0] // accumulation, *x.shape[1:])
        return jax.make_array_from_process_local_data(layout.batch(accumulation > 1), x)

    return jax.tree.map(place, batch)
