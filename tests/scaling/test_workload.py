"""FLOPs a sample of the full-size models, against arithmetic that does not come from this program."""

import jax
import pytest

from somaspeed_jax import recipes
from somaspeed_jax.assemble import make_learner
from somaspeed_jax.config import Config, Data, Flow, Mesh, Model, Remat, Tune
from somaspeed_jax.scaling import flops, workload
from somaspeed_jax.step import jit_train_step


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("SOMASPEED_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def stages(config: Config, robot: workload.Robot):
    facts = workload.robot_facts(config, robot)
    learner = make_learner(config, facts, jax.devices()[:8])
    sample = workload.sample_shapes(config, facts, robot.picture)
    prepare = recipes.get(config.model.name).prepare(config, facts)
    return workload.stage_flops(config, learner, prepare, sample)


def total(found) -> float:
    return sum(stage.forward + stage.backward for stage in found.values())


def test_pi05_expert_fine_tuning():
    """4.53 TF for three pictures and 200 prompt tokens, of which SigLIP .66 and the expert's forward .04."""
    found = stages(Config(), workload.Robot(cameras=3, prompt=200))
    assert total(found) == pytest.approx(4.53e12, rel=0.005)
    assert found["context"].backward == 0
    assert found["expert"].forward == pytest.approx(0.04e12, rel=0.05)
    # Keys and values of the prefix are not trained: no gradient reaches them, so less than twice the forward.
    assert found["expert"].forward < found["expert"].backward < 2 * found["expert"].forward


def test_pi05_full_fine_tuning_costs_three_forwards():
    """14.0 TF with the last layer of the prefix whole; a little less where it gives keys and values alone."""
    found = stages(Config(tune=Tune(preset="full")), workload.Robot(cameras=3, prompt=200))
    assert 13.0e12 < total(found) < 14.0e12
    assert total(found) == pytest.approx(3 * sum(stage.forward for stage in found.values()), rel=0.02)


def test_groot_expert_fine_tuning():
    """Two cameras of 256 x 256 and 152 tokens: vision .337, text .258, VL .064, DiT .100 TF forward.

    Those .100 hold keys and values of all 152 tokens in each of 16 cross blocks. A block reads the text or the pictures
    alone and half of that work is not done here.
    """
    found = stages(Config(model=Model(name="groot")), workload.Robot(cameras=2, picture=(256, 256)))
    assert found["context"].forward == pytest.approx((0.337 + 0.258) * 1e12, rel=0.03)
    unread = 0.5 * 16 * 152 * 2 * (2 * 2048 * 1536)
    trained = found["memory"].forward + found["expert"].forward
    assert trained == pytest.approx((0.064 + 0.100) * 1e12 - unread, rel=0.03)
    assert found["context"].backward == 0
    assert total(found) == pytest.approx(found["context"].forward + 3 * trained, rel=0.01)


def test_molmoact2_expert_fine_tuning():
    """A 4B text model over two pictures of 196 tokens and the words: 2 x 3.6e9 parameters a token, and the tower."""
    found = stages(Config(model=Model(name="molmoact2")), workload.Robot(cameras=2))
    assert 4.5e12 < found["context"].forward < 6.5e12
    assert found["context"].backward == 0
    assert found["expert"].backward == pytest.approx(2 * found["expert"].forward, rel=0.05)


def test_flow_times_repeat_the_expert_alone():
    robot = workload.Robot(cameras=2, prompt=48)
    one = stages(Config(model=Model(size="bench")), robot)
    eight = stages(Config(model=Model(size="bench"), flow=Flow(times=8)), robot)
    assert eight["context"] == one["context"]
    assert eight["expert"].forward == pytest.approx(8 * one["expert"].forward, rel=0.01)


def test_recomputation_is_told_apart_and_changes_nothing_else():
    robot = workload.Robot(cameras=2, prompt=48)
    none = stages(Config(model=Model(size="bench")), robot)
    full = stages(Config(model=Model(size="bench"), remat=Remat(expert="full")), robot)
    assert none["expert"].recomputation == 0
    assert 0 < full["expert"].recomputation <= full["expert"].forward
    assert total(full) == pytest.approx(total(none), rel=1e-6)


def test_mesh_changes_no_count():
    robot = workload.Robot(cameras=1, prompt=48)
    counts = {
        total(stages(Config(model=Model(size="bench"), mesh=Mesh(replica=r, fsdp=f)), robot))
        for r, f in [(8, 1), (1, 8)]
    }
    assert len(counts) == 1


def test_no_product_is_as_wide_as_a_vocabulary():
    config = Config()
    robot = workload.Robot(cameras=1, prompt=48)
    facts = workload.robot_facts(config, robot)
    learner = make_learner(config, facts, jax.devices()[:1])
    sample = workload.sample_shapes(config, facts, robot.picture)
    step = jit_train_step(config, learner, recipes.get("pi05").prepare(config, facts))
    found = flops.products(step, workload.learner_state(config, learner), workload.abstract_batch(sample, 8))
    assert flops.largest_dimension(found) == learner.model_config.trunk.mlp < learner.model_config.vocabulary


def test_facts_of_a_robot():
    facts = workload.robot_facts(Config(), workload.Robot(cameras=3, state=9, actions=6))
    assert (len(facts.cameras), len(facts.state_names), len(facts.action_names)) == (3, 9, 6)
    assert facts.prompt_length == 200
    two, three = (workload.robot_facts(Config(model=Model(name="groot")), workload.Robot(cameras=n)) for n in (2, 3))
    assert (two.prompt_length, three.prompt_length) == (152, 224)  # a picture is 66 tokens, lengths are multiples of 8
    named = workload.robot_facts(Config(data=Data(cameras=("top", "wrist"), prompt_length=64)), workload.Robot())
    assert (named.cameras, named.prompt_length) == (("top", "wrist"), 64)


def test_accumulated_batch_has_a_leading_axis():
    sample = {"tokens": jax.ShapeDtypeStruct((48,), "int32"), "images": (jax.ShapeDtypeStruct((8, 8, 3), "uint8"),)}
    fields = {name: sample.get(name, jax.ShapeDtypeStruct((), "float32")) for name in workload.Batch._fields}
    batch = workload.abstract_batch(fields, 12, accumulation=3)
    assert batch.tokens.shape == (3, 4, 48)
    assert batch.images[0].shape == (3, 4, 8, 8, 3)
    assert batch.position.shape == batch.weight.shape == (3, 4)
