"""Adapters of π0.5 against openpi's own: one trunk layer and one expert layer, outputs and gradients, float32.

The recording is made by fixtures/pi05_lora_openpi.py. openpi has an A and a B per query head; its output projection
contracts the heads in A and sums them again in B.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parity import ACTIVATION, GRADIENT, above, error, quick_jit

from somaspeed_jax.models import pi05
from somaspeed_jax.models.language.gemma import ROPE_THETA, ExpertLayer, GemmaConfig, TrunkLayer
from somaspeed_jax.models.layers.linear import Linear, Lora
from somaspeed_jax.models.layers.param import Runtime, bind, initial_value, initialise, param_specs, zeros
from somaspeed_jax.models.layers.rotary import rotary_angles
from somaspeed_jax.state import split_trainable

with np.load(Path(__file__).resolve().parents[1] / "fixtures" / "pi05_lora_openpi.npz") as _file:
    REFERENCE = {name: _file[name] for name in _file.files}

SHARED = {"depth": 1, "heads": 4, "head_width": 6}
TRUNK = TrunkLayer(GemmaConfig(width=12, mlp=20, lora=pi05.TRUNK_LORA, **SHARED), Runtime())
EXPERT = ExpertLayer(GemmaConfig(width=8, mlp=16, lora=pi05.EXPERT_LORA, **SHARED), Runtime(), zeros)


def group(name: str) -> dict[str, np.ndarray]:
    return {key.removeprefix(f"{name}/"): value for key, value in REFERENCE.items() if key.startswith(f"{name}/")}


def ours(openpi: dict[str, np.ndarray], suffix: str, d: int) -> dict[str, np.ndarray]:
    """A layer's tensors in openpi's layout -> by our paths.

    suffix: openpi's mark of the stream, "" or "_1"; d: its width. Kernels are [heads, d, e] there, [d, heads * e] here.
    """
    q, kv, out = (openpi[f"attn/{name}_einsum{suffix}/w"] for name in ("q", "kv", "attn_vec"))
    mlp = f"mlp{suffix}"
    found = {
        "attn.q.kernel": q.transpose(1, 0, 2).reshape(d, -1),
        "attn.k.kernel": kv[0, 0],
        "attn.v.kernel": kv[1, 0],
        "attn.out.kernel": out.reshape(-1, d),
        "mlp.gate.kernel": openpi[f"{mlp}/gating_einsum"][0],
        "mlp.up.kernel": openpi[f"{mlp}/gating_einsum"][1],
        "mlp.down.kernel": openpi[f"{mlp}/linear"],
    }
    for factor in ("a", "b"):
        q, kv, out = (openpi[f"attn/{name}_einsum{suffix}/lora_{factor}"] for name in ("q", "kv", "attn_vec"))
        gating, linear = (openpi[f"{mlp}/{name}_lora_{factor}"] for name in ("gating_einsum", "linear"))
        found |= {
            f"attn.q.lora.{factor}": q,
            f"attn.k.lora.{factor}": kv[0],
            f"attn.v.lora.{factor}": kv[1],
            f"attn.out.lora.{factor}": out.reshape(1, -1, out.shape[-1]) if factor == "a" else out,
            f"mlp.gate.lora.{factor}": gating[0][None],
            f"mlp.up.lora.{factor}": gating[1][None],
            f"mlp.down.lora.{factor}": linear[None],
        }
    for path, name in (("norm1", "pre_attention_norm"), ("norm2", "pre_ffw_norm")):
        if suffix:
            found[f"{path}.dense.kernel"] = openpi[f"{name}{suffix}/Dense_0/kernel"]
            found[f"{path}.dense.bias"] = openpi[f"{name}{suffix}/Dense_0/bias"]
        else:
            found[f"{path}.scale"] = openpi[f"{name}/scale"]
    return found


def both(openpi: dict[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    return {"trunk": ours(openpi, "", 12), "expert": ours(openpi, "_1", 8)}


def layers(params) -> dict[str, jax.Array]:
    """The trunk layer, and the expert layer over its keys and values."""
    seen = {name: jnp.asarray(value) for name, value in group("in").items()}
    valid, horizon = seen["valid"], seen["expert"].shape[1]
    angles = rotary_angles(jnp.cumsum(valid, axis=1) - 1, SHARED["head_width"], ROPE_THETA)
    trunk, prefix = bind(TRUNK, params["trunk"])(seen["trunk"], angles, valid)
    positions = jnp.sum(valid, axis=1)[:, None] + jnp.arange(horizon)
    angles = rotary_angles(positions, SHARED["head_width"], ROPE_THETA)[:, None]
    bound = bind(EXPERT, params["expert"])
    expert = bound(seen["expert"][:, None], prefix, valid, angles, seen["condition"][:, None])[:, 0]
    return {"trunk": trunk, "expert": expert}


@quick_jit
def outputs_and_gradients(params):
    def loss(params):
        out = layers(params)
        return sum(jnp.sum(out[name] * REFERENCE[f"in/{name}_weight"]) for name in out), out

    (_, out), gradients = jax.value_and_grad(loss, has_aux=True)(params)
    return out, gradients


def compare(params) -> tuple[dict[str, float], dict[str, float]]:
    """Relative errors of the outputs, on valid rows, and of the gradients."""
    out, gradients = outputs_and_gradients(params)
    rows = {"trunk": REFERENCE["in/valid"], "expert": slice(None)}
    recorded = both(group("grad"))
    return (
        {name: error(np.asarray(out[name])[rows[name]], REFERENCE[f"out/{name}"][rows[name]]) for name in out},
        {f"{s}.{path}": error(gradients[s][path], recorded[s][path]) for s in gradients for path in gradients[s]},
    )


@pytest.fixture(scope="module")
def params():
    return both(group("w"))


def test_outputs_and_gradients_equal_openpi(params):
    for name, module in (("trunk", TRUNK), ("expert", EXPERT)):
        assert {path: value.shape for path, value in params[name].items()} == {
            path: spec.shape for path, spec in param_specs(module).items()
        }
    outputs, gradients = compare(params)
    assert above(outputs, ACTIVATION) == {}
    assert above(gradients, GRADIENT) == {}
    assert sum(".lora." in name for name in gradients) == 28


@pytest.mark.parametrize("stream", ["trunk", "expert"])
@pytest.mark.parametrize("linear", ["attn.q", "attn.k", "attn.v", "attn.out", "mlp.gate", "mlp.up", "mlp.down"])
def test_a_changed_adapter_is_noticed(params, stream, linear):
    path = f"{linear}.lora.b"
    changed = {**params, stream: {**params[stream], path: params[stream][path] + 0.01}}
    outputs, gradients = compare(changed)
    read_by_expert = stream == "expert" or linear in ("attn.k", "attn.v")
    assert (outputs["expert"] > ACTIVATION) == read_by_expert
    assert (outputs["trunk"] > ACTIVATION) == (stream == "trunk")
    assert gradients[f"{stream}.{linear}.lora.a"] > GRADIENT


@pytest.mark.parametrize("groups, summed", [(1, 1), (4, 1), (1, 4)])
def test_merged_adapter_gives_the_same(groups, summed):
    linear = Linear(6, 8, Runtime(), lora=Lora(6, 8, pi05.TRUNK_LORA, out_groups=groups, summed=summed))
    params = initialise(linear, 0)
    x = jax.random.normal(jax.random.key(1), (3, 6))
    adapter = bind(linear, params).lora
    assert adapter is not None
    merged = x @ (params["kernel"] + adapter.delta()) + params["bias"]
    plain = x @ params["kernel"] + params["bias"]
    assert error(merged, bind(linear, params)(x)) < 1e-6
    assert error(plain, merged) > 1e-5


def test_fresh_adapters_are_openpis():
    """Ranks 16 and 32, scale 1, both factors normal with standard deviation 0.01."""
    policy = pi05.build(pi05.SIZES["demo"].with_lora())
    specs = param_specs(policy)
    adapters = [path for path in specs if ".lora." in path]
    assert len(adapters) == 2 * (7 + 2 + 7)  # trunk, keys and values of its last layer, expert
    rank_axis = {"a": -1, "b": -2}
    found = {path: specs[path].shape[rank_axis[path[-1]]] for path in adapters}
    assert found == {path: 16 if path.startswith("trunk") else 32 for path in adapters}
    for path in adapters:
        assert np.std(initial_value(specs[path], path, 0)) == pytest.approx(0.01, rel=0.1)
    assert policy.expert.layers.attn.out.lora.scale == policy.trunk.layers.mlp.up.lora.scale == 1


def test_what_the_lora_preset_trains():
    specs = param_specs(pi05.build(pi05.SIZES["demo"].with_lora()))
    trained, frozen = split_trainable(specs, pi05.trainable_patterns("lora"))
    assert {path.split(".")[0] for path in trained if ".lora." not in path} == {
        "vision", "projector", "action_in", "action_out", "time_in", "time_out",
    }  # fmt: skip
    assert {path.split(".")[0] for path in frozen} == {"embed", "trunk", "expert"}
    assert not [path for path in frozen if ".lora." in path]
