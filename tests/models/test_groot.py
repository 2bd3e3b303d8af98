"""GR00T N1.7 against numbers recorded from LeRobot 0.6.1 (torch, float32) at a tiny size, and what ours adds to it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from groot_reference import BATCH, CONFIG, GRIDS, PATCHES, REFERENCE, observation, reference_params, relative_error

from somaspeed_jax import flow
from somaspeed_jax.models import groot
from somaspeed_jax.models.base import Observation
from somaspeed_jax.models.language.qwen3 import causal_mask
from somaspeed_jax.models.layers.param import Runtime, bind, param_specs
from somaspeed_jax.models.vision.qwen3_vl import interleaved_angles, patch_angles, place_images
from somaspeed_jax.models.weights.groot import table
from somaspeed_jax.models.weights.table import place

ACTIVATION, GRADIENT, ZERO = 1e-5, 1e-4, 1e-7
QUICK = {"xla_backend_optimization_level": 0}  # compiles in half the time, to the same numbers within rounding
UPSTREAM = dataclasses.replace(CONFIG, mask_vl_padding=False)
POLICY = groot.build(UPSTREAM, Runtime())
NOISE, TIME = jnp.asarray(REFERENCE["in/noise"])[:, None], jnp.asarray(REFERENCE["in/time"])[:, None]


class WithPatches:
    """A bound policy whose `encode` takes the recorded patches: their two frames differ, which no picture gives."""

    def __init__(self, policy: groot.Groot):
        self.policy, self.flow = policy, policy.flow
        self.condition, self.velocity = policy.condition, policy.velocity

    def encode(self, observation: Observation, keys) -> groot.Context:
        return self.policy.encode_patches(PATCHES, observation)


def loss_of(params, noise=NOISE, time=TIME):
    """flow.py's loss on the recorded batch; noise [b, K, t, a], time [b, K]."""
    bound = WithPatches(bind(POLICY, params))
    actions, mask = jnp.asarray(REFERENCE["in/action"]), jnp.asarray(REFERENCE["in/action_mask"] > 0)
    terms = flow.flow_loss(bound, observation(), actions, mask, jnp.ones(BATCH), noise, time, None)
    return flow.loss_value(bound.flow, terms)


def layer(stacked: nnx.Module, index: int) -> nnx.Module:
    """One layer of a bound stack."""
    graph, state = nnx.split(stacked)
    return nnx.merge(graph, jax.tree.map(lambda x: x[index], state))


def vision_activations(policy: groot.Groot) -> dict[str, jax.Array]:
    tower, traces = policy.vision, []
    for patches, grid in zip(PATCHES, GRIDS, strict=True):
        x = tower.patch(patches)
        trace = {"act/vision_patch_embed": x}
        x = x + tower.positions_of(grid)
        for i, segment in enumerate(tower.segments):
            x = trace[f"act/vision_block{i}"] = layer(segment, 0)(x, patch_angles(grid, UPSTREAM.vision))
        trace["act/vision_features"], taps = tower(patches, grid)
        trace |= {f"act/deepstack{i}": tap for i, tap in enumerate(taps)}
        traces.append(trace)
    # The recording has samples below one another, and in each its cameras.
    return {name: jnp.concatenate([t[name][b] for b in range(BATCH) for t in traces]) for name in traces[0]}


def language_activations(policy: groot.Groot, seen: Observation) -> dict[str, jax.Array]:
    features, taps = policy._look(PATCHES, list(GRIDS))
    at = place_images(seen.tokens, seen.token_mask, seen.image_mask, GRIDS, image_token=150, merge=2)
    angles = interleaved_angles(at.positions, 16, UPSTREAM.rope_theta, UPSTREAM.mrope_section)
    out = {"act/position_ids": at.positions}

    def placed(x):
        return jnp.take_along_axis(x, at.source[..., None], axis=1)

    x = jnp.where(at.is_image[..., None], placed(features), policy.language.embed(seen.tokens))
    for i in range(UPSTREAM.text_layers):
        stacked, index = (policy.language.tapped, i) if i < len(taps) else (policy.language.rest, i - len(taps))
        x, _ = layer(stacked, index)(x, angles, causal_mask(seen.token_mask))
        out[f"act/llm_layer{i}"] = x
        if i < len(taps):
            x = x + jnp.where(at.is_image[..., None], placed(taps[i]), 0)
    return out


def expert_activations(policy: groot.Groot, seen: Observation) -> dict[str, jax.Array]:
    context = policy.encode_patches(PATCHES, seen)
    memory = policy.condition(context, seen, None)
    bucket = flow.network_time(policy.flow, TIME)
    t = TIME[..., None, None]
    noisy = t * REFERENCE["in/action"][:, None] + (1 - t) * NOISE
    actions, time = policy.head.action(noisy, bucket, memory.embodiment), policy.head.time(bucket)
    out = {
        "context": context.features,
        "act/vlln": policy.head.vlln(context.features),
        "act/vl_embeds": policy._attend_features(context, None),
        "act/state_features": memory.state[:, None],
        "act/action_features": actions[:, 0],
        "act/timestep_emb": time[:, 0],
        "out/pred_velocity": policy.velocity(memory, noisy, bucket, None)[:, 0],
    }
    actions = actions + policy.head.positions(jnp.arange(UPSTREAM.horizon))
    x = jnp.concatenate([memory.state[:, None, None], actions], axis=2)
    quad = layer(policy.head.quads, 0)
    text, image = (groot.CrossMemory(m.k[0], m.v[0], m.mask) for m in (memory.text, memory.image))
    for i, (block, read) in enumerate([(quad.text, text), (quad.self1, None), (quad.image, image), (quad.self2, None)]):
        x = block(x, jax.nn.silu(time), read, None)
        out[f"act/dit_block{i}"] = x[:, 0]
    return out


