"""LeRobot's own π0.5 class loads what this program exports, and acts the same.

    python tools/check_export_against_lerobot.py --lerobot-python path/to/lerobot-venv/bin/python

Needs a second Python environment with `lerobot[pi]==0.6.1` (Python 3.12). Nothing is fetched.

1. lerobot: builds PI05Policy at this program's `bench` size (its classes, smaller numbers), random weights, saves it.
2. here: reads that directory, moves every parameter of the action expert, saves a checkpoint, exports it with
   tools/export.py's function, and samples actions.
3. lerobot: PI05Policy.from_pretrained(export); compares every tensor with the file and the sampled actions with those
   of step 2, and runs the exported pre- and postprocessor.

Prints one JSON object; exit status 0 only if all of it holds.
"""

# pyright: reportMissingImports=false

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, cast

import numpy as np

TOLERANCE = 1e-5  # of the largest action
ROBOT_DIMS, PROMPT, BATCH = 7, 12, 2
CAMERAS = ("observation.images.front", "observation.images.wrist")


def inputs(image: int, vocabulary: int, horizon: int, action_dim: int) -> dict[str, np.ndarray]:
    """The same observation and noise for both sides: pictures [b, c, h, w, 3] in [0, 1]."""
    rng = np.random.default_rng(0)
    mask = np.ones((BATCH, PROMPT), bool)
    mask[-1, PROMPT - 3 :] = False
    return {
        "images": rng.random((BATCH, len(CAMERAS), image, image, 3), np.float32),
        "tokens": np.where(mask, rng.integers(2, vocabulary, mask.shape), 0).astype(np.int32),
        "mask": mask,
        "noise": rng.standard_normal((BATCH, horizon, action_dim), np.float32),
        "state": rng.standard_normal((BATCH, ROBOT_DIMS), np.float32),
    }


def statistics() -> dict[str, dict[str, np.ndarray]]:
    """Fields of state and action statistics, [a] each."""
    centre = np.linspace(-1, 1, ROBOT_DIMS)
    offsets = {"min": -2.0, "q01": -1.5, "mean": 0.1, "q99": 1.5, "max": 2.0}
    return {
        name: {field: centre + offset * spread for field, offset in offsets.items()}
        | {"std": np.full(ROBOT_DIMS, spread)}
        for name, spread in (("state", 1.0), ("action", 2.0))
    }


def here(work: Path) -> None:
    """Step 2, in this program's environment."""
    import dataclasses

    import jax
    import jax.numpy as jnp

    from somaspeed_jax import recipes
    from somaspeed_jax.assemble import Data, Part, make_learner, save_processor
    from somaspeed_jax.checkpoint import Checkpoints
    from somaspeed_jax.config import Config
    from somaspeed_jax.data.demo import ensure_demo_tokenizer
    from somaspeed_jax.data.stats import FeatureStatistics
    from somaspeed_jax.data.tokenizers import load_tokenizer
    from somaspeed_jax.export.run import export_run
    from somaspeed_jax.flow import sample_actions
    from somaspeed_jax.initial import initial_parameters
    from somaspeed_jax.models.base import Observation
    from somaspeed_jax.models.layers.param import bind
    from somaspeed_jax.recipes import Facts
    from somaspeed_jax.state import create_state

    def change(config, **sections):
        return dataclasses.replace(
            config, **{name: dataclasses.replace(getattr(config, name), **values) for name, values in sections.items()}
        )

    config = change(
        Config(),
        model=dict(size="bench"),
        weights=dict(path=str(work / "base")),
        dtype=dict(compute="float32", frozen="float32"),
        mesh=dict(devices=1, replica=1, fsdp=1),
    )
    names = tuple(f"joint{i}" for i in range(ROBOT_DIMS))
    facts = Facts(CAMERAS, names, names, 30.0, 200)
    recipe = recipes.get("pi05")
    learner = make_learner(config, facts)
    trainable, frozen, fingerprint = initial_parameters(config, recipe, learner)
    moved = {
        path: value + 0.01 * jax.random.normal(jax.random.key(i), value.shape)
        for i, (path, value) in enumerate(trainable.items())
    }
    state = create_state(moved, frozen, learner.optimizer, learner.shardings)
    workdir = work / "run"
    workdir.mkdir()
    with Checkpoints(workdir, keep=1) as checkpoints:
        checkpoints.save(1, dataclasses.replace(state, step=jnp.int32(1)), config, fingerprint, False)
    stats = {name: FeatureStatistics(name, names, 100, **cast(Any, values)) for name, values in statistics().items()}
    tokenizer = load_tokenizer(ensure_demo_tokenizer(work / "cache", "sentencepiece"), cast(Any, recipe.TOKENIZER))
    save_processor(workdir, Data((Part(cast(Any, None), None, stats, facts),), tokenizer, facts))
    report = export_run(workdir, work / "export")

    size = learner.model_config
    given = inputs(size.vision.image[0], size.vocabulary, size.horizon, size.action_dim)
    observation = Observation(
        images=tuple(jnp.asarray(given["images"][:, i]) * 2 - 1 for i in range(len(CAMERAS))),
        image_mask=jnp.ones((BATCH, len(CAMERAS)), bool),
        tokens=jnp.asarray(given["tokens"]),
        token_mask=jnp.asarray(given["mask"]),
        state=jnp.zeros((BATCH, ROBOT_DIMS)),
        embodiment=jnp.zeros(BATCH, jnp.int32),
    )
    with jax.default_matmul_precision("highest"):
        actions = jax.jit(lambda params, noise: sample_actions(bind(learner.policy, params), observation, noise))(
            {**frozen, **moved}, jnp.asarray(given["noise"])
        )
    np.save(work / "actions.npy", np.asarray(actions)[..., :ROBOT_DIMS])
    summary = {"trained": report.exported.trained, "copied": report.exported.copied, "zeros": report.exported.zeros}
    (work / "exported.json").write_text(json.dumps(summary))


