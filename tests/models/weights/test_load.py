"""Upstream tensors into parameters: exact values, every fault at once, straight into shards."""

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from weight_files import BFLOAT16, random_tensors, write_tensors

from somaspeed_jax.models.layers.param import ParamSpec, zeros
from somaspeed_jax.models.weights import load
from somaspeed_jax.models.weights.load import load_params
from somaspeed_jax.models.weights.safetensors_file import WeightsError
from somaspeed_jax.models.weights.source import open_source
from somaspeed_jax.models.weights.table import Row

TABLE = [
    Row("layers.{i}.proj.weight", (16, 8), "stack.kernel", layers=(0, 1, 2), transpose=(1, 0)),
    Row("layers.{i}.norm", (8,), "stack.scale", layers=(0, 1, 2)),
    Row("layers.{i}.proj.weight", (16, 8), "last.kernel", layers=(3,), stacked=False, transpose=(1, 0)),
    Row("layers.{i}.norm", (8,), None, layers=(3,)),
    Row("qkv", (12, 8), "q", take=(0, 0, 4), transpose=(1, 0)),
    Row("qkv", (12, 8), "k", take=(0, 4, 12), transpose=(1, 0)),
    Row("old_rows", (6, 8), "table", part=(0, 0, 6)),
    Row("new_rows", (2, 8), "table", part=(0, 6, 8)),
    Row("head", (7, 4), None, alias_of="embed"),
    Row("embed", (7, 4), "embed"),
    Row("scalar", (), "scalar"),
    Row("extra", (3,), None, optional=True),
]


def spec(*shape, stacked=False):
    return ParamSpec(shape, "matrix", zeros, stacked)


SPECS = {
    "stack.kernel": spec(3, 8, 16, stacked=True),
    "stack.scale": spec(3, 8, stacked=True),
    "last.kernel": spec(8, 16),
    "q": spec(8, 4),
    "k": spec(8, 8),
    "table": spec(8, 8),
    "embed": spec(7, 4),
    "scalar": spec(),
}
TENSORS = random_tensors(TABLE)


def expected(tensors):
    t = {name: np.asarray(array, np.float32) for name, array in tensors.items()}
    return {
        "stack.kernel": np.stack([t[f"layers.{i}.proj.weight"].T for i in range(3)]),
        "stack.scale": np.stack([t[f"layers.{i}.norm"] for i in range(3)]),
        "last.kernel": t["layers.3.proj.weight"].T,
        "q": t["qkv"][:4].T,
        "k": t["qkv"][4:].T,
        "table": np.concatenate([t["old_rows"], t["new_rows"]]),
        "embed": t["embed"],
        "scalar": t["scalar"],
    }


def read(directory, tensors, **options):
    write_tensors(directory, tensors)
    return load_params(open_source(directory), TABLE, SPECS, **options)


def same(params, reference):
    assert params.keys() == reference.keys()
    for path, value in reference.items():
        np.testing.assert_array_equal(np.asarray(params[path]), value, err_msg=path)


def faults(directory, tensors):
    with pytest.raises(WeightsError) as error:
        read(directory, tensors)
    return str(error.value)


def test_every_tensor_lands_where_the_table_says(tmp_path):
    params = read(tmp_path, TENSORS)
    assert all(value.dtype == np.float32 for value in params.values())
    same(params, expected(TENSORS))


@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float16)])
def test_u19_half_precision_widens_exactly(tmp_path, dtype):
    tensors = {name: array.astype(dtype) for name, array in TENSORS.items()}
    same(read(tmp_path, tensors), expected(tensors))


def test_float32_is_rounded_to_nearest_even_only_where_asked(tmp_path):
    tensors = without("head") | {"embed": np.full((7, 4), np.float32(1 + 2**-8))}  # halfway: rounds to the even 1.0
    params = read(tmp_path, tensors, dtype_for=lambda path: ml_dtypes.bfloat16 if path == "embed" else np.float32)
    assert params["embed"].dtype == BFLOAT16 and params["q"].dtype == np.float32
    np.testing.assert_array_equal(np.asarray(params["embed"], np.float32), 1.0)


