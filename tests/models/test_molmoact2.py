"""MolmoAct2's network against LeRobot 0.6.1's, layer by layer, in float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from molmoact2_reference import CONFIG, error, from_upstream, layer, observation, read

from somaspeed_jax.flow import flow_loss, loss_value, sample_actions
from somaspeed_jax.models.layers.param import bind, param_specs
from somaspeed_jax.models.layers.rotary import rotary_angles
from somaspeed_jax.models.molmoact2 import build, time_features
from somaspeed_jax.models.vision.molmo import patches
from somaspeed_jax.models.weights.molmoact2 import table
from somaspeed_jax.models.weights.table import place

ACTIVATION, GRADIENT, NOTHING = 1e-5, 1e-4, 1e-7


@pytest.fixture(scope="module")
def reference():
    return read("molmoact2_tiny.safetensors")[0]


def activations(policy, reference):
    """Every recorded activation, recomputed layer by layer under upstream's name."""
    seen = {}
    obs = observation(reference)
    vision = policy.vision
    images = jnp.stack(obs.images, axis=1).reshape(-1, *obs.images[0].shape[1:])
    seen["vit_patch_embedding"] = vision.patch(patches(images, vision.sizes.patch))
    x, number, taps = seen["vit_patch_embedding"] + vision.position[...], 0, []
    for segment, blocks in zip(vision.segments, vision.sizes.segments, strict=True):
        for i in range(len(blocks)):
            x = seen[f"vit_block{number}"] = layer(segment, i)(x)
            number += 1
        taps.append(x)
    pooled = vision.pool(taps)
    seen["image_pooled"] = pooled.reshape(-1, 1, pooled.shape[-1])
    seen["image_features"] = vision.projector(pooled).reshape(-1, policy.config.text.width)

    x = seen["inputs_embeds"] = policy.prompt(obs)
    angles = rotary_angles(policy.positions(obs.token_mask), policy.config.text.head_width, policy.config.rope_theta)
    mask = policy.attention_mask(obs.tokens, obs.token_mask, training=True)
    for i in range(policy.config.layers - 1):
        x, kv = layer(policy.llm.layers, i)(x, angles, mask)
        seen[f"llm_layer{i}"] = x
        seen[f"llm_key{i}"], seen[f"llm_value{i}"] = (a.transpose(0, 2, 1, 3) for a in kv)
    last = policy.config.layers - 1
    seen[f"llm_key{last}"], seen[f"llm_value{last}"] = (a.transpose(0, 2, 1, 3) for a in policy.llm.last(x, angles))

    expert, memory = policy.expert, policy.condition(policy.encode(obs, None), obs, None)
    memory = policy.mask_steps(memory, ~jnp.asarray(reference["in/action_horizon_is_pad"]))
    time, flow_x = jnp.asarray(reference["in/time"]), jnp.asarray(reference["act/x_t"])
    c = expert.time_out(jax.nn.silu(expert.time_in(time_features(time, expert.sizes.time_width))))
    x = expert.action_in(flow_x)
    flat = lambda a: a.reshape(-1, *a.shape[2:])  # noqa: E731
    seen["time_conditioning"], seen["action_embed"] = flat(c), flat(x)
    for i in range(policy.config.layers):
        x = layer(expert.blocks, i)(x, jax.nn.silu(c), memory.keys[i], memory.values[i], memory)
        seen[f"expert_block{i}"] = flat(x)
    seen["pred_velocity"] = flat(policy.velocity(memory, flow_x, time, None))
    return seen


def training_loss(policy, params, reference):
    """The loss of the recorded batch, as a function of the parameters."""
    steps = ~reference["in/action_horizon_is_pad"]
    counted = steps[:, :, None] & ~reference["in/action_dim_is_pad"][:, None]
    bound = bind(policy, params)
    condition = bound.condition
    bound.condition = lambda *args: bound.mask_steps(condition(*args), jnp.asarray(steps))
    terms = flow_loss(
        bound,
        observation(reference),
        jnp.asarray(reference["in/action"]),
        jnp.asarray(counted),
        jnp.ones(len(counted)),
        jnp.asarray(reference["in/noise"]),
        jnp.asarray(reference["in/time"]),
        None,
    )
    return loss_value(policy.flow, terms)


