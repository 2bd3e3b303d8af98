"""Records what LeRobot's MolmoAct2Policy gives on tiny weights and inputs, into tests/fixtures.

Needs an environment of its own with `pip install "lerobot[molmoact2]==0.6.1" peft` (Python 3.12); torch and lerobot are
imported nowhere else. The weights and the configuration are those of molmoact2_tiny.safetensors.

    python tools/make_reference_molmoact2.py                                 # molmoact2_more.safetensors
    PYTHONPATH=LEROBOT/src python tools/make_reference_molmoact2.py          # molmoact2_head.safetensors

The second line runs a checkout of LeRobot's main branch (recorded at 7427f31, 2026-08-23).

Cases: `full` (8 flow times, all trained that upstream trains, flow loss alone, prompts of two lengths), `lora`
(adapters with random values), `alone` (the shorter sample by itself), `one_camera` (a sample with one picture), `use`
(main branch: a chunk sampled for each sample by itself). A gradient is recorded as its norm and its products with two
fixed vectors (see `projections`).
"""

import argparse
import contextlib
import dataclasses
import json
import os
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.policies.molmoact2 import modeling_molmoact2 as upstream
from lerobot.policies.molmoact2.configuration_molmoact2 import MolmoAct2Config
from safetensors import safe_open
from safetensors.numpy import save_file

FIXTURES = Path(__file__).resolve().parents[1] / "tests" / "fixtures"
LORA_RANK, LORA_ALPHA = 4, 1  # as 64 and 16
MAIN = "train_mode_vlm" in {field.name for field in dataclasses.fields(MolmoAct2Config)}  # not yet in 0.6.1


def projections(gradient: np.ndarray) -> np.ndarray:
    """[norm, <g, cos(0.7 i)>, <g, cos(1.3 i + 1)>] in float64, i counting the elements in row-major order."""
    flat = gradient.astype(np.float64).reshape(-1)
    i = np.arange(flat.size)
    return np.array([np.linalg.norm(flat), flat @ np.cos(0.7 * i), flat @ np.cos(1.3 * i + 1)])


def read(name: str) -> tuple[dict[str, np.ndarray], dict]:
    with safe_open(FIXTURES / name, "np") as f:
        return {key: f.get_tensor(key) for key in f.keys()}, json.loads(f.metadata()["json"])  # noqa: SIM118


def load_policy(folder: str | Path, horizon: int, **options) -> upstream.MolmoAct2Policy:
    """LeRobot's policy over a checkpoint folder, in training mode."""
    config = MolmoAct2Config(
        checkpoint_path=str(folder),
        action_mode="continuous",
        inference_action_mode="continuous",
        chunk_size=horizon,
        n_action_steps=horizon,
        device="cpu",
        **({"dtype": "float32", "llm_residual_dropout": 0.0} if MAIN else {"model_dtype": "float32"}),
        input_features={
            "observation.images.front": PolicyFeature(FeatureType.VISUAL, (3, 24, 24)),
            "observation.state": PolicyFeature(FeatureType.STATE, (4,)),
        },
        output_features={"action": PolicyFeature(FeatureType.ACTION, (7,))},
        **options,
    )
    policy = upstream.MolmoAct2Policy(config)
    policy.train()
    return policy


