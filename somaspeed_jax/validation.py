"""Loss and action error on held-out episodes, each record counted once, draws fixed by the record."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from somaspeed_jax.assemble import Data, Learner
from somaspeed_jax.config import Config
from somaspeed_jax.data.pipeline import eval_batches
from somaspeed_jax.flow import LossTerms, draw_noise, loss_value, sample_actions, sample_keys
from somaspeed_jax.mesh import global_batch_arrays
from somaspeed_jax.models.layers.param import bind
from somaspeed_jax.state import TrainState
from somaspeed_jax.step import EVALUATION_STEP, Batch, Prepare, make_validation_step, observe

RECORDS = 1024  # validation uses at most so many records, evenly spaced


class Validation:
    """Called with a state, returns the numbers of the held-out episodes; {} without any.

    loss: the flow loss. action_mse: error of sampled chunks, normalised units. mean_action_mse: the error of the best
    constant chunk on these very records, which a policy that sees anything at all beats.
    A mixture has `loss` over all its datasets, and "NAME: loss" and so on for each in its own normalised units.
    """

    def __init__(self, config: Config, learner: Learner, data: Data, transform: Any, prepare: Prepare):
        self._data, self._transform, self._learner = data.validation, transform, learner
        if self._data is None:
            return
        policy, layout = learner.policy, learner.layout
        self._records: dict[str, list[int]] = {}  # by dataset
        first = 0
        for part in data.parts:
            size = len(part.validation or ())
            spread = first + np.linspace(0, size - 1, min(RECORDS, size))
            self._records[part.name] = np.unique(spread.astype(np.int64)).tolist()
            first += size
        self._batch = config.batch.per_device * layout.mesh.size
        self._loss = jax.jit(make_validation_step(policy, prepare, seed=config.seed, times=config.flow.times))
        self._errors = jax.jit(_make_action_sums(policy, prepare, config.seed))

    def __call__(self, state: TrainState) -> dict[str, float]:
        if self._data is None:
            return {}
        params = {**state.frozen, **(state.ema or state.trainable)}
        measured = {name: self._measure(params, records) for name, records in self._records.items()}
        if len(measured) == 1:
            ((_, numbers),) = measured.values()
            return numbers
        terms = jax.tree.map(lambda *t: sum(t), *(terms for terms, _ in measured.values()))
        each = {f"{name}: {key}": value for name, (_, own) in measured.items() for key, value in own.items()}
        return {"loss": float(loss_value(self._learner.policy.flow, terms)), **each}

    def _measure(self, params: Any, records: list[int]) -> tuple[LossTerms, dict[str, float]]:
        assert self._data is not None
        terms, sums = LossTerms(jnp.float32(0), jnp.float32(0)), None
        for rows in eval_batches(
            self._data,
            self._transform,
            records,
            self._batch,
            process_index=jax.process_index(),
            process_count=jax.process_count(),
        ):
            batch = global_batch_arrays(Batch(**{name: rows[name] for name in Batch._fields}), self._learner.layout, 1)
            terms = jax.tree.map(jnp.add, terms, self._loss(params, batch))
            new = self._errors(params, batch)
            sums = new if sums is None else jax.tree.map(jnp.add, sums, new)
        error, total, square, count = jax.device_get(sums)
        variance = square - np.square(total) / np.maximum(count, 1)
        return terms, {
            "loss": float(loss_value(self._learner.policy.flow, terms)),
            "action_mse": float(error / count.sum()),
            "mean_action_mse": float(variance.sum() / count.sum()),
        }


def _make_action_sums(policy: Any, prepare: Prepare, seed: int):
    """Sums over records: squared error (scalar), actions, squared actions and count, [t, a] each."""
    shape = (policy.horizon, policy.action_dim)

    def sums(params, batch: Batch):
        keys = sample_keys(jax.random.key(seed), jnp.int32(EVALUATION_STEP), batch.position)
        counted = (batch.action_mask * batch.weight[:, None, None]).astype(jnp.float32)
        dims = jnp.any(batch.action_mask, axis=1)
        sampled = sample_actions(
            bind(policy, params), observe(batch, prepare, None), draw_noise(keys, shape), dims=dims
        )
        return (
            jnp.sum(jnp.square(sampled - batch.actions) * counted),
            jnp.sum(batch.actions * counted, axis=0),
            jnp.sum(jnp.square(batch.actions) * counted, axis=0),
            jnp.sum(counted, axis=0),
        )

    return sums
