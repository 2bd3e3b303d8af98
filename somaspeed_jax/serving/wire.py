"""What travels between a robot and the policy server: msgpack with numpy arrays, as openpi-client writes and reads it.

Everything that arrives is untrusted. A message becomes an observation only after each part has been checked; nothing
is unpickled, and no array is made whose bytes are not in the message.

An array is a map with the byte-string keys `__ndarray__`, `data`, `dtype` (numpy's type string) and `shape`; a numpy
scalar one with `__npgeneric__`, `data` and `dtype` (openpi, packages/openpi-client: `msgpack_numpy.py`).
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgpack
import numpy as np

_PLAIN_TYPE = re.compile(r"[<>|=]?[biuf][1248]")  # bool, integers, floats: no objects, strings or records
_MAX_AXES = 8
_PROMPT_KEYS = ("prompt", "task")


class RequestError(ValueError):
    """A message that cannot be answered: says what was found, what was expected, and the fix. Sent to the client."""


def pack(message: Mapping[str, Any]) -> bytes:
    """A message of plain values and numpy arrays, as bytes."""
    return msgpack.Packer(default=_encode).pack(message)


def unpack(data: bytes | str) -> Any:
    """The message in `data`; arrays are read-only. Raises RequestError for anything that is not one."""
    if isinstance(data, str):
        raise RequestError("a text message; expected a binary one (msgpack, as openpi-client sends)")
    try:
        return msgpack.unpackb(data, object_hook=_decode)
    except RequestError:
        raise
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise RequestError(
            f"{len(data)} bytes that are not one msgpack message: {error or type(error).__name__}"
        ) from None


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}
    if isinstance(value, np.generic):
        return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}
    raise TypeError(f"cannot send a {type(value).__name__}")


def _decode(value: dict) -> Any:
    if b"__ndarray__" in value:
        data, shape = value.get(b"data"), value.get(b"shape")
        dtype = _dtype(value.get(b"dtype"))
        sizes = shape if isinstance(shape, list) and all(type(s) is int and s >= 0 for s in shape) else None
        if sizes is None or len(sizes) > _MAX_AXES or not isinstance(data, bytes):
            raise RequestError(f"an array of shape {str(shape)[:80]}; expected at most {_MAX_AXES} sizes, and bytes")
        if math.prod(sizes) * dtype.itemsize != len(data):
            raise RequestError(f"an array of shape {sizes} and type {dtype} with {len(data)} bytes of data")
        return np.frombuffer(data, dtype).reshape(sizes)
    if b"__npgeneric__" in value:
        try:
            return _dtype(value.get(b"dtype")).type(value.get(b"data"))
        except (TypeError, ValueError, OverflowError) as error:
            raise RequestError(f"a numpy scalar that is none: {error}") from None
    return value


def _dtype(text: Any) -> np.dtype:
    if not isinstance(text, str) or not _PLAIN_TYPE.fullmatch(text):
        raise RequestError(f"an array of type {str(text)[:40]!r}; expected bool, integers or floats")
    try:
        return np.dtype(text)
    except TypeError:
        raise RequestError(f"an array of type {text!r}, which numpy does not know") from None


def read_observation(
    message: Any,
    cameras: Sequence[str],
    state_dim: int,
    *,
    names: Mapping[str, str] | None = None,
    default_prompt: str = "",
) -> dict[str, Any]:
    """The observation in a message: `images` {camera: uint8 [h, w, 3]}, `state` float32 [s], `task` str.

    Keys are matched without `observation` and `images` in front, whether written with dots, with slashes or nested:
    "observation.images.top", "observation/images/top", "observation/top" and {"images": {"top": ...}} all mean camera
    top. The state is `state`, the task `prompt` or `task`. `names` maps a client's own short name to one of these.

    A picture is uint8 RGB, [h, w, 3] or [3, h, w]. The state is `state_dim` finite numbers in robot units.
    Raises RequestError for a key that is missing, unknown or there twice, and for a value of another form.
    """
    if not isinstance(message, dict):
        raise RequestError(f"a message of type {type(message).__name__}; expected a map from names to values")
    short = {_short(camera): camera for camera in cameras}
    found: dict[str, Any] = {}
    for key, value in _flatten(message):
        name = _short(key)
        name = (names or {}).get(name, name)
        name = "prompt" if name in _PROMPT_KEYS else name
        if name in found:
            raise RequestError(f"{name} is there twice, the second time as {key!r}")
        found[name] = value
    if default_prompt:
        found.setdefault("prompt", default_prompt)
    expected = {*short, "state", "prompt"}
    if set(found) != expected:
        unknown = sorted(set(found) - expected)[:20]
        raise RequestError(
            f"the observation should have {sorted(expected)}: missing {sorted(expected - set(found))}, "
            f"unknown {unknown}; send these names, or map yours when starting the server (--name)"
        )
    if not isinstance(found["prompt"], str) or not found["prompt"].strip():
        raise RequestError(f"prompt is {str(found['prompt'])[:80]!r}; expected the task in words")
    return {
        "images": {camera: _picture(camera, found[name]) for name, camera in short.items()},
        "state": _state(found["state"], state_dim),
        "task": found["prompt"],
    }


def _flatten(message: dict, prefix: str = ""):
    for key, value in message.items():
        if not isinstance(key, str):
            raise RequestError(f"a key of type {type(key).__name__} ({str(key)[:40]}); expected names")
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _short(key: str) -> str:
    parts = key.replace("/", ".").split(".")
    while len(parts) > 1 and parts[0] in ("observation", "images"):
        parts = parts[1:]
    return ".".join(parts)


def _picture(camera: str, value: Any) -> np.ndarray:
    if not isinstance(value, np.ndarray):
        raise RequestError(f"camera {camera}: a {type(value).__name__}, expected an array")
    if value.dtype == np.uint8 and value.ndim == 3 and value.size:
        if value.shape[2] == 3:
            return value
        if value.shape[0] == 3:
            return np.ascontiguousarray(value.transpose(1, 2, 0))
    raise RequestError(
        f"camera {camera}: shape {value.shape}, type {value.dtype}; expected uint8 RGB [h, w, 3] or [3, h, w]. Convert "
        "on the robot: floats in [0, 1] times 255, grey repeated three times, no alpha"
    )


def _state(value: Any, size: int) -> np.ndarray:
    try:
        array = np.asarray(value)
    except ValueError:
        array = np.empty(0, object)  # a ragged list
    if array.dtype.kind not in "iuf" or array.shape != (size,):
        raise RequestError(f"state: shape {array.shape}, type {array.dtype}; expected {size} numbers in robot units")
    state = array.astype(np.float32)
    if not np.isfinite(state).all():
        where = int(np.flatnonzero(~np.isfinite(state))[0])
        raise RequestError(f"state[{where}] is {array[where]}; expected finite numbers")
    return state
