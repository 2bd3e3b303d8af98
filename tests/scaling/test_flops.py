"""FLOPs counted from the jaxpr against arithmetic by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from somaspeed_jax.scaling import flops

B, D, F, L = 4, 8, 16, 5


def shape(*size):
    return jax.ShapeDtypeStruct(size, jnp.float32)


def test_product_is_two_m_n_k():
    assert flops.count_flops(jnp.dot, shape(B, D), shape(D, F)) == 2 * B * D * F


def test_batched_product():
    found = flops.products(lambda q, k: jnp.einsum("bqne,bkne->bnqk", q, k), shape(2, 3, 4, 8), shape(2, 7, 4, 8))
    assert [p.total for p in found] == [2 * 2 * 4 * 3 * 7 * 8]


def test_scan_counts_every_layer_forward_and_backward():
    def loss(w, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0].sum()

    forward = 2 * B * D * D * L
    assert flops.count_flops(loss, shape(L, D, D), shape(B, D)) == forward
    assert flops.count_flops(jax.grad(loss), shape(L, D, D), shape(B, D)) == 3 * forward
    remat = jax.grad(lambda w, x: jax.lax.scan(jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None)), x, w)[0].sum())
    assert flops.count_flops(remat, shape(L, D, D), shape(B, D)) == 4 * forward


def test_frozen_weights_have_no_gradient_products():
    def loss(trained, frozen, x):
        return (jnp.tanh(x @ frozen) @ trained).sum()

    # Forward twice, and the gradient of the second weight alone.
    got = flops.count_flops(jax.grad(loss), shape(F, D), shape(D, F), shape(B, D))
    assert got == 2 * B * D * F * 2


def test_dead_products_are_not_counted():
    def fn(x, w):
        unused = jax.jit(jnp.dot)(x, w)
        return x + 0 * unused.shape[0]

    assert flops.count_flops(fn, shape(B, D), shape(D, F)) == 0


def test_custom_vjp_counts_its_rule_not_its_transposed_body():
    @jax.custom_vjp
    def gathered(w):
        return w

    gathered.defvjp(lambda w: (w, None), lambda _, g: (g,))
    got = flops.count_flops(jax.grad(lambda w, x: (x @ gathered(w)).sum()), shape(D, F), shape(B, D))
    assert got == 2 * B * D * F  # the forward's result is not needed for a sum's gradient


def test_patch_convolution_equals_the_matrix_product():
    def patches(x, w):
        return jax.lax.conv_general_dilated(x, w, (14, 14), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    per_image = 2 * (16 * 16) * (14 * 14 * 3) * 32
    args = shape(2, 224, 224, 3), shape(14, 14, 3, 32)
    assert flops.count_flops(patches, *args) == 2 * per_image


def test_gradients_of_a_patch_convolution_cost_as_much_as_two_forwards():
    def loss(x, w):
        out = jax.lax.conv_general_dilated(x, w, (4, 4), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jnp.tanh(out).sum()

    args = shape(2, 16, 16, 3), shape(4, 4, 3, 8)
    assert flops.count_flops(jax.grad(loss, (0, 1)), *args) == 3 * flops.count_flops(loss, *args)


def test_grouped_convolution():
    def depthwise(x, w):
        numbers = ("NWC", "WIO", "NWC")
        return jax.lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=numbers, feature_group_count=6)

    assert flops.count_flops(depthwise, shape(2, 10, 6), shape(3, 1, 6)) == 2 * 2 * 10 * 6 * 3


def test_pallas_kernel_counts_its_grid():
    def kernel(x, w, out):
        out[...] = jnp.dot(x[...], w[...])

    def fn(x, w):
        rows = pl.BlockSpec((B, D), lambda i: (i, 0))
        whole = pl.BlockSpec((D, D), lambda i: (0, 0))
        return pl.pallas_call(kernel, grid=(3,), in_specs=[rows, whole], out_specs=rows, out_shape=x)(x, w)

    assert flops.count_flops(fn, shape(3 * B, D), shape(D, D)) == 2 * 3 * B * D * D


def test_shard_map_counts_every_device():
    mesh = Mesh(np.asarray(jax.devices()[:4]), ("fsdp",))
    fn = jax.shard_map(jnp.dot, mesh=mesh, in_specs=(P("fsdp"), P()), out_specs=P("fsdp"))
    assert flops.count_flops(fn, shape(8, D), shape(D, F)) == 2 * 8 * D * F


def test_cond_counts_the_heavier_branch():
    def fn(flag, x, w):
        return jax.lax.cond(flag, lambda: (x @ w) @ w, lambda: x @ w)

    assert flops.count_flops(fn, jax.ShapeDtypeStruct((), bool), shape(B, D), shape(D, D)) == 2 * 2 * B * D * D


def test_unknown_trip_count_is_refused():
    def fn(n, x, w):
        return jax.lax.fori_loop(0, n, lambda _, x: x @ w, x)

    with pytest.raises(ValueError, match=r"trip count.*fixed bounds"):
        flops.count_flops(fn, jax.ShapeDtypeStruct((), jnp.int32), shape(B, D), shape(D, D))


def test_random_draws_loop_without_products():
    fn = lambda key: jax.random.beta(key, 1.5, 1.0, (8,))  # noqa: E731
    assert flops.count_flops(fn, jax.eval_shape(lambda: jax.random.key(0))) == 0


def test_scopes_tell_forward_from_backward():
    def loss(w, x):
        with jax.named_scope("expert"):
            return jnp.tanh(x @ w).sum()

    forward, backward = flops.products(jax.grad(loss), shape(D, F), shape(B, D))
    assert "expert" in forward.scope and "transpose" not in forward.scope
    assert "expert" in backward.scope and "transpose" in backward.scope


def test_largest_dimension():
    found = flops.products(jnp.dot, shape(B, D), shape(D, 257))
    assert flops.largest_dimension(found) == 257
    assert flops.largest_dimension([]) == 0
