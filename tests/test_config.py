"""What is refused before any device work, and how."""

from pathlib import Path

import pytest

from somaspeed_jax.command_line import parse
from somaspeed_jax.config import Config, ConfigError, field_names, from_json, resolve, to_config_dict, to_json

ROOT = Path(__file__).resolve().parents[1]
PI05 = str(ROOT / "configs" / "pi05.py")


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))


def test_U27_misspelled_override_names_the_nearest_field():
    with pytest.raises(ConfigError, match=r"config\.data\.bacth_size: unknown field; did you mean"):
        parse(["--config", PI05, "--config.data.bacth_size=8"])
    with pytest.raises(
        ConfigError, match=r"config\.batch\.per_devise: unknown field; did you mean config\.batch\.per_device\?"
    ):
        parse(["--config", PI05, "--config.batch.per_devise=8"])


def test_U27_right_name_in_the_wrong_section():
    with pytest.raises(
        ConfigError, match=r"config\.data\.per_device: unknown field; did you mean config\.batch\.per_device\?"
    ):
        parse(["--config", PI05, "--config.data.per_device=8"])


def test_U27_misspelled_field_in_the_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from configs.base import get_base\n"
        "def get_config(variant=''):\n"
        "    config = get_base()\n"
        "    config.unlock()\n"
        "    config.data.worker = 3\n"
        "    return config\n"
    )
    with pytest.raises(ConfigError, match=r"config\.data\.worker: unknown field; did you mean config\.data\.workers\?"):
        parse(["--config", str(file)])


@pytest.mark.parametrize(
    "override, message",
    [
        ("--config.batch.per_device=0", r"config\.batch\.per_device: is 0, expected at least 1"),
        ("--config.tune.preset=expret", r"config\.tune\.preset: is 'expret'.*did you mean 'expert'"),
        ("--config.optim.floor=1.0", r"config\.optim\.floor: 1\.0 is above config\.optim\.lr"),
        ("--config.stats.source=file", r"config\.stats\.file: is empty"),
        ("--config.profile.steps=9", r"config\.profile\.steps: is '9'"),
        ("--config.batch.per_device=many", "per_device"),
    ],
)
def test_contradictions_and_wrong_values(override, message):
    with pytest.raises(ConfigError, match=message):
        parse(["--config", PI05, override])


def test_all_faults_at_once():
    values = to_config_dict(Config())
    values.batch.per_device = 0
    values.mesh.frozen = "melt"
    with pytest.raises(ConfigError) as error:
        resolve(values)
    assert "per_device" in str(error.value) and "mesh.frozen" in str(error.value)


VARIANTS = {
    "pi05": ("", "lerobot", "libero", "lora", "small", "demo"),
    "groot": ("", "lora", "full", "demo"),
    "molmoact2": ("", "lora", "full", "demo"),
}


@pytest.mark.parametrize("model, variant", [(model, v) for model, variants in VARIANTS.items() for v in variants])
def test_every_variant_resolves(model, variant):
    file = str(ROOT / "configs" / f"{model}.py")
    arguments = parse(["--config", f"{file}:{variant}" if variant else file])
    assert from_json(to_json(arguments.config)) == arguments.config
    assert str(arguments.workdir) == f"runs/{model}-{variant}".rstrip("-")


def test_overrides_reach_the_config():
    arguments = parse(["--config", PI05, "--config.optim.lr=1e-3", "--config.data.episodes=(3, 7)", "--workdir", "x"])
    assert arguments.config.optim.lr == 1e-3
    assert arguments.config.data.episodes == (3, 7)
    assert str(arguments.workdir) == "x"


def test_every_field_is_documented():
    source = (ROOT / "somaspeed_jax" / "config.py").read_text()
    for name in field_names():
        last = name.rsplit(".", 1)[-1]
        lines = [line for line in source.splitlines() if line.startswith(f"    {last}: ")]
        assert lines and all("  # " in line for line in lines), name
