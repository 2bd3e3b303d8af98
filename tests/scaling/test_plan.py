"""Plans of a small model, compiled for eight virtual CPU devices and, where its compiler is installed, for CUDA."""

import argparse
import dataclasses
import json
import math

import jax
import pytest

from somaspeed_jax import recipes
from somaspeed_jax.assemble import make_learner
from somaspeed_jax.config import Config, ConfigError, Dtype, Ema, Mesh, Model, Remat, Tune
from somaspeed_jax.mesh import split_axis
from somaspeed_jax.models.layers.param import Runtime, param_specs
from somaspeed_jax.scaling import devices, hlo, plan_text, targets, workload
from somaspeed_jax.scaling import planner as planner_module
from somaspeed_jax.scaling.plan import (
    SUSTAINED_LINK,
    SUSTAINED_MEMORY,
    SUSTAINED_PRODUCTS,
    Memory,
    Plan,
    changed,
    knobs,
    make_plan,
    meshes,
    predict,
    read_memory,
)
from somaspeed_jax.scaling.planner import Planner, strict_json
from somaspeed_jax.scaling.workload import Robot
from somaspeed_jax.state import split_trainable

# Float32: the CPU compiler has bfloat16 products only by way of conversions, which take long to compile.
DEMO = Config(model=Model(size="demo"), dtype=Dtype(compute="float32", frozen="float32"))
BENCH = Config(model=Model(size="bench"))
ROBOT = Robot(cameras=2, prompt=48)
cuda = pytest.mark.skipif(not targets.available(), reason="the CUDA compiler is not installed (extra: plan)")


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOMASPEED_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def cpu_plan():
    return make_plan(DEMO, ROBOT, "a40", jax.devices()[:8], "cpu")


@pytest.fixture(scope="module")
def cuda_plan():
    return make_plan(BENCH, ROBOT, "h100", targets.devices("h100", 8), "cuda")


def sharded_bytes(plan: Plan) -> int:
    """Float32 bytes on one of eight devices of what trains, by the rule that mesh.py states."""
    recipe = recipes.get("pi05")
    specs = param_specs(recipe.build(recipe.model_config(DEMO, None), Runtime()))
    trainable, _ = split_trainable(specs, recipe.trainable(DEMO))
    total = 0
    for path in trainable:
        layer = specs[path].shape[1:] if specs[path].stacked else specs[path].shape
        total += 4 * math.prod(specs[path].shape) // (1 if split_axis(layer, plan.fsdp) is None else plan.fsdp)
    return total


def test_memory_is_what_the_shardings_say(cpu_plan):
    memory = cpu_plan.memory
    assert memory.trainable == memory.gradients == sharded_bytes(cpu_plan)
    assert memory.optimizer == pytest.approx(2 * memory.trainable, abs=64)  # two moments and the counters
    assert (memory.frozen, memory.average) == (4 * cpu_plan.parameters_frozen, 0)
    kept = memory.trainable + memory.frozen + memory.optimizer + memory.batch
    assert memory.peak >= kept


def test_program_does_the_models_work_and_no_more(cpu_plan):
    assert cpu_plan.program_flops_per_sample == pytest.approx(cpu_plan.model_flops_per_sample, rel=0.05)


def test_replicated_frozen_weights_are_never_gathered(cpu_plan):
    gathered = sum(c.bytes for c in cpu_plan.collectives if c.kind == "all-gather")
    # What trains, at most twice a step: nothing is left for the frozen trunk.
    assert 0 < gathered <= 2 * 4 * cpu_plan.parameters_trainable


def test_every_gpu_is_predicted_and_named(cpu_plan):
    assert [p.gpu for p in cpu_plan.predictions] == ["a40", "a100", "h100", "h200", "b200"]
    for p in cpu_plan.predictions:
        slow, fast = p.step_seconds
        assert slow >= fast > 0
        assert p.samples_per_second[0] * slow == pytest.approx(cpu_plan.global_batch)
        flops = cpu_plan.model_flops_per_sample * cpu_plan.global_batch
        assert p.mfu[1] == pytest.approx(flops / (fast * 8 * devices.named(p.gpu).peak))
        assert p.mfu[1] <= SUSTAINED_PRODUCTS * 1.05
        assert 0 < p.efficiency[0] <= p.efficiency[1] <= 1
        assert p.fits
    assert "roofline only" in cpu_plan.prediction("b200").note
    assert any("compiled for the CPU" in note for note in cpu_plan.notes)
    assert any("products are in float32" in note for note in cpu_plan.notes)


def test_pcie_is_the_bound_where_it_is(cpu_plan):
    assert cpu_plan.prediction("a40").bound.startswith("link (PCIe")


