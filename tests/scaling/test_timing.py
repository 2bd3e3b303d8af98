"""The timing tool over a stand-in trainer that writes metrics.jsonl as the real one does."""

import dataclasses
import json
import os
import runpy
import sys
import textwrap
from pathlib import Path

import pytest

from somaspeed_jax.scaling import schema, timing

ROOT = Path(__file__).parents[2]

# Five slow first updates (compile, warm-up), then steps of 50 ms of which 20 ms are spent waiting for data.
TRAINER = """
import json, os, sys, time
count, per_device, workdir, behaviour = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
assert f"device_count={count}" in os.environ["XLA_FLAGS"] and os.environ["JAX_PLATFORMS"] == "cpu"
out = open(workdir + "/metrics.jsonl", "a")
def write(**line):
    out.write(json.dumps(line) + "\\n"); out.flush()
write(kind="run", devices=count, per_device_batch=per_device, global_batch=count * per_device, device_kind="cpu")
for step in range(10**6):
    if behaviour == "fails" and step == 7:
        sys.exit("no memory left on the device")
    if behaviour == "hangs" and step == 7:
        time.sleep(60)
    samples = per_device if behaviour == "wrong" else count * per_device
    seconds = 5.0 if step == 0 else 1.0 if step < 5 else 0.05
    write(kind="step", step=step, seconds=seconds, samples=samples, wait_seconds=0.02, loss=1.0, compile=step == 0)
    time.sleep(0.002)
"""


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    """Puts the stand-in in the trainer's place; its behaviour may depend on the device count."""
    script = tmp_path / "trainer.py"
    script.write_text(textwrap.dedent(TRAINER))
    behaviours: dict[int, str] = {}

    def command(study, count, workdir):
        how = behaviours.get(count, "works")
        return [sys.executable, str(script), str(count), str(study.per_device), str(workdir), how]

    monkeypatch.setattr(timing, "command", command)
    return behaviours


def study(**changes):
    usual = timing.Study("pi05", 8, (1, 2), (), "synthetic", 1, 5, 0.5, 20.0, None)
    return dataclasses.replace(usual, **changes)


def test_warmup_is_left_out_and_waiting_and_compile_are_apart(trainer, tmp_path):
    trial = timing.run_trial(study(), 2, tmp_path / "run")
    assert trial.seconds / trial.steps == pytest.approx(0.05)
    assert trial.samples == trial.steps * 16
    assert trial.samples / trial.seconds == pytest.approx(320)
    assert trial.wait_seconds / trial.steps == pytest.approx(0.02)
    assert trial.compile_seconds == 5.0
    assert trial.seconds >= 0.5
    words = timing.line(study(), 2, 1, trial)
    assert "320.00 samples/s (160.00 a device)" in words and "waiting for data 40.0%" in words


def test_every_count_becomes_a_record_that_says_it_is_no_scaling_result(trainer, tmp_path):
    said = []
    output = tmp_path / "scaling.json"
    timing.run(study(counts=(2, 1), trials=2), output, tmp_path / "runs", said.append)
    content = schema.read(output)
    one, two = content.models["pi05"]
    assert (one.samples_per_second, two.samples_per_second) == (pytest.approx(160), pytest.approx(320))
    assert (one.gpus, two.gpus, two.global_batch, two.trials) == (1, 2, 16, 2)
    assert two.efficiency_percent == pytest.approx(100)
    samples = one.samples_per_second * one.measured_training_seconds
    assert samples == pytest.approx(round(samples)) and round(samples) % 8 == 0
    assert timing.VIRTUAL in content.measurement and timing.VIRTUAL in said
    assert not (tmp_path / "scaling.log").exists()


def test_failed_run_is_recorded_with_its_reason_beside_it(trainer, tmp_path):
    trainer[2] = "fails"
    output = tmp_path / "scaling.json"
    timing.run(study(counts=(1, 2, 4)), output, tmp_path / "runs", lambda _: None)
    one, two, four = schema.read(output).models["pi05"]
    assert one.complete and four.complete and not two.complete
    assert (two.samples_per_second, two.measured_training_seconds, two.efficiency_percent) == (0.0, 0.0, 0.0)
    log = (tmp_path / "scaling.log").read_text()
    assert "pi05 on 2 device(s), trial 1" in log and "no memory left on the device" in log


def test_hanging_run_is_given_up(trainer, tmp_path):
    trainer[1] = "hangs"
    with pytest.raises(timing.TrialError, match=r"0\.1 of 0\.5 s measured after 1\.5 s"):
        timing.run_trial(study(limit=1.5), 1, tmp_path / "run")


def test_trainer_that_counts_otherwise_is_no_measurement(trainer, tmp_path):
    trainer[2] = "wrong"
    with pytest.raises(timing.TrialError, match="samples in"):
        timing.run_trial(study(), 2, tmp_path / "run")


