"""Training and coming back to it: resume, meshes, accumulation, averages, health."""

import dataclasses

import jax
import numpy as np
import pytest
from small_run import run, small_config, steps

from somaspeed_jax.assemble import batch_arithmetic
from somaspeed_jax.checkpoint import Checkpoints, check_resume
from somaspeed_jax.config import ConfigError
from somaspeed_jax.data.order import Order
from somaspeed_jax.train import UnhealthyRun


def losses(workdir):
    return [line["loss"] for line in steps(workdir)]


def equal(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a, b)


@pytest.fixture(scope="module")
def uninterrupted(demo_dataset, tmp_path_factory):
    """Four steps with an average, in one go."""
    workdir = tmp_path_factory.mktemp("uninterrupted")
    config = small_config(demo_dataset, ema=dict(decay=0.9), flow=dict(times=2))
    outcome, printed = run(config, workdir)
    return config, workdir, outcome, printed


@pytest.mark.slow
def test_U16_U18_four_steps_equal_two_stop_resume_two(uninterrupted, tmp_path):
    config, whole, outcome, _ = uninterrupted
    run(dataclasses.replace(config, stop_after_seconds=1e-9), tmp_path)  # stops after its first step
    resumed, printed = run(config, tmp_path)
    assert "resumed from step 1" in printed
    assert losses(tmp_path) == losses(whole)
    assert resumed.step == 4
    equal(resumed.state, outcome.state)  # trainable, optimiser, average: bit for bit


def test_U18_average_is_not_the_trained_parameters(uninterrupted):
    _, _, outcome, _ = uninterrupted
    state = outcome.state
    assert any(not np.array_equal(state.ema[path], state.trainable[path]) for path in state.ema)


def test_start_prints_the_arithmetic(uninterrupted):
    _, workdir, _, printed = uninterrupted
    for expected in ("mesh", "batch", "parameters", "bytes/device", "FLOPs", "4 a device x 1 devices x 1 microbatches"):
        assert expected in printed
    assert (workdir / "first_batch.png").stat().st_size > 10_000
    assert (workdir / "config.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    "replica, fsdp, per_device, frozen",
    [(2, 1, 2, "replicate"), (1, 2, 2, "shard"), (2, 2, 1, "replicate"), (1, 4, 1, "shard")],
)
def test_U20_meshes_agree(uninterrupted, tmp_path, replica, fsdp, per_device, frozen):
    config, whole, _, _ = uninterrupted
    mesh = dataclasses.replace(config.mesh, devices=replica * fsdp, replica=replica, fsdp=fsdp, frozen=frozen)
    run(
        dataclasses.replace(config, mesh=mesh, batch=dataclasses.replace(config.batch, per_device=per_device)), tmp_path
    )
    np.testing.assert_allclose(losses(tmp_path), losses(whole), rtol=1e-5)


@pytest.mark.slow
def test_U20_accumulation_agrees(uninterrupted, tmp_path):
    config, whole, _, _ = uninterrupted
    run(dataclasses.replace(config, batch=dataclasses.replace(config.batch, per_device=1, global_batch=4)), tmp_path)
    np.testing.assert_allclose(losses(tmp_path), losses(whole), rtol=1e-5)


@pytest.mark.slow
def test_U25_restores_on_another_mesh(uninterrupted, tmp_path):
    config, whole, outcome, _ = uninterrupted
    sharded = dataclasses.replace(
        config,
        mesh=dataclasses.replace(config.mesh, devices=4, replica=2, fsdp=2),
        batch=dataclasses.replace(config.batch, per_device=1),
    )
    run(dataclasses.replace(sharded, stop_after_seconds=1e-9), tmp_path)
    resumed, printed = run(config, tmp_path)
    assert "config.mesh.devices: 4 -> 1" in printed
    np.testing.assert_allclose(losses(tmp_path), losses(whole), rtol=1e-5)
    for path in ("trainable", "ema"):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-5),
            getattr(resumed.state, path),
            getattr(outcome.state, path),
        )


@pytest.mark.slow
def test_U29_stops_at_the_first_loss_that_is_not_finite(demo_dataset, tmp_path):
    config = small_config(demo_dataset, steps=6, optim=dict(lr=1e30, floor=0.0, warmup=0), checkpoint=dict(every=1))
    with pytest.raises(UnhealthyRun, match=r"step \d+: loss .* gradient norm .* Records of this batch: \[") as failure:
        run(config, tmp_path)
    broken = int(str(failure.value).split()[1].rstrip(":"))
    with Checkpoints(tmp_path, keep=10) as checkpoints:
        assert checkpoints.latest is not None and checkpoints.latest <= broken
    assert len(steps(tmp_path)) == broken  # strict JSON, every good step


def test_U21_a_batch_that_does_not_divide_is_refused(demo_dataset):
    config = small_config(demo_dataset, batch=dict(per_device=4, global_batch=19))
    with pytest.raises(
        ConfigError, match=r"19 is not a multiple of .* 4 x 4 = 16; the nearest that work are 16 and 32"
    ):
        batch_arithmetic(config, 4)
    assert batch_arithmetic(small_config(demo_dataset, batch=dict(per_device=4, global_batch=32)), 4) == (32, 2)


def test_U21_no_short_batch(demo_dataset):
    order = Order(19, 4, seed=0)
    drawn = np.concatenate([order.record_ids(step) for step in range(19)])
    assert all(len(order.record_ids(step)) == 4 for step in range(19))
    assert np.array_equal(np.sort(drawn), np.repeat(np.arange(19), 4))


def test_resume_lists_changes_and_refuses_binding_ones(demo_dataset):
    old = small_config(demo_dataset)
    assert check_resume(old, small_config(demo_dataset, optim=dict(lr=5e-4))) == ["config.optim.lr: 0.001 -> 0.0005"]
    other = small_config(demo_dataset, data=dict(path="elsewhere"))
    with pytest.raises(ConfigError, match=r"config\.data\.path: .* -> 'elsewhere'"):
        check_resume(old, other)
    allowed = dataclasses.replace(other, checkpoint=dataclasses.replace(other.checkpoint, allow_changes=("data.path",)))
    assert len(check_resume(old, allowed)) == 2
