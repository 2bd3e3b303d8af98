"""Products, collectives and kernels read from optimised HLO, against arithmetic by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from somaspeed_jax.scaling import flops, hlo

L, B, D = 5, 16, 64
FORWARD = 2 * B * D * D * L


def float32(*shape, sharding=None):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)


def compiled(fn, *args):
    return hlo.read(jax.jit(fn).lower(*args).compile().as_text())


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.asarray(jax.devices()[:8]).reshape(2, 4), ("replica", "fsdp"))


@pytest.fixture(scope="module")
def program(mesh):
    """Gradient of a rematerialised scan over layers whose weights are gathered inside the body."""
    whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P(("replica", "fsdp"), None))

    def loss(w, x):
        def body(x, w):
            x = jnp.tanh(x @ jax.lax.with_sharding_constraint(w, whole))
            return jax.lax.with_sharding_constraint(x, rows), None

        return jax.lax.scan(jax.checkpoint(body, prevent_cse=False), x, w)[0].sum()

    w = float32(L, D, D, sharding=NamedSharding(mesh, P(None, "fsdp", None)))
    text = jax.jit(jax.grad(loss)).lower(w, float32(B, D, sharding=rows)).compile().as_text()
    return hlo.read(text)


def test_flops_are_of_one_device_with_loops_and_recomputation_counted(program):
    # Forward, recomputed forward and two backward products; the batch is split over 8 devices.
    assert program.flops == 4 * FORWARD // 8


def test_gathers_are_one_a_layer_and_pass(program):
    runs, size = program.collective("all-gather")
    assert (runs, size) == (2 * L, 2 * L * D * D * 4)
    gather = next(c for c in program.collectives if c.kind == "all-gather")
    assert (gather.group, gather.types) == (4, ("f32",))
    assert gather.wire == gather.total * 3 / 4


def test_gradients_are_reduced_over_both_axes(program):
    # The CPU compiler reduces the whole gradient once over all devices, or over one axis and then the other.
    reduced = [c for c in program.collectives if c.kind == "all-reduce" and c.bytes >= D * D]
    assert {c.count for c in reduced} == {L}
    assert np.prod([c.group for c in reduced]) == 8


def test_largest_dimension_is_of_products_alone(program):
    assert flops.largest_dimension(program.products) == D


def test_count_agrees_with_the_jaxpr():
    def mlp(x, w, v):
        return jnp.einsum("bsf,fd->bsd", jax.nn.gelu(jnp.einsum("bsd,df->bsf", x, w)), v)

    args = float32(2, 3, 8), float32(8, 32), float32(32, 8)
    assert compiled(mlp, *args).flops == flops.count_flops(mlp, *args)


def test_convolution_agrees_with_the_jaxpr():
    def patches(x, w):
        return jax.lax.conv_general_dilated(x, w, (4, 4), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    args = float32(2, 16, 16, 3), float32(4, 4, 3, 8)
    assert compiled(patches, *args).flops == flops.count_flops(patches, *args)


def test_kernels_are_launches_not_bookkeeping():
    kernels = compiled(lambda x: jnp.tanh(x) * 2 + 1, float32(B, D)).kernels
    assert [(k.opcode, k.count) for k in kernels] == [("fusion", 1)]


def test_bytes_of_a_kernel_are_what_it_reads_and_writes():
    (kernel,) = hlo.read(
        jax.jit(lambda x, y: x * y + 1).lower(float32(B, D), float32(B, D)).compile().as_text()
    ).kernels
    assert kernel.bytes == 3 * B * D * 4


def test_a_scan_reads_a_layer_at_a_time_and_writes_in_place():
    def fn(x, w):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x * w), x), x, w)

    kernels = compiled(fn, float32(B, D), float32(L, B, D)).kernels
    looped = sum(k.count * k.bytes for k in kernels if k.count == L and k.opcode == "fusion")
    # Per layer: read w and x, write the carry; read the carry, write one of the stacked outputs; small counters.
    assert looped == pytest.approx(5 * L * B * D * 4, rel=0.01)


def test_products_are_charged_to_their_kernel():
    kernels = hlo.read(
        jax.jit(lambda x, w: jnp.tanh(x @ w)).lower(float32(B, D), float32(D, D)).compile().as_text()
    ).kernels
    assert sum(k.flops for k in kernels) == 2 * B * D * D


def test_loop_without_a_known_trip_count_is_refused():
    def fn(n, x, w):
        return jax.lax.fori_loop(0, n, lambda _, x: x @ w, x)

    with pytest.raises(ValueError, match="trip count XLA does not know"):
        compiled(fn, jax.ShapeDtypeStruct((), jnp.int32), float32(B, D), float32(D, D))


def test_text_that_is_no_module_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        hlo.read("nothing")


# The CUDA compiler's way to print the same things: library calls, asynchronous pairs, collectives joined into one.
CUDA = """HloModule jit_step, is_scheduled=true, num_partitions=8

