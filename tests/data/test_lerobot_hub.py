"""Fetching a dataset: only what the chosen episodes and cameras need, and nothing at all for a local folder."""

import fnmatch
import shutil

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from recordings import write_dataset

from somaspeed_jax.data.errors import DataError
from somaspeed_jax.data.hub import resolve_dataset
from somaspeed_jax.data.lerobot import LeRobotDataset


class FakeHub:
    """Copies the files that match, as the hub's client does, and remembers what it was asked for."""

    def __init__(self, remote, cache):
        self.remote, self.cache, self.calls = remote, cache, []

    def __call__(self, repo_id, *, repo_type, allow_patterns):
        self.calls.append((repo_id, repo_type, allow_patterns))
        for path in sorted(p for p in self.remote.rglob("*") if p.is_file()):
            name = path.relative_to(self.remote).as_posix()
            if any(fnmatch.fnmatch(name, pattern) for pattern in allow_patterns):
                target = self.cache / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
        return str(self.cache)


def fetched(hub):
    files = sorted(p.relative_to(hub.cache).as_posix() for p in hub.cache.rglob("*") if p.is_file())
    return [name for name in files if not name.startswith("meta/")]


def test_a_local_folder_is_left_alone(tmp_path):
    def no_network(*args, **options):
        raise AssertionError("a local folder must not be looked up")

    assert resolve_dataset(tmp_path, episodes=[3], download=no_network) == tmp_path


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_only_the_files_of_the_chosen_episodes_and_cameras(version, tmp_path):
    remote = tmp_path / "remote"
    write_dataset(
        remote, [4, 5, 6, 7], version=version, cameras=("a", "b"), episodes_a_data_file=2, episodes_a_video_file=1
    )
    hub = FakeHub(remote, tmp_path / "cache")
    root = resolve_dataset("owner/name", episodes=[1, 2], cameras=["b"], download=hub)
    assert [call[:2] for call in hub.calls] == [("owner/name", "dataset")] * 2
    assert hub.calls[0][2] == ["meta/*"]
    if version == "v2.1":
        data = [f"data/chunk-000/episode_00000{e}.parquet" for e in (1, 2)]
        videos = [f"videos/chunk-000/b/episode_00000{e}.mp4" for e in (1, 2)]
    else:
        data = [f"data/chunk-000/file-00{f}.parquet" for f in (0, 1)]
        videos = [f"videos/b/chunk-000/file-00{f}.mp4" for f in (1, 2)]
    assert fetched(hub) == data + videos
    dataset = LeRobotDataset(root, horizon=2, episodes=[1, 2], cameras=["b"])
    assert [dataset[i]["task"] for i in (0, 10)] == ["episode 1", "episode 2"]


def test_everything_when_nothing_is_chosen(tmp_path):
    remote = write_dataset(tmp_path / "remote", [4, 5], cameras=("a",))
    hub = FakeHub(remote, tmp_path / "cache")
    assert len(LeRobotDataset(resolve_dataset("owner/name", download=hub), horizon=2)) == 9


def test_episodes_that_do_not_exist_are_refused_before_any_video_is_fetched(tmp_path):
    hub = FakeHub(write_dataset(tmp_path / "remote", [4, 5], cameras=()), tmp_path / "cache")
    with pytest.raises(DataError, match=r"\[7\] do not exist; the dataset has 2 episodes, 0 to 1"):
        resolve_dataset("owner/name", episodes=[7], download=hub)
    assert len(hub.calls) == 1


@pytest.mark.parametrize("name", ["/no/such/folder", "./nothing", "~/nothing-of-this-name", "name", "a/b/c"])
def test_a_name_that_can_be_neither_is_refused_without_the_network(name):
    with pytest.raises(DataError, match=r"no such folder"):
        resolve_dataset(name, download=lambda *args, **options: pytest.fail("asked the hub"))


def test_a_failed_download_says_what_was_tried():
    def offline(*args, **options):
        raise LocalEntryNotFoundError("no network")

    with pytest.raises(DataError, match=r"'owner/name': no such folder here, and it cannot be fetched .* no network"):
        resolve_dataset("owner/name", download=offline)
