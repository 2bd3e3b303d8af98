"""π0.5 against numbers recorded from LeRobot 0.6.1 (torch, float32) at a tiny size: forward, gradients, updates."""

import jax
import numpy as np
import optax
import pytest
from parity import ACTIVATION, GRADIENT, ZERO, above, error, pairs, quick_jit
from pi05_reference import (
    ACTIONS,
    CONFIG,
    META,
    NOISE,
    POLICY,
    PRESENT,
    REAL,
    REFERENCE,
    SPECS,
    TABLE,
    TIME,
    VALID,
    group,
    loss_of,
    observation,
    reference_params,
)

from somaspeed_jax.flow import sample_actions
from somaspeed_jax.models.layers.param import bind
from somaspeed_jax.models.pi05 import time_embedding, trainable_patterns
from somaspeed_jax.optim import Group, adamw, assign_groups, global_norms
from somaspeed_jax.state import split_trainable

TRAINABLE, FROZEN = split_trainable(SPECS, trainable_patterns("expert"))


class Watched:
    """A bound policy that notes each velocity as it is computed."""

    def __init__(self, policy, note):
        self.flow, self.encode, self.condition = policy.flow, policy.encode, policy.condition
        self.inner, self.note = policy, note

    def velocity(self, memory, x, time, keys):
        velocity = self.inner.velocity(memory, x, time, keys)
        jax.debug.callback(self.note, velocity[:, 0], ordered=True)
        return velocity


class Measure:
    """Everything that was recorded of forward pass and sampling, by its name in the recording, from parameters."""

    def __init__(self):
        self.velocities: list[np.ndarray] = []
        self.compiled = quick_jit(self.trace)

    def __call__(self, params) -> dict[str, np.ndarray]:
        self.velocities.clear()
        out = jax.device_get(self.compiled(params))
        jax.effects_barrier()
        return {**out, "out/sample_velocities": np.stack(self.velocities)}

    def trace(self, params) -> dict[str, jax.Array]:
        policy, seen = bind(POLICY, params), observation()
        out = {}
        for i, image in enumerate(seen.images):
            out[f"act/vision_{i}"] = policy.vision(image)
            out[f"act/features_{i}"] = policy.projector(out[f"act/vision_{i}"])
        out["act/prefix"], _ = policy.prefix(seen)
        context = policy.encode(seen, None)
        for i in range(CONFIG.trunk.depth):
            out[f"act/key_{i}"], out[f"act/value_{i}"] = (a[i] for a in context.keys_values)
        t = TIME[..., None, None]
        x = t * NOISE + (1 - t) * ACTIONS[:, None]
        out["out/velocity"] = policy.velocity(policy.condition(context, seen, None), x, TIME, None)[:, 0]
        watched = Watched(policy, lambda velocity: self.velocities.append(np.asarray(velocity)))
        out["out/sampled"] = sample_actions(watched, seen, NOISE[:, 0])[..., :REAL]
        return out


@pytest.fixture(scope="module")
def params():
    return reference_params()


@pytest.fixture(scope="module")
def measure():
    return Measure()


@pytest.fixture(scope="module")
def value_and_gradient():
    """Of the loss with respect to every parameter: full fine-tuning."""
    return quick_jit(jax.value_and_grad(loss_of))


def activation_errors(found: dict[str, np.ndarray]) -> dict[str, float]:
    """Relative errors on valid rows; what stands in the rows of padding is never read."""
    errors = {}
    for name, value in found.items():
        expected = REFERENCE[name]
        if name.startswith(("act/key", "act/value")):
            expected = expected.transpose(0, 2, 1, 3)  # heads after positions
        if name.startswith(("act/prefix", "act/key", "act/value")):
            value, expected = value[VALID], expected[:, PRESENT][VALID]
        errors[name] = error(value, expected)
    return errors


def gradient_errors(gradients) -> tuple[dict[str, float], dict[str, float]]:
    """Relative errors by upstream name; and the largest magnitudes, on either side, of those that are zero in theory.

    A bias on the keys adds the same to all scores of a query: softmax does not see it.
    """
    relative, zero = {}, {}
    for name, found, expected in pairs(TABLE, SPECS, gradients, group("grad")):
        if name.endswith("k_proj.bias"):
            zero[name] = float(max(np.abs(found).max(), np.abs(expected).max()))
        else:
            relative[name] = error(found, expected)
    return relative, zero


def test_activations_loss_and_sampling(params, measure, value_and_gradient):
    loss, _ = value_and_gradient(params)
    errors = activation_errors({**measure(params), "out/loss": loss})
    assert errors.keys() == {name for name in REFERENCE if name.startswith(("act/", "out/"))}
    assert above(errors, ACTIVATION) == {}


def test_every_gradient_of_full_fine_tuning(params, value_and_gradient):
    relative, zero = gradient_errors(value_and_gradient(params)[1])
    assert relative.keys() | zero.keys() == group("grad").keys()
    assert len(zero) == CONFIG.vision.depth
    assert above(relative, GRADIENT) == {}
    assert above(zero, ZERO) == {}