@functools.partial(jax.jit, compiler_options=QUICK)
def activations(params) -> dict[str, jax.Array]:
    """Everything that was recorded, by its name in the recording."""
    policy, seen = bind(POLICY, params), observation()
    sampled = flow.sample_actions(WithPatches(policy), seen, NOISE[:, 0])
    return {
        **vision_activations(policy),
        **language_activations(policy, seen),
        **expert_activations(policy, seen),
        "out/loss": loss_of(params),
        "out/sampled_actions": sampled[..., : REFERENCE["out/sampled_actions"].shape[-1]],
    }


def errors(ours: dict[str, jax.Array]) -> dict[str, float]:
    """Relative error of each recorded activation. Left-padded rows of the language layers hold nothing."""
    valid = REFERENCE["in/attention_mask"] > 0
    found = {}
    for name, value in ours.items():
        value, reference = np.asarray(value), REFERENCE["act/llm_layer2" if name == "context" else name]
        if name == "act/position_ids":  # upstream's first row numbers the text alone
            value, reference = value[:, valid], reference[1:][:, valid]
        elif name.startswith(("act/llm", "context")):
            value, reference = value[valid], reference[valid]
        found[name] = relative_error(value, reference)
    return found


@pytest.fixture(scope="module")
def params():
    return reference_params(UPSTREAM)


@pytest.fixture(scope="module")
def gradient():
    """Of the trained parameters, by all parameters."""

    def loss(head, rest):
        return loss_of(rest | head)

    compiled = jax.jit(jax.grad(loss), compiler_options=QUICK)

    def of(params):
        head = {path: value for path, value in params.items() if path.startswith("head.")}
        return compiled(head, {path: value for path, value in params.items() if path not in head})

    return of


def test_activations_equal_upstream(params):
    found = errors(activations(params))
    recorded = {name for name in REFERENCE if name.startswith(("act/", "out/"))}
    # These are inner values of modules that are compared by their inputs and their output.
    assert recorded - found.keys() == {"act/decoder_out", "act/dit_out", "out/sample_velocities"}
    assert {name: error for name, error in found.items() if not error <= ACTIVATION} == {}


def gradient_errors(gradients) -> tuple[dict[str, float], dict[str, float]]:
    """Relative errors by upstream name, and largest values of the key biases, whose gradient is zero."""
    pieces = place(table(UPSTREAM), param_specs(POLICY))
    relative, zero = {}, {}
    for path, gradient in gradients.items():
        for piece in pieces[path]:
            recorded, ours = REFERENCE[f"grad/{piece.name}"], np.asarray(gradient)[piece.box]
            if piece.name.endswith("to_k.bias"):
                zero[piece.name] = float(np.abs(ours).max())
            elif piece.row.take is not None:  # one embodiment's row: absent ones have exactly no gradient
                reference = piece.section(recorded)
                whole = np.abs(recorded).max()
                relative[f"{piece.name}[{piece.row.take[1]}]"] = float(np.abs(ours - reference).max() / whole)
                if not reference.any():
                    assert not ours.any(), f"{piece.name}: a gradient in the row of an absent embodiment"
            else:
                relative[piece.name] = relative_error(ours, piece.section(recorded))
    return relative, zero


def test_all_trainable_gradients_equal_upstream(params, gradient):
    relative, zero = gradient_errors(gradient(params))
    recorded = {name[5:] for name in REFERENCE if name.startswith("grad/")}
    assert {name.split("[")[0] for name in relative} | zero.keys() == recorded
    assert {name: error for name, error in relative.items() if not error <= GRADIENT} == {}
    assert {name: value for name, value in zero.items() if value > ZERO} == {}


# Each weight, and the first thing recorded that it must change; what is computed from that changes as well.
PERTURBED = {
    "vision.patch.kernel": ["act/vision_patch_embed", "act/vision_features", "act/deepstack0", "act/deepstack1"],
    "vision.positions.table": ["act/vision_block0"],
    "vision.segments.1.qkv.kernel": ["act/vision_block1", "act/vision_block2"],
    "vision.taps.0.norm.scale": ["act/deepstack0", "act/llm_layer1"],
    "language.embed.table": ["act/llm_layer0", "context"],
    "language.rest.q_norm.scale": ["act/llm_layer2", "context"],
    "head.vlln.bias": ["act/vlln", "act/vl_embeds"],
    "head.features.mlp.fc2.bias": ["act/vl_embeds", "out/loss"],
    "head.state.fc2.offset": ["act/state_features", "act/dit_block0"],
    "head.action.w3.kernel": ["act/action_features", "out/sampled_actions"],
    "head.time.fc1.bias": ["act/timestep_emb", "act/dit_block0"],
    "head.text_kv.kernel": ["act/dit_block0"],
    "head.image_kv.bias": ["act/dit_block2"],
    "head.quads.self1.qkv.kernel": ["act/dit_block1"],
    "head.quads.self2.mlp.fc1.kernel": ["act/dit_block3", "out/pred_velocity"],
    "head.positions.table": ["act/dit_block0"],
    "head.decoder.mlp.fc2.kernel": ["out/pred_velocity", "out/loss", "out/sampled_actions"],
}


@pytest.mark.parametrize("path", PERTURBED)
def test_a_changed_weight_is_noticed(params, gradient, path):
    changed = {**params, path: params[path] * 1.01 + 1e-3}
    found = errors(activations(changed))
    assert [name for name in PERTURBED[path] if not found[name] > ACTIVATION] == []
    relative, _ = gradient_errors(gradient(changed))
    assert max(relative.values()) > GRADIENT
