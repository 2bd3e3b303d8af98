"""Messages that are what they should be, and a great many that are not."""

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from somaspeed_jax.serving.wire import RequestError, pack, read_observation, unpack

CAMERAS = ("observation.images.top", "observation.images.wrist")
RED = np.zeros((4, 6, 3), np.uint8)
RED[..., 0] = 255


def message(**changes):
    return {"observation/top": RED, "observation/wrist": RED, "observation/state": [0.0, 1.0], "prompt": "go"} | changes


def read(m, **kwargs):
    return read_observation(m, CAMERAS, 2, **kwargs)


ARRAY = {b"__ndarray__": True, b"data": b"\0" * 8, b"dtype": "<f4", b"shape": [2]}


def test_arrays_and_values_go_there_and_back():
    sent = {
        "a": np.arange(6, dtype=np.int16).reshape(2, 3),
        "b": np.float32(2.5),
        "c": [1, "x", None],
        "d": np.zeros((0, 3)),
    }
    found = unpack(pack(sent))
    np.testing.assert_array_equal(found["a"], sent["a"])
    assert found["a"].dtype == np.int16
    assert found["b"] == sent["b"]
    assert isinstance(found["b"], np.float32)
    assert found["c"] == sent["c"]
    assert found["d"].shape == (0, 3)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "0 bytes"),
        (b"\xc1 never used", "12 bytes"),
        (msgpack.packb({"a": 1})[:-1], "3 bytes"),
        (msgpack.packb(1) * 2, "2 bytes"),
        (b"\x91" * 5000 + b"\x00", "5001 bytes"),  # lists in lists
        ("text", "a text message"),
        (msgpack.packb({b"__ndarray__": True}), "type 'None'"),
        (msgpack.packb({**ARRAY, b"dtype": "|O"}), "type '|O'"),
        (msgpack.packb({**ARRAY, b"dtype": "<f3"}), "type '<f3'"),
        (msgpack.packb({**ARRAY, b"dtype": "<b8"}), "numpy does not know"),
        (msgpack.packb({**ARRAY, b"shape": [-2]}), "expected at most 8 sizes"),
        (msgpack.packb({**ARRAY, b"shape": [1] * 9}), "expected at most 8 sizes"),
        (msgpack.packb({**ARRAY, b"shape": [2**62, 2**62]}), "8 bytes of data"),
        (msgpack.packb({**ARRAY, b"shape": [3]}), "8 bytes of data"),
        (msgpack.packb({**ARRAY, b"data": "text"}), "and bytes"),
        (msgpack.packb({b"__npgeneric__": True, b"dtype": "|u1", b"data": "x"}), "numpy scalar"),
    ],
)
def test_what_is_no_message_is_refused(data, words):
    with pytest.raises(RequestError) as caught:
        unpack(data)
    assert words in str(caught.value)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_no_bytes_do_anything_but_refuse(data):
    try:
        read(unpack(data))
    except RequestError:
        return
    raise AssertionError("random bytes were an observation")


@pytest.mark.parametrize(
    "m",
    [
        message(),
        {"observation.images.top": RED, "observation.images.wrist": RED, "observation.state": [0, 1], "task": "go"},
        {"images": {"top": RED, "wrist": RED}, "state": np.array([0, 1], np.float64), "prompt": "go"},
        {"images": dict.fromkeys(CAMERAS, RED), "state": [0, 1], "task": "go"},
        {"observation": {"images": {"top": RED, "wrist": RED}, "state": np.array([0, 1])}, "prompt": "go"},
        message(**{"observation/top": np.ascontiguousarray(RED.transpose(2, 0, 1))}),
    ],
)
def test_every_accepted_spelling_gives_the_same_observation(m):
    found = read(unpack(pack(m)))
    assert tuple(found["images"]) == CAMERAS
    for picture in found["images"].values():
        np.testing.assert_array_equal(picture, RED)
    np.testing.assert_array_equal(found["state"], np.array([0, 1], np.float32))
    assert found["state"].dtype == np.float32
    assert found["task"] == "go"


def test_a_client_s_own_names_and_a_default_prompt():
    m = message()
    m["observation/image"] = m.pop("observation/top")
    del m["prompt"]
    found = read(m, names={"image": "top"}, default_prompt="tidy up")
    assert tuple(found["images"]) == CAMERAS
    assert found["task"] == "tidy up"


@pytest.mark.parametrize(
    ("picture", "form"),
    [
        (RED / np.float32(255), "shape (4, 6, 3), type float32"),
        (RED[..., 0], "shape (4, 6), type uint8"),
        (RED[..., :1], "shape (4, 6, 1), type uint8"),
        (np.dstack([RED, RED[..., :1]]), "shape (4, 6, 4), type uint8"),
        (RED[None], "shape (1, 4, 6, 3), type uint8"),
        (RED.astype(np.int64), "type int64"),
        (np.zeros((0, 6, 3), np.uint8), "shape (0, 6, 3)"),
        (RED.tolist(), "a list, expected an array"),
    ],
)
def test_other_forms_of_picture_are_refused_by_name(picture, form):
    with pytest.raises(RequestError) as caught:
        read(message(**{"observation/wrist": picture}))
    assert "camera observation.images.wrist" in str(caught.value)
    assert form in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"observation/state": [0.0]}, "state: shape (1,), type float64; expected 2 numbers"),
        ({"observation/state": [0.0, float("nan")]}, "state[1] is nan"),
        ({"observation/state": [[0.0], [1.0, 2.0]]}, "expected 2 numbers"),
        ({"observation/state": "0 1"}, "expected 2 numbers"),
        ({"observation/state": [True, False]}, "expected 2 numbers"),
        ({"prompt": "  "}, "expected the task in words"),
        ({"prompt": 3}, "expected the task in words"),
        ({"observation/left": RED}, "unknown ['left']"),
        ({"images": {"top": RED}}, "top is there twice, the second time as 'images.top'"),
        ({"task": "stay"}, "prompt is there twice"),
        ({7: 1}, "a key of type int"),
    ],
)
def test_other_values_are_refused(changes, words):
    with pytest.raises(RequestError) as caught:
        read(message() | changes)
    assert words in str(caught.value)


def test_a_missing_camera_is_refused_with_both_lists():
    m = message()
    del m["observation/wrist"]
    with pytest.raises(RequestError, match=r"should have \['prompt', 'state', 'top', 'wrist'\]: missing \['wrist'\]"):
        read(m)
    with pytest.raises(RequestError, match="of type list"):
        read([1])
