"""Device facts: found by the command line's name and by what jax calls the device."""

import pytest

from somaspeed_jax.scaling import devices


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA A40", "a40"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GH200 480GB", "h200"),
        ("NVIDIA H200 NVL", "h200-nvl"),
        ("NVIDIA B200", "b200"),
    ],
)
def test_device_kind(kind, name):
    device = devices.of_kind(kind)
    assert device is not None
    assert device.name == name


@pytest.mark.parametrize("kind", ["cpu", "NVIDIA RTX A4000", "NVIDIA GeForce RTX 4090"])
def test_unknown_kind_has_no_mfu(kind):
    assert devices.of_kind(kind) is None
    assert devices.mfu(1e12, 1.0, 1, kind) is None


def test_name_in_any_case_and_unknown_name():
    assert devices.named("A40").name == "a40"
    with pytest.raises(ValueError, match=r"unknown GPU 'v100'; known: a40, a100"):
        devices.named("v100")


def test_mfu_is_achieved_over_peak():
    # 4.53 TFLOP a sample at 120 samples/s on one H200.
    assert devices.mfu(4.53e12 * 120, 1.0, 1, "NVIDIA H200") == pytest.approx(0.549, abs=1e-3)
    assert devices.mfu(4.53e12 * 120, 1.0, 2, "NVIDIA H200") == pytest.approx(0.2747, abs=1e-3)


def test_names_and_kinds_are_unique():
    kinds = [kind for device in devices.DEVICES for kind in device.kinds]
    assert len(kinds) == len(set(kinds))
    assert len({device.name for device in devices.DEVICES}) == len(devices.DEVICES)
