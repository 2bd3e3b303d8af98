"""Flow matching, once for all models: draws, training loss over K flow times, Euler sampling.

With x(0) and x(1) the two ends of the straight path (one noise, one data; `FlowSpec.noise_at` says which),
x(t) = t x(1) + (1 - t) x(0) and the velocity to learn is dx/dt = x(1) - x(0).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from somaspeed_jax.flow_spec import FlowSpec
from somaspeed_jax.models.base import Observation, Policy

# Purposes of randomness, folded into a sample's key.
NOISE, TIME, DROPOUT, AUGMENT = range(4)


class LossTerms(NamedTuple):
    """Sums over a batch: the loss is numerator / (denominator + epsilon), denominators summed over all devices,
    microbatches and flow times before the division."""

    numerator: jax.Array
    denominator: jax.Array


def sample_keys(seed: jax.Array, step: jax.Array, positions: jax.Array) -> jax.Array:
    """One key a sample: a function of (seed, step, position in the global batch), of nothing else.

    seed: a PRNG key; step: int32 scalar; positions: [b] int32. Returns [b] keys.
    """
    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.fold_in(seed, step), positions)


def purpose(keys: jax.Array, what: int) -> jax.Array:
    """The [b] keys of one purpose."""
    return jax.vmap(jax.random.fold_in, (0, None))(keys, what)


def draw_times(spec: FlowSpec, keys: jax.Array, count: int) -> jax.Array:
    """[b] keys -> flow times [b, count] float32, by the exact inverse of the Beta distribution function."""
    u = jax.vmap(lambda key: jax.random.uniform(key, (count,), jnp.float32))(purpose(keys, TIME))
    a, b = spec.beta
    s = u ** (1.0 / a) if b == 1.0 else 1.0 - u ** (1.0 / b)
    return spec.time_offset + spec.time_scale * (1.0 - s if spec.reflect else s)


def draw_noise(keys: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """[b] keys -> standard normal noise [b, *shape] float32."""
    return jax.vmap(lambda key: jax.random.normal(key, shape, jnp.float32))(purpose(keys, NOISE))


def network_time(spec: FlowSpec, time: jax.Array) -> jax.Array:
    """The time as the network sees it, float32: t, or the bucket floor(buckets * t)."""
    return time if spec.buckets is None else jnp.floor(spec.buckets * time)


def _ends(spec: FlowSpec, noise: jax.Array, data: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x(0), x(1)."""
    return (noise, data) if spec.noise_at == 0 else (data, noise)


def flow_loss(
    policy: Policy,
    observation: Observation,
    actions: jax.Array,
    action_mask: jax.Array,
    weight: jax.Array,
    noise: jax.Array,
    time: jax.Array,
    keys: jax.Array | None,
) -> LossTerms:
    """Squared velocity error of a bound policy at K flow times that share one context and one memory.

    actions [b, t, a] float32; action_mask [b, t, a] bool: what counts; weight [b] float32: 0 leaves a sample out;
    noise [b, K, t, a]; time [b, K]; keys [b] or None (no dropout).
    """
    spec = policy.flow
    dims = jnp.any(action_mask, axis=1)  # [b, a]: dimensions that the robot has
    if spec.zero_padding:
        noise = noise * dims[:, None, None]
    x0, x1 = _ends(spec, noise, jnp.broadcast_to(actions[:, None], noise.shape))
    t = time[:, :, None, None]
    x, target = t * x1 + (1.0 - t) * x0, x1 - x0

    dropout = None if keys is None else purpose(keys, DROPOUT)
    context = policy.encode(observation, dropout)
    memory = policy.condition(context, observation, dropout)
    if hide_steps := getattr(policy, "mask_steps", None):  # a model whose uncounted steps are hidden from the others
        memory = hide_steps(memory, jnp.any(action_mask, axis=-1))
    velocity = policy.velocity(memory, x, network_time(spec, time), dropout)

    counted = (action_mask[:, None] * weight[:, None, None, None]).astype(jnp.float32)
    error = jnp.square(velocity.astype(jnp.float32) - target) * counted
    if spec.reduction == "elements":
        return LossTerms(jnp.sum(error), jnp.sum(counted) * noise.shape[1])
    real = jnp.maximum(jnp.sum(dims, axis=-1), 1).astype(jnp.float32)
    rows = jnp.sum(error, axis=-1) / real[:, None, None]
    return LossTerms(jnp.sum(rows), jnp.sum(weight) * noise.shape[1] * noise.shape[2])


def loss_value(spec: FlowSpec, terms: LossTerms) -> jax.Array:
    """The loss of summed terms, float32 scalar."""
    return terms.numerator / (terms.denominator + spec.epsilon)


def sample_actions(
    policy: Policy,
    observation: Observation,
    noise: jax.Array,
    *,
    dims: jax.Array | None = None,
    steps: int | None = None,
) -> jax.Array:
    """Euler integration from noise to actions with one encode and one condition.

    noise [b, t, a] float32; dims [b, a] or [a] bool: dimensions that the robot has (read where the model zeroes
    padding); steps: default the model's. Returns [b, t, a] float32, normalised.
    """
    spec = policy.flow
    count = spec.steps if steps is None else steps
    memory = policy.condition(policy.encode(observation, None), observation, None)
    keep = None
    if spec.zero_padding and dims is not None:
        keep = jnp.broadcast_to(dims, (noise.shape[0], noise.shape[2]))[:, None].astype(jnp.float32)
        noise = noise * keep
    direction = 1.0 if spec.noise_at == 0 else -1.0

    def step(x, i):
        time = jnp.full((x.shape[0], 1), spec.noise_at + direction * i / count, jnp.float32)
        velocity = policy.velocity(memory, x[:, None], network_time(spec, time), None)[:, 0]
        x = x + direction / count * velocity
        return (x if keep is None else x * keep), None

    x, _ = jax.lax.scan(step, noise, jnp.arange(count, dtype=jnp.float32))
    return x
