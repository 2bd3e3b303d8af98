"""The command lines over weights: what they print, and their exit status."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from weight_files import BFLOAT16, random_tensors, write_tensors

from somaspeed_jax.models import pi05
from somaspeed_jax.models.weights import pi05 as pi05_weights

ROOT = Path(__file__).resolve().parents[2]


def tool(name: str):
    spec = importlib.util.spec_from_file_location(f"tools_{name}", ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


@pytest.fixture
def from_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def counted(capsys, *arguments: str) -> dict:
    assert tool("count_parameters")(["--json", "--config", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("preset", "trained", "learns"),
    [
        ("expert", 693_422_112, 430_098_464),
        ("full", 4_143_404_816, 3_244_377_872),
        # The adapters of the last trunk layer's queries, output and MLP are not held: nothing reads them.
        ("lora", 466_957_072, 466_957_072 - 1_474_560),
    ],
)
def test_counts_of_pi05(capsys, from_root, preset, trained, learns):
    counts = counted(capsys, "configs/pi05.py", f"--config.tune.preset={preset}")
    assert counts["upstream_total"] == 4_143_404_816
    assert (counts["upstream_trained"], counts["learns"]) == (trained, learns)
    groups = {group["name"]: group for group in counts["groups"]}
    for key in ("upstream", "held", "learns"):
        assert sum(group[key] for group in groups.values()) == counts["upstream_total" if key == "upstream" else key]
    assert groups["not read"]["held"] == 0 and groups["vision"]["upstream"] == 412_442_352


def test_counts_as_a_table(capsys, from_root):
    assert tool("count_parameters")(["--config", "configs/pi05.py"]) == 0
    out = capsys.readouterr().out
    for number in ("4,143,404,816", "693,422,112", "3,244,377,872", "430,098,464", "not read", "899,026,944"):
        assert number in out
    assert tool("count_parameters")(["--config", "configs/pi05.py", "--config.tune.preest=full"]) == 2
    assert "did you mean config.tune.preset" in capsys.readouterr().err


def test_check_weights(capsys, from_root, tmp_path):
    tensors = random_tensors(pi05_weights.table(pi05.SIZES["demo"]), dtype_of=lambda _: BFLOAT16)
    check = tool("check_weights")
    write_tensors(tmp_path / "fits", {f"model.{name}": array for name, array in tensors.items()}, shard_bytes=500_000)
    (tmp_path / "fits" / "config.json").write_text('{"type": "pi05"}')
    assert check([str(tmp_path / "fits"), "--config", "configs/pi05.py:demo"]) == 0
    out = capsys.readouterr().out
    size = sum(array.size for array in tensors.values())
    files = len(list((tmp_path / "fits").glob("*.safetensors")))
    assert files > 1
    for words in (
        f"{len(tensors)} tensors in {files} files",
        "config.json says 'pi05'",
        f"{size:,} elements: {size:,} BF16",
        "names begin with 'model.'",
        "fits: every tensor is accounted for",
    ):
        assert words in out
    # The published sizes are another matter.
    assert check([str(tmp_path / "fits"), "--model", "pi05"]) == 1
    assert "wrong shape: model.action_in_proj.weight is [64, 8]" in capsys.readouterr().out
    write_tensors(tmp_path / "strange", {"a": np.zeros(3, np.float32)})
    assert check([str(tmp_path / "strange"), "--model", "pi05"]) == 1
    assert "no tensor of pi05" in capsys.readouterr().out
    for place in (tmp_path, tmp_path / "absent"):
        assert check([str(place), "--model", "pi05"]) == 2
        assert str(place) in capsys.readouterr().err


def test_export_refuses_in_words(capsys, tmp_path):
    assert tool("export")([str(tmp_path), str(tmp_path / "out")]) == 2
    assert "neither the workdir of a run" in capsys.readouterr().err
