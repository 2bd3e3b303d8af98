"""The doctor: what it finds on a sound machine and on the machines that people ask about."""

import pytest

from somaspeed_jax import doctor, xla_flags

CARD = "NVIDIA A40, 570.86.15, 46068 MiB"
TOPOLOGY = "\tGPU0\tGPU1\nGPU0\t X \tSYS\nGPU1\tSYS\t X \n"


def found(section):
    return [(f.topic, f.status, f.text, f.fix) for f in section]


def missing(section):
    return [f for f in section if f.status == "missing"]


@pytest.fixture
def two_cards(monkeypatch):
    def run(*command):
        return TOPOLOGY if "topo" in command else f"{CARD}\n{CARD}"

    monkeypatch.setattr(doctor, "_run", run)


@pytest.fixture
def versions(monkeypatch):
    table = {}
    monkeypatch.setattr(doctor, "_version", table.get)
    return table


def test_this_machine_has_all_that_a_run_needs(monkeypatch, tmp_path):
    monkeypatch.setattr(xla_flags, "enable_compilation_cache", lambda: tmp_path)
    monkeypatch.setattr(doctor, "_run", lambda *command: None)
    findings = doctor.examine({})
    assert missing(findings) == []
    text = doctor.report(findings, "options")
    for topic in ("python", "packages", "driver", "devices", "decoder", "memory", "compile cache", "plan"):
        assert f"] {topic}: " in text
    assert "jax 0." in text and "h264, hevc, av1" in text


def test_missing_package_says_how_to_get_it(versions):
    versions.update({name: "1.0" for name in doctor.NEEDED if name != "pyarrow"})
    (finding,) = missing(doctor.versions())
    assert "pyarrow is not installed" in finding.text
    assert finding.fix == "pip install somaspeed-jax"


def test_driver_without_plugin_is_the_accident_it_is(two_cards, versions):
    versions["jaxlib"] = "0.10.2"
    (finding,) = missing(doctor.gpu_support())
    assert "cannot see the 2 GPU(s)" in finding.text
    assert "somaspeed-jax[cuda12]" in finding.fix


def test_plugin_of_another_version(two_cards, versions):
    versions.update({"jaxlib": "0.10.2", "jax-cuda12-plugin": "0.9.0"})
    (finding,) = missing(doctor.gpu_support())
    assert "jaxlib 0.10.2, jax-cuda12-plugin 0.9.0 do not match" in finding.text


def test_sound_gpu_machine(two_cards, versions):
    versions.update({"jaxlib": "0.10.2", "jax-cuda12-plugin": "0.10.2"})
    assert [status for _, status, _, _ in found(doctor.gpu_support())] == ["ok", "ok"]


def test_jax_on_the_cpu_of_a_gpu_machine(two_cards):
    (finding,) = missing(doctor.jax_devices())
    assert "although the driver has GPUs" in finding.text


def test_pcie_links_are_shown_with_their_advice(two_cards):
    matrix, advice = found(doctor.links())
    assert "GPU1\tSYS" in matrix[2]
    assert "PCIe alone" in advice[2] and "config.mesh.frozen='replicate'" in advice[2]


def test_missing_codec(monkeypatch):
    monkeypatch.setattr(doctor, "_decodes", lambda codec: codec != "av1")
    (finding,) = missing(doctor.decoder())
    assert "no decoder for av1" in finding.text


def test_unknown_codec_is_no_crash():
    assert doctor._decodes("h264")
    assert not doctor._decodes("no_such_codec")


def test_small_shared_memory(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: type("Usage", (), {"total": 64 * 2**20}))
    ((_, status, text, fix),) = found(doctor.shared_memory())
    assert status == "note" and "0.1 GiB" in text and "--shm-size" in fix


def test_cache_that_is_off(monkeypatch):
    monkeypatch.setattr(xla_flags, "enable_compilation_cache", lambda: None)
    ((_, status, _, fix),) = found(doctor.compilation_cache())
    assert status == "note" and "JAX_COMPILATION_CACHE_DIR" in fix


@pytest.mark.parametrize("lacking", [True, False])
def test_exit_status(lacking, monkeypatch, capsys):
    finding = doctor.Finding(
        "packages", "missing" if lacking else "ok", "numpy", "pip install numpy" if lacking else ""
    )
    monkeypatch.setattr(doctor, "examine", lambda in_force: [finding])
    monkeypatch.setattr(doctor.sys, "argv", ["doctor"])
    assert doctor.main() == lacking
    assert ("-> pip install numpy" in capsys.readouterr().out) == lacking
