"""FLOPs of a JAX function, counted from its jaxpr: no compile, no device, any depth in a second or two.

Only products are counted (dot_general and convolutions): 2 m n k for a product of [m, k] with [k, n], the convention
of every published MFU. The count is of the program as traced, so of the whole batch on all devices, and of what is
left after dead code is dropped. A loop counts as often as it runs, which XLA's own cost analysis does not do.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import partial_eval


@dataclasses.dataclass(frozen=True)
class Product:
    """One product of the program and how often it runs.

    primitive: `dot_general` or `conv_general_dilated`.
    shapes: of the two operands and the result.
    count: how often it runs (trip counts of the loops around it, times the devices of a shard_map).
    flops: of one run.
    scope: the jax.named_scope path around it, outermost first; derivatives show as `jvp(...)` and `transpose(...)`.
    """

    primitive: str
    shapes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    count: int
    flops: int
    scope: str

    @property
    def total(self) -> int:
        return self.count * self.flops


def count_flops(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
    """FLOPs of the products in one call of `fn`.

    args, kwargs: arrays, jax.ShapeDtypeStructs or pytrees of them; nothing is computed and nothing is moved.
    Raises ValueError for a product in a `while` loop whose trip count is not known before it runs.
    """
    return sum(product.total for product in products(fn, *args, **kwargs))


def products(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Product]:
    """Every product in one call of `fn`, in program order. Arguments and errors as in `count_flops`."""
    closed = jax.make_jaxpr(fn)(*args, **kwargs)
    live, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    return list(_walk(live, 1, ""))


def largest_dimension(found: Iterable[Product]) -> int:
    """The widest axis of any operand or result: shows whether a product as wide as a vocabulary exists."""
    return max((size for product in found for shape in product.shapes for size in shape), default=0)


def _walk(jaxpr: core.Jaxpr, count: int, scope: str) -> Iterator[Product]:
    for eqn in jaxpr.eqns:
        here = "/".join(part for part in (scope, str(eqn.source_info.name_stack)) if part)
        name = eqn.primitive.name
        if name in _COUNTED:
            shapes = _shape(eqn.invars[0]), _shape(eqn.invars[1]), _shape(eqn.outvars[0])
            yield Product(name, shapes, count, _COUNTED[name](eqn), here)
        elif name == "cond":
            branches = [list(_walk(branch.jaxpr, count, here)) for branch in eqn.params["branches"]]
            yield from max(branches, key=lambda found: sum(p.total for p in found))
        elif name == "while":
            yield from _refuse_products(eqn, here)
        else:
            times = count * _repeats(eqn)
            for inner in _inner(eqn):
                yield from _walk(inner, times, here)


def _repeats(eqn: core.JaxprEqn) -> int:
    """How often the jaxpr inside `eqn` runs for one run of `eqn`."""
    if eqn.primitive.name == "scan":
        return eqn.params["length"]
    if eqn.primitive.name == "shard_map":
        return math.prod(eqn.params["mesh"].shape[axis] for axis in eqn.params["newly_manual_axes"])
    if eqn.primitive.name == "pallas_call":
        return math.prod(eqn.params["grid_mapping"].grid)
    return 1


def _inner(eqn: core.JaxprEqn) -> Iterator[core.Jaxpr]:
    """The jaxprs that `eqn` runs. Derivative rules of custom_jvp and custom_vjp are functions there, not jaxprs."""
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, core.ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, core.Jaxpr):
                yield item


def _refuse_products(eqn: core.JaxprEqn, scope: str) -> Iterator[Product]:
    for inner in _inner(eqn):
        for product in _walk(inner, 1, scope):
            raise ValueError(
                f"cannot count FLOPs: the product {product.shapes} at {product.scope or 'the top level'} is in a while "
                "loop whose trip count is known only when it runs; use jax.lax.scan or a fori_loop with fixed bounds"
            )
    yield from ()


def _shape(variable: Any) -> tuple[int, ...]:
    return tuple(variable.aval.shape)


def _dot(eqn: core.JaxprEqn) -> int:
    (contract, _), _ = eqn.params["dimension_numbers"]
    lhs = _shape(eqn.invars[0])
    return 2 * math.prod(_shape(eqn.outvars[0])) * math.prod(lhs[axis] for axis in contract)


def _convolution(eqn: core.JaxprEqn) -> int:
    """2 x results x (kernel elements that meet one result): the kernel without its output-feature axis."""
    kernel = _shape(eqn.invars[1])
    features = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
    # The transpose of a strided convolution dilates its input with zeros; those meet the kernel but are no work.
    dilation = math.prod(eqn.params["lhs_dilation"])
    return 2 * math.prod(_shape(eqn.outvars[0])) * math.prod(kernel) // features // dilation


_COUNTED: dict[str, Callable[[core.JaxprEqn], int]] = {"dot_general": _dot, "conv_general_dilated": _convolution}
