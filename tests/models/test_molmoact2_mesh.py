"""MolmoAct2 on a mesh: the same loss and gradients as on one device, weights gathered layer by layer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from molmoact2_reference import error

from somaspeed_jax.flow import draw_noise, draw_times, flow_loss, loss_value
from somaspeed_jax.mesh import Layout, make_mesh
from somaspeed_jax.models.base import Observation
from somaspeed_jax.models.layers.param import bind, initialise, param_specs
from somaspeed_jax.models.molmoact2 import SIZES, build

CONFIG, BATCH, WIDTH = SIZES["demo"], 4, 40
QUICK = {"xla_backend_optimization_level": 0}


def make_batch():
    """Two cameras, prompts of four lengths; the second sample lacks its first camera, the last has padded steps."""
    rng = np.random.default_rng(0)
    windows, ids = CONFIG.vision.windows, CONFIG.ids
    tokens, mask = np.zeros((BATCH, WIDTH), np.int32), np.zeros((BATCH, WIDTH), bool)
    present = np.ones((BATCH, 2), bool)
    present[1, 0] = False
    for i in range(BATCH):
        prompt = [ids.end, *[ids.patch] * (windows * present[i].sum()), *rng.integers(1, 300, 9 + 3 * i)]
        tokens[i, -len(prompt) :], mask[i, -len(prompt) :] = prompt, True
    images = tuple(rng.uniform(-1, 1, (BATCH, *CONFIG.vision.image, 3)).astype(np.float32) for _ in range(2))
    observation = Observation(
        images, present, tokens, mask, np.zeros((BATCH, 1), np.float32), np.zeros(BATCH, np.int32)
    )
    actions = rng.normal(size=(BATCH, CONFIG.horizon, CONFIG.action_dim)).astype(np.float32)
    counted = np.ones(actions.shape, bool)
    counted[:, :, 5:] = False
    counted[-1, -3:] = False
    return observation, actions, counted


def loss_and_gradients(layout, remat="none"):
    policy = build(CONFIG, layout.runtime(remat, remat))
    specs = param_specs(policy)
    params = jax.device_put(initialise(build(CONFIG), 0), layout.params(specs, trainable=True))
    batch = jax.tree.map(lambda x: jax.device_put(x, layout.batch()), make_batch())
    keys = jax.random.split(jax.random.key(1), BATCH)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def run(params, batch, keys):
        observation, actions, counted = batch
        noise = draw_noise(keys, (2, CONFIG.horizon, CONFIG.action_dim))
        times = draw_times(policy.flow, keys, 2)

        def loss(params):
            bound = bind(policy, params)
            terms = flow_loss(bound, observation, actions, counted, jnp.ones(BATCH), noise, times, None)
            return loss_value(policy.flow, terms)

        return jax.value_and_grad(loss)(params)

    return run(params, batch, keys)


@pytest.mark.slow
def test_same_loss_and_gradients_on_a_mesh():
    devices = jax.devices()
    loss, grads = loss_and_gradients(Layout(make_mesh(1, 1, devices[:1])))
    assert np.isfinite(loss) and all(np.isfinite(g).all() for g in grads.values())
    other_loss, other_grads = loss_and_gradients(Layout(make_mesh(2, 2, devices[:4])), remat="full")
    assert error(other_loss, loss) <= 1e-6
    split = {path for path, g in other_grads.items() if not g.sharding.is_fully_replicated}
    assert any(path.startswith("expert.blocks") for path in split)
    errors = {path: np.abs(np.asarray(other_grads[path]) - g).max() for path, g in grads.items()}
    largest = {path: max(float(jnp.abs(g).max()), 1e-5) for path, g in grads.items()}
    worst = max(errors, key=lambda path: errors[path] / largest[path])
    assert errors[worst] / largest[worst] <= 1e-4, worst
