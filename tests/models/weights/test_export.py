"""Parameters back into upstream's files: the same bytes where nothing was trained, what was trained elsewhere."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_load import SPECS, TABLE, TENSORS, expected
from weight_files import BFLOAT16, write_tensors

from somaspeed_jax.models.layers.linear import Linear, Lora, LoraSpec
from somaspeed_jax.models.layers.param import Runtime, initialise, param_specs, stack
from somaspeed_jax.models.weights.export import export_weights
from somaspeed_jax.models.weights.fingerprint import compare, fingerprint, read_fingerprint, sampled_digest
from somaspeed_jax.models.weights.load import load_params
from somaspeed_jax.models.weights.lora import deltas
from somaspeed_jax.models.weights.safetensors_file import WeightsError
from somaspeed_jax.models.weights.source import open_source
from somaspeed_jax.models.weights.table import Row, prefixed

HALF = {name: array.astype(BFLOAT16) for name, array in TENSORS.items()}


@pytest.fixture
def source(tmp_path):
    write_tensors(tmp_path / "source", {f"m.{name}": array for name, array in HALF.items()})
    return open_source(tmp_path / "source")


def load(source, prefix="m."):
    return load_params(source, prefixed(TABLE, prefix), SPECS)


def same_bytes(found, tensors):
    assert set(found.names()) == set(tensors)
    for name, array in tensors.items():
        assert found.dtype(name) == array.dtype and found.tensor(name).tobytes() == array.tobytes(), name


def test_what_was_not_trained_is_the_same_bytes_under_another_prefix(tmp_path, source):
    done = export_weights(tmp_path / "out", source, TABLE, SPECS, {}, source_prefix="m.", export_prefix="model.")
    assert (done.trained, done.copied, done.zeros) == (0, len(HALF), 0)
    same_bytes(open_source(tmp_path / "out"), {f"model.{name}": array for name, array in HALF.items()})


def test_read_and_written_back_is_the_same_bytes(tmp_path, source):
    params = load(source)
    done = export_weights(tmp_path / "out", source, TABLE, SPECS, params, source_prefix="m.", stored="source")
    assert done.trained == len(HALF) - 2  # layers.3.norm and extra are not read
    same_bytes(open_source(tmp_path / "out"), HALF)


def test_trained_tensors_are_float32_and_the_rest_stays(tmp_path, source):
    trained = {path: load(source)[path] + 2**-20 for path in ("stack.kernel", "k", "embed")}
    export_weights(tmp_path / "out", source, TABLE, SPECS, trained, source_prefix="m.", shard_bytes=2000)
    found = open_source(tmp_path / "out")
    again = load_params(found, TABLE, SPECS)
    reference = expected(HALF) | {path: np.asarray(value) for path, value in trained.items()}
    for path, value in reference.items():
        np.testing.assert_array_equal(np.asarray(again[path]), value, err_msg=path)
    types = {name: found.dtype(name) for name in found.names()}
    for name in ("layers.0.proj.weight", "qkv", "embed", "head"):
        assert types[name] == np.float32, name
    for name in ("layers.3.proj.weight", "layers.0.norm", "old_rows", "scalar", "extra"):
        assert types[name] == BFLOAT16, name
    # The section of a shared tensor that was not trained keeps its values.
    np.testing.assert_array_equal(found.tensor("qkv")[:4], HALF["qkv"][:4].astype(np.float32))


def test_a_tied_name_is_written_where_the_source_has_it_and_an_untied_one_always(tmp_path):
    write_tensors(tmp_path / "source", {name: array for name, array in HALF.items() if name != "head"})
    source = open_source(tmp_path / "source")
    untied = [dataclasses.replace(row, untied=row.alias_of is not None) for row in TABLE]
    trained = {"embed": np.ones((7, 4), np.float32)}
    for values in ({}, trained):
        for table in (TABLE, untied):
            directory = tmp_path / f"out{len(values)}{table is untied}"
            export_weights(directory, source, table, SPECS, values)
            found = open_source(directory)
            assert ("head" in found.names()) == (table is untied)
            if table is untied:
                assert found.tensor("head").tobytes() == found.tensor("embed").tobytes()


def test_without_a_source_every_parameter_needs_a_value_and_the_rest_is_zeros(tmp_path, source):
    params = {path: np.asarray(value) for path, value in load(source).items()}
    done = export_weights(tmp_path / "out", None, TABLE, SPECS, params)
    assert done.zeros == 1
    found = open_source(tmp_path / "out")
    assert not found.tensor("layers.3.norm").any() and "extra" not in found.names()
    again = load_params(found, TABLE, SPECS)
    for path, value in params.items():
        np.testing.assert_array_equal(np.asarray(again[path]), value)
    del params["embed"], params["k"]
    with pytest.raises(WeightsError, match="no source, and no value for embed, k"):
        export_weights(tmp_path / "other", None, TABLE, SPECS, params)


def test_an_unread_tensor_that_upstream_asks_for_is_zeros_where_the_source_has_none(tmp_path):
    table = [*TABLE, Row("spare", (2, 2), None, optional=True, zeros=True)]
    write_tensors(tmp_path / "source", HALF)
    assert export_weights(tmp_path / "out", open_source(tmp_path / "source"), table, SPECS, {}).zeros == 1
    np.testing.assert_array_equal(open_source(tmp_path / "out").tensor("spare"), np.zeros((2, 2), np.float32))


def test_a_parameter_that_started_afresh_does_not_need_its_tensor(tmp_path):
    tensors = {name: array for name, array in HALF.items() if name != "scalar"} | {"old_rows": np.zeros((9, 9))}
    write_tensors(tmp_path / "source", tensors)
    trained = {"scalar": np.float32(3).reshape(()), "table": np.ones((8, 8), np.float32)}
    source = open_source(tmp_path / "source")
    assert set(load_params(source, TABLE, SPECS, new=trained)) == SPECS.keys() - trained.keys()
    export_weights(tmp_path / "out", source, TABLE, SPECS, trained)
    found = open_source(tmp_path / "out")
    assert found.tensor("scalar") == 3
    np.testing.assert_array_equal(found.tensor("old_rows"), np.ones((6, 8)))


def test_adapters_are_merged_in_float32_layer_by_layer(tmp_path):
    class Net(nnx.Module):
        def __init__(self):
            adapter = Lora(8, 16, LoraSpec(rank=2, alpha=4.0, init_b=0.5), out_groups=4)
            self.stack = stack(3, Linear(8, 16, Runtime(), bias=False, lora=adapter))
            self.last = Linear(8, 16, Runtime(), bias=False, lora=Lora(8, 16, LoraSpec(2, 2.0, 1.0, 1.0), summed=3))

    net = Net()
    specs, params = param_specs(net), initialise(net, 0)
    table = [row for row in TABLE if row.path in specs]
    tensors = {name: HALF[name] for row in table for name, _ in row.names()}
    write_tensors(tmp_path / "source", tensors)
    source = open_source(tmp_path / "source")
    done = export_weights(tmp_path / "out", source, table, specs, {}, deltas=deltas(net, params))
    assert done.trained == 4
    found = open_source(tmp_path / "out")
    a, b = (np.asarray(params[f"stack.lora.{name}"]) for name in "ab")  # [3, 4, 8, 2], [3, 4, 2, 4]
    for layer in range(3):
        delta = np.concatenate([a[layer, group] @ b[layer, group] for group in range(4)], axis=1) * 2
        reference = tensors[f"layers.{layer}.proj.weight"].astype(np.float32) + delta.T
        np.testing.assert_allclose(found.tensor(f"layers.{layer}.proj.weight"), reference, rtol=0, atol=1e-6)
        assert np.abs(delta).max() > 1e-2
    a, b = (np.asarray(params[f"last.lora.{name}"]) for name in "ab")  # [1, 8, 2], [3, 2, 16]
    reference = tensors["layers.3.proj.weight"].astype(np.float32) + (a[0] @ b.sum(axis=0)).T
    np.testing.assert_allclose(found.tensor("layers.3.proj.weight"), reference, rtol=0, atol=1e-5)


def test_an_export_is_whole_or_absent_and_never_overwrites(tmp_path, source):
    class Fails:
        shape = (7, 4)

        def __array__(self, *args, **kwargs):
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        export_weights(tmp_path / "out", source, TABLE, SPECS, {"embed": Fails()}, source_prefix="m.")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]
    with pytest.raises(WeightsError, match="exists and is not empty"):
        export_weights(tmp_path / "source", source, TABLE, SPECS, {}, source_prefix="m.")
    for name in ("../config.json", "/config.json", "a/b/c", "a/../b", ".hidden"):
        with pytest.raises(WeightsError, match="plain names"):
            export_weights(tmp_path / "out", source, TABLE, SPECS, {}, source_prefix="m.", files={name: b""})
    export_weights(tmp_path / "out", source, TABLE, SPECS, {}, source_prefix="m.", files={"config.json": b"{}"})
    assert (tmp_path / "out" / "config.json").read_bytes() == b"{}"


def test_values_that_do_not_belong_are_refused(tmp_path, source):
    with pytest.raises(WeightsError, match="not parameters of this model: other"):
        export_weights(tmp_path / "out", source, TABLE, SPECS, {"other": jnp.zeros(2)}, source_prefix="m.")
    with pytest.raises(WeightsError, match=r"embed is \[4, 7\], expected \[7, 4\]"):
        export_weights(tmp_path / "out", source, TABLE, SPECS, {"embed": jnp.zeros((4, 7))}, source_prefix="m.")


def test_a_fingerprint_names_what_was_not_trained_and_refuses_other_weights(tmp_path, source):
    saved = fingerprint(source, TABLE, {"stack.kernel", "embed"}, prefix="m.")
    assert "layers.3.norm" in saved and "extra" in saved  # not read, but an export copies them
    assert not {"layers.0.proj.weight", "embed", "head"} & saved.keys()
    compare(read_fingerprint(saved, "frozen.json"), saved, "the same")
    changed = dict(HALF)
    changed["layers.3.norm"] = changed["layers.3.norm"] + np.float32(1)
    changed["scalar"] = changed["scalar"].astype(np.float32)
    del changed["extra"]
    write_tensors(tmp_path / "other", changed)
    with pytest.raises(WeightsError) as error:
        compare(saved, fingerprint(open_source(tmp_path / "other"), TABLE, {"stack.kernel", "embed"}), "other")
    for words in (
        "missing: extra BF16 [3]",
        "layers.3.norm: dtype",
        "layers.3.norm: digest",
        "scalar: dtype is F32, was BF16",
    ):
        assert words in str(error.value)
    with pytest.raises(WeightsError, match=r"frozen\.json: tensor 'a' must have"):
        read_fingerprint({"a": {"dtype": "F32"}}, "frozen.json")


def test_the_digest_samples_first_and_last_page():
    rng = np.random.default_rng(0)
    large = rng.integers(0, 255, 3_000_000, np.uint8)
    digests = {sampled_digest(large)}
    for place in (0, 2_999_999, 1):
        other = large.copy()
        other[place] ^= 1
        digests.add(sampled_digest(other))
    assert len(digests) == 4
    assert sampled_digest(large.reshape(3000, 1000).T.copy().T) == sampled_digest(large)
