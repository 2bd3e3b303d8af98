"""LeRobot's own MolmoAct2 classes load what this program writes, act the same, and this program reads what they save.

    python tools/check_export_molmoact2.py --lerobot-python path/to/lerobot-venv/bin/python

Needs a second Python environment with `lerobot[molmoact2]==0.6.1` (Python 3.12). Nothing is fetched.

1. here: random weights at the `tiny` size, exported as a Hugging Face directory with its config.json.
2. lerobot: MolmoAct2Policy over that directory; every tensor is compared with the file; it samples a chunk for a batch
   with fixed noise and saves itself in LeRobot's own layout.
3. here: reads what LeRobot saved; every parameter is compared with step 1; samples the same chunk.

Prints one JSON object; exit status 0 only if all of it holds.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

TOLERANCE = 1e-5  # of the largest action
STEPS = 4


def export(work: Path) -> None:
    """Step 1."""
    from somaspeed_jax.models.layers.param import initialise, param_specs
    from somaspeed_jax.models.molmoact2 import build
    from somaspeed_jax.models.weights.export import export_weights
    from somaspeed_jax.models.weights.molmoact2 import table
    from somaspeed_jax.models.weights.molmoact2_config import config_to_json

    config = sizes()
    policy = build(config)
    files = {"config.json": json.dumps(config_to_json(config)).encode()}
    export_weights(work / "hf", None, table(config), param_specs(policy), initialise(policy, 0), files=files)


def sizes():
    """The tiny model with an output that is not zero, and positions as LeRobot 0.6.1 counts them in a batch."""
    import dataclasses

    from somaspeed_jax.models.molmoact2 import SIZES

    tiny = SIZES["tiny"]
    flow = dataclasses.replace(tiny.flow, steps=STEPS)
    return dataclasses.replace(tiny, flow=flow, fresh_modulation=0.3, batch_positions=True)


def lerobot(work: Path) -> None:
    """Step 2, in LeRobot's environment."""
    import make_reference_molmoact2 as reference
    from safetensors.numpy import load_file, save_file

    hf_config = json.loads((work / "hf" / "config.json").read_text())
    policy = reference.load_policy(work / "hf", hf_config["max_action_horizon"])
    ours, theirs = load_file(work / "hf" / "model.safetensors"), policy.model.state_dict()
    buffers = {"model.transformer.rotary_emb.inv_freq"}
    differ = sorted(n for n in ours if n not in theirs or not np.array_equal(ours[n], theirs[n].numpy()))
    batch = reference.make_batch(hf_config, [(2, [21, 22, 23, 24]), (2, [31])], seed=5, pads=False)
    noise = reference.normal(6, 2, hf_config["max_action_horizon"], hf_config["max_action_dim"])
    policy.eval()
    with reference.drawn(noise, noise):
        actions = policy.predict_action_chunk(batch)
    policy.save_pretrained(work / "lerobot")
    inputs = {key: value.contiguous().numpy() for key, value in batch.items()}
    save_file(inputs | {"noise": noise.numpy(), "actions": actions.contiguous().numpy()}, work / "run.safetensors")
    missing = sorted(theirs.keys() - ours.keys() - buffers)
    (work / "lerobot.json").write_text(json.dumps({"tensors_that_differ": differ, "missing": missing}))


def compare(work: Path) -> dict:
    """Step 3."""
    import jax
    import jax.numpy as jnp
    from safetensors.numpy import load_file

    from somaspeed_jax.flow import sample_actions
    from somaspeed_jax.models.base import Observation
    from somaspeed_jax.models.layers.param import bind, initialise, param_specs
    from somaspeed_jax.models.molmoact2 import build
    from somaspeed_jax.models.weights.load import load_params
    from somaspeed_jax.models.weights.molmoact2 import PREFIXES, table
    from somaspeed_jax.models.weights.source import open_source
    from somaspeed_jax.models.weights.table import choose_prefix, prefixed

    config, run = sizes(), load_file(work / "run.safetensors")
    policy, source = build(config), open_source(work / "lerobot")
    prefix = choose_prefix(list(source.names()), table(config), PREFIXES)
    params = load_params(source, prefixed(table(config), prefix), param_specs(policy))
    first = initialise(policy, 0)
    changed = sorted(path for path in first if not np.array_equal(first[path], params[path]))

    side, patch = config.vision.grid[0], config.vision.patch
    pixels = run["pixel_values"].reshape(2, 2, side, side, patch, patch, 3).transpose(0, 1, 2, 4, 3, 5, 6)
    pictures = pixels.reshape(2, 2, *config.vision.image, 3)
    observation = Observation(
        images=(jnp.asarray(pictures[:, 0]), jnp.asarray(pictures[:, 1])),
        image_mask=jnp.ones((2, 2), bool),
        tokens=jnp.asarray(run["input_ids"], jnp.int32),
        token_mask=jnp.asarray(run["attention_mask"]).astype(bool),
        state=jnp.zeros((2, 1)),
        embodiment=jnp.zeros(2, jnp.int32),
    )
    dims = jnp.asarray(~run["action_dim_is_pad"])
    noise = jnp.asarray(run["noise"])
    sample = jax.jit(lambda params: sample_actions(bind(policy, params), observation, noise, dims=dims))
    actions = np.asarray(sample(params))[..., :7]
    return {
        **json.loads((work / "lerobot.json").read_text()),
        "lerobot_prefix": prefix,
        "parameters_changed_on_the_way": changed,
        "largest_action": float(np.abs(run["actions"]).max()),
        "action_error": float(np.abs(actions - run["actions"]).max() / np.abs(run["actions"]).max()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lerobot-python", type=Path, help="interpreter of the environment with lerobot")
    parser.add_argument("--lerobot-step", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.lerobot_step:
        lerobot(args.lerobot_step)
        return 0
    if args.lerobot_python is None:
        parser.error("--lerobot-python is needed")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        export(work)
        subprocess.run([str(args.lerobot_python), __file__, "--lerobot-step", str(work)], check=True)
        report = compare(work)
    print(json.dumps(report, indent=2))
    faults = report["tensors_that_differ"] or report["missing"] or report["parameters_changed_on_the_way"]
    return 1 if faults or report["action_error"] > TOLERANCE else 0


if __name__ == "__main__":
    sys.exit(main())
