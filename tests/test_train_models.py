"""GR00T and MolmoAct2 train, resume, shard and act in the same way as π0.5."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from small_run import run, small_config, steps

from somaspeed_jax import recipes
from somaspeed_jax.assemble import make_learner
from somaspeed_jax.export.run import export_run
from somaspeed_jax.initial import initial_parameters
from somaspeed_jax.policy import load_policy

pytestmark = pytest.mark.slow

MODELS = {
    # Dropout, state dropout, random windows and colour jitter all on.
    "groot": dict(
        model=dict(name="groot", size="demo", horizon=8),
        groot=dict(embodiment="simpler_env_widowx", dropout=True, state_dropout=0.5, crop_fraction=0.9),
        data=dict(tail="repeat"),
        optim=dict(schedule="groot", floor=0.0, warmup=1),
    ),
    "molmoact2": dict(
        model=dict(name="molmoact2", size="demo"),
        molmoact2=dict(setup="tabletop arm", control="absolute position"),
        flow=dict(times=2),
        optim=dict(schedule="molmoact2", warmup=1),
    ),
}


@pytest.fixture(scope="module", params=list(MODELS))
def uninterrupted(request, demo_dataset, tmp_path_factory):
    workdir = tmp_path_factory.mktemp(request.param)
    config = small_config(demo_dataset, steps=3, **MODELS[request.param])
    outcome, _ = run(config, workdir)
    return config, workdir, outcome


def losses(workdir):
    return [line["loss"] for line in steps(workdir)]


def test_resume_is_exact(uninterrupted, tmp_path):
    config, whole, outcome = uninterrupted
    run(dataclasses.replace(config, stop_after_seconds=1e-9), tmp_path)
    resumed, printed = run(config, tmp_path)
    assert "resumed from step 1" in printed
    assert losses(tmp_path) == losses(whole)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), resumed.state, outcome.state)


def test_U20_two_shards_agree(uninterrupted, tmp_path):
    config, whole, _ = uninterrupted
    mesh = dataclasses.replace(config.mesh, devices=2, replica=1, fsdp=2, frozen="shard")
    run(dataclasses.replace(config, mesh=mesh, batch=dataclasses.replace(config.batch, per_device=2)), tmp_path)
    np.testing.assert_allclose(losses(tmp_path), losses(whole), rtol=1e-5)


def test_acts(uninterrupted):
    _, workdir, _ = uninterrupted
    policy = load_policy(workdir)
    image = np.zeros((48, 48, 3), np.uint8)
    observation = {
        "images": dict.fromkeys(policy.facts.cameras, image),
        "state": np.zeros(2, np.float32),
        "task": "reach the red block",
    }
    actions = policy.act(observation)
    assert actions.shape[1] == 2 and actions.shape[0] >= 8 and np.isfinite(actions).all()
    with pytest.raises(ValueError, match=r"no picture of observation\.images\.wrist"):
        policy.act({**observation, "images": {"observation.images.top": image}})
    with pytest.raises(ValueError, match=r"state has shape \(3,\).*expected 2 finite numbers"):
        policy.act({**observation, "state": np.zeros(3)})
    facts = json.loads((workdir / "processor" / "facts.json").read_text())
    assert facts["cameras"] == ["observation.images.top", "observation.images.wrist"]


def test_export_and_reload_through_upstreams_layout(uninterrupted, tmp_path):
    config, workdir, outcome = uninterrupted
    export_run(workdir, tmp_path / "exported")
    again = dataclasses.replace(config, weights=dataclasses.replace(config.weights, path=str(tmp_path / "exported")))
    recipe = recipes.get(config.model.name)
    learner = make_learner(again, None)
    trainable, frozen, facts = initial_parameters(again, recipe, learner)
    trained = {**outcome.state.trainable, **outcome.state.frozen}
    assert {**trainable, **frozen}.keys() == trained.keys()
    for path, value in {**trainable, **frozen}.items():
        np.testing.assert_array_equal(np.asarray(value), np.asarray(trained[path]), err_msg=path)
    assert facts["source"] == str(tmp_path / "exported")
