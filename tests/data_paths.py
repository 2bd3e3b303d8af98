"""Where the sample recordings are, when they are at hand."""

import os
from pathlib import Path


def shared_data() -> Path | None:
    """The folder of sample LeRobot datasets (SOMASPEED_TEST_DATA, or ../shared/data beside the checkout), or None."""
    path = Path(os.environ.get("SOMASPEED_TEST_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
    return path if path.is_dir() else None