def test_what_upstream_gives_no_gradient_is_what_we_do_not_have():
    unread = {name for row in TABLE if row.path is None for name, _ in row.names()}
    assert unread == set(META["without_gradient"])


def test_gradients_and_three_adamw_updates_of_the_expert(params):
    recipe = META["adamw"]
    groups = assign_groups([Group("all", (".*",), weight_decay=recipe["weight_decay"])], TRAINABLE)
    optimizer = adamw(
        lambda step: recipe["lr"], groups, betas=tuple(recipe["betas"]), eps=recipe["eps"], clip_norm=recipe["clip"]
    )
    frozen = {path: params[path] for path in FROZEN}

    @quick_jit
    def update(trainable, state):
        grads = jax.grad(lambda t: loss_of({**frozen, **t}))(trainable)
        updates, state = optimizer.update(grads, state, trainable)
        return optax.apply_updates(trainable, updates), state, grads

    start = {path: params[path] for path in TRAINABLE}
    trained, state, grads = start, optimizer.init(start), []
    for _ in range(recipe["updates"]):
        trained, state, grad = update(trained, state)
        grads.append(grad)

    relative, zero = gradient_errors(grads[0])
    assert relative.keys() == group("moved").keys() and not zero
    assert above(relative, GRADIENT) == {}
    norms = [float(global_norms(grad, groups)["all"]) for grad in grads]
    assert error(norms, recipe["gradient_norms"]) <= ACTIVATION

    moves = {path: np.asarray(trained[path]) - np.asarray(start[path]) for path in TRAINABLE}
    first = {name: np.abs(grad) for name, grad, _ in pairs(TABLE, SPECS, grads[0], group("moved"))}
    errors, elements, undecided = {}, 0, 0
    for name, found, expected in pairs(TABLE, SPECS, moves, group("moved")):
        # Adam turns the sign of a gradient into a whole step. Where float32 cannot tell the sign, nothing is compared.
        grad = first[name]
        decided = (grad == 0) | (grad > 1e-5 * grad.max())
        errors[name] = float(np.abs(found - expected)[decided].max() / np.abs(group("w")[name]).max())
        elements, undecided = elements + grad.size, undecided + int((~decided).sum())
    assert above(errors, ACTIVATION) == {}
    assert undecided < 0.003 * elements


def test_time_embedding_is_its_float64_value():
    times = np.linspace(0, 1, 1001, dtype=np.float32)
    period = 4e-3 * 1000 ** np.linspace(0, 1, 512)
    angle = 2 * np.pi * times[:, None].astype(np.float64) / period
    expected = np.concatenate([np.sin(angle), np.cos(angle)], axis=-1)
    assert np.abs(quick_jit(time_embedding, static_argnums=1)(times, 1024) - expected).max() < 1e-6


# In the order of computation; what is computed from a changed number changes, what is computed before it does not.
ORDER = ["vision", "features", "prefix", "key_0", "value_0", "key_1", "value_1", "key_2", "value_2", "out"]
PERTURBED = {  # a weight and the first of ORDER that reads it
    "vision.patch.kernel": "vision",
    "vision.layers.attn.q.kernel": "vision",
    "projector.bias": "features",
    "embed.table": "prefix",
    "trunk.layers.norm1.scale": "key_0",
    "trunk.layers.attn.v.kernel": "value_0",
    "trunk.layers.attn.out.kernel": "key_1",
    "trunk.layers.mlp.down.kernel": "key_1",
    "trunk.last.norm1.scale": "key_2",
    "trunk.last.attn.v.kernel": "value_2",
    "expert.layers.norm1.dense.bias": "out",
    "expert.layers.attn.k.kernel": "out",
    "expert.layers.mlp.gate.kernel": "out",
    "expert.norm.dense.kernel": "out",
    "action_in.kernel": "out",
    "action_out.bias": "out",
    "time_in.kernel": "out",
    "time_out.bias": "out",
}


@pytest.mark.parametrize("path", PERTURBED)
def test_a_changed_weight_is_noticed(params, measure, value_and_gradient, path):
    changed = {**params, path: params[path] * 1.1 + 0.01}
    loss, gradients = value_and_gradient(changed)
    errors = activation_errors({**measure(changed), "out/loss": loss})
    first = ORDER.index(PERTURBED[path])
    reached = {name for name in errors if any(name.split("/")[-1].startswith(part) for part in ORDER[first:-1])}
    assert above(errors, ACTIVATION).keys() == reached | {name for name in errors if name.startswith("out/")}
    relative, _ = gradient_errors(gradients)
    unnoticed = relative.keys() - above(relative, GRADIENT).keys()
    assert not unnoticed if path == "vision.patch.kernel" else len(unnoticed) < len(relative)