def test_straight_into_shards_reading_each_section_once(tmp_path, monkeypatch):
    mesh = jax.make_mesh((2, 4), ("replica", "fsdp"), devices=jax.devices()[:8])
    split = {"stack.kernel": P(None, None, "fsdp"), "table": P("fsdp"), "k": P(None, "fsdp"), "stack.scale": P()}
    sections = []
    real = load.read_section

    def counted(source, pieces, bounds, dtype):
        sections.append((pieces[0][0], bounds))
        return real(source, pieces, bounds, dtype)

    monkeypatch.setattr(load, "read_section", counted)
    shardings = {path: NamedSharding(mesh, split.get(path, P())) for path in SPECS}
    params = read(tmp_path, TENSORS, sharding_for=shardings.__getitem__)
    same(params, expected(TENSORS))
    for path, value in params.items():
        assert value.sharding.is_equivalent_to(shardings[path], value.ndim)
    assert len(sections) == len(set(sections)) == 3 * 4 + 5
    assert {bounds for name, bounds in sections if name == "old_rows"} == {((i, i + 2), (0, 8)) for i in range(0, 8, 2)}


def test_large_transposed_matrices_are_copied_in_squares():
    array = np.arange(300 * 200, dtype=np.float32).reshape(2, 150, 200).astype(BFLOAT16)
    out = np.empty((2, 200, 150), np.float32)
    load.copy_cast(out, array.transpose(0, 2, 1))
    np.testing.assert_array_equal(out, array.transpose(0, 2, 1).astype(np.float32))


def test_parameters_that_the_configuration_says_are_new_are_left_out(tmp_path):
    write_tensors(tmp_path, TENSORS)
    specs = SPECS | {"stack.lora.a": spec(3, 8, 2, stacked=True)}
    params = load_params(open_source(tmp_path), TABLE, specs, new={"stack.lora.a"})
    assert params.keys() == SPECS.keys()
    with pytest.raises(ValueError, match=r"no row for stack\.lora\.a"):
        load_params(open_source(tmp_path), TABLE, specs)


def without(*names):
    return {name: array for name, array in TENSORS.items() if name not in names}


def test_u26_either_name_of_a_tied_tensor_or_both(tmp_path):
    for present in (without("head"), without("embed"), TENSORS):
        same(read(tmp_path, present), expected(TENSORS))
        (tmp_path / "model.safetensors").unlink()


def test_u26_all_faults_at_once_by_name_and_file(tmp_path):
    tensors = without("head", "embed", "layers.1.norm")
    tensors["layers.0.proj.weight"] = tensors["layers.0.proj.weight"].T
    tensors["new_rows"] = np.zeros((3, 8), np.float32)
    tensors["old_rows"] = np.zeros((6, 8), np.int8)
    tensors["surprise"] = np.zeros((2, 2), np.float32)
    message = faults(tmp_path, tensors)
    assert f"{tmp_path}: the weights do not fit this model (6 faults):" in message
    for line in (
        "unexpected: surprise [2, 2] in model.safetensors",
        "missing: layers.1.norm [8]",
        "missing: embed [7, 4], and head, which may stand for it",
        "wrong shape: layers.0.proj.weight is [8, 16] (looks transposed) in model.safetensors, expected [16, 8]",
        "wrong shape: new_rows is [3, 8] in model.safetensors, expected [2, 8]",
        "wrong type: old_rows is int8 in model.safetensors; can read bfloat16, float16, float32",
    ):
        assert line in message


def test_a_tensor_that_is_not_read_is_still_expected(tmp_path):
    assert "missing: layers.3.norm [8]" in faults(tmp_path, without("layers.3.norm"))
    same(read(tmp_path, without("extra")), expected(TENSORS))


def test_tied_tensors_that_differ_are_refused_unless_upstream_holds_two(tmp_path):
    tensors = TENSORS | {"head": TENSORS["head"] + 1}
    assert "tied but different: embed in model.safetensors and head" in faults(tmp_path, tensors)
    table = [row if row.name != "head" else Row("head", (7, 4), None, alias_of="embed", untied=True) for row in TABLE]
    same(load_params(open_source(tmp_path), table, SPECS), expected(TENSORS))
