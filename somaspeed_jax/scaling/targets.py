"""Descriptions of GPUs for XLA, so that a program compiles for a machine that is not there.

The compiler asks a GPU for little: its generation, how much shared memory and how many registers a multiprocessor has,
bandwidth, cache and memory. The H100's values are those that the driver of one reports; the others were put together
from NVIDIA's data sheets and the CUDA programming guide's table of compute capabilities, and were not read from a
device. Ground of the figures: docs.nvidia.com/cuda/cuda-c-programming-guide, "Technical Specifications".
"""

import dataclasses
import importlib.util
import os
from typing import Any

from somaspeed_jax.scaling.devices import Device, named

CUDNN = (9, 10, 0)
CUDA = (12, 9, 0)


@dataclasses.dataclass(frozen=True)
class Target:
    """What XLA asks about one GPU. Sizes in bytes, clock in GHz.

    capability: compute capability. multiprocessors, threads (resident on each), lanes (float32 units of each).
    shared, shared_most: shared memory of a multiprocessor, and what one block may ask for.
    cache: L2.
    """

    description: str
    capability: tuple[int, int]
    multiprocessors: int
    threads: int
    lanes: int
    shared: int
    shared_most: int
    cache: int
    clock: float


TARGETS: dict[str, Target] = {
    "a40": Target("NVIDIA A40", (8, 6), 84, 1536, 128, 102_400, 101_376, 6 << 20, 1.74),
    "a100": Target("NVIDIA A100-SXM4-80GB", (8, 0), 108, 2048, 64, 167_936, 166_912, 40 << 20, 1.41),
    "h100": Target("NVIDIA H100 80GB HBM3", (9, 0), 132, 2048, 128, 233_472, 232_448, 50 << 20, 1.98),
    "h200": Target("NVIDIA H200", (9, 0), 132, 2048, 128, 233_472, 232_448, 60 << 20, 1.98),
}


def available() -> bool:
    """Whether the CUDA compiler is installed (the extra `plan`); a GPU is not needed."""
    return any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))


def devices(name: str, count: int) -> list[Any]:
    """`count` devices of one process that exist only for the compiler.

    Raises ValueError for a GPU without a description, RuntimeError where the CUDA compiler is missing or the platform
    it was started for asks for a real GPU (set JAX_PLATFORMS=cpu before jax starts).
    """
    if name not in TARGETS:
        raise ValueError(f"no compiler description of {name!r}; known: {', '.join(TARGETS)}")
    if not available():
        raise RuntimeError("the CUDA compiler is not installed: pip install 'somaspeed-jax[plan]'")
    if os.environ.get("JAX_PLATFORMS") != "cpu":
        raise RuntimeError("set JAX_PLATFORMS=cpu: otherwise the CUDA plugin looks for a GPU when it starts")
    from jax.experimental import topologies

    text = textproto(TARGETS[name], named(name))
    return list(topologies.get_topology_desc(platform="cuda", topology=f"1x1x{count}", target_config=text).devices)


def textproto(target: Target, device: Device) -> str:
    """XLA's GpuTargetConfigProto (xla/stream_executor/device_description.proto) as text."""
    major, minor = target.capability
    return f"""gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: {48 << 10}
  shared_memory_per_core: {target.shared}
  shared_memory_per_block_optin: {target.shared_most}
  threads_per_core_limit: {target.threads}
  core_count: {target.multiprocessors}
  fpus_per_core: {target.lanes}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {int(device.bandwidth)}
  device_memory_size: {device.memory}
  l2_cache_size: {target.cache}
  clock_rate_ghz: {target.clock}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: {CUDNN[0]} minor: {CUDNN[1]} patch: {CUDNN[2]} }}
runtime_version {{ major: {CUDA[0]} minor: {CUDA[1]} patch: {CUDA[2]} }}
device_description_str: "{target.description}"
"""
