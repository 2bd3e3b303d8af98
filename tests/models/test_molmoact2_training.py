"""MolmoAct2 in training: full fine-tuning, adapters, 8 flow times, prompts of two lengths, an absent camera, both
behaviours; against LeRobot 0.6.1 and its main branch."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from molmoact2_reference import CONFIG, error, from_upstream, observation, read

from somaspeed_jax.flow import flow_loss, loss_value, sample_actions
from somaspeed_jax.models.layers.linear import LoraSpec
from somaspeed_jax.models.layers.param import bind, param_specs
from somaspeed_jax.models.molmoact2 import SIZES, build, trainable_patterns
from somaspeed_jax.models.weights.molmoact2 import table
from somaspeed_jax.models.weights.table import place

ACTIVATION, GRADIENT, NOTHING = 1e-5, 1e-4, 1e-7
OWN = SIZES["tiny"]  # positions from each sample's own first token
HEAD = dataclasses.replace(OWN, behaviour="head", flow=dataclasses.replace(OWN.flow, steps=4))
LORA = dataclasses.replace(CONFIG, lora=LoraSpec(rank=4, alpha=1.0))
QUICK = {"xla_backend_optimization_level": 0}  # compiles in half the time, to the same bits within rounding
ADAPTER = "lora/adapter/base_model.model."


@pytest.fixture(scope="module")
def weights():
    tensors, _ = read("molmoact2_tiny.safetensors")
    return {key[2:]: value for key, value in tensors.items() if key.startswith("w/")}


@pytest.fixture(scope="module")
def more():
    return read("molmoact2_more.safetensors")


@pytest.fixture(scope="module")
def head():
    return read("molmoact2_head.safetensors")


@functools.cache
def compiled(config):
    """(trained, other parameters, case) -> (loss, velocity), gradients; compiled once a configuration and shape."""
    policy = build(config)

    def loss(trained, rest, case):
        obs, steps, counted, action, noise, time = case
        bound, seen = bind(policy, rest | trained), []
        condition, velocity = bound.condition, bound.velocity
        bound.condition = lambda *args: bound.mask_steps(condition(*args), steps)
        bound.velocity = lambda *args: seen.append(velocity(*args)) or seen[0]
        keys = jax.random.split(jax.random.key(0), len(action))  # training, as upstream's recording
        terms = flow_loss(bound, obs, action, counted, jnp.ones(len(action)), noise, time, keys)
        return loss_value(config.flow, terms), seen[0]

    return jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=QUICK)


def evaluate(config, params, reference, preset, case):
    """(loss, gradients of what `preset` trains, velocity) of one recorded case."""
    names = ("action_horizon_is_pad", "action_dim_is_pad", "action", "noise", "time")
    step_pad, dim_pad, action, noise, time = (jnp.asarray(reference[f"{case}/{name}"]) for name in names)
    counted = ~step_pad[:, :, None] & ~dim_pad[:, None]
    patterns = trainable_patterns(preset, config.behaviour)
    trained = {p: v for p, v in params.items() if any(re.fullmatch(pattern, p) for pattern in patterns)}
    rest = {p: v for p, v in params.items() if p not in trained}
    inputs = (observation(reference, f"{case}/"), ~step_pad, counted, action, noise, time)
    (loss, velocity), grads = compiled(config)(trained, rest, inputs)
    return loss, grads, velocity


def check_velocity(found, reference, case):
    steps = ~reference[f"{case}/action_horizon_is_pad"]
    expected = reference[f"{case}/velocity"]
    mask = np.broadcast_to(steps[:, None], found.shape[:3])
    assert error(np.asarray(found)[mask], expected[mask]) <= ACTIVATION


def projections(gradient):
    """As recorded by tools/make_reference_molmoact2.py."""
    flat = np.asarray(gradient, np.float64).reshape(-1)
    i = np.arange(flat.size)
    return np.array([np.linalg.norm(flat), flat @ np.cos(0.7 * i), flat @ np.cos(1.3 * i + 1)])


def upstream_gradients(grads, config):
    """Our gradients in upstream's shapes, by upstream's names; a part that we do not hold is zero."""
    found = {}
    specs = param_specs(build(dataclasses.replace(config, lora=None)))
    for path, pieces in place(table(config), specs).items():
        for piece in pieces:
            if path in grads:
                tensor = found.setdefault(piece.name, np.zeros(piece.row.shape, np.float32))
                piece.write(np.asarray(grads[path]), tensor)
    return found


def check_gradients(found, reference, prefix):
    """Every recorded gradient: norm and two products, relative to the norm; mathematically zero ones absolutely."""
    expected = {key.removeprefix(prefix): value for key, value in reference.items() if key.startswith(prefix)}
    assert expected.keys() == found.keys()
    zero = [name for name, value in expected.items() if value[0] <= NOTHING]
    assert all(name.endswith("wk.bias") for name in zero), zero  # a softmax does not see a shift of all its keys
    errors = {}
    for name, value in expected.items():
        ours = projections(found[name])
        errors[name] = ours[0] * GRADIENT / NOTHING if name in zero else np.abs(ours - value).max() / value[0]
    worst = max(errors, key=lambda name: errors[name])
    assert errors[worst] <= GRADIENT, (worst, errors[worst])
    return len(errors) - len(zero)


def test_full_fine_tuning(weights, more):
    """8 flow times that share one context, prompts of 19 and 16 tokens, two padded steps, gradients of everything."""
    reference, meta = more
    loss, grads, velocity = evaluate(CONFIG, from_upstream(weights), reference, "full", "full")
    assert error(loss, reference["full/loss"]) <= ACTIVATION
    check_velocity(velocity, reference, "full")
    found = upstream_gradients(grads, CONFIG)
    assert check_gradients(found, reference, "full/grad/") == 137
    # What upstream trains without a gradient is what we do not hold.
    unread = {name for row in table(CONFIG) if row.path is None for name, _ in row.names()}
    assert set(meta["notes"]["full_without_gradient"]) <= unread - found.keys()


def test_full_gradients_see_one_wrong_weight(weights, more):
    reference, _ = more
    params = from_upstream(weights)
    params["vision.patch.kernel"] = params["vision.patch.kernel"].at[0, 0].add(0.01)
    _, grads, _ = evaluate(CONFIG, params, reference, "full", "full")
    with pytest.raises(AssertionError):
        check_gradients(upstream_gradients(grads, CONFIG), reference, "full/grad/")


def adapter_rows(config):
    """(upstream linear, row) of every kernel that the table reads and upstream adapts."""
    for row in table(config):
        if row.path is not None and row.path.endswith(".kernel") and not row.path.startswith("expert."):
            yield from ((name.removesuffix(".weight"), index, row) for name, index in row.names())


def test_lora(weights, more):
    reference, meta = more
    specs = param_specs(build(LORA))
    adapters = {path: np.zeros(spec.shape, np.float32) for path, spec in specs.items() if ".lora." in path}
    for linear, index, row in adapter_rows(LORA):
        path, at = row.path.removesuffix("kernel") + "lora", ... if index is None else index
        b = reference[f"{ADAPTER}{linear}.lora_B.default.weight"]
        if row.take is not None:
            b = b[row.take[1] : row.take[2]]
        adapters[f"{path}.a"][at] = reference[f"{ADAPTER}{linear}.lora_A.default.weight"].T[None]
        adapters[f"{path}.b"][at] = b.T[None]
    assert all(value.any() for value in adapters.values())
    params = from_upstream(weights) | {path: jnp.asarray(value) for path, value in adapters.items()}
    loss, grads, velocity = evaluate(LORA, params, reference, "lora", "lora")
    assert error(loss, reference["lora/loss"]) <= ACTIVATION
    check_velocity(velocity, reference, "lora")

    found = {f"base_model.model.{name}": value for name, value in upstream_gradients(grads, LORA).items()}
    for linear, index, row in adapter_rows(LORA):
        path, at = row.path.removesuffix("kernel") + "lora", ... if index is None else index
        name = f"base_model.model.{linear}"
        a, b = (np.asarray(grads[f"{path}.{factor}"])[at][0].T for factor in "ab")
        if row.take is not None:
            b = np.pad(b, [(row.take[1], 0), (0, 0)])  # queries of the last layer, which are not computed
        found |= {f"{name}.lora_A.default.weight": a, f"{name}.lora_B.default.weight": b}
    assert check_gradients(found, reference, "lora/grad/") == 130
    # Upstream adapts three more linears of the last layer, whose outputs nothing reads.
    without = {name.split(".lora_")[0] for name in meta["notes"]["lora_without_gradient"]}
    assert len(without) == 3
    ours = {f"base_model.model.{linear}" for linear, _, _ in adapter_rows(LORA)}
    assert ours | without == set(meta["notes"]["lora_linears"])


def test_padding_neighbours_and_an_absent_camera_change_nothing(weights, more):
    """One batch of two samples, padded beyond need, the second without its first camera: each equals upstream's run
    of that sample alone with the pictures that it has."""
    reference, _ = more
    cases, grey = ("alone", "one_camera"), 0.3
    width = max(reference[f"{case}/input_ids"].shape[1] for case in cases) + 5
    padded = {
        f"in/{name}": np.concatenate([np.pad(r, [(0, 0), (width - r.shape[1], 0)]) for r in rows])
        for name in ("input_ids", "attention_mask")
        for rows in [[reference[f"{case}/{name}"] for case in cases]]
    }
    both, single = (reference[f"{case}/pixel_values"] for case in cases)
    padded["in/pixel_values"] = np.concatenate([both, np.full_like(single, grey), single])
    obs = observation(padded, image_mask=[[True, True], [False, True]])
    noise, time, action = (
        jnp.asarray(np.concatenate([reference[f"{case}/{name}"] for case in cases]))
        for name in ("noise", "time", "action")
    )
    real = jnp.asarray(~reference["alone/action_dim_is_pad"])
    t = time[..., None, None]

    @functools.partial(jax.jit, compiler_options=QUICK)
    def run(params):
        bound = bind(build(OWN), params)
        memory = bound.condition(bound.encode(obs, None), obs, None)
        return bound.velocity(memory, (1 - t) * noise * real + t * action[:, None], time, None)

    velocity = run(from_upstream(weights))
    for i, case in enumerate(cases):
        assert error(velocity[i : i + 1], reference[f"{case}/velocity"]) <= ACTIVATION


def test_head_training(weights, head):
    """LeRobot's main branch: causal pictures, positions of each sample's own, every prompt token visible."""
    reference, _ = head
    loss, grads, velocity = evaluate(HEAD, from_upstream(weights), reference, "full", "full")
    assert error(loss, reference["full/loss"]) <= ACTIVATION
    check_velocity(velocity, reference, "full")
    found = upstream_gradients(grads, HEAD)
    assert "model.transformer.wte.new_embedding" in found
    check_gradients(found, reference, "full/grad/")


def test_head_in_use(weights, head):
    """Its pictures see each other there. A padded sample is what upstream gives for it alone: in a padded batch
    upstream's sampling, unlike its training, counts positions over the padding."""
    reference, _ = head
    obs = observation(reference, "full/")
    noise, dims = jnp.asarray(reference["full/noise"][:, 0]), jnp.asarray(~reference["full/action_dim_is_pad"])
    bound = bind(build(HEAD), from_upstream(weights))
    sample = jax.jit(lambda: sample_actions(bound, obs, noise, dims=dims), compiler_options=QUICK)
    for i, sampled in enumerate(sample()):
        assert error(sampled[None, :, :7], reference[f"use/actions_{i}"]) <= ACTIVATION
