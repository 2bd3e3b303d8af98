"""openpi's JAX tree: read as its own einsums read it, and refused by the names of its own arrays."""

import dataclasses

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from weight_files import write_tensors

from somaspeed_jax.models import pi05
from somaspeed_jax.models.layers.param import Runtime, param_specs
from somaspeed_jax.models.weights import openpi
from somaspeed_jax.models.weights.export import export_weights
from somaspeed_jax.models.weights.load import load_params
from somaspeed_jax.models.weights.openpi import OpenpiSource, open_pi05
from somaspeed_jax.models.weights.pi05 import EXPERT_HEAD, TRUNK_HEAD, table
from somaspeed_jax.models.weights.safetensors_file import WeightsError
from somaspeed_jax.models.weights.source import SafetensorsSource, open_source
from somaspeed_jax.models.weights.table import prefixed, shapes

CONFIG = pi05.SIZES["demo"]
SPECS = param_specs(pi05.build(CONFIG, Runtime()))


def random_arrays(config=CONFIG, seed=0):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(leaf.shape, np.float32) for name, leaf in openpi.leaves(config).items()}


def save(directory, arrays, *, value=True, item="params"):
    tree = {}
    for name, array in arrays.items():
        node, keys = tree, [*name.split("/"), *(["value"] if value else [])]
        for key in keys[:-1]:
            node = node.setdefault(key, {})
        node[keys[-1]] = jnp.asarray(array)
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save((directory / item).absolute(), {"params": tree})


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory, arrays = tmp_path_factory.mktemp("openpi"), random_arrays()
    save(directory, arrays)
    return directory, arrays, load_params(OpenpiSource(directory, CONFIG), table(CONFIG), SPECS)


def close(a, b):
    a, b = np.asarray(a), np.asarray(b)
    np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * np.abs(b).max())


def test_every_tensor_of_the_table_is_there_but_the_unused_heads():
    config = pi05.SIZES["published"]
    found = {
        name: pick(np.empty(leaf.shape, "V0")).shape
        for leaf in openpi.leaves(config).values()
        for name, pick in leaf.tensors.items()
    }
    expected = shapes(table(config))
    assert expected.keys() - found.keys() == {TRUNK_HEAD, EXPERT_HEAD}
    assert found == {name: expected[name] for name in found}


def test_attention_is_openpis_einsums(saved):
    _, arrays, params = saved
    rng = np.random.default_rng(1)
    for stack, suffix, gemma in (("trunk.layers", "", CONFIG.trunk), ("expert.layers", "_1", CONFIG.expert)):
        x = rng.standard_normal((5, gemma.width), np.float32)
        heads = rng.standard_normal((5, gemma.heads, gemma.head_width), np.float32)
        q = arrays[f"PaliGemma/llm/layers/attn/q_einsum{suffix}/w"]
        kv = arrays[f"PaliGemma/llm/layers/attn/kv_einsum{suffix}/w"]
        out = arrays[f"PaliGemma/llm/layers/attn/attn_vec_einsum{suffix}/w"]
        for layer in range(gemma.depth - (suffix == "")):
            ours = {name: np.asarray(params[f"{stack}.attn.{name}.kernel"])[layer] for name in ("q", "k", "v", "out")}
            close((x @ ours["q"]).reshape(heads.shape), np.einsum("TD,NDH->TNH", x, q[layer]))
            both = np.einsum("SD,CKDH->CSKH", x, kv[layer])
            close((x @ ours["k"])[:, None], both[0])
            close((x @ ours["v"])[:, None], both[1])
            close(heads.reshape(5, -1) @ ours["out"], np.einsum("TNH,NHD->TD", heads, out[layer]))
    close(x @ np.asarray(params["expert.layers.norm1.dense.kernel"])[2],
          x @ arrays["PaliGemma/llm/layers/pre_attention_norm_1/Dense_0/kernel"][2])  # fmt: skip
    last = np.asarray(params["trunk.last.attn.k.kernel"])
    kv = arrays["PaliGemma/llm/layers/attn/kv_einsum/w"]
    np.testing.assert_array_equal(last, kv[-1, 0, 0])


def test_mlp_norms_embedding_and_projections(saved):
    _, arrays, params = saved
    same = {
        "expert.layers.mlp.gate.kernel": arrays["PaliGemma/llm/layers/mlp_1/gating_einsum"][:, 0],
        "expert.layers.mlp.up.kernel": arrays["PaliGemma/llm/layers/mlp_1/gating_einsum"][:, 1],
        "expert.layers.mlp.down.kernel": arrays["PaliGemma/llm/layers/mlp_1/linear"],
        "trunk.layers.mlp.up.kernel": arrays["PaliGemma/llm/layers/mlp/gating_einsum"][:-1, 1],
        "trunk.layers.norm1.scale": arrays["PaliGemma/llm/layers/pre_attention_norm/scale"][:-1],
        "trunk.layers.norm2.scale": arrays["PaliGemma/llm/layers/pre_ffw_norm/scale"][:-1],
        "trunk.last.norm1.scale": arrays["PaliGemma/llm/layers/pre_attention_norm/scale"][-1],
        "expert.layers.norm2.dense.bias": arrays["PaliGemma/llm/layers/pre_ffw_norm_1/Dense_0/bias"],
        "expert.norm.dense.kernel": arrays["PaliGemma/llm/final_norm_1/Dense_0/kernel"],
        "embed.table": arrays["PaliGemma/llm/embedder/input_embedding"],
        "projector.kernel": arrays["PaliGemma/img/head/kernel"],
        "action_in.kernel": arrays["action_in_proj/kernel"],
        "action_out.kernel": arrays["action_out_proj/kernel"],
        "time_out.bias": arrays["time_mlp_out/bias"],
    }
    for path, array in same.items():
        np.testing.assert_array_equal(np.asarray(params[path]), array, err_msg=path)


