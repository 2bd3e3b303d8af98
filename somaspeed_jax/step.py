"""The compiled training step and the compiled validation loss."""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from somaspeed_jax.assemble import Learner
from somaspeed_jax.config import Config
from somaspeed_jax.flow import (
    AUGMENT,
    LossTerms,
    draw_noise,
    draw_times,
    flow_loss,
    loss_value,
    purpose,
    sample_keys,
)
from somaspeed_jax.mesh import Layout
from somaspeed_jax.models.base import Observation
from somaspeed_jax.models.layers.param import bind
from somaspeed_jax.optim import average, global_norms
from somaspeed_jax.state import TrainState

Prepare = Callable[[tuple[jax.Array, ...], jax.Array | None], tuple[jax.Array, ...]]

EVALUATION_STEP = 2**31 - 1  # its draws never coincide with a training step's


class Batch(NamedTuple):
    """A batch on the devices, uint8 pictures as they left the host.

    images: c arrays [b, h, w, 3] uint8; image_mask [b, c] bool; tokens [b, p] int32; token_mask [b, p] bool;
    state [b, s] float32; embodiment [b] int32; actions [b, t, a] float32; action_mask [b, t, a] bool;
    position [b] int32, index in the global batch (in validation: the record's number); weight [b] float32.
    With accumulation every field has a leading microbatch axis.
    """

    images: tuple[Any, ...]
    image_mask: Any
    tokens: Any
    token_mask: Any
    state: Any
    embodiment: Any
    actions: Any
    action_mask: Any
    position: Any
    weight: Any


class Metrics(NamedTuple):
    """Scalars of one step, on the device."""

    loss: jax.Array
    grad_norm: jax.Array
    lr: jax.Array
    healthy: jax.Array
    group_norms: dict[str, jax.Array]


def observe(batch: Batch, prepare: Prepare, keys: jax.Array | None) -> Observation:
    """The policy's observation of a batch; `keys` [b] turn the random picture operations on."""
    images = prepare(batch.images, None if keys is None else purpose(keys, AUGMENT))
    return Observation(images, batch.image_mask, batch.tokens, batch.token_mask, batch.state, batch.embodiment)


def make_train_step(
    policy: Any,
    prepare: Prepare,
    optimizer: optax.GradientTransformation,
    rate: Callable,
    groups: dict,
    layout: Layout,
    *,
    seed: int,
    times: int,
    accumulation: int,
    ema_decay: float,
    dropout: bool = True,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The step as a pure function, to be jitted with the state donated.

    Gradients are of the summed loss terms with respect to the trainable parameters alone; microbatches add up; the
    one division is by the global denominator.
    """
    shape = (times, policy.horizon, policy.action_dim)

    def terms(trainable, frozen, batch, step):
        keys = sample_keys(jax.random.key(seed), step, batch.position)
        bound = bind(policy, {**frozen, **trainable})
        result = flow_loss(
            bound,
            observe(batch, prepare, keys),
            batch.actions,
            batch.action_mask,
            batch.weight,
            draw_noise(keys, shape),
            draw_times(policy.flow, keys, times),
            keys if dropout else None,
        )
        return result.numerator, result.denominator

    grad_terms = jax.value_and_grad(terms, has_aux=True)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        def micro(total, part):
            (numerator, denominator), grads = grad_terms(state.trainable, state.frozen, part, state.step)
            return jax.tree.map(jnp.add, total, (numerator, denominator, grads)), None

        if accumulation == 1:
            (numerator, denominator), grads = grad_terms(state.trainable, state.frozen, batch, state.step)
        else:
            zero = jax.tree.map(jnp.zeros_like, state.trainable)
            start = (jnp.float32(0), jnp.float32(0), zero)
            (numerator, denominator, grads), _ = jax.lax.scan(micro, start, batch)

        loss_terms = LossTerms(numerator, denominator)
        loss = loss_value(policy.flow, loss_terms)
        grads = {path: grad / (denominator + policy.flow.epsilon) for path, grad in grads.items()}
        norms = global_norms(grads, groups)
        norm = jnp.sqrt(sum(jnp.square(value) for value in norms.values()))
        healthy = state.healthy & jnp.isfinite(loss) & jnp.isfinite(norm)

        updates, opt_state = optimizer.update(grads, state.opt_state, state.trainable)
        trainable = {path: param + cast(dict, updates)[path] for path, param in state.trainable.items()}
        ema = average(state.ema, trainable, ema_decay) if state.ema else {}
        new = TrainState(state.step + 1, trainable, state.frozen, opt_state, ema, healthy)
        old = TrainState(state.step, state.trainable, state.frozen, state.opt_state, state.ema, healthy)
        kept = jax.tree.map(lambda a, b: a if a is b else jnp.where(healthy, a, b), new, old)
        return kept, Metrics(loss, norm, jnp.asarray(rate(state.step), jnp.float32), healthy, norms)

    return step


def jit_train_step(config: Config, learner: Learner, prepare: Prepare) -> Any:
    """The training step of a run, jitted: the state is donated and stays on its shardings."""
    step = make_train_step(
        learner.policy,
        prepare,
        learner.optimizer,
        learner.rate,
        learner.groups,
        learner.layout,
        seed=config.seed,
        times=config.flow.times,
        accumulation=learner.accumulation,
        ema_decay=config.ema.decay,
    )
    return jax.jit(step, donate_argnums=0, out_shardings=(learner.shardings, learner.layout.replicated))


def make_validation_step(policy: Any, prepare: Prepare, *, seed: int, times: int) -> Callable:
    """(params, batch) -> LossTerms, with noise and flow times fixed by the record: comparable from step to step."""
    shape = (times, policy.horizon, policy.action_dim)

    def step(params: dict[str, jax.Array], batch: Batch) -> LossTerms:
        keys = sample_keys(jax.random.key(seed), jnp.int32(EVALUATION_STEP), batch.position)
        return flow_loss(
            bind(policy, params),
            observe(batch, prepare, None),
            batch.actions,
            batch.action_mask,
            batch.weight,
            draw_noise(keys, shape),
            draw_times(policy.flow, keys, times),
            None,
        )

    return step
