"""Attention, rotation, norms, stacks and initial values, against numpy and against each other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from parity import error, quick_jit

from somaspeed_jax.models.layers.attention import attend, attend_split
from somaspeed_jax.models.layers.linear import Embedding, Linear, Lora, LoraSpec
from somaspeed_jax.models.layers.norm import LayerNorm, RMSNorm
from somaspeed_jax.models.layers.param import Runtime, bind, initial_value, param_specs, stack
from somaspeed_jax.models.layers.rotary import rotary_angles, rotate
from somaspeed_jax.models.layers.stack import REMAT, run_stack

B, K, T, P, N, KV, E = 2, 3, 4, 5, 6, 2, 8


def draw(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def softmax_attention(q, k, v, mask):
    """float64; q [t, n, e], k, v [s, n, e], mask [t, s]; rows without a key give zero."""
    scores = np.einsum("tne,sne->nts", q.astype(np.float64), k.astype(np.float64)) / np.sqrt(q.shape[-1])
    weights = np.where(mask, np.exp(scores), 0.0)
    total = weights.sum(-1, keepdims=True)
    return np.einsum("nts,sne->tne", weights / np.where(total > 0, total, 1), v.astype(np.float64))


@pytest.fixture(scope="module")
def tensors():
    return {
        "q": draw(0, B, K, T, N, E),
        "k_prefix": draw(1, B, P, KV, E),
        "v_prefix": draw(2, B, P, KV, E),
        "k_own": draw(3, B, K, T, KV, E),
        "v_own": draw(4, B, K, T, KV, E),
    }


MASK = np.asarray([[True, True, False, True, False], [False] * P])


def test_grouped_attention_with_masks(tensors):
    """Query head i reads key head i // (n / k); a row that sees nothing gives zero, and no NaN in any gradient."""
    q, k, v = tensors["q"][:, 0], tensors["k_prefix"], tensors["v_prefix"]
    mask = np.broadcast_to(MASK[:, None], (B, T, P)).copy()
    mask[0, 1] = False
    repeated = [np.repeat(x, N // KV, axis=2) for x in (k, v)]
    expected = np.stack([softmax_attention(q[b], repeated[0][b], repeated[1][b], mask[b]) for b in range(B)])

    def run(q, k, v):
        out = attend(q, k, v, mask)
        return jnp.sum(jnp.square(out)), out

    gradients, found = quick_jit(jax.grad(run, argnums=(0, 1, 2), has_aux=True))(q, k, v)
    assert error(found, expected) < 1e-6
    assert not np.asarray(found)[1].any() and not np.asarray(found)[0, 1].any()
    assert all(np.isfinite(g).all() for g in gradients)
    assert not np.asarray(gradients[1])[1].any()


def test_split_softmax_is_one_softmax_over_both(tensors):
    """Values and every gradient equal those of the concatenated keys, also where no prefix token is valid."""
    weight = draw(5, B, K, T, N, E)

    def split(t):
        out = attend_split(t["q"], t["k_prefix"], t["v_prefix"], jnp.asarray(MASK), t["k_own"], t["v_own"])
        return jnp.sum(out * weight), out

    def joined(t):
        k, v = (
            jnp.concatenate([jnp.broadcast_to(t[f"{x}_prefix"][:, None], (B, K, P, KV, E)), t[f"{x}_own"]], axis=2)
            for x in ("k", "v")
        )
        mask = jnp.concatenate([jnp.asarray(MASK), jnp.ones((B, T), bool)], axis=1)[:, None]
        out = jax.vmap(lambda q, k, v: attend(q, k, v, mask), in_axes=1, out_axes=1)(t["q"], k, v)
        return jnp.sum(out * weight), out

    def both(t):
        return tuple(jax.value_and_grad(f, has_aux=True)(t) for f in (split, joined))

    ((_, found), gradients), ((_, expected), reference) = quick_jit(both)(tensors)
    assert error(found, expected) < 1e-6
    assert max(error(gradients[name], reference[name]) for name in tensors) < 1e-5
    assert not np.asarray(gradients["k_prefix"])[1].any()


def test_attention_keeps_scores_in_float32():
    """bfloat16 scores of about 300 are whole numbers apart by two: the two keys would be equal."""
    q = jnp.full((1, 1, 1, 64), 6.0, jnp.bfloat16)
    k = jnp.stack([jnp.full((64,), 6.0), jnp.full((64,), 6.0).at[0].set(6.125)]).reshape(1, 2, 1, 64)
    v = jnp.asarray([0.0, 1.0]).reshape(1, 2, 1, 1) * jnp.ones((1, 2, 1, 64))
    out = attend(q, k.astype(jnp.bfloat16), v.astype(jnp.bfloat16))
    assert out.dtype == jnp.bfloat16
    expected = 1 / (1 + np.exp(-6.0 * 0.125 / 8))
    assert float(out[0, 0, 0, 0]) == pytest.approx(expected, abs=2e-3)


def test_rotation_turns_pairs_by_relative_position():
    x, y = draw(6, 1, 1, 1, E), draw(7, 1, 1, 1, E)

    def at(value, position):
        return np.asarray(rotate(value, rotary_angles(jnp.asarray([[position]]), E, 10_000.0)))

    assert np.sum(at(x, 17) * at(y, 12)) == pytest.approx(np.sum(at(x, 5) * at(y, 0)), rel=1e-5)
    assert np.array_equal(at(x, 0), x)
    angle = 3 * 10_000.0 ** (-2 * 1 / E)  # channel 1 pairs with channel 1 + e/2
    expected = x[0, 0, 0, 1] * np.cos(angle) - x[0, 0, 0, 1 + E // 2] * np.sin(angle)
    assert at(x, 3)[0, 0, 0, 1] == pytest.approx(expected, rel=1e-5)


def test_norms_compute_in_float32():
    """Large bfloat16 inputs: squares summed in bfloat16 would lose the small ones."""
    x = jnp.asarray([[300.0] * 4 + [1.0] * 60], jnp.bfloat16)
    exact = np.asarray(x, np.float64)
    scale = np.linspace(-0.5, 0.5, 64, dtype=np.float32)
    rms = exact / np.sqrt((exact**2).mean() + 1e-6)
    centred = exact - exact.mean()
    layer = centred / np.sqrt((centred**2).mean() + 1e-6)
    cases = [
        (RMSNorm(64, offset=1.0), {"scale": scale}, rms * (1 + scale)),
        (RMSNorm(64), {"scale": scale}, rms * scale),
        (LayerNorm(64, eps=1e-6), {"scale": scale, "bias": scale}, layer * scale + scale),
    ]
    for norm, params, expected in cases:
        found = bind(norm, {name: jnp.asarray(value) for name, value in params.items()})(x)
        assert found.dtype == jnp.bfloat16
        assert error(found.astype(jnp.float32), expected) < 2**-8
        assert error(bind(norm, params)(exact.astype(np.float32)), expected) < 1e-6


def test_embedding_rows_are_float32_whatever_the_table():
    table = jnp.asarray(draw(8, 7, 3), jnp.bfloat16)
    found = bind(Embedding(7, 3), {"table": table})(jnp.asarray([[6, 0]]))
    assert found.dtype == jnp.float32 and np.array_equal(found[0], np.asarray(table, np.float32)[[6, 0]])


class Block(nnx.Module):
    def __init__(self):
        self.linear = Linear(4, 4, Runtime())

    def __call__(self, x):
        return x + jnp.tanh(self.linear(x))


def test_stack_equals_a_loop_under_every_rematerialisation():
    layers = stack(3, Block())
    specs = param_specs(layers)
    params = {path: initial_value(spec, path, 0) + 0.1 for path, spec in specs.items()}
    x, ys = draw(9, 2, 4), draw(10, 3, 2, 4)

    def loop(params):
        h, seen = x, []
        for i in range(3):
            h = bind(Block(), {path: value[i] for path, value in params.items()})(h) + ys[i]
            seen.append(h)
        return jnp.sum(h**2), jnp.stack(seen)

    def scanned(params, remat, runtime):
        def body(layer, h, y):
            h = layer(h) + y
            return h, h

        h, seen = run_stack(bind(layers, params), body, jnp.asarray(x), jnp.asarray(ys), runtime=runtime, remat=remat)
        return jnp.sum(h**2), seen

    gathered = Runtime(gather=lambda variable: variable.get_value() * 1.0)

    def everything(params):
        out = {"loop": jax.value_and_grad(loop, has_aux=True)(params)}
        for remat in REMAT:
            for name, runtime in (("whole", Runtime()), ("gathered", gathered)):
                out[f"{remat}/{name}"] = jax.value_and_grad(scanned, has_aux=True)(params, remat, runtime)
        return out

    results = quick_jit(everything)(params)
    reference = results.pop("loop")
    assert len(results) == 2 * len(REMAT)
    for name, result in results.items():
        for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(reference), strict=True):
            assert error(a, b) < 1e-6, name


def test_unknown_rematerialisation_and_stacks_of_stacks_are_refused():
    layers = stack(2, Block())
    params = {path: jnp.zeros(spec.shape) for path, spec in param_specs(layers).items()}
    with pytest.raises(ValueError, match=r"policy 'half'; known: none, keep_gathered, dots, full"):
        run_stack(bind(layers, params), lambda layer, h, _: (h, None), jnp.zeros(4), runtime=Runtime(), remat="half")
    with pytest.raises(ValueError, match="stack of stacks"):
        stack(2, layers)


def test_adapter_groups_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="10 outputs do not divide into 4"):
        Lora(4, 10, LoraSpec(rank=2, alpha=2.0), out_groups=4)


def test_initial_values_are_a_function_of_seed_and_path():
    spec = param_specs(stack(3, Block()))["linear.kernel"]
    value = np.asarray(initial_value(spec, "linear.kernel", 0))
    assert value.shape == (3, 4, 4) and np.array_equal(value, initial_value(spec, "linear.kernel", 0))
    assert not np.array_equal(value, initial_value(spec, "linear.kernel", 1))
    assert not np.array_equal(value, initial_value(spec, "other.kernel", 0))
    assert not np.array_equal(value[0], value[1])


def test_stacked_layers_have_their_own_fan_in():
    spec = param_specs(stack(50, Linear(64, 16, Runtime())))["kernel"]
    assert np.std(initial_value(spec, "kernel", 0)) == pytest.approx(64**-0.5, rel=0.05)
