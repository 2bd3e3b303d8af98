"""What must not change π0.5's numbers: absent cameras, padding, one context for several flow times. And bfloat16."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parity import ACTIVATION, above, error, quick_jit
from pi05_reference import (
    ACTIONS,
    BATCH,
    CONFIG,
    NOISE,
    POLICY,
    REFERENCE,
    SPECS,
    TIME,
    loss_of,
    observation,
    reference_params,
)

from somaspeed_jax.models import pi05
from somaspeed_jax.models.layers.param import Runtime, bind

UNCHANGED = 1e-6
X = TIME[..., None, None] * NOISE + (1 - TIME[..., None, None]) * ACTIONS[:, None]  # [b, K, t, a]


@pytest.fixture(scope="module")
def params():
    return reference_params()


@pytest.fixture(scope="module")
def run():
    """(params, observation, x, time) -> context and velocity [b, K, t, a]."""

    def context_and_velocity(params, seen, x=X, time=TIME):
        policy = bind(POLICY, params)
        context = policy.encode(seen, None)
        return context, policy.velocity(policy.condition(context, seen, None), x, time, None)

    return quick_jit(context_and_velocity)


@pytest.fixture(scope="module")
def velocity(params, run):
    return run(params, observation())[1]


def test_masked_camera_gives_upstreams_numbers(params, run):
    """All three slots, the third one masked, as LeRobot has it: same keys and values, same velocity."""
    seen = observation()
    noise = jax.random.uniform(jax.random.key(0), seen.images[0].shape, minval=-1, maxval=1)
    mask = jnp.asarray([[True, True, False]] * BATCH)
    context, found = run(params, seen._replace(images=(*seen.images, noise), image_mask=mask))
    valid = REFERENCE["in/prefix_mask"]
    assert np.array_equal(context.mask, valid)
    errors = {"velocity": error(found[:, 0], REFERENCE["out/velocity"])}
    for i in range(CONFIG.trunk.depth):
        for name, ours in (("key", context.keys_values.k), ("value", context.keys_values.v)):
            expected = REFERENCE[f"act/{name}_{i}"].transpose(0, 2, 1, 3)
            errors[f"{name}_{i}"] = error(np.asarray(ours[i])[valid], expected[valid])
    assert above(errors, ACTIVATION) == {}


def test_camera_absent_in_one_row_is_like_a_camera_dropped(params, run):
    """Sample 0 without its second camera beside a whole sample 1, against sample 0 alone with one camera."""
    seen = observation()
    _, together = run(params, seen._replace(image_mask=jnp.asarray([[True, False], [True, True]])))
    alone = jax.tree.map(lambda a: a[:1], seen)
    dropped = alone._replace(images=alone.images[:1], image_mask=jnp.ones((1, 1), bool))
    _, single = run(params, dropped, X[:1], TIME[:1])
    _, whole = run(params, seen)
    assert error(together[:1], single) <= UNCHANGED
    assert error(together[1:], whole[1:]) <= UNCHANGED
    assert error(together[:1], whole[:1]) > 1e-3  # the camera matters


def test_prompt_padding_is_trimmed_without_a_change(params, run, velocity):
    seen = observation()
    used = int(seen.token_mask[1].sum())
    assert used < seen.tokens.shape[1]
    row = jax.tree.map(lambda a: a[1:], seen)
    trimmed = row._replace(tokens=row.tokens[:, :used], token_mask=row.token_mask[:, :used])
    assert error(run(params, trimmed, X[1:], TIME[1:])[1], velocity[1:]) <= UNCHANGED

    longer = seen._replace(
        tokens=jnp.pad(seen.tokens, [(0, 0), (0, 4)], constant_values=CONFIG.vocabulary - 1),
        token_mask=jnp.pad(seen.token_mask, [(0, 0), (0, 4)]),
    )
    assert error(run(params, longer)[1], velocity) <= UNCHANGED


def test_no_pictures_at_all(params, run):
    """The prompt alone is a prefix; a row whose cameras are all masked gives the same."""
    seen = observation()
    none = seen._replace(images=(), image_mask=jnp.zeros((BATCH, 0), bool))
    masked = seen._replace(image_mask=jnp.zeros_like(seen.image_mask))
    assert error(run(params, none)[1], run(params, masked)[1]) <= UNCHANGED


def test_three_flow_times_in_one_call(params, run):
    """Velocity, loss and gradient of K = 3 are those of three calls; the loss is their mean."""
    noise = jax.random.normal(jax.random.key(1), (BATCH, 3, *NOISE.shape[2:]))
    time = jnp.asarray([[0.1, 0.5, 0.9], [0.7, 1.0, 0.001]])
    together = run(params, observation(), noise, time)[1]
    apart = [run(params, observation(), noise[:, i : i + 1], time[:, i : i + 1])[1] for i in range(3)]
    assert error(together, jnp.concatenate(apart, axis=1)) <= UNCHANGED

    # One weight of each part, the earliest ones: their gradients run through everything.
    chosen = ("vision.patch.kernel", "trunk.layers.norm1.scale", "trunk.last.attn.v.kernel", "action_in.kernel")
    some = {path: params[path] for path in chosen}
    gradient = quick_jit(jax.value_and_grad(lambda some, noise, time: loss_of({**params, **some}, noise, time)))
    loss, grads = gradient(some, noise, time)
    singles = [gradient(some, noise[:, i : i + 1], time[:, i : i + 1]) for i in range(3)]
    assert error(loss, np.mean([single for single, _ in singles])) <= UNCHANGED
    for path in chosen:
        assert error(grads[path], np.mean([single[path] for _, single in singles], axis=0)) <= 1e-5


def test_bfloat16_compute_with_bfloat16_frozen_weights(params, run, velocity):
    """What training runs: near the float32 numbers, and float32 where it must be."""
    policy = pi05.build(CONFIG, Runtime(compute=jnp.bfloat16))
    stored = {
        path: value.astype(jnp.bfloat16) if SPECS[path].kind in ("matrix", "table") else value
        for path, value in params.items()
    }

    def context_and_velocity(params):
        bound, seen = bind(policy, params), observation()
        context = bound.encode(seen, None)
        return context, bound.velocity(bound.condition(context, seen, None), X, TIME, None)

    context, found = quick_jit(context_and_velocity)(stored)
    assert found.dtype == jnp.float32
    assert context.keys_values.k.dtype == context.keys_values.v.dtype == jnp.bfloat16
    assert 1e-4 < error(found, velocity) < 0.03