SIZE = {
    "gemma_2b": {"width": 512, "depth": 8, "mlp_dim": 4096, "num_heads": 8, "num_kv_heads": 1, "head_dim": 64},
    "gemma_300m": {"width": 256, "depth": 8, "mlp_dim": 1024, "num_heads": 8, "num_kv_heads": 1, "head_dim": 64},
    "vision": {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 4},
    "vocabulary": 8192,
    "image": 112,
    "horizon": 50,
}


def shrink(module) -> None:
    """LeRobot hard-codes π0.5's sizes: the same classes are built with smaller numbers in this process."""
    paligemma, expert = module.PaliGemmaForConditionalGenerationWithPiGemma, module.PiGemmaForCausalLM

    def small_paligemma(config):
        config._vocab_size = config.text_config.vocab_size = config.image_token_index = SIZE["vocabulary"]
        vision, width = config.vision_config, config.text_config.hidden_size
        for name, value in SIZE["vision"].items():
            setattr(vision, name, value)
        vision.projection_dim = config.projection_dim = width
        vision.num_image_tokens = (SIZE["image"] // vision.patch_size) ** 2
        return paligemma(config=config)

    def small_expert(config):
        config.vocab_size = SIZE["vocabulary"]
        return expert(config=config)

    module.get_gemma_config = lambda variant: module.GemmaConfig(**SIZE[variant])
    module.PaliGemmaForConditionalGenerationWithPiGemma = small_paligemma
    module.PiGemmaForCausalLM = small_expert


def lerobot_make(work: Path) -> None:
    """Step 1, in LeRobot's environment."""
    import torch
    from lerobot.configs import FeatureType, PolicyFeature
    from lerobot.policies.pi05 import modeling_pi05
    from lerobot.policies.pi05.configuration_pi05 import PI05Config

    shrink(modeling_pi05)
    image = SIZE["image"]
    features = {name: PolicyFeature(FeatureType.VISUAL, (3, image, image)) for name in CAMERAS}
    features["observation.state"] = PolicyFeature(FeatureType.STATE, (ROBOT_DIMS,))
    policy = modeling_pi05.PI05Policy(
        PI05Config(
            input_features=features,
            output_features={"action": PolicyFeature(FeatureType.ACTION, (ROBOT_DIMS,))},
            image_resolution=(image, image),
            device="cpu",
            dtype="float32",
        )
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():  # zero-initialised layers would hide a mistake
            scale = 0.1 if parameter.ndim < 2 else 0.7 / parameter[0].numel() ** 0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    policy.save_pretrained(work / "base")


def lerobot_compare(work: Path) -> None:
    """Step 3, in LeRobot's environment."""
    import torch
    from lerobot.policies.factory import make_pre_post_processors
    from lerobot.policies.pi05 import modeling_pi05
    from lerobot.processor import tokenizer_processor
    from safetensors.torch import load_file

    shrink(modeling_pi05)
    policy = modeling_pi05.PI05Policy.from_pretrained(work / "export")
    policy.eval()
    # from_pretrained goes on with random weights when it cannot load: compare with the file.
    stored, loaded = load_file(work / "export" / "model.safetensors"), policy.state_dict()
    different = [name for name, value in loaded.items() if name not in stored or not torch.equal(value, stored[name])]
    base = load_file(work / "base" / "model.safetensors")
    moved = sum(not torch.equal(base[name].float(), stored[name].float()) for name in base)

    given = inputs(SIZE["image"], SIZE["vocabulary"], SIZE["horizon"], policy.config.max_action_dim)
    batch = {name: torch.from_numpy(given["images"][:, i]).permute(0, 3, 1, 2) for i, name in enumerate(CAMERAS)}
    batch["observation.state"] = torch.zeros(BATCH, ROBOT_DIMS)
    batch["observation.language.tokens"] = torch.from_numpy(given["tokens"]).long()
    batch["observation.language.attention_mask"] = torch.from_numpy(given["mask"])
    with torch.no_grad():
        theirs = policy.predict_action_chunk(batch, noise=torch.from_numpy(given["noise"])).numpy()
    ours = np.load(work / "actions.npy")
    error = float(np.abs(theirs - ours).max() / np.abs(theirs).max())

    class FixedTokens:  # the published tokenizer is not at hand; the statistics are what is compared
        @staticmethod
        def from_pretrained(name, **_):
            return lambda texts, **kw: {
                "input_ids": torch.zeros(len(texts), kw["max_length"], dtype=torch.long),
                "attention_mask": torch.ones(len(texts), kw["max_length"], dtype=torch.long),
            }

    tokenizer_processor.AutoTokenizer = FixedTokens
    before, after = make_pre_post_processors(policy.config, pretrained_path=str(work / "export"))
    sample = {name: value[:1] for name, value in batch.items() if name.startswith("observation.images")}
    sample |= {"observation.state": torch.from_numpy(given["state"][:1]), "task": ["pick up"]}
    normalised = before(sample)["observation.state"].numpy()
    stats = statistics()
    low, high = stats["state"]["q01"], stats["state"]["q99"]
    normal_error = float(np.abs(normalised - (2 * (given["state"][:1] - low) / (high - low) - 1)).max())
    low, high = stats["action"]["q01"], stats["action"]["q99"]
    robot = after(torch.from_numpy(theirs[:, 0])).numpy()
    robot_error = float(np.abs(robot - ((theirs[:, 0] + 1) * (high - low) / 2 + low)).max())
    exported = json.loads((work / "exported.json").read_text())
    result = {
        "tensors": len(stored),
        "tensors_exported": exported,
        "tensors_that_differ_after_from_pretrained": different,
        "tensors_moved_by_training": moved,
        "parameters": sum(parameter.numel() for parameter in policy.parameters()),
        "sampled_actions_max_error_over_largest": error,
        "largest_action": float(np.abs(theirs).max()),
        "preprocessor_state_max_error": normal_error,
        "postprocessor_action_max_error": robot_error,
    }
    sound = not different and len(loaded) == len(stored) and moved == exported["trained"] and error < TOLERANCE
    result["holds"] = sound and normal_error < 1e-5 and robot_error < 1e-5
    (work / "result.json").write_text(json.dumps(result, indent=2))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lerobot-python", help="the Python of an environment with lerobot[pi]==0.6.1")
    parser.add_argument("--step", nargs=2, metavar=("NAME", "DIRECTORY"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.step:
        {"make": lerobot_make, "here": here, "compare": lerobot_compare}[args.step[0]](Path(args.step[1]))
        return 0
    if not args.lerobot_python:
        parser.error("--lerobot-python is needed")
    with tempfile.TemporaryDirectory() as work:
        for python, step in ((args.lerobot_python, "make"), (sys.executable, "here"), (args.lerobot_python, "compare")):
            subprocess.run([python, __file__, "--step", step, work], check=True, stdout=sys.stderr)
        result = json.loads((Path(work) / "result.json").read_text())
    print(json.dumps(result, indent=2))
    return 0 if result["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
