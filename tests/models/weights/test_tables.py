"""The weight table of each model: complete at full size, strict, and the same bytes both ways."""

import dataclasses
import math
import re
from collections import Counter
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from weight_files import BFLOAT16, random_tensors, write_tensors

from somaspeed_jax.models import groot, molmoact2, pi05
from somaspeed_jax.models.layers.param import Runtime, param_specs
from somaspeed_jax.models.weights import groot as groot_weights
from somaspeed_jax.models.weights import molmoact2 as molmoact2_weights
from somaspeed_jax.models.weights import pi05 as pi05_weights
from somaspeed_jax.models.weights.export import export_weights
from somaspeed_jax.models.weights.load import load_params
from somaspeed_jax.models.weights.safetensors_file import INDEX, WeightsError
from somaspeed_jax.models.weights.source import open_source
from somaspeed_jax.models.weights.table import choose_prefix, parameter_counts, place, prefixed, shapes

UPSTREAM = Path(__file__).parents[2] / "fixtures" / "upstream_tensors.txt"


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    model: ModuleType
    weights: ModuleType
    expert_tensor: str  # of the action expert, not square
    counts: tuple[int, int]  # total and trainable (expert), as upstream counts

    def table(self, size: str = "demo"):
        return self.weights.table(self.model.SIZES[size])

    def specs(self, size: str = "demo"):
        return param_specs(self.model.build(self.model.SIZES[size], Runtime()))


CASES = [
    Case(
        "pi05", pi05, pi05_weights,
        "paligemma_with_expert.gemma_expert.model.layers.1.mlp.down_proj.weight", (4_143_404_816, 693_422_112),
    ),
    Case(
        "groot", groot, groot_weights,
        "action_head.model.transformer_blocks.1.ff.net.2.weight", (3_144_016_000, 1_620_515_968),
    ),
    Case(
        "molmoact2", molmoact2, molmoact2_weights,
        "model.action_expert.blocks.1.mlp.down_proj.weight", (5_442_196_208, 577_564_448),
    ),
]  # fmt: skip


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request):
    return request.param


def read(directory, case, **options):
    source, table = open_source(directory), case.table()
    prefix = choose_prefix(list(source.names()), table, case.weights.PREFIXES)
    return load_params(source, prefixed(table, prefix), case.specs(), **options)


def refusal(directory, case):
    with pytest.raises(WeightsError) as error:
        read(directory, case)
    return str(error.value)


def same(a, b):
    assert a.keys() == b.keys()
    for path in a:
        np.testing.assert_array_equal(np.asarray(a[path]), np.asarray(b[path]), err_msg=path)


def test_the_published_layout_is_complete(case):
    """Names (layer numbers aside), shapes and how many of each equal upstream's own list; every parameter is filled."""
    table = case.table("published")
    pieces = place(table, case.specs("published"))
    assert pieces.keys() == case.specs("published").keys()
    upstream = shapes(table)
    ours = Counter((re.sub(r"\.\d+\.", ".N.", name), str(list(upstream[name]))) for name in parameter_counts(table))
    theirs, inside = Counter(), False
    for line in UPSTREAM.read_text().splitlines():
        if re.match(r"\w+: total", line):
            inside = line.startswith(f"{case.name}:")
        found = re.match(r"    [T-] x(\d+) +(\[.*\]) +(\S+)", line)
        if inside and found:
            theirs[found[3], found[2]] += int(found[1])
    assert ours == theirs and len(theirs) > 50


def test_counts_as_upstream_makes_them(case):
    counts = parameter_counts(case.table("published"))
    patterns = case.weights.UPSTREAM_TRAINABLE["expert"]
    trained = [name for name in counts if any(re.fullmatch(pattern, name) for pattern in patterns)]
    assert (sum(counts.values()), sum(counts[name] for name in trained)) == case.counts


def test_pi05_what_really_learns():
    specs = CASES[0].specs("published")
    sizes = {path: math.prod(spec.shape) for path, spec in specs.items()}
    patterns = pi05.trainable_patterns("expert")
    assert sum(n for path, n in sizes.items() if any(re.fullmatch(p, path) for p in patterns)) == 430_098_464
    assert sum(sizes.values()) == 3_244_377_872