def test_full_fine_tuning_without_sharding_has_no_gathers():
    config = dataclasses.replace(DEMO, tune=Tune(preset="full"), mesh=Mesh(replica=2, fsdp=1), ema=Ema(0.99))
    plan = make_plan(config, Robot(cameras=1, prompt=48), "h100", jax.devices()[:2], "cpu")
    assert {c.kind for c in plan.collectives} == {"all-reduce"}
    assert plan.memory.trainable == plan.memory.average == 4 * plan.parameters_trainable
    assert plan.parameters_frozen == plan.memory.frozen == 0
    summed = sum(c.bytes for c in plan.collectives)
    assert summed == pytest.approx(4 * plan.parameters_trainable, rel=0.05)


def test_one_device_has_no_collectives_and_no_loss():
    kernel = hlo.Kernel("dot", "dot", "", 3, 10**12, 10**9, "")
    program = hlo.Program((), (), (kernel,))
    memory = Memory(*[2**30] * 8)
    p = predict(devices.named("a100"), program, memory, 3e12, 1, 1, "cuda", compiled_for="a100")
    assert p.efficiency == (1.0, 1.0) and p.link == 0.0
    assert p.step_seconds == (3e12 / (312e12 * SUSTAINED_PRODUCTS),) * 2
    assert p.mfu[0] == pytest.approx(SUSTAINED_PRODUCTS)
    assert p.bound == "products"


def test_kernel_takes_the_longer_of_work_and_traffic():
    kernel = hlo.Kernel("fusion", "fusion", "", 1, 0, 2 * 10**12, "")
    gather = hlo.Collective("all-gather", ("bf16",), 8 * 10**9, 8, 1, "")
    program = hlo.Program((), (gather,), (kernel,))
    p = predict(devices.named("a100"), program, Memory(*[2**40] * 8), 1e12, 8, 8, "cuda", compiled_for="a100")
    assert p.memory_bound == pytest.approx(2e12 / (2.039e12 * SUSTAINED_MEMORY))
    assert p.link == pytest.approx(7e9 / (300e9 * SUSTAINED_LINK))
    assert p.step_seconds == (p.memory_bound + p.link, p.memory_bound)
    assert p.efficiency == (p.memory_bound / p.step_seconds[0], 1.0)
    assert p.bound == "memory bandwidth" and not p.fits


def memory_of(replica, fsdp):
    """Memory by kind without a compile."""
    config = changed(BENCH, "mesh", {"replica": replica, "fsdp": fsdp})
    facts = workload.robot_facts(config, ROBOT)
    learner = make_learner(config, facts, jax.devices()[:8])
    sample = workload.sample_shapes(config, facts, ROBOT.picture)
    batch = workload.abstract_batch(sample, learner.global_batch, sharding=learner.layout.batch())
    return read_memory(config, learner, batch, argparse.Namespace(peak_memory_in_bytes=0), "cuda")


def test_bytes_fall_with_the_shards():
    whole, half, eighth = memory_of(8, 1), memory_of(4, 2), memory_of(1, 8)
    assert half.trainable == pytest.approx(whole.trainable / 2, rel=0.02)
    assert eighth.trainable == pytest.approx(whole.trainable / 8, rel=0.05)
    assert eighth.optimizer == pytest.approx(whole.optimizer / 8, rel=0.05)
    assert whole.frozen == half.frozen == eighth.frozen
    assert whole.batch == eighth.batch


@cuda
def test_cuda_program_is_fsdp_by_hand(cuda_plan):
    assert cuda_plan.compiler == "cuda for h100"
    assert cuda_plan.program_flops_per_sample == pytest.approx(cuda_plan.model_flops_per_sample, rel=0.05)
    kinds = {c.kind for c in cuda_plan.collectives}
    assert kinds == {"all-gather", "reduce-scatter", "all-reduce"}
    scattered = sum(
        c.bytes * (1 if c.types == ("f32",) else 2) for c in cuda_plan.collectives if c.kind == "reduce-scatter"
    )
    small = 0.05 * cuda_plan.memory.trainable  # parameters that are not split are summed whole
    assert scattered == pytest.approx(cuda_plan.memory.trainable, abs=small)
    assert cuda_plan.memory.peak > cuda_plan.memory.frozen + cuda_plan.memory.trainable


@cuda
def test_cuda_gathers_are_in_the_compute_type(cuda_plan):
    halves = sum(c.bytes for c in cuda_plan.collectives if c.kind == "all-gather" and c.types == ("bf16",))
    whole = sum(c.bytes for c in cuda_plan.collectives if c.kind == "all-gather" and c.types != ("bf16",))
    assert halves > 2 * cuda_plan.parameters_trainable * 0.8
    assert whole < 0.1 * halves


@cuda
def test_cuda_program_predicts_memory_bound_kernels(cuda_plan):
    p = cuda_plan.prediction("h100")
    assert p.memory_bound > 0 and p.note == ""
    assert cuda_plan.prediction("a40").note == "from the program compiled for h100"


