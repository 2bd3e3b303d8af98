"""One .safetensors file: sound ones read as the library reads them, broken ones are refused in words."""

import json
import os

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from weight_files import write_tensors

from somaspeed_jax.models.weights.safetensors_file import (
    DTYPES,
    INDEX,
    MAX_HEADER,
    SafetensorsFile,
    TensorToWrite,
    WeightsError,
    write_safetensors,
)

EXAMPLES = int(os.environ.get("SOMASPEED_FUZZ_EXAMPLES", "60"))


def some_tensors():
    rng = np.random.default_rng(0)
    return {
        "odd": rng.standard_normal((3, 5)).astype(np.float32),
        "half": rng.standard_normal(7).astype(ml_dtypes.bfloat16),
        "ids": np.arange(5, dtype=np.int64),
        "flag": np.array([True, False, True]),
        "scalar": np.array(2.5, np.float32),
        "empty": np.zeros((0, 4), np.float16),
    }


def build(header: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def one(**changes) -> dict:
    return {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


def test_reads_what_the_library_writes_and_the_library_reads_what_is_written(tmp_path):
    tensors = some_tensors()
    safetensors.numpy.save_file(tensors, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    write_tensors(tmp_path, tensors)
    for file in ("theirs.safetensors", "model.safetensors"):
        found = SafetensorsFile(tmp_path / file)
        assert found.metadata == {"format": "pt"}
        assert found.entries.keys() == tensors.keys()
        for name, array in tensors.items():
            read = found.tensor(name)
            assert read.dtype == array.dtype and read.shape == array.shape
            assert read.tobytes() == array.tobytes() == found.raw(name).tobytes()
            assert not read.flags.writeable
    for name, array in safetensors.numpy.load_file(tmp_path / "model.safetensors").items():
        assert array.dtype == tensors[name].dtype and array.tobytes() == tensors[name].tobytes()


def test_tensors_lie_as_the_library_lays_them_whatever_the_order_in_which_they_are_written(tmp_path):
    tensors = some_tensors()
    safetensors.numpy.save_file(tensors, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    write_tensors(tmp_path, dict(reversed(tensors.items())))
    ours, theirs = (SafetensorsFile(tmp_path / f"{name}.safetensors").entries for name in ("model", "theirs"))
    written = [name for name, entry in sorted(ours.items(), key=lambda item: item[1].start) if entry.stop > entry.start]
    expected = [
        name for name, entry in sorted(theirs.items(), key=lambda item: item[1].start) if entry.stop > entry.start
    ]
    assert written == expected


def test_every_tensor_of_a_written_file_is_aligned_to_its_type(tmp_path):
    write_tensors(tmp_path, some_tensors())
    entries = SafetensorsFile(tmp_path / "model.safetensors").entries.values()
    assert all(entry.start % entry.dtype.itemsize == 0 for entry in entries)


BROKEN = {
    "empty file": (b"", "0 bytes are too few"),
    "shorter than a header": (b"\x02\0\0\0\0\0\0\0{", "too few"),
    "a Git LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs pull"),
    "a pickle": (b"PK\x03\x04" + b"\0" * 60, "pickles are never read"),
    "a web page": (b"<!DOCTYPE html><html></html>", "web page"),
    "header beyond the file": (build(b"{}", length=1000), "announce a header of 1,000 bytes"),
    "header beyond reason": (build(b"{}", length=2**62), "announce a header"),
    "not JSON": (build(b"{nonsense"), "is not JSON"),
    "not UTF-8": (build(b"{\xff\xff}"), "is not JSON"),
    "nested without end": (build(b"[" * 100_000), "is not JSON"),
    "a number without end": (build(b'{"a":' + b"1" * 10_000 + b"}"), "is not JSON"),
    "not an object": (build([1, 2]), "expected an object"),
    "tensor is no object": (build({"a": 3}), "tensor 'a': expected dtype, shape and data_offsets, found int"),
    "unknown field": (build(one(extra=1), b"\0" * 8), "tensor 'a': expected dtype"),
    "unknown dtype": (build(one(dtype="F31"), b"\0" * 8), "unknown dtype 'F31'"),
    "dtype is no name": (build(one(dtype=["F32"]), b"\0" * 8), "unknown dtype"),
    "negative size": (build(one(shape=[-2]), b"\0" * 8), "whole numbers"),
    "size is a float": (build(one(shape=[2.0]), b"\0" * 8), "whole numbers"),
    "size is a bool": (build(one(shape=[True, 2]), b"\0" * 8), "whole numbers"),
    "shape too long": (build(one(shape=[1] * 40 + [2]), b"\0" * 8), "at most 16"),
    "shape beyond memory": (build(one(shape=[2**40, 2**40, 0], data_offsets=[0, 0])), "too large"),
    "shape product": (build(one(shape=[3]), b"\0" * 8), r"F32 \[3\] takes 12 bytes, data_offsets hold 8"),
    "offsets reversed": (build(one(data_offsets=[8, 0]), b"\0" * 8), r"\[begin, end\]"),
    "offsets negative": (build(one(data_offsets=[-8, 0]), b"\0" * 8), r"\[begin, end\]"),
    "three offsets": (build(one(data_offsets=[0, 8, 9]), b"\0" * 8), r"\[begin, end\]"),
    "named twice": (build(b'{"a":{},"a":{}}'), "named twice: 'a'"),
    "a field twice": (build(b'{"a":{"dtype":"F32","dtype":"F32"}}'), "named twice: 'dtype'"),
    "metadata is a list": (build({"__metadata__": []}), "__metadata__"),
    "metadata holds a number": (build({"__metadata__": {"a": 1}}), "__metadata__"),
    "cut short": (build(one(), b"\0" * 7), "cut short.*not whole: a"),
    "more than announced": (build(one(), b"\0" * 9), "1 bytes after the last tensor"),
    "hole before": (build(one(data_offsets=[4, 12]), b"\0" * 12), "4 bytes after the end of the header"),
    "overlap": (build({**one(), "b": one(data_offsets=[4, 12])["a"]}, b"\0" * 12), "'b' overlaps tensor 'a'"),
    "same bytes twice": (build({**one(), "b": one()["a"]}, b"\0" * 8), "overlaps"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_file_is_refused_by_name(tmp_path, what):
    content, message = BROKEN[what]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(WeightsError, match=message) as error:
        SafetensorsFile(path)
    assert str(path) in str(error.value)


def test_a_header_that_is_too_long_is_not_read(tmp_path):
    path = tmp_path / "long.safetensors"
    with path.open("wb") as file:
        file.write((MAX_HEADER + 1).to_bytes(8, "little"))
        file.truncate(MAX_HEADER + 100)
    with pytest.raises(WeightsError, match="announce a header"):
        SafetensorsFile(path)


def test_a_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(WeightsError, match=r"absent\.safetensors: cannot be read"):
        SafetensorsFile(tmp_path / "absent.safetensors")


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
    path = tmp_path / "model.safetensors"
    write_tensors(tmp_path, {"a": np.zeros(2, np.float32)})
    before = path.read_bytes()

    def fails():
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_safetensors(path, [TensorToWrite("a", np.dtype(np.float32), (2,), fails)], {})
    wrong = TensorToWrite("a", np.dtype(np.float32), (2,), lambda: np.zeros(3, np.float32))
    with pytest.raises(WeightsError, match="was given for"):
        write_safetensors(path, [wrong], {})
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_shards_hold_everything_and_the_index_says_where(tmp_path):
    tensors = {f"t{i}": np.full(10, i, np.float32) for i in range(5)}
    files = write_tensors(tmp_path, tensors, shard_bytes=80)
    assert files == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)] + [INDEX]
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"] == {"total_size": 200}
    for name, file in index["weight_map"].items():
        assert SafetensorsFile(tmp_path / file).tensor(name).tobytes() == tensors[name].tobytes()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(list(DTYPES)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)
tensor_like = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPES, "F7"]) | json_values,
        "shape": st.lists(st.integers(-1, 2**65) | st.integers(0, 4), max_size=20) | json_values,
        "data_offsets": st.lists(st.integers(-1, 2**65) | st.integers(0, 64), max_size=3) | json_values,
    }
)
headers = st.dictionaries(st.text(max_size=4) | st.just("__metadata__"), tensor_like | json_values, max_size=4)
files = st.one_of(
    st.binary(max_size=200),
    st.builds(build, headers, st.binary(max_size=64)),
    st.builds(lambda text, data: build(text, data), st.binary(max_size=100), st.binary(max_size=20)),
    st.builds(lambda header, n: build(header, b"", length=n), headers, st.integers(0, 2**64 - 1)),
)


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(content=files)
def test_any_bytes_are_read_or_refused(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "fuzz.safetensors"
    path.write_bytes(content)
    try:
        file = SafetensorsFile(path)
    except WeightsError as error:
        assert str(path) in str(error)
        return
    for name, entry in file.entries.items():
        assert file.tensor(name).shape == entry.shape


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_damaged_copy_is_refused_or_differs_only_in_its_data(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    sound = build({**one(), "b": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [8, 16]}}, bytes(range(16)))
    place, byte = data.draw(st.integers(0, len(sound) - 1)), data.draw(st.integers(0, 255))
    keep = data.draw(st.integers(0, len(sound)))
    path.write_bytes((sound[:place] + bytes([byte]) + sound[place + 1 :])[:keep])
    try:
        file = SafetensorsFile(path)
    except WeightsError:
        return
    assert keep == len(sound)
    assert sum(entry.stop - entry.start for entry in file.entries.values()) == 16