def test_read_and_written_back_is_the_same_bytes(tmp_path, case):
    table, specs = case.table(), case.specs()
    tensors = random_tensors(table, dtype_of=lambda name: np.dtype(np.float32) if len(name) % 2 else BFLOAT16)
    source_prefix, export_prefix = case.weights.PREFIXES[-1], case.weights.PREFIXES[0]
    write_tensors(
        tmp_path / "in", {source_prefix + name: array for name, array in tensors.items()}, shard_bytes=400_000
    )
    source = open_source(tmp_path / "in")
    assert choose_prefix(list(source.names()), table, case.weights.PREFIXES) == source_prefix
    params = load_params(source, prefixed(table, source_prefix), specs)
    options = {"source_prefix": source_prefix, "export_prefix": export_prefix, "stored": "source"}
    done = export_weights(tmp_path / "out", source, table, specs, params, **options)
    assert done.trained > done.copied and done.zeros == 0
    found = open_source(tmp_path / "out")
    assert set(found.names()) == {export_prefix + name for name in tensors}
    for name, array in tensors.items():
        assert found.dtype(export_prefix + name) == array.dtype
        assert found.tensor(export_prefix + name).tobytes() == array.tobytes(), name


@pytest.mark.parametrize("case", [c for c in CASES if any(row.alias_of for row in c.table())], ids=lambda c: c.name)
def test_u26_the_tied_embedding_under_either_name_both_or_none(tmp_path, case):
    tensors = random_tensors(case.table())
    alias = next(row for row in case.table() if row.alias_of is not None)
    loaded = {}
    for present in ("either", alias.alias_of, alias.name):
        dropped = {alias.name, alias.alias_of} - {present} if present != "either" else set()
        write_tensors(tmp_path / str(present), {name: a for name, a in tensors.items() if name not in dropped})
        loaded[present] = read(tmp_path / str(present), case)
        same(loaded[present], loaded["either"])
    write_tensors(
        tmp_path / "none", {name: a for name, a in tensors.items() if name not in (alias.name, alias.alias_of)}
    )
    message = refusal(tmp_path / "none", case)
    assert f"missing: {alias.alias_of}" in message and alias.name in message and "(1 fault)" in message


def test_u26_weights_that_do_not_fit_are_refused_by_name_and_file(tmp_path, case):
    tensors = random_tensors(case.table())
    expert = case.expert_tensor
    shape, turned = list(tensors[expert].shape), list(tensors[expert].shape[::-1])
    assert shape != turned
    faulty = {
        "absent": ({name: a for name, a in tensors.items() if name != expert}, f"missing: {expert} {shape}"),
        "unknown": (tensors | {"other.weight": np.zeros(3, np.float32)}, "unexpected: other.weight [3] in model.safe"),
        "turned": (tensors | {expert: tensors[expert].T}, f"{expert} is {turned} (looks transposed) in model.safe"),
    }
    for name, (content, message) in faulty.items():
        write_tensors(tmp_path / name, content)
        text = refusal(tmp_path / name, case)
        assert message in text and "(1 fault)" in text and str(tmp_path / name) in text


def test_u26_files_that_are_missing_or_cut_short(tmp_path, case):
    tensors = random_tensors(case.table())
    for fault in ("gone", "short"):
        files = write_tensors(tmp_path / fault, tensors, shard_bytes=600_000)
        assert files[-1] == INDEX and len(files) > 3
        shard = tmp_path / fault / files[1]
        held = set(open_source(shard).names())
        if fault == "gone":
            shard.unlink()
        else:
            shard.write_bytes(shard.read_bytes()[:-40])
        text = refusal(tmp_path / fault, case)
        assert files[1] in text
        named = {name for name in held if re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.])", text)}
        assert named == held if fault == "gone" else named and named <= held
    (tmp_path / "empty").mkdir()
    assert "no model.safetensors" in refusal(tmp_path / "empty", case)
