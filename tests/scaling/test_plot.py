"""The scaling figure and table: what is drawn, from one file and from several, and what the tool writes."""

import runpy
import sys
from pathlib import Path

import pytest

from somaspeed_jax.scaling import plot, schema

ROOT = Path(__file__).parents[2]
SOMASPEED = ROOT / "tests" / "fixtures" / "somaspeed_scaling.json"


@pytest.fixture
def ours(tmp_path):
    path = tmp_path / "ours.json"
    records = [schema.measured("pi05", n, 8, [(1000 * n, 10.0), (900 * n, 10.0)]) for n in (1, 2)]
    schema.add(path, [*records, schema.failed("pi05", 4, 8, 1)])
    return path


def drawn(axes, label):
    return next(list(c[0].get_ydata()) for c in axes.containers if c.get_label() == label)


def test_both_systems_are_drawn_with_their_numbers(ours):
    files = [schema.read(ours), schema.read(SOMASPEED)]
    figure = plot.figure(files, ["ours", "theirs"])
    top = {axes.get_title(): axes for axes in figure.axes[:3]}
    assert list(top) == ["MolmoAct2", "GR00T N1.7", "π0.5"]
    # The record that did not finish is no point at zero.
    assert drawn(top["π0.5"], "SomaSpeed JAX") == [95.0, 190.0]
    assert drawn(top["π0.5"], "SomaSpeed")[0] == pytest.approx(43.6758, abs=1e-4)
    assert [c.get_label() for c in top["GR00T N1.7"].containers] == ["SomaSpeed"]
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["SomaSpeed", "SomaSpeed JAX", "perfect scaling"]


def test_two_files_of_one_system_are_told_apart(ours):
    content = schema.read(ours)
    assert plot.labels([content, content], ["h100", "a40"]) == ["SomaSpeed JAX (h100)", "SomaSpeed JAX (a40)"]


def test_table_shows_every_record_and_says_what_failed(ours):
    lines = plot.table([schema.read(ours), schema.read(SOMASPEED)], ["ours", "theirs"]).splitlines()
    assert len(lines) == 2 + 3 + 9
    assert "| π0.5 | SomaSpeed JAX | 2 | 8 | 190.00 | 180.00 – 200.00 | 100.0 % | 2 |" in lines
    assert "| π0.5 | SomaSpeed JAX | 4 | 8 | did not finish |  |  | 1 |" in lines
    assert "| π0.5 | SomaSpeed | 4 | 8 | 154.76 | 154.76 – 154.76 | 88.6 % | 1 |" in lines


def test_seven_files_have_seven_looks():
    assert len(set(plot._styles(7))) == 7


def test_nothing_complete_is_refused(tmp_path):
    schema.add(tmp_path / "f.json", [schema.failed("pi05", 1, 8, 1)])
    with pytest.raises(ValueError, match="no complete record"):
        plot.figure([schema.read(tmp_path / "f.json")], ["f"])


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["plot_scaling.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as status:
        runpy.run_path(str(ROOT / "tools" / "plot_scaling.py"), run_name="__main__")
    return status.value.code


def test_tool_writes_png_svg_and_table(ours, tmp_path, monkeypatch):
    stem = tmp_path / "out" / "fig.v1"
    assert run(monkeypatch, ours, SOMASPEED, "--output", stem) == 0
    assert stem.with_name("fig.v1.png").read_bytes().startswith(b"\x89PNG")
    svg = stem.with_name("fig.v1.svg").read_text()
    assert "<svg" in svg and "samples / s" in svg  # text stays text
    assert "MolmoAct2" in stem.with_name("fig.v1.md").read_text()


def test_tool_names_the_file_that_is_wrong(tmp_path, monkeypatch, capsys):
    (tmp_path / "bad.json").write_text("{}")
    assert run(monkeypatch, tmp_path / "bad.json") == 1
    assert "bad.json: top level" in capsys.readouterr().err
