"""Runs LeRobot's GR00T N1.7 on a checkpoint directory and given inputs, and records what it computes.

For reference numbers and for checking an export against upstream's own class. It needs an environment of its own with
lerobot 0.6.1 and torch, which the package never imports:

    python tools/make_reference_groot.py CHECKPOINT inputs.npz outputs.npz [--full]

CHECKPOINT: a directory in NVIDIA's layout (bare names) or LeRobot's, with config.json. inputs.npz: input_ids,
attention_mask [b, p]; pixel_values [patches, 3 * 2 * patch²]; image_grid_thw [pictures, 3]; state [b, s]; action,
action_mask [b, t, a]; embodiment_id [b] (upstream's rows); noise [b, K, t, a]; time [b, K]. Float32, dropouts off.

outputs.npz: features [b, p, d]; velocity [b, K, t, a]; loss, the mean of the K losses; actions [b, t, a] sampled from
noise[:, 0]; and per trained tensor `norm/<name>` and `dot/<name>`, the norm of its gradient and its product with
`probe(name, shape)`. --full: every tensor is trained, otherwise upstream's default.
"""

import argparse
import json
import os
import tempfile
import zlib
from pathlib import Path

import numpy as np

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from lerobot.policies.groot import groot_n1_7 as upstream
from safetensors.torch import load_file, save_file
from transformers import Qwen3VLConfig

PREFIX = "_groot_model."


def probe(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A fixed float64 direction for the tensor `name`."""
    return np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)


def backbone_config(fields: dict) -> Qwen3VLConfig:
    """The sizes that config.json states for a backbone other than the published one."""
    text, vision = fields["text"], fields["vision"]
    return Qwen3VLConfig(
        image_token_id=fields["image_token"],
        video_token_id=fields["image_token"] + 1,
        tie_word_embeddings=True,
        text_config={
            "hidden_size": text["width"],
            "intermediate_size": text["hidden"],
            "num_hidden_layers": 64,  # cut to select_layer
            "num_attention_heads": text["heads"],
            "num_key_value_heads": text["kv_heads"],
            "head_dim": text["head_width"],
            "vocab_size": fields["vocabulary"],
            "rms_norm_eps": text["eps"],
            "rope_theta": fields["rope_theta"],
            "rope_scaling": {
                "mrope_interleaved": True,
                "mrope_section": fields["mrope_section"],
                "rope_type": "default",
            },
            "attention_bias": False,
            "hidden_act": "silu",
            "model_type": "qwen3_vl_text",
            "tie_word_embeddings": True,
        },
        vision_config={
            "hidden_size": vision["width"],
            "intermediate_size": vision["hidden"],
            "depth": vision["depth"],
            "num_heads": vision["heads"],
            "patch_size": vision["patch"],
            "num_position_embeddings": vision["positions"],
            "deepstack_visual_indexes": vision["taps"],
            "out_hidden_size": vision["out"],
            "spatial_merge_size": vision["merge"],
            "temporal_patch_size": 2,
            "hidden_act": "gelu_pytorch_tanh",
            "in_channels": 3,
            "model_type": "qwen3_vl",
        },
    )


def load(checkpoint: Path) -> torch.nn.Module:
    """Upstream's model through its own from_pretrained, in float32."""
    fields = json.loads((checkpoint / "config.json").read_text())
    if "somaspeed_backbone" in fields:
        upstream._cosmos_reason2_qwen3_vl_config = lambda: backbone_config(fields["somaspeed_backbone"])
    tensors = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        tensors |= load_file(file)
    with tempfile.TemporaryDirectory() as folder:
        bare = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
        save_file(bare, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        for block in ("diffusion_model_cfg", "vl_self_attention_cfg"):
            fields[block]["dropout"] = 0.0
        (Path(folder) / "config.json").write_text(json.dumps(fields | {"state_dropout_prob": 0.0}))
        model = upstream.GR00TN17.from_pretrained(folder, tune_visual=False)  # as GrootPolicy does
    upstream._tie_unused_qwen_lm_head(model.backbone.model)
    loaded = dict(model.named_parameters())
    for name, tensor in bare.items():
        if name in loaded and not torch.equal(loaded[name], tensor.to(torch.float32)):
            raise SystemExit(f"{name} was not loaded as stored")
    missing = sorted(loaded.keys() - bare.keys())
    if missing:
        raise SystemExit(f"the checkpoint lacks {missing}")
    return model.to(torch.float32)


def run(model: torch.nn.Module, inputs: dict[str, np.ndarray], full: bool) -> dict[str, np.ndarray]:
    tensors = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in inputs.items()}
    noise, time = tensors.pop("noise"), tensors.pop("time")
    batch = {**tensors, "state": tensors["state"][:, None]}
    batch["action_mask"] = batch["action_mask"].to(torch.float32)
    if full:
        model.requires_grad_(True)
    model.train()
    head, times = model.action_head, noise.shape[1]
    out: dict[str, np.ndarray] = {}
    velocities: list[torch.Tensor] = []
    horizon = noise.shape[2]
    hook = head.action_decoder.register_forward_hook(lambda _m, _i, o: velocities.append(o.detach()[:, -horizon:]))
    losses = []
    for k in range(times):
        with fixed(head, noise[:, k], time[:, k]):
            loss = model(dict(batch))["loss"]
        (loss / times).backward()
        losses.append(loss.item())
    out["loss"] = np.float32(np.mean(losses))
    out["velocity"] = torch.stack(velocities, dim=1).numpy()
    hook.remove()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradient = parameter.grad.numpy().astype(np.float64)
            out[f"norm/{name}"] = np.linalg.norm(gradient)
            out[f"dot/{name}"] = np.sum(gradient * probe(name, gradient.shape))
    model.eval()
    with torch.no_grad():
        backbone, _ = model.prepare_input(dict(batch))
        out["features"] = model.backbone(backbone)["backbone_features"].numpy()
        del batch["action"]  # otherwise it would be taken for the end of an earlier chunk
        with fixed(head, noise[:, 0], time[:, 0]):
            out["actions"] = model.get_action(dict(batch))["action_pred"].numpy()
    return out


class fixed:
    """Gives the head this noise and these times in place of its random ones."""

    def __init__(self, head: torch.nn.Module, noise: torch.Tensor, time: torch.Tensor):
        self.head, self.noise, self.time = head, noise, time

    def __enter__(self):
        self.randn, torch.randn = torch.randn, lambda *_, **__: self.noise.clone()
        self.head.sample_time = lambda *_, **__: self.time.clone()

    def __exit__(self, *_):
        torch.randn = self.randn
        del self.head.sample_time


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("inputs", type=Path)
    parser.add_argument("outputs", type=Path)
    parser.add_argument("--full", action="store_true")
    arguments = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    np.savez_compressed(
        arguments.outputs, **run(load(arguments.checkpoint), dict(np.load(arguments.inputs)), arguments.full)
    )
