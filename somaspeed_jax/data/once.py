"""Make a folder once, whole or not at all, also when several processes ask for it together."""

import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path


def make_once(target: Path, make: Callable[[Path], None]) -> Path:
    """`target`, after `make(folder)` has filled it if it was not there.

    `make` writes into a folder of another name, which is renamed when complete: whoever sees `target` sees all of it.
    If another process was faster, its folder is kept and ours is dropped.
    """
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.parent / f".{target.name}.{uuid.uuid4().hex}"
    draft.mkdir()
    try:
        make(draft)
        os.rename(draft, target)
    except OSError:
        if not target.is_dir():
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target
