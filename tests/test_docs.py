"""README and docs: every command parses, every name, link and message in them exists."""

import argparse
import ast
import importlib
import importlib.util
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from somaspeed_jax.command_line import parse as parse_config
from somaspeed_jax.config import field_names

ROOT = Path(__file__).resolve().parents[1]
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "README.md", *ROOT.glob("docs/*.md"))}
# Run in an environment with torch and LeRobot, and import them: the flags are looked up in the text.
ELSEWHERE = ("make_reference_pi05", "make_reference_groot", "make_reference_molmoact2")


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))


def blocks(page: str) -> Iterator[tuple[str, str]]:
    """(language, text) of fenced blocks, and of indented ones as bash."""
    for found in re.finditer(r"^```(\w*)\n(.*?)^```", page, re.M | re.S):
        yield found[1], found[2]
    without = re.sub(r"^```.*?^```", "", page, flags=re.M | re.S)
    for found in re.finditer(r"(?:^ {4}.*\n)+", without, re.M):
        yield "bash", re.sub(r"^ {4}", "", found[0], flags=re.M)


def spans(page: str) -> list[str]:
    """What stands between backticks in the prose, line breaks as spaces."""
    prose = re.sub(r"^```.*?^```", "", page, flags=re.M | re.S)
    return [re.sub(r"\s+", " ", span) for span in re.findall(r"`([^`]+)`", prose)]


def commands(page: str) -> Iterator[list[str]]:
    """Words of each command, without what is set in front of it."""
    lines = [line for kind, text in blocks(page) if kind == "bash" for line in text.replace("\\\n", " ").splitlines()]
    for line in [*lines, *spans(page)]:
        for part in line.split("&&"):
            words = re.sub(r"^\s*(\w+=\S+\s+)+", "", part).strip()
            if re.match(r"(python3?|pip|pytest) ", words):
                yield shlex.split(words)


COMMANDS = sorted({(name, shlex.join(words)) for name, page in PAGES.items() for words in commands(page)})


class Parsed(Exception):
    """Raised in place of the work when a command line has been understood; holds what was left over."""


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"documented_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def understand(module: ModuleType, arguments: list[str], monkeypatch) -> list[str]:
    """Runs `main` up to the end of its argument parser; returns the arguments that the parser leaves to others."""
    known = argparse.ArgumentParser.parse_known_args

    def leave_rest(self, args=None, namespace=None):
        raise Parsed(known(self, args, namespace)[1])

    def all_known(self, args=None, namespace=None):
        rest = known(self, args, namespace)[1]
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        raise Parsed([])

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", leave_rest)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", all_known)
    monkeypatch.setattr("sys.argv", [str(module.__file__), *arguments])
    with pytest.raises(Parsed) as parsed:
        module.main(*([arguments] if module.main.__code__.co_argcount else []))
    return parsed.value.args[0]


@pytest.mark.parametrize("page, command", COMMANDS)
def test_command_is_understood(page, command, monkeypatch, capsys):
    program, *words = shlex.split(command)
    if program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert set(re.findall(r"\[(\w+)\]", command)) <= set(extras)
        return
    if program == "pytest" or words[:2] in (["-m", "pytest"], ["-m", "venv"]):
        assert all((ROOT / word).exists() for word in words if word.startswith("tests/"))
        return
    if words[0] == "-m":
        target, arguments = words[1], words[2:]
        if target == "somaspeed_jax.main":
            parse_config(arguments)
            return
        package = (ROOT / target.replace(".", "/")).is_dir()
        module = importlib.import_module(f"{target}.__main__" if package else target)
    else:
        path, arguments = ROOT / words[0], words[1:]
        if path.stem in ELSEWHERE:
            assert all(word.split("=")[0] in path.read_text() for word in arguments if word.startswith("--"))
            return
        module = load(path)
        if path.stem == "count_parameters":
            parse_config([word for word in arguments if word != "--json"])
            return
        if path.stem == "compute_stats":
            module.parse(arguments)  # with the options that need each other
            return
    rest = understand(module, arguments, monkeypatch)
    if rest:
        parse_config(rest)


def test_there_are_commands_and_wrong_ones_are_noticed(monkeypatch, capsys):
    assert len(COMMANDS) > 30
    with pytest.raises(SystemExit):
        understand(load(ROOT / "tools" / "export.py"), ["RUN", "out", "--rawest"], monkeypatch)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", PAGES[page]):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), f"{page}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)", file.read_text(), re.M)
            assert anchor in {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_fields_and_paths_in_the_text_exist(page):
    fields, sections = set(field_names()), {name.split(".")[0] for name in field_names() if "." in name}
    for span in spans(PAGES[page]):
        name = re.fullmatch(r"(?:--)?(?:config\.)?(\w+)\.(\w+)(=.*)?", span)
        if name and name[1] in sections and name[2] not in ("py", "safetensors"):
            assert f"{name[1]}.{name[2]}" in fields, f"{page}: {span}"
        if re.fullmatch(r"(somaspeed_jax|tools|tests|configs|docs|benchmarks)/[\w/.]+", span) and "new" not in span:
            assert (ROOT / span).exists(), f"{page}: {span}"


@pytest.mark.parametrize("page", PAGES)
def test_python_in_the_text_compiles_and_imports(page):
    for kind, text in blocks(PAGES[page]):
        if kind != "python":
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("somaspeed_jax"):
                assert all(hasattr(importlib.import_module(node.module or ""), name.name) for name in node.names)


def printed_texts() -> list[str]:
    """Every string of the program; the values in an f-string are …."""
    texts = []
    for path in [*ROOT.glob("somaspeed_jax/**/*.py"), *ROOT.glob("tools/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(str(p.value) if isinstance(p, ast.Constant) else "…" for p in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return texts


def test_messages_are_what_the_program_prints():
    messages = [text.strip() for kind, text in blocks(PAGES["docs/troubleshooting.md"]) if kind == "text"]
    texts = printed_texts()
    assert len(messages) > 15
    for message in messages:
        assert any(message in text for text in texts), message


def situations() -> dict[str, str]:
    """Case -> its cell of tests in the table of docs/parity.md."""
    rows = re.findall(r"^\| (U\d\d) \|[^|]*\| (.*) \|$", PAGES["docs/parity.md"], re.M)
    assert len(rows) == len(dict(rows))
    return dict(rows)


def test_every_situation_has_a_row_with_tests_that_exist_or_says_that_it_is_open():
    cells = situations()
    assert list(cells) == [f"U{number:02}" for number in range(1, 31)]
    for case, cell in cells.items():
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", cell)
        assert named or "*open:*" in cell, case
        for file, test in named:
            assert re.search(rf"^def {test}\(", (ROOT / "tests" / file).read_text(), re.M | re.I), (
                f"{case}: {file}::{test}"
            )


def test_suites_in_the_table_of_parity_exist():
    for span in spans(PAGES["docs/parity.md"]):
        if re.fullmatch(r"[\w/]*(test_\w+\.py|transforms/)", span):
            assert (ROOT / "tests" / span).exists(), span
