"""Records tests/fixtures/pi05_tiny.npz: what LeRobot's PI05Policy gives on tiny weights and inputs, float32, on a CPU.

Needs an environment of its own with `pip install "lerobot[pi]==0.6.1"` (Python 3.12); torch and lerobot are imported
nowhere else.

    python tools/make_reference_pi05.py

Two cameras and a third, absent one; the second of two prompts is padded; seven of eight action dimensions are real. The
fixture holds the tensors that the network reads (`w/`, LeRobot's names), inputs (`in/`), activations (`act/`), results
(`out/`), the gradient of every parameter under full fine-tuning (`grad/`), and how far the trained parameters are after
three AdamW updates of expert-only fine-tuning on the same batch, noise and times (`moved/`). The last two are 16-bit
fractions of the tensor's largest magnitude: an error of 1.5e-5 of it at most. `meta` is JSON: these magnitudes
(`scale`), versions, sizes, optimiser, and the tensors that get no gradient.
"""

# pyright: reportMissingImports=false

import argparse
import contextlib
import importlib.metadata
import json
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.policies.pi05 import modeling_pi05 as upstream
from lerobot.policies.pi05.configuration_pi05 import PI05Config

FIXTURE = Path(__file__).resolve().parents[1] / "tests" / "fixtures" / "pi05_tiny.npz"
BATCH, IMAGE, PROMPT, PADDED, HORIZON, REAL, ACTION, STEPS, VOCABULARY = 2, 28, 9, 3, 6, 7, 8, 5, 160
# LeRobot writes eight heads into its joint layer: their number cannot be smaller.
SHARED = {"depth": 3, "num_heads": 8, "num_kv_heads": 1, "head_dim": 16}
GEMMA = {
    "gemma_2b": {"width": 64, "mlp_dim": 128, **SHARED},
    "gemma_300m": {"width": 32, "mlp_dim": 64, **SHARED},
}
VISION = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "patch_size": 14,
}
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}
CLIP, UPDATES = 1.0, 3


