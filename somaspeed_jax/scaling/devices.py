"""What is known of GPUs from their data sheets: the ground of MFU and of the plan's roofline.

Peaks are dense bfloat16 tensor-core rates with float32 accumulation (data sheets print twice as much "with sparsity").
Link bandwidth is per GPU and direction; data sheets print both directions together.
"""

import dataclasses
import re


@dataclasses.dataclass(frozen=True)
class Device:
    """One kind of GPU.

    name: what the command line calls it.
    kinds: words of jax's `device.device_kind`; over all devices the longest that matches decides.
    peak: FLOP/s, bfloat16, dense.
    memory: bytes that the driver reports, where known.
    bandwidth: bytes/s of device memory.
    link: bytes/s and direction between GPUs of a node.
    link_name: what that link is.
    """

    name: str
    kinds: tuple[str, ...]
    peak: float
    memory: int
    bandwidth: float
    link: float
    link_name: str


# Sources: NVIDIA's data sheets of each product: "A40" (2022), "A100 Tensor Core GPU" (SXM4 80 GB), "H100 Tensor Core
# GPU" (SXM5, PCIe and NVL columns), "H200 Tensor Core GPU" (SXM), "DGX B200". Bytes of memory of the first four are
# what the driver reports; B200's are the data sheet's 180 GB.
DEVICES: tuple[Device, ...] = (
    # PCIe 4.0 x16; an NVLink bridge joins at most two cards and is not assumed.
    Device("a40", ("A40",), 149.7e12, 47_850_782_720, 696e9, 31.5e9, "PCIe 4.0 x16"),
    Device("a100", ("A100",), 312e12, 84_974_239_744, 2.039e12, 300e9, "NVLink 3"),
    Device("h100", ("H100",), 989.4e12, 84_942_979_072, 3.352e12, 450e9, "NVLink 4"),
    Device("h100-pcie", ("H100 PCIe",), 756e12, 85_000_000_000, 2.0e12, 63e9, "PCIe 5.0 x16"),
    Device("h100-nvl", ("H100 NVL",), 835e12, 100_000_000_000, 3.9e12, 63e9, "PCIe 5.0 x16"),
    # GH200 holds the same die; its device kind ends in the host memory's size.
    Device("h200", ("H200", "GH200"), 989.4e12, 150_109_880_320, 4.8e12, 450e9, "NVLink 4"),
    Device("h200-nvl", ("H200 NVL",), 835e12, 150_000_000_000, 4.8e12, 63e9, "PCIe 5.0 x16"),
    Device("b200", ("B200",), 2250e12, 180_000_000_000, 8.0e12, 900e9, "NVLink 5"),
)


def named(name: str) -> Device:
    """The device that the command line calls `name`, in any case. Raises ValueError listing the known ones."""
    for device in DEVICES:
        if device.name == name.lower():
            return device
    raise ValueError(f"unknown GPU {name!r}; known: {', '.join(device.name for device in DEVICES)}")


def of_kind(device_kind: str) -> Device | None:
    """The device of jax's `device_kind`, such as "NVIDIA A40" or "NVIDIA H100 80GB HBM3"; None where unknown."""
    words = _words(device_kind)
    matches = [(len(kind), device) for device in DEVICES for kind in device.kinds if _words(kind) <= words]
    return max(matches, key=lambda match: match[0])[1] if matches else None


def _words(kind: str) -> set[str]:
    """Whole words, so that an RTX A4000 is no A40."""
    return set(re.split(r"[^a-z0-9]+", kind.lower()))


def mfu(flops: float, seconds: float, devices: int, device_kind: str) -> float | None:
    """Model FLOPs utilisation: FLOPs of the products over what `devices` could have done in `seconds`.

    flops: of all devices together, without recomputation. Returns a fraction, or None for an unknown device.
    """
    device = of_kind(device_kind)
    return flops / (seconds * devices * device.peak) if device else None
