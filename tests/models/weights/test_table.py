"""Rows and tables, read both ways."""

import numpy as np
import pytest

from somaspeed_jax.models.layers.param import ParamSpec, zeros
from somaspeed_jax.models.weights.table import Row, choose_prefix, parameter_counts, place, prefixed, shapes

ROWS = [
    Row("plain", (3, 5), "p"),
    Row("linear", (3, 5), "p", transpose=(1, 0)),
    Row("view", (4, 2, 3), "p", view=(4, 6), transpose=(1, 0)),
    Row("conv", (4, 3, 2, 2), "p", transpose=(2, 3, 1, 0), reshape=(12, 4)),
    Row("taken", (6, 5), "p", transpose=(1, 0), take=(0, 2, 4)),
    Row("all", (6, 5), "p", view=(2, 3, 5), take=(1, 1, 3), transpose=(2, 0, 1), reshape=(5, 4)),
]


def spec(*shape, stacked=False):
    return ParamSpec(shape, "matrix", zeros, stacked)


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_write_is_the_inverse_of_read(row):
    tensor = np.arange(np.prod(row.shape), dtype=np.float32).reshape(row.shape)
    section = row.read(tensor)
    assert section.shape == row.section_shape()
    other = np.full_like(tensor, -1)
    row.write(section, other)
    taken = other != -1
    np.testing.assert_array_equal(other[taken], tensor[taken])
    assert taken.sum() == section.size


def test_a_convolution_kernel_becomes_a_matrix_over_y_x_channel():
    kernel = np.arange(4 * 3 * 2 * 2).reshape(4, 3, 2, 2)  # out, channel, y, x
    matrix = ROWS[3].read(kernel)
    for y, x, c, out in np.ndindex(2, 2, 3, 4):
        assert matrix[(y * 2 + x) * 3 + c, out] == kernel[out, c, y, x]


def test_place_finds_the_box_of_every_tensor():
    table = [
        Row("a.{i}", (2, 3), "stack", layers=(4, 2), transpose=(1, 0)),
        Row("last.{i}", (2,), "single", layers=(7,), stacked=False),
        Row("low", (2, 3), "parts", part=(0, 0, 2)),
        Row("high", (1, 3), "parts", part=(0, 2, 3)),
        Row("copy", (2, 3), None, alias_of="low"),
    ]
    pieces = place(table, {"stack": spec(2, 3, 2, stacked=True), "single": spec(2), "parts": spec(3, 3)})
    assert [(piece.name, piece.box[0]) for piece in pieces["stack"]] == [("a.4", slice(0, 1)), ("a.2", slice(1, 2))]
    assert [(piece.name, piece.box) for piece in pieces["single"]] == [("last.7", (slice(0, 2),))]
    assert [piece.box[0] for piece in pieces["parts"]] == [slice(0, 2), slice(2, 3)]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([Row("a", (2,), "q")], "not a parameter"),
        ([Row("a", (3,), "p")], "does not fit"),
        ([Row("a", (1,), "p", part=(0, 0, 1))], "not filled exactly once"),
        ([Row("a", (2,), "p"), Row("b", (2,), "p")], "not filled exactly once"),
        ([Row("a", (1,), "p", part=(0, 0, 1)), Row("b", (1,), "p", part=(0, 0, 1))], "not filled exactly once"),
        ([Row("a", (2,), "p", part=(0, 1, 3))], "does not fit"),
    ],
)
def test_a_wrong_table_is_refused(table, message):
    with pytest.raises(ValueError, match=message):
        place(table, {"p": spec(2)})


def test_prefix_counts_and_shapes():
    table = [
        Row("x.{i}", (2, 3), "p", layers=(0, 1)),
        Row("x.head", (5,), None, alias_of="x.tail"),
        Row("x.other", (7,), None, alias_of="x.tail", untied=True),
        Row("x.tail", (5,), "q"),
        Row("x.frequencies", (4,), None, buffer=True),
    ]
    assert parameter_counts(table) == {"x.0": 6, "x.1": 6, "x.other": 7, "x.tail": 5}
    assert shapes(prefixed(table, "m."))["m.x.1"] == (2, 3)
    assert prefixed(table, "m.")[1].alias_of == "m.x.tail"
    assert choose_prefix(["m.x.0", "m.x.1", "x.0"], table, ("", "m.")) == "m."
    assert choose_prefix(["nothing"], table, ("", "m.")) == ""
