"""Draws, loss and Euler sampling of flow matching, over a policy of one line."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from somaspeed_jax import flow
from somaspeed_jax.flow_spec import FlowSpec
from somaspeed_jax.models import pi05

PI05 = pi05.FLOW
GROOT = FlowSpec(noise_at=0, beta=(1.5, 1.0), time_scale=0.999, reflect=True, buckets=1000, steps=4, epsilon=1e-6)
MOLMO = FlowSpec(
    noise_at=0, beta=(1.0, 1.5), time_scale=0.999, time_offset=0.001, zero_padding=True, reduction="rows"
)  # fmt: skip
SPECS = {"pi05": PI05, "groot": GROOT, "molmoact2": MOLMO}
# P(t <= x) of what each upstream draws.
CDFS = {
    "pi05": lambda x: ((x - 0.001) / 0.999) ** 1.5,
    "groot": lambda x: 1 - (1 - x / 0.999) ** 1.5,
    "molmoact2": lambda x: 1 - (1 - (x - 0.001) / 0.999) ** 1.5,
}
KEY = jax.random.key(0)


class Line:
    """velocity = slope x + time; notes what it is called with."""

    def __init__(self, spec: FlowSpec, slope: float = 0.5):
        self.flow, self.slope, self.keys, self.encodes = spec, slope, [], 0

    def encode(self, observation, keys):
        self.keys.append(keys)
        self.encodes += 1
        return observation

    def condition(self, context, observation, keys):
        self.keys.append(keys)
        return context

    def velocity(self, memory, x, time, keys):
        self.keys.append(keys)
        return self.slope * x + time[:, :, None, None]


def keys_of(positions, seed: int = 0, step: int = 0) -> jax.Array:
    return flow.sample_keys(jax.random.key(seed), jnp.int32(step), jnp.asarray(positions, jnp.int32))


@pytest.mark.parametrize("name", SPECS)
def test_times_have_upstreams_distribution(name):
    """Largest distance to the distribution function, of 40,000 draws: 0.008 is exceeded once in a hundred."""
    times = np.sort(np.asarray(flow.draw_times(SPECS[name], keys_of(np.arange(10_000)), 4)).ravel())
    low, high = (0.001, 1.0) if name != "groot" else (0.0, 0.999)
    assert low <= times[0] and times[-1] <= high + 1e-6
    rank = (np.arange(times.size) + 0.5) / times.size
    assert np.abs(CDFS[name](np.clip(times, low, high)) - rank).max() < 0.0082
    other = CDFS["groot" if name == "pi05" else "pi05"]
    assert np.abs(other(np.clip(times, 0.001, 0.999)) - rank).max() > 0.1


def test_noise_is_standard_normal_and_independent_of_times():
    keys = keys_of(np.arange(200))
    noise = np.asarray(flow.draw_noise(keys, (2, 5, 20)))
    assert noise.shape == (200, 2, 5, 20) and noise.dtype == np.float32
    assert abs(noise.mean()) < 0.02 and abs(noise.std() - 1) < 0.02
    data = [np.asarray(jax.random.key_data(flow.purpose(keys, what))) for what in range(4)]
    assert len({tuple(row) for purpose in data for row in purpose}) == 4 * 200


def test_a_draw_is_a_function_of_seed_step_and_position_alone():
    """Not of the batch around it, of the mesh that it is drawn on, or of the order."""
    draw = jax.jit(lambda positions, seed, step: flow.draw_noise(
        flow.sample_keys(jax.random.key(seed), step, positions), (3,)))  # fmt: skip
    positions = jnp.arange(16, dtype=jnp.int32)
    whole = np.asarray(draw(positions, 0, 7))
    mesh = jax.make_mesh((8,), ("data",))
    spread = draw(jax.device_put(positions, NamedSharding(mesh, PartitionSpec("data"))), 0, 7)
    assert len(spread.sharding.device_set) == 8
    assert np.array_equal(spread, whole)
    assert np.array_equal(draw(positions[::-1], 0, 7)[::-1], whole)
    assert np.array_equal(np.concatenate([draw(positions[i : i + 4], 0, 7) for i in range(0, 16, 4)]), whole)
    others = [whole, np.asarray(draw(positions, 1, 7)), np.asarray(draw(positions, 0, 8))]
    assert len({tuple(row) for rows in others for row in rows}) == 3 * 16


def batch():
    """actions [3, 4, 5] of which three dimensions are real, steps of sample 2 padded; K = 2."""
    rng = np.random.default_rng(0)
    mask = np.zeros((3, 4, 5), bool)
    mask[:, :, :3] = True
    mask[2, 2:] = False
    actions = rng.normal(size=mask.shape).astype(np.float32) * (np.arange(5) < 3)
    noise = rng.normal(size=(3, 2, 4, 5)).astype(np.float32)
    return actions, mask, np.asarray([1.0, 0.0, 1.0], np.float32), noise, rng.uniform(size=(3, 2)).astype(np.float32)


def errors_by_hand(spec: FlowSpec, actions, mask, noise, time):
    """Squared velocity errors [b, K, t, a] in float64."""
    noise, actions = noise.astype(np.float64), actions[:, None].astype(np.float64)
    if spec.zero_padding:
        noise = noise * mask.any(1)[:, None, None]
    t = time[:, :, None, None].astype(np.float64)
    if spec.noise_at == 1:
        x, target = t * noise + (1 - t) * actions, noise - actions
    else:
        x, target = t * actions + (1 - t) * noise, actions - noise
    seen = t if spec.buckets is None else np.floor(spec.buckets * t)
    return (0.5 * x + seen - target) ** 2


@pytest.mark.parametrize("name", SPECS)
def test_loss_is_upstreams_formula(name):
    """Sample 1 has weight zero. The sums of the samples one by one are those of the batch."""
    spec = SPECS[name]
    actions, mask, weight, noise, time = batch()
    error = errors_by_hand(spec, actions, mask, noise, time)
    kept = weight > 0
    if spec.reduction == "elements":
        counted = np.broadcast_to(mask[:, None], error.shape)[kept]
        expected = error[kept][counted].sum() / (counted.sum() + spec.epsilon)
    else:
        rows = (error * mask[:, None]).sum(-1) / 3  # three real dimensions; padded steps are zeros that count
        expected = rows[kept].mean()
    loss = jax.jit(lambda *args: flow.flow_loss(Line(spec), None, *args, None))
    terms = loss(actions, mask, weight, noise, time)
    assert float(flow.loss_value(spec, terms)) == pytest.approx(expected, rel=1e-5)
    parts = [loss(*(a[i : i + 1] for a in (actions, mask, weight, noise, time))) for i in range(3)]
    summed = flow.LossTerms(*(sum(float(part[i]) for part in parts) for i in range(2)))
    assert (summed.numerator, summed.denominator) == pytest.approx([float(t) for t in terms], rel=1e-5)
    assert float(parts[1].numerator) == float(parts[1].denominator) == 0


def test_padding_is_what_each_model_makes_of_it():
    """Noise on padded dimensions is zero for MolmoAct2 alone: with a policy that mixes dimensions it would be seen."""

    class Mixing(Line):
        def velocity(self, memory, x, time, keys):
            return jnp.broadcast_to(x.sum(-1, keepdims=True), x.shape)

    for spec, seen in ((PI05, True), (MOLMO, False)):
        actions, mask, weight, noise, time = batch()
        louder = noise + 10 * (np.arange(5) >= 3).astype(np.float32)
        loss = jax.jit(lambda noise, spec=spec, rest=(actions, mask, weight), time=time: flow.flow_loss(
            Mixing(spec), None, *rest, noise, time, None))  # fmt: skip
        assert (float(loss(noise)[0]) != float(loss(louder)[0])) == seen


def test_epsilon_is_added_to_the_whole_denominator():
    terms = flow.LossTerms(jnp.float32(3.0), jnp.float32(2.0))
    assert float(flow.loss_value(dataclasses.replace(PI05, epsilon=1.0), terms)) == 1.0
    assert float(flow.loss_value(PI05, terms)) == 1.5


def test_one_context_and_dropout_keys_of_their_own_purpose():
    actions, mask, weight, noise, time = batch()
    keys = keys_of([0, 1, 2])
    policy = Line(PI05)
    flow.flow_loss(policy, None, actions, mask, weight, noise, time, keys)
    dropout = jax.random.key_data(flow.purpose(keys, flow.DROPOUT))
    assert policy.encodes == 1 and len(policy.keys) == 3
    assert all(np.array_equal(jax.random.key_data(seen), dropout) for seen in policy.keys)
    policy = Line(PI05)
    flow.flow_loss(policy, None, actions, mask, weight, noise, time, None)
    assert policy.keys == [None] * 3


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("steps", [None, 3])
def test_euler_grid(name, steps):
    """From the noise end in equal steps, times as the network sees them; padding is zeroed where upstream does."""
    spec = SPECS[name]
    count = steps or spec.steps
    noise = np.random.default_rng(1).normal(size=(2, 4, 5)).astype(np.float32)
    dims = np.arange(5) < 3
    expected = noise.astype(np.float64) * (dims if spec.zero_padding else 1)
    for i in range(count):
        t = 1 - i / count if spec.noise_at == 1 else i / count
        seen = t if spec.buckets is None else float(np.floor(np.float32(spec.buckets) * np.float32(t)))
        expected = expected + (0.5 * expected + seen) / count * (-1 if spec.noise_at == 1 else 1)
        expected = expected * (dims if spec.zero_padding else 1)
    policy = Line(spec)
    sample = jax.jit(lambda noise: flow.sample_actions(policy, None, noise, dims=jnp.asarray(dims), steps=steps))
    found = np.asarray(sample(noise))
    assert np.abs(found - expected).max() <= 2e-6 * np.abs(expected).max()
    assert policy.encodes == 1 and set(policy.keys) == {None}


def test_a_time_distribution_without_an_exact_inverse_is_refused():
    with pytest.raises(ValueError, match=r"beta is \(2.0, 1.5\)"):
        FlowSpec(noise_at=0, beta=(2.0, 1.5))