@pytest.fixture(scope="module")
def run(reference):
    """params -> (activations, loss, gradients of the expert, sampled actions), compiled once."""
    policy = build(CONFIG)
    dims = jnp.asarray(~reference["in/action_dim_is_pad"])

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiles in half the time
    def everything(params):
        expert = {path: value for path, value in params.items() if path.startswith("expert.")}
        loss, grads = jax.value_and_grad(lambda p: training_loss(policy, params | p, reference))(expert)
        bound = bind(policy, params)
        noise = jnp.asarray(reference["in/sample_noise"])
        sampled = sample_actions(bound, observation(reference), noise, dims=dims, steps=4)
        return activations(bound, reference), loss, grads, sampled

    return everything


@pytest.fixture(scope="module")
def params(reference):
    return from_upstream({key[2:]: value for key, value in reference.items() if key.startswith("w/")})


@pytest.fixture(scope="module")
def result(run, params):
    return run(params)


def activation_errors(seen, reference):
    """Error of each recorded activation, over real tokens and real action steps."""
    tokens = reference["in/attention_mask"].astype(bool)
    steps = np.repeat(~reference["in/action_horizon_is_pad"], reference["in/time"].shape[1], axis=0)
    errors = {}
    for name, found in seen.items():
        expected = reference[("out/" if name == "pred_velocity" else "act/") + name]
        found, expected = np.asarray(found), np.asarray(expected)
        if name.startswith(("llm_key", "llm_value")):
            found, expected = (a.transpose(0, 2, 1, 3)[tokens] for a in (found, expected))
        elif name.startswith(("llm_layer", "inputs_embeds")):
            found, expected = found[tokens], expected[tokens]
        elif name.startswith(("expert_block", "action_embed", "pred_velocity")):
            found, expected = found[steps], expected[steps]
        errors[name] = error(found, expected)
    return errors


def gradient_errors(grads, reference):
    """Error of each gradient of the expert."""
    expected = {key[5:]: value for key, value in reference.items() if key.startswith("grad/")}
    assert len(expected) == 60
    specs = param_specs(build(CONFIG))
    errors = {}
    for path, pieces in place(table(CONFIG), specs).items():
        for piece in pieces:
            if not path.startswith("expert."):
                continue
            ours = np.zeros(piece.row.shape, np.float32)
            piece.write(np.asarray(grads[path]), ours)
            theirs = expected.pop(piece.name)
            assert np.abs(theirs).max() > NOTHING, piece.name  # queries and keys are normed: none is zero by symmetry
            errors[piece.name] = error(ours, theirs)
    assert not expected
    return errors


def test_activations(result, reference):
    errors = activation_errors(result[0], reference)
    assert len(errors) == 21
    assert max(errors.values()) <= ACTIVATION, errors


def test_loss(result, reference):
    assert error(result[1], reference["out/loss"]) <= ACTIVATION


def test_gradients(result, reference):
    errors = gradient_errors(result[2], reference)
    assert max(errors.values()) <= GRADIENT, errors


def test_sampled_actions(result, reference):
    sampled = np.asarray(result[3])
    assert error(sampled[:, :, :7], reference["out/sampled_actions"]) <= ACTIVATION
    assert not sampled[:, :, 7:].any()  # padded dimensions stay zero


def test_one_wrong_weight_shows(run, params, reference):
    """The checks above see a change of one element in the first weight that each depends on."""
    changed = dict(params)
    for path in ("vision.patch.kernel", "expert.time_in.kernel", "expert.action_in.kernel"):
        changed[path] = params[path].at[0, 0].add(0.01)
    seen, loss, grads, sampled = run(changed)
    quiet = {name: e for name, e in activation_errors(seen, reference).items() if e <= ACTIVATION}
    assert not quiet
    assert error(loss, reference["out/loss"]) > ACTIVATION
    quiet = {name: e for name, e in gradient_errors(grads, reference).items() if e <= GRADIENT}
    assert not quiet
    assert error(np.asarray(sampled)[:, :, :7], reference["out/sampled_actions"]) > ACTIVATION
