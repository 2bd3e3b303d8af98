"""Eight virtual CPU devices for every test, set before jax starts."""

import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
flags = os.environ.get("XLA_FLAGS", "")
if "host_platform_device_count" not in flags:
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=8".strip()

sys.path.insert(0, str(Path(__file__).parent))

import pytest  # noqa: E402


@pytest.fixture(scope="session")
def demo_dataset(tmp_path_factory) -> Path:
    """Twelve demonstrations of the tabletop, as a LeRobot dataset."""
    from somaspeed_jax.data.demo import ensure_demo

    return ensure_demo(tmp_path_factory.mktemp("demo"), episodes=12, seed=0)