%body (param: (s32[], bf16[64,64])) -> (s32[], bf16[64,64]) {
  %param = (s32[], bf16[64,64]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%param), index=0
  %w = bf16[64,64]{1,0} get-tuple-element(%param), index=1
  %x = bf16[8,64]{1,0} broadcast(%i), dimensions={}
  %custom-call.1 = (bf16[8,64]{1,0}, s8[4194304]{0}) custom-call(%x, %w), custom_call_target="__cublas$lt$matmul", \
metadata={op_name="jit(step)/dot_general"}, backend_config={"gemm_backend_config":{"dot_dimension_numbers":\
{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
  ROOT %t = (s32[], bf16[64,64]{1,0}) tuple(%i, %w)
}

%condition (p: (s32[], bf16[64,64])) -> pred[] {
  %p = (s32[], bf16[64,64]{1,0}) parameter(0)
  ROOT %lt = pred[] constant(false)
}

ENTRY %main (a: bf16[64,64], b: f32[16]) -> bf16[64,64] {
  %a = bf16[64,64]{1,0} parameter(0)
  %b = f32[16]{0} parameter(1)
  %zero = s32[] constant(0)
  %both = (s32[], bf16[64,64]{1,0}) tuple(%zero, %a)
  %while.1 = (s32[], bf16[64,64]{1,0}) while(%both), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"18"}}
  %all-gather-start = ((bf16[64,64]{1,0}, f32[16]{0}), (bf16[256,64]{1,0}, f32[64]{0})) all-gather-start(%a, %b), \
replica_groups=mesh['axis_0'=2,'axis_1'=4], device_ids=([8]) {'axis_1'}, dimensions={0}
  %all-gather-done = (bf16[256,64]{1,0}, /*index=1*/f32[64]{0}) all-gather-done(%all-gather-start)
  %reduce-scatter = f32[8,64]{1,0} reduce-scatter(%a), replica_groups=[1,8]<=[8], dimensions={0}, to_apply=%condition
  %all-reduce = f32[16]{0} all-reduce(%b), replica_groups={{0,4},{1,5},{2,6},{3,7}}, to_apply=%condition
  ROOT %collective-permute = bf16[64,64]{1,0} collective-permute(%a), source_target_pairs={{0,1},{1,0}}
}
"""


def test_cuda_text():
    program = hlo.read(CUDA)
    assert [(p.count, p.flops) for p in program.products] == [(18, 2 * 8 * 64 * 64)]
    gather, scatter, reduce, permute = program.collectives
    assert (gather.bytes, gather.group, gather.types) == (256 * 64 * 2 + 64 * 4, 4, ("bf16", "f32"))
    assert (scatter.bytes, scatter.group, scatter.wire) == (8 * 64 * 4, 8, 7 * 8 * 64 * 4)
    assert (reduce.group, reduce.wire) == (2, 16 * 4)
    assert permute.wire == 64 * 64 * 2
    gemm = next(k for k in program.kernels if k.target)
    assert (gemm.count, gemm.flops, gemm.bytes) == (18, 2 * 8 * 64 * 64, (8 * 64 + 64 * 64 + 8 * 64) * 2)
    launched = [k.opcode for k in program.kernels]
    assert launched == [
        "broadcast", "custom-call", "all-gather-start", "reduce-scatter", "all-reduce", "collective-permute",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("bf16[8,4]{1,0}", 64),
        ("(f32[2]{0}, s8[3]{0})", 11),
        ("pred[]", 1),
        ("f8e4m3fn[16]", 16),
        ("u4[8]", 4),
        ("token[]", 0),
    ],
)
def test_bytes_of_printed_shapes(shape, size):
    assert hlo.bytes_of(shape) == size


def test_unknown_replica_groups_are_refused():
    with pytest.raises(ValueError, match="replica groups are printed"):
        hlo.read(CUDA.replace("[1,8]<=[8]", "everyone"))