def test_knobs_apply_where_they_can(cpu_plan):
    assert [(s, f) for s, f in knobs(BENCH, cpu_plan)] == [
        ("remat", {"expert": "full"}),
        ("mesh", {"frozen": "shard"}),
        ("optim", {"moments": "bfloat16"}),
        ("batch", {"per_device": 4, "global_batch": 64}),
    ]
    turned = dataclasses.replace(
        BENCH, remat=Remat(expert="full"), mesh=Mesh(frozen="shard"), ema=Ema(0.9),
    )  # fmt: skip
    sections = [section for section, _ in knobs(turned, dataclasses.replace(cpu_plan, replica=2, fsdp=4))]
    assert sections == ["mesh", "optim", "ema", "batch"]


def test_meshes_of_eight():
    assert meshes(8) == [(1, 8), (2, 4), (4, 2), (8, 1)]


def arguments(**changes):
    usual = dict(
        gpus=2, gpu="a40", cameras=2, picture="64x64", prompt=48, state=8, actions=7, meshes="", batches="",
        knobs=False, compiler="cpu", json=False,
    )  # fmt: skip
    return argparse.Namespace(**usual | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpu": "v100"}, "unknown GPU 'v100'"),
        ({"gpus": 0}, "--gpus is 0"),
        ({"picture": "256"}, "--picture: '256' is not of the form NxN"),
        ({"meshes": "2x4"}, r"--meshes 2x4: 2 x 4 = 8, but --gpus is 2"),
        ({"batches": "8,many"}, "--batches: 'many' is not of the form N"),
    ],
)
def test_bad_options_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Planner.create(Config(), arguments(**changes))


def test_what_the_trainer_refuses_the_plan_refuses():
    config = changed(Config(model=Model(size="demo")), "batch", {"global_batch": 19})
    with pytest.raises(ConfigError, match=r"19 is not a multiple.*nearest that work are 16 and 32"):
        Planner.create(config, arguments()).plan()


def test_planner_makes_plan_and_table(cpu_plan, monkeypatch):
    asked = []

    def planned(config, robot, gpu, chosen, compiler):
        asked.append((config.mesh.replica, config.mesh.fsdp, config.batch.per_device))
        replica, fsdp, per_device = asked[-1]
        return dataclasses.replace(cpu_plan, replica=replica or 1, fsdp=fsdp or 2, per_device=per_device)

    monkeypatch.setattr(planner_module, "make_plan", planned)
    planner = Planner.create(BENCH, arguments(meshes="all", batches="8,16"))
    plan = planner.plan()
    others = planner.table(plan)
    # The plan itself is a row of its table and is not compiled again.
    assert asked == [(0, 0, 8), (1, 2, 16), (2, 1, 8), (2, 1, 16)] and others[0] is plan
    text = planner.text(plan, [("--config.remat.expert=full", others[1])], others)
    for part in (
        "GiB on a device",
        "TFLOP a sample",
        "collectives a step",
        "prediction",
        "note: ",
        "remat.expert",
        "2x1",
    ):
        assert part in text
    document = json.loads(strict_json(plan, [], others), parse_constant=pytest.fail)
    assert document["plan"]["memory"]["peak"] == plan.memory.peak
    assert len(document["table"]) == 4


def test_a_plan_that_does_not_fit_says_so_and_shows_what_would(cpu_plan, monkeypatch):
    tight = dataclasses.replace(
        cpu_plan,
        predictions=tuple(dataclasses.replace(p, fits=False, memory_share=1.2) for p in cpu_plan.predictions),
    )
    assert "DOES NOT FIT" in plan_text.summary(tight, "a40")
    planner = Planner(BENCH, ROBOT, "a40", [], "cpu", (), ())
    smaller = iter([tight, cpu_plan])
    monkeypatch.setattr(Planner, "plan", lambda self, config=None: next(smaller))
    turned = planner.turn_knobs(tight)
    assert [fields for fields, _ in turned] == ["--config.remat.expert=full", "--config.mesh.frozen=shard"]
    assert plan_text.knob_table(tight, turned, "a40").splitlines()[-1].endswith("fits")


def test_target_descriptions_cover_what_can_be_compiled():
    for name, target in targets.TARGETS.items():
        text = targets.textproto(target, devices.named(name))
        assert f"core_count: {target.multiprocessors}" in text and target.description in text
        assert devices.of_kind(target.description) == devices.named(name)
    with pytest.raises(ValueError, match="no compiler description of 'b200'"):
        targets.devices("b200", 8)


def test_missing_compiler_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(targets, "available", lambda: False)
    with pytest.raises(RuntimeError, match=r"somaspeed-jax\[plan\]"):
        targets.devices("a40", 8)
