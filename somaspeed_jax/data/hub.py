"""Datasets by name: a folder stays as it is, a Hugging Face id becomes a folder with what is needed of it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from somaspeed_jax.data.errors import DataError
from somaspeed_jax.data.layout import Layout, read_layout


def resolve_dataset(
    path_or_repo_id: str | Path,
    episodes: Sequence[int] | None = None,
    cameras: Sequence[str] | None = None,
    download: Callable[..., Any] = snapshot_download,
) -> Path:
    """The dataset's folder. A local folder never touches the network.

    A Hugging Face dataset id fetches meta/ first, then only the files that hold the chosen `episodes` and `cameras`
    (None: all) into the hub's cache. `download` has the signature of `huggingface_hub.snapshot_download`. Raises
    DataError if the name is neither a folder nor a dataset that can be fetched, and for episodes that do not exist.
    """
    local = Path(path_or_repo_id).expanduser()
    if local.is_dir():
        return local
    name = str(path_or_repo_id)
    if local.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise DataError(
            f"data.path is {name!r}: no such folder, and a Hugging Face dataset id has the form owner/name."
        )
    try:
        root = Path(download(name, repo_type="dataset", allow_patterns=["meta/*"]))
        patterns = wanted_files(read_layout(root), episodes, cameras)
        return Path(download(name, repo_type="dataset", allow_patterns=["meta/*", *patterns]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise DataError(
            f"data.path is {name!r}: no such folder here, and it cannot be fetched from the Hugging Face hub "
            f"({error.__class__.__name__}: {error}). Check the name, the network, and HF_TOKEN for a private dataset."
        ) from error


def wanted_files(layout: Layout, episodes: Sequence[int] | None, cameras: Sequence[str] | None) -> list[str]:
    """Sorted paths, below the dataset's root, of the parquet and video files of the chosen episodes and cameras."""
    numbers = list(layout.episodes) if episodes is None else list(episodes)
    unknown = sorted(set(numbers) - set(layout.episodes))
    if unknown:
        known = list(layout.episodes)
        raise DataError(
            f"data.episodes: {unknown} do not exist; the dataset has {len(known)} episodes, {known[0]} to {known[-1]}."
        )
    files = set()
    for number in numbers:
        meta = layout.episodes[number]
        files.add(meta.data_path)
        files |= {span.path for name, span in meta.videos.items() if cameras is None or name in cameras}
    return sorted(files)
