"""GPU options: what is set, what wins, what is refused; and that the installed XLA knows every flag."""

import os
import subprocess
import sys

import jax
import pytest

from somaspeed_jax import xla_flags


@pytest.fixture
def gpu(monkeypatch):
    """A process in which jax would look for a GPU and has not started."""
    monkeypatch.setattr(xla_flags, "expects_gpu", lambda: True)
    monkeypatch.setattr(xla_flags, "backend_started", lambda: False)
    for option in xla_flags.OPTIONS.values():
        monkeypatch.delenv(option.variable, raising=False)
    # The environment that `apply` edits is put back afterwards.
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION")


def test_every_option_with_a_value_is_set_and_foreign_flags_stay(gpu):
    in_force = xla_flags.apply()
    assert in_force == {name: o.value for name, o in xla_flags.OPTIONS.items() if o.value is not None}
    flags = os.environ["XLA_FLAGS"].split()
    assert "--xla_force_host_platform_device_count=8" in flags
    assert "--xla_gpu_enable_latency_hiding_scheduler=true" in flags
    assert not any("command_buffer" in flag for flag in flags)
    assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.92"


def test_twice_is_the_same_as_once(gpu):
    first = xla_flags.apply()
    flags = os.environ["XLA_FLAGS"]
    assert xla_flags.apply() == first
    assert os.environ["XLA_FLAGS"] == flags


def test_override_wins_over_ours(gpu):
    in_force = xla_flags.apply({"triton_gemm": "true", "command_buffer": ""})
    assert (in_force["triton_gemm"], in_force["command_buffer"]) == ("true", "")
    assert "--xla_gpu_enable_triton_gemm=true" in os.environ["XLA_FLAGS"]
    assert "--xla_gpu_enable_command_buffer=" in os.environ["XLA_FLAGS"].split()


def test_the_users_own_flag_is_left_alone(gpu, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.4")
    in_force = xla_flags.apply()
    assert (in_force["triton_gemm"], in_force["memory_fraction"]) == ("true", "0.4")
    assert os.environ["XLA_FLAGS"].count("triton_gemm") == 1


def test_override_against_the_users_flag_is_refused(gpu, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=true")
    with pytest.raises(ValueError, match="xla_gpu_enable_triton_gemm is 'true' in XLA_FLAGS but 'false' by override"):
        xla_flags.apply({"triton_gemm": "false"})


def test_unknown_option_names_the_nearest(gpu):
    with pytest.raises(ValueError, match="unknown XLA option 'triton_gem'; did you mean 'triton_gemm'"):
        xla_flags.apply({"triton_gem": "true"})


def test_too_late_is_refused_and_nothing_changes(gpu, monkeypatch):
    monkeypatch.setattr(xla_flags, "backend_started", lambda: True)
    before = dict(os.environ)
    with pytest.raises(RuntimeError, match="already started a backend"):
        xla_flags.apply()
    assert dict(os.environ) == before


def test_without_a_gpu_nothing_is_set(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    before = dict(os.environ)
    assert xla_flags.apply() == {}
    assert dict(os.environ) == before


def test_started_backend_is_seen():
    jax.devices()
    assert xla_flags.backend_started()


def test_every_option_is_described():
    text = xla_flags.describe({"triton_gemm": "true"})
    assert len(text.splitlines()) == len(xla_flags.OPTIONS)
    for option in xla_flags.OPTIONS.values():
        assert option.variable in text


def test_installed_xla_knows_every_flag():
    """XLA aborts at a flag that it does not know, also on a CPU."""
    values = {"command_buffer": "FUSION", "autotune_level": "4"}
    flags = [
        f"--{option.variable}={option.value or values.get(name, '1000')}"
        for name, option in xla_flags.OPTIONS.items()
        if not option.environment
    ]
    environment = os.environ | {"XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        [sys.executable, "-c", "import jax; jax.devices()"], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


@pytest.fixture
def cache_config(monkeypatch):
    before = jax.config.jax_compilation_cache_dir
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    jax.config.update("jax_compilation_cache_dir", before)


def test_cache_is_on_by_default_under_the_cache_home(cache_config, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert xla_flags.enable_compilation_cache() == tmp_path / "somaspeed_jax" / "xla"
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "somaspeed_jax" / "xla")


def test_cache_goes_where_the_user_says(cache_config, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))
    assert xla_flags.enable_compilation_cache() == tmp_path / "mine"


def test_cache_that_cannot_be_written_is_off_and_loud(cache_config, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="cannot be written: no compilation cache"):
        assert xla_flags.enable_compilation_cache(tmp_path / "file" / "cache") is None
    assert jax.config.jax_compilation_cache_dir is None