def test_trainer_is_gone_afterwards(trainer, tmp_path):
    timing.run_trial(study(), 1, tmp_path / "run")
    size = (tmp_path / "run" / "metrics.jsonl").stat().st_size
    timing.run_trial(study(), 1, tmp_path / "again")
    assert (tmp_path / "run" / "metrics.jsonl").stat().st_size == size


def test_half_written_line_is_not_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "run", "devices": 1}\n{"kind": "step", "step": 0}\n{"kind": "st')
    assert timing.read_metrics(path) == ({"kind": "run", "devices": 1}, [{"kind": "step", "step": 0}])
    assert timing.read_metrics(tmp_path / "none") == ({}, [])


def test_list_without_one_device_is_refused_before_anything_starts(trainer, tmp_path):
    output = tmp_path / "scaling.json"
    with pytest.raises(ValueError, match=r"--gpus 2,4: lacks 1.*add 1"):
        timing.run(study(counts=(2, 4)), output, tmp_path / "runs")
    assert not output.exists() and not (tmp_path / "runs").exists()


def test_more_counts_join_a_file_that_has_one_device(trainer, tmp_path):
    output = tmp_path / "scaling.json"
    timing.run(study(counts=(1,)), output, tmp_path / "runs", lambda _: None)
    timing.run(study(counts=(4,)), output, tmp_path / "more", lambda _: None)
    assert [r.gpus for r in schema.read(output).models["pi05"]] == [1, 4]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"counts": (4,), "per_device": 16}, r"per_device is 16, but .* holds pi05 at 8"),
        ({"data": "decode"}, "measured otherwise"),
        ({"physical": ("0", "1")}, "measured otherwise"),
    ],
)
def test_file_of_another_measurement_is_refused(changes, message, trainer, tmp_path):
    output = tmp_path / "scaling.json"
    timing.run(study(counts=(1,)), output, tmp_path / "runs", lambda _: None)
    with pytest.raises(ValueError, match=message):
        timing.check(study(**changes), output)


def test_more_gpus_than_there_are(tmp_path):
    with pytest.raises(ValueError, match=r"--gpus 4: this machine has 2 GPU\(s\)"):
        timing.check(study(counts=(1, 4), physical=("0", "1")), tmp_path / "s.json")


def test_environment_shows_exactly_the_devices():
    gpu = timing.environment(study(physical=("3", "5", "7")), 2, {"PATH": "/bin"})
    assert gpu == {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "3,5"}
    base = {"XLA_FLAGS": "--xla_dump_to=x --xla_force_host_platform_device_count=8"}
    cpu = timing.environment(study(), 2, base)
    assert cpu["XLA_FLAGS"].split() == ["--xla_dump_to=x", "--xla_force_host_platform_device_count=2"]
    assert cpu["JAX_PLATFORMS"] == "cpu"


def test_command_is_the_real_trainer_with_known_fields(tmp_path, monkeypatch):
    from somaspeed_jax.command_line import parse

    monkeypatch.syspath_prepend(ROOT)
    configured = study(arguments=("--config", str(ROOT / "configs" / "pi05.py:demo")), data="cached")
    executable, module, name, *rest = timing.command(configured, 2, tmp_path)
    assert (executable, module, name) == (sys.executable, "-m", "somaspeed_jax.main")
    config = parse(rest).config
    assert (config.mesh.devices, config.batch.per_device, config.batch.global_batch) == (2, 8, 0)
    assert config.data.cache == "frames"
    assert config.evaluation.closed_loop_starts == 0 and config.data.holdout == 0


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    return runpy.run_path(str(ROOT / "tools" / "time_scaling.py"))["main"]


def test_tool_refuses_bad_options(tool, tmp_path, capsys):
    config = ["--config", str(ROOT / "configs" / "pi05.py:demo"), "--output", str(tmp_path / "s.json")]
    for extra, message in (
        (["--gpus", "1,1"], "not a list of different device counts"),
        (["--gpus", "1,x"], "not a list of different device counts"),
        (["--gpus", "2,4"], "lacks 1"),
        (["--gpus", "1", "--trials", "0"], "--trials: is 0, expected at least 1"),
        (["--gpus", "1", "--config.batch.per_devise=4"], "did you mean config.batch.per_device"),
    ):
        assert tool([*config, *extra]) == 2
        assert message in capsys.readouterr().err


def test_tool_writes_the_file_and_the_table(trainer, tool, tmp_path, capsys):
    output = tmp_path / "s.json"
    config = ["--config", str(ROOT / "configs" / "pi05.py:demo"), "--config.batch.per_device=4"]
    status = tool([*config, "--gpus", "1,2", "--seconds", "0.3", "--data", "synthetic", "--output", str(output)])
    assert status == 0
    assert "| π0.5 | SomaSpeed JAX | 2 | 4 | 160.00 |" in capsys.readouterr().out
    assert json.loads(output.read_text())["models"]["pi05"][0]["per_gpu_batch"] == 4.0
    assert set(os.listdir(tmp_path)) == {"s.json", "trainer.py"}