def make_policy(weights: dict[str, np.ndarray], hf_config: dict, **options) -> upstream.MolmoAct2Policy:
    """LeRobot's policy with the recorded weights, loaded from a checkpoint folder as it always is."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(hf_config))
        save_file(weights, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        return load_policy(folder, hf_config["max_action_horizon"], **options)


@contextlib.contextmanager
def drawn(noise: torch.Tensor, times: torch.Tensor):
    """Upstream draws these instead of random numbers."""
    randn, sample = torch.randn, upstream._sample_beta_timesteps
    torch.randn = lambda *size, **kw: noise.clone()
    upstream._sample_beta_timesteps = lambda **kw: times.reshape(-1).clone()
    try:
        yield
    finally:
        torch.randn, upstream._sample_beta_timesteps = randn, sample


def velocity_hook(policy) -> list[np.ndarray]:
    """The list that every predicted velocity of `policy` is appended to, [b * K, t, a]."""
    seen: list[np.ndarray] = []
    layer = policy._backbone().action_expert.final_layer
    layer.register_forward_hook(lambda _m, _i, out: seen.append(out.detach().numpy().copy()))
    return seen


def run(policy, batch: dict[str, torch.Tensor], noise: torch.Tensor, times: torch.Tensor):
    """(loss, velocity [b, K, t, a]) with gradients left in the policy."""
    policy.config.num_flow_timesteps = times.shape[1]
    seen = velocity_hook(policy)
    with drawn(noise, times):
        loss, _ = policy(batch)
    loss.backward()
    return loss.detach().numpy(), seen[0].reshape(*noise.shape)


def sequence(patches_per_image: int, cameras: int, words: list[int], ids: dict[str, int]) -> list[int]:
    """A prompt in upstream's layout: begin, pictures, words, end of the user's turn, action output."""
    picture = [ids["image_start_token_id"], *[ids["image_patch_id"]] * patches_per_image, ids["image_end_token_id"]]
    return [ids["eos_token_id"], *picture * cameras, *words, ids["eos_token_id"], 90]


def make_batch(hf_config: dict, rows: list[tuple[int, list[int]]], seed: int, pads: bool) -> dict[str, torch.Tensor]:
    """rows: (cameras, word ids) of each sample; prompts are padded on the left to the longest."""
    rng = np.random.default_rng(seed)
    vit = hf_config["vit_config"]
    side = vit["image_default_input_size"][0] // vit["image_patch_size"]
    windows = -(-side // 2)
    padded = np.full((2 * windows, 2 * windows), -1)
    padded[:side, :side] = np.arange(side * side).reshape(side, side)
    pooling = padded.reshape(windows, 2, windows, 2).transpose(0, 2, 1, 3).reshape(-1, 4)
    prompts = [sequence(windows * windows, cameras, words, hf_config) for cameras, words in rows]
    longest, pictures = max(map(len, prompts)), sum(cameras for cameras, _ in rows)
    pixels = rng.integers(0, 256, (pictures, side * side, vit["image_patch_size"] ** 2 * 3))
    ids = np.array([[0] * (longest - len(p)) + p for p in prompts])
    image_ids = [value for key, value in hf_config.items() if key.startswith(("image_", "low_res", "frame_"))]
    action = np.zeros((len(rows), hf_config["max_action_horizon"], hf_config["max_action_dim"]), np.float32)
    action[..., :7] = rng.normal(size=(*action.shape[:2], 7))
    dims = np.ones((len(rows), action.shape[2]), bool)
    dims[:, :7] = False
    steps = np.zeros(action.shape[:2], bool)
    steps[-1, -2:] = pads
    batch = {
        "input_ids": ids,
        "attention_mask": np.array([[0] * (longest - len(p)) + [1] * len(p) for p in prompts]),
        "token_type_ids": np.isin(ids, image_ids).astype(np.int64),
        "pixel_values": (pixels.astype(np.float32) / 255.0 * 2.0 - 1.0).astype(np.float32),
        "image_token_pooling": np.tile(pooling, (pictures, 1)),
        "image_grids": np.tile([windows, windows, 0, 0], (pictures, 1)),
        "image_num_crops": np.ones(pictures, np.int64),
        "action": action,
        "action_dim_is_pad": dims,
        "action_horizon_is_pad": steps,
    }
    return {key: torch.from_numpy(value) for key, value in batch.items()}


def alone(batch: dict[str, torch.Tensor], i: int) -> dict[str, torch.Tensor]:
    """Sample i of a batch with two pictures a sample, as a batch of one without padding."""
    start = int(batch["attention_mask"][i].argmax())
    windows = len(batch["image_token_pooling"]) // len(batch["image_grids"])
    rows = {"pixel_values": 2, "image_grids": 2, "image_num_crops": 2, "image_token_pooling": 2 * windows}
    sample = {key: value[i * rows.get(key, 1) : (i + 1) * rows.get(key, 1)] for key, value in batch.items()}
    return sample | {key: sample[key][:, start:] for key in ("input_ids", "attention_mask", "token_type_ids")}


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    default = FIXTURES / ("molmoact2_head.safetensors" if MAIN else "molmoact2_more.safetensors")
    parser.add_argument("--out", type=Path, default=default)
    out = parser.parse_args().out
    torch.use_deterministic_algorithms(True)
    tiny, meta = read("molmoact2_tiny.safetensors")
    hf_config = meta["hf_config"]
    weights = {key[2:]: value for key, value in tiny.items() if key.startswith("w/")}
    horizon, dims = hf_config["max_action_horizon"], hf_config["max_action_dim"]
    recorded: dict[str, np.ndarray] = {}
    notes: dict[str, list[str]] = {}

    def keep(case: str, batch: dict, noise, times, loss, velocity) -> None:
        names = ("input_ids", "attention_mask", "pixel_values", "action", "action_dim_is_pad", "action_horizon_is_pad")
        values = {name: batch[name].numpy() for name in names}
        values |= {"noise": noise.numpy(), "time": times.numpy(), "loss": loss, "velocity": velocity}
        for name, value in values.items():
            value = value.astype(np.int32) if value.dtype == np.int64 else value
            recorded[f"{case}/{name}"] = value

    def keep_gradients(case: str, module: torch.nn.Module) -> None:
        notes[case + "_without_gradient"] = []
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                recorded[f"{case}/grad/{name}"] = projections(parameter.grad.numpy())
            elif parameter.requires_grad:
                notes[case + "_without_gradient"].append(name)

    rows = [(2, [21, 22, 23, 24, 25, 26]), (2, [31, 32, 33])]
    times = torch.from_numpy(np.random.default_rng(3).uniform(0.001, 1.0, (2, 8)).astype(np.float32))
    noise = normal(4, 2, 8, horizon, dims)
    batch = make_batch(hf_config, rows, seed=1, pads=not MAIN)  # the main branch's transform marks no step as padding
    policy = make_policy(weights, hf_config, **({"train_mode_vlm": "fft"} if MAIN else {}))
    keep("full", batch, noise, times, *run(policy, batch, noise, times))
    keep_gradients("full", policy.model)

    if MAIN:
        policy.eval()
        policy._checkpoint_action_mode = "continuous"  # as for a policy that LeRobot has trained and saved
        for i in range(2):
            with drawn(noise[i : i + 1, 0], times):
                chunk = policy.predict_action_chunk(alone(batch, i))
            recorded[f"use/actions_{i}"] = chunk.contiguous().numpy()
    else:
        policy = make_policy(
            weights, hf_config, enable_lora_vlm=True, lora_rank=LORA_RANK, lora_alpha=LORA_ALPHA, lora_dropout=0.0
        )
        adapters = {name: p for name, p in policy.model.named_parameters() if ".lora_" in name}
        for number, (name, parameter) in enumerate(sorted(adapters.items())):
            value = normal(100 + number, *parameter.shape) * parameter.shape[1] ** -0.5
            parameter.data.copy_(value)
            recorded[f"lora/adapter/{name}"] = value.numpy()
        keep("lora", batch, noise, times, *run(policy, batch, noise, times))
        keep_gradients("lora", policy.model)
        notes["lora_linears"] = sorted({name.split(".lora_")[0] for name in adapters})

        few, few_noise = times[:1, :2], noise[:1, :2]
        policy = make_policy(weights, hf_config, train_action_expert_only=True)
        for case, cameras in (("alone", 2), ("one_camera", 1)):
            batch = make_batch(hf_config, [(cameras, rows[1][1])], seed=7, pads=False)
            keep(case, batch, few_noise, few, *run(policy, batch, few_noise, few))

    import importlib.metadata

    versions = {name: importlib.metadata.version(name) for name in ("lerobot", "torch", "transformers", "peft")}
    if MAIN:
        versions["lerobot"] = "main branch"
    text = json.dumps({"versions": versions, "notes": notes, "source": "tools/make_reference_molmoact2.py"})
    save_file(recorded, out, metadata={"json": text})
    out.chmod(0o644)
    print(f"{out}: {out.stat().st_size} bytes, {len(recorded)} tensors")


if __name__ == "__main__":
    main()