@contextlib.contextmanager
def tiny_modules() -> Iterator[None]:
    """While a policy is built: Gemma, SigLIP and vocabulary sizes that LeRobot has as constants are the ones above."""
    names = ("get_gemma_config", "PaliGemmaForConditionalGenerationWithPiGemma", "PiGemmaForCausalLM")
    real = {name: getattr(upstream, name) for name in names}

    def trunk(config):
        config._vocab_size = config.text_config.vocab_size = config.image_token_index = VOCABULARY
        for name, value in VISION.items():
            setattr(config.vision_config, name, value)
        config.vision_config.num_image_tokens = (IMAGE // VISION["patch_size"]) ** 2
        config.vision_config.projection_dim = config.projection_dim = config.text_config.hidden_size
        return real[names[1]](config=config)

    def expert(config):
        config.vocab_size = VOCABULARY
        return real[names[2]](config=config)

    tiny = (lambda variant: upstream.GemmaConfig(**GEMMA[variant]), trunk, expert)
    try:
        for name, replacement in zip(names, tiny, strict=True):
            setattr(upstream, name, replacement)
        yield
    finally:
        for name, original in real.items():
            setattr(upstream, name, original)


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_policy() -> upstream.PI05Policy:
    """Expert-only, with random values in every parameter: layers that start at zero would hide errors."""
    config = PI05Config(
        input_features={
            "observation.images.front": PolicyFeature(FeatureType.VISUAL, (3, IMAGE, IMAGE)),
            "observation.images.wrist": PolicyFeature(FeatureType.VISUAL, (3, IMAGE, IMAGE)),
            "observation.state": PolicyFeature(FeatureType.STATE, (REAL,)),
        },
        output_features={"action": PolicyFeature(FeatureType.ACTION, (REAL,))},
        chunk_size=HORIZON,
        n_action_steps=HORIZON,
        max_state_dim=ACTION,
        max_action_dim=ACTION,
        image_resolution=(IMAGE, IMAGE),
        num_inference_steps=STEPS,
        empty_cameras=1,
        train_expert_only=True,
        freeze_vision_encoder=True,
        device="cpu",
        dtype="float32",
    )
    with tiny_modules():
        policy = upstream.PI05Policy(config)
    for name, parameter in policy.named_parameters():
        noise = normal((zlib.crc32(name.encode()) + 3) % 2**31, *parameter.shape)
        if parameter.ndim == 1:
            value = float((parameter == 1).all()) + 0.1 * noise
        else:
            value = noise * (0.8 / parameter[0].numel() ** 0.5)
        parameter.data.copy_(value)
    policy.train()
    return policy


def make_batch() -> dict[str, torch.Tensor]:
    def picture(seed: int) -> torch.Tensor:
        return torch.rand((BATCH, 3, IMAGE + 12, IMAGE + 4), generator=torch.Generator().manual_seed(seed))

    mask = torch.ones(BATCH, PROMPT, dtype=torch.bool)
    mask[-1, PROMPT - PADDED :] = False
    tokens = torch.randint(2, VOCABULARY, (BATCH, PROMPT), generator=torch.Generator().manual_seed(1))
    return {
        "observation.images.front": picture(2),
        "observation.images.wrist": picture(3),
        "observation.state": normal(4, BATCH, REAL),
        "observation.language.tokens": tokens.masked_fill(~mask, 0),
        "observation.language.attention_mask": mask,
        "action": normal(5, BATCH, HORIZON, REAL),
    }


class Recorder:
    """Collects arrays by name; hooks record a module's output at its first calls."""

    def __init__(self):
        self.arrays: dict[str, np.ndarray] = {}
        self.scales: dict[str, float] = {}

    def put(self, name: str, value: torch.Tensor) -> None:
        if name in self.arrays:
            raise ValueError(f"{name} is recorded twice")
        value = value.detach().to(torch.int32 if value.dtype == torch.int64 else value.dtype)
        self.arrays[name] = value.numpy().copy()

    def put_coded(self, group: str, name: str, value: torch.Tensor) -> None:
        """16-bit fractions of the largest magnitude."""
        array = value.detach().numpy()
        scale = float(np.abs(array).max())
        self.arrays[f"{group}/{name}"] = np.round(array / scale * 32767).astype(np.int16)
        self.scales[f"{group}/{name}"] = scale

    def hook(self, module: torch.nn.Module, *names: str, pick: Callable = lambda out: out):
        """The first call is recorded under the first name, and so on."""
        waiting = list(names)

        def record(_module, _inputs, out):
            if waiting:
                self.put(waiting.pop(0), pick(out))

        return module.register_forward_hook(record)


def record_activations(policy: upstream.PI05Policy, batch: dict, record: Recorder) -> None:
    """The training pass: what each part of the network gives, and the loss."""
    model = policy.model
    vlm = model.paligemma_with_expert.paligemma.model
    hooks = [
        record.hook(vlm.vision_tower, "act/vision_0", "act/vision_1", pick=lambda out: out.last_hidden_state),
        record.hook(vlm.multi_modal_projector, "act/features_0", "act/features_1"),
        record.hook(model.action_out_proj, "out/velocity"),
    ]
    real_prefix = model.embed_prefix

    def embed_prefix(images, *args, **kw):
        out = real_prefix(images, *args, **kw)
        for i, image in enumerate(images[:2]):
            record.put(f"in/image_{i}", image)
        if len(images) != 3 or not (images[2] == -1).all():
            raise ValueError(f"expected two pictures and a blank one, got {len(images)}")
        record.put("act/prefix", out[0])
        record.put("in/prefix_mask", out[1])
        return out

    model.embed_prefix = embed_prefix
    record.put("out/loss", policy(batch)[0])
    model.embed_prefix = real_prefix
    for hook in hooks:
        hook.remove()


def record_sampling(policy: upstream.PI05Policy, batch: dict, noise: torch.Tensor, record: Recorder) -> None:
    """Inference: keys and values of the prefix in every layer, the velocity of every Euler step, the chunk."""
    joint = policy.model.paligemma_with_expert
    real, velocities = joint.forward, []

    def forward(**kw):
        out = real(**kw)
        if out[1] is not None and "act/key_0" not in record.arrays:
            for i, layer in enumerate(out[1].layers):
                record.put(f"act/key_{i}", layer.keys)
                record.put(f"act/value_{i}", layer.values)
        return out

    joint.forward = forward
    hook = policy.model.action_out_proj.register_forward_hook(lambda _m, _i, out: velocities.append(out.detach()))
    record.put("out/sampled", policy.predict_action_chunk(batch, noise=noise.clone()))
    record.put("out/sample_velocities", torch.stack(velocities))
    hook.remove()
    joint.forward = real


def record_gradients(policy: upstream.PI05Policy, batch: dict, record: Recorder) -> list[str]:
    """Gradients of full fine-tuning; the names of the parameters that get none, or one that is zero everywhere."""
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    for parameter in policy.parameters():
        parameter.requires_grad_(True)
    policy(batch)[0].backward()
    without = []
    for name, parameter in policy.named_parameters():
        if parameter.grad is None or not parameter.grad.any():
            without.append(name)
        else:
            record.put_coded("grad", name, parameter.grad)
    policy.zero_grad(set_to_none=True)
    for parameter in policy.parameters():
        parameter.requires_grad_(False)
    for parameter in trained:
        parameter.requires_grad_(True)
    return without


def record_updates(policy: upstream.PI05Policy, batch: dict, record: Recorder) -> list[float]:
    """Three AdamW updates of what expert-only fine-tuning trains; the gradients' norms before clipping."""
    trained = {name: parameter for name, parameter in policy.named_parameters() if parameter.requires_grad}
    start = {name: parameter.detach().clone() for name, parameter in trained.items()}
    optimizer = torch.optim.AdamW(trained.values(), **ADAMW)
    norms = []
    for _ in range(UPDATES):
        optimizer.zero_grad()
        policy(batch)[0].backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained.values(), CLIP)))
        optimizer.step()
    for name, parameter in trained.items():
        if not torch.equal(parameter, start[name]):
            record.put_coded("moved", name, parameter - start[name])
    return norms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FIXTURE)
    out = parser.parse_args().out
    torch.use_deterministic_algorithms(True)
    policy, batch, record = make_policy(), make_batch(), Recorder()
    noise, time = normal(11, BATCH, HORIZON, ACTION), torch.tensor([0.35, 0.8])
    policy.model.sample_noise = lambda shape, device: noise.clone()
    policy.model.sample_time = lambda size, device: time.clone()
    for name, key in (("tokens", "observation.language.tokens"), ("token_mask", "observation.language.attention_mask")):
        record.put(f"in/{name}", batch[key])
    for name, value in (("action", batch["action"]), ("noise", noise), ("time", time)):
        record.put(f"in/{name}", value)

    record_activations(policy, batch, record)
    record_sampling(policy, batch, noise, record)
    policy.train()
    without = record_gradients(policy, batch, record)
    for name, value in policy.state_dict().items():
        if name not in without:
            record.put(f"w/{name}", value)
    norms = record_updates(policy, batch, record)

    meta = {
        "versions": {name: importlib.metadata.version(name) for name in ("lerobot", "torch", "transformers")},
        "source": "tools/make_reference_pi05.py",
        "gemma": GEMMA,
        "vision": VISION,
        "adamw": {**ADAMW, "clip": CLIP, "updates": UPDATES, "gradient_norms": norms},
        "without_gradient": without,
        "scale": record.scales,
    }
    np.savez_compressed(out, allow_pickle=False, meta=json.dumps(meta), **record.arrays)
    print(f"{out}: {out.stat().st_size:,} bytes, {len(record.arrays)} arrays; loss {record.arrays['out/loss']}")


if __name__ == "__main__":
    main()