def test_vision_is_openpis_convolution_and_attention(saved):
    _, arrays, params = saved
    rng = np.random.default_rng(2)
    width, patch = CONFIG.vision.width, CONFIG.vision.patch
    picture = rng.standard_normal((patch, patch, 3), np.float32)
    kernel = arrays["PaliGemma/img/embedding/kernel"]
    close(picture.reshape(-1) @ np.asarray(params["vision.patch.kernel"]), np.einsum("yxc,yxcd->d", picture, kernel))
    np.testing.assert_array_equal(np.asarray(params["vision.position"]), arrays["PaliGemma/img/pos_embedding"][0])
    block = "PaliGemma/img/Transformer/encoderblock/MultiHeadDotProductAttention_0"
    x = rng.standard_normal((5, width), np.float32)
    for ours, theirs in (("q", "query"), ("k", "key"), ("v", "value")):
        reference = (
            np.einsum("sd,dnh->snh", x, arrays[f"{block}/{theirs}/kernel"][1]) + arrays[f"{block}/{theirs}/bias"][1]
        )
        found = x @ np.asarray(params[f"vision.layers.attn.{ours}.kernel"])[1]
        found = found + np.asarray(params[f"vision.layers.attn.{ours}.bias"])[1]
        close(found.reshape(reference.shape), reference)
    heads = x.reshape(5, CONFIG.vision.heads, -1)
    out = np.asarray(params["vision.layers.attn.out.kernel"])[0]
    close(x @ out, np.einsum("snh,nhd->sd", heads, arrays[f"{block}/out/kernel"][0]))
    fc1 = arrays["PaliGemma/img/Transformer/encoderblock/MlpBlock_0/Dense_0/kernel"]
    np.testing.assert_array_equal(np.asarray(params["vision.layers.mlp.fc1.kernel"]), fc1)


def test_leaves_without_value_and_in_bfloat16_and_the_params_directory_itself(tmp_path, saved):
    _, arrays, params = saved
    small = {name: array.astype(ml_dtypes.bfloat16) for name, array in arrays.items()}
    save(tmp_path, small, value=False)
    source = open_pi05(tmp_path / "params", CONFIG)
    assert isinstance(source, OpenpiSource)
    for path, value in load_params(source, table(CONFIG), SPECS).items():
        np.testing.assert_array_equal(np.asarray(value), np.asarray(params[path]).astype(ml_dtypes.bfloat16))


def test_faults_are_named_as_openpi_names_them(tmp_path):
    arrays = random_arrays()
    arrays["PaliGemma/llm/layers/attn/q_einsum/lora_a"] = np.zeros(3, np.float32)
    arrays["action_in_proj/kernel"] = arrays["action_in_proj/kernel"].T
    del arrays["time_mlp_in/bias"]
    save(tmp_path, arrays)
    with pytest.raises(WeightsError) as error:
        OpenpiSource(tmp_path, CONFIG)
    for line in (
        "(3 faults)",
        "unexpected: PaliGemma/llm/layers/attn/q_einsum/lora_a [3]",
        "wrong shape: action_in_proj/kernel is [64, 8], expected [8, 64]",
        "missing: time_mlp_in/bias [64]",
    ):
        assert line in str(error.value)


def test_a_directory_that_is_none(tmp_path):
    with pytest.raises(WeightsError, match="neither it nor its"):
        OpenpiSource(tmp_path, CONFIG)
    (tmp_path / "_METADATA").write_text("{}")
    with pytest.raises(WeightsError, match=r"orbax cannot read it|not π0.5"):
        OpenpiSource(tmp_path, CONFIG)


def test_exported_in_lerobots_layout_with_both_heads(tmp_path, saved):
    directory, arrays, params = saved
    source = open_pi05(directory, CONFIG)
    done = export_weights(tmp_path / "out", source, table(CONFIG), SPECS, {}, export_prefix="model.")
    assert done.zeros == 1
    found = open_source(tmp_path / "out")
    assert len(list(found.names())) == len(shapes(table(CONFIG)))
    embedding = arrays["PaliGemma/llm/embedder/input_embedding"]
    np.testing.assert_array_equal(found.tensor(f"model.{TRUNK_HEAD}"), embedding)
    assert not found.tensor(f"model.{EXPERT_HEAD}").any()
    again = load_params(found, prefixed(table(CONFIG), "model."), SPECS)
    for path, value in params.items():
        np.testing.assert_array_equal(np.asarray(again[path]), np.asarray(value))


def test_lerobots_layout_opens_as_itself(tmp_path):
    write_tensors(tmp_path, {"a": np.zeros(1, np.float32)})
    assert isinstance(open_pi05(tmp_path, CONFIG), SafetensorsSource)


def test_counts_under_openpis_freeze_filters():
    config = pi05.SIZES["published"]
    both = config.with_lora()
    assert openpi.trainable_count(config) == 3_353_433_872
    assert openpi.trainable_count(both) == 466_957_072
    assert openpi.trainable_count(dataclasses.replace(config, trunk=both.trunk)) == 872_771_344
    assert openpi.trainable_count(dataclasses.replace(config, expert=both.expert)) == 2_947_619_600
