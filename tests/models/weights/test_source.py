"""Where weights come from: directories, shards, files and repositories."""

import json
import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from weight_files import write_tensors

from somaspeed_jax.models.weights.safetensors_file import INDEX, WeightsError
from somaspeed_jax.models.weights.source import find_directory, open_source, read_config

EXAMPLES = int(os.environ.get("SOMASPEED_FUZZ_EXAMPLES", "60"))
TENSORS = {f"t{i}": np.full(10, i, np.float32) for i in range(5)}


@pytest.fixture
def sharded(tmp_path):
    write_tensors(tmp_path, TENSORS, shard_bytes=80)
    return tmp_path


def edit_index(directory, change):
    index = json.loads((directory / INDEX).read_text())
    change(index["weight_map"])
    (directory / INDEX).write_text(json.dumps(index))


def test_a_directory_a_file_and_shards_hold_the_same(tmp_path, sharded):
    write_tensors(tmp_path / "single", TENSORS)
    for path in (tmp_path / "single", tmp_path / "single" / "model.safetensors", sharded, str(sharded)):
        source = open_source(path)
        assert set(source.names()) == set(TENSORS)
        for name, array in TENSORS.items():
            assert source.shape(name) == (10,) and source.dtype(name) == np.float32
            assert source.tensor(name).tobytes() == array.tobytes()
    assert open_source(sharded).where("t4") == "model-00003-of-00003.safetensors"


def test_a_file_of_another_name_can_be_named(tmp_path):
    write_tensors(tmp_path, TENSORS)
    (tmp_path / "model.safetensors").rename(tmp_path / "ema.safetensors")
    assert set(open_source(tmp_path / "ema.safetensors").names()) == set(TENSORS)
    with pytest.raises(WeightsError, match=r"no model\.safetensors.*found ema\.safetensors"):
        open_source(tmp_path)


def test_u26_no_weight_file(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    with pytest.raises(WeightsError, match=r"no model\.safetensors.*pytorch_model\.bin.*pickles are never read"):
        open_source(tmp_path)


def test_u26_a_shard_that_is_not_there_and_one_cut_short(sharded):
    (sharded / "model-00001-of-00003.safetensors").unlink()
    last = sharded / "model-00003-of-00003.safetensors"
    last.write_bytes(last.read_bytes()[:-1])
    with pytest.raises(WeightsError) as error:
        open_source(sharded)
    assert "model-00001-of-00003.safetensors: not there; it should hold t0, t1" in str(error.value)
    assert "cut short" in str(error.value) and "not whole: t4" in str(error.value)


def test_an_index_that_names_other_tensors(sharded):
    def change(weight_map):
        weight_map["ghost"] = "model-00001-of-00003.safetensors"
        del weight_map["t1"]
        weight_map["t2"] = "model-00003-of-00003.safetensors"

    edit_index(sharded, change)
    with pytest.raises(WeightsError) as error:
        open_source(sharded)
    for fault in ("has no tensor 'ghost'", "'t1' is not in the index", "'t2' is listed in model-00003-of-00003"):
        assert fault in str(error.value)


ELSEWHERE = [
    "../a.safetensors",
    "/etc/a.safetensors",
    "a/b.safetensors",
    "..\\a.safetensors",
    ".safetensors",
    "a.bin",
    3,
]


@pytest.mark.parametrize("file", ELSEWHERE)
def test_an_index_cannot_lead_out_of_its_directory(sharded, file):
    edit_index(sharded, lambda weight_map: weight_map.update(t0=file))
    with pytest.raises(WeightsError, match=r"tensor 't0' is in .*expected the plain name"):
        open_source(sharded)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": []}', '{"weight_map": {"a": "b"']
)
def test_an_index_that_is_none(sharded, text):
    (sharded / INDEX).write_text(text)
    with pytest.raises(WeightsError, match="index"):
        open_source(sharded)


def test_an_index_that_names_a_tensor_twice(sharded):
    (sharded / INDEX).write_text('{"weight_map": {"t0": "a.safetensors", "t0": "b.safetensors"}}')
    with pytest.raises(WeightsError, match="named twice: 't0'"):
        open_source(sharded)


def test_two_sets_of_weights_are_refused(sharded):
    (sharded / "model.safetensors").write_bytes(b"")
    with pytest.raises(WeightsError, match="holds both"):
        open_source(sharded)


def test_a_repository_is_fetched_only_where_no_such_path_exists(tmp_path, monkeypatch):
    asked = []

    def download(name, allow_patterns):
        asked.append(name)
        if name == "no/such":
            raise RuntimeError("404 not found\nlong explanation")
        assert not any("py" in pattern or "bin" in pattern for pattern in allow_patterns)
        return str(tmp_path / "fetched")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    write_tensors(tmp_path / "fetched", TENSORS)
    write_tensors(tmp_path / "lerobot" / "pi05_base", TENSORS)
    assert set(open_source("lerobot/pi05_base").names()) == set(TENSORS)
    assert asked == []
    assert set(open_source("lerobot/pi0_base").names()) == set(TENSORS)
    assert asked == ["lerobot/pi0_base"]
    with pytest.raises(WeightsError, match=r"no/such: no such directory here.*404 not found$"):
        find_directory("no/such")
    for path in ("./no/such", "/no/such", "no", "a/b/c", "../x", "~/nothing/here"):
        with pytest.raises(WeightsError, match="no such directory or file"):
            find_directory(path)
    assert asked == ["lerobot/pi0_base", "no/such"]


def test_config(tmp_path):
    with pytest.raises(WeightsError, match=r"config\.json: cannot be read"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(WeightsError, match="expected an object"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"type": "pi05"}')
    assert read_config(tmp_path) == {"type": "pi05"}


index_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=12) | st.sampled_from(["t0", "a.safetensors", "../a"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner, max_size=3),
    max_leaves=6,
)
indices = st.one_of(
    st.binary(max_size=100),
    index_values.map(lambda value: json.dumps(value).encode()),
    st.dictionaries(st.sampled_from(["t0", "t4", "x"]), index_values | st.just("model-00001-of-00003.safetensors")).map(
        lambda value: json.dumps({"weight_map": value}).encode()
    ),
)


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(content=indices)
def test_any_index_is_read_or_refused(tmp_path_factory, content):
    directory = tmp_path_factory.getbasetemp() / "fuzzed-index"
    if not directory.is_dir():
        write_tensors(directory, TENSORS, shard_bytes=80)
    (directory / INDEX).write_bytes(content)
    try:
        names = set(open_source(directory).names())
    except WeightsError as error:
        assert str(directory) in str(error)
        return
    assert names <= set(TENSORS)
