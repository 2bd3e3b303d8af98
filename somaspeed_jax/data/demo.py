"""The demonstrations that ship with the program: the tabletop's scripted expert, recorded as a LeRobot v3.0 dataset.

Nothing is downloaded: `ensure_demo` records on first use, in seconds. What it writes is an ordinary dataset (parquet,
h264 video with several episodes a file, metadata, statistics), so the demo trains through the same reader as a real
recording.
"""

import concurrent.futures
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from somaspeed_jax.data import tabletop
from somaspeed_jax.data.demo_tokenizer import ensure_demo_tokenizer
from somaspeed_jax.data.once import make_once
from somaspeed_jax.data.video_writer import VideoWriter

__all__ = ["ensure_demo", "ensure_demo_tokenizer", "make_demo"]

VERSION = 5  # raise it when anything that is written changes: it is part of the folder's name

_REST = 4  # frames recorded after the tip has arrived
_EPISODES_PER_DATA_FILE = 200
_EPISODES_PER_VIDEO_FILE = 64  # not a divisor of the above: data and video files roll over independently
_RENDER = 64  # frames drawn at a time, which keeps the canvas in cache
_GROUP_OF_PICTURES = 4
_DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
_VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
_QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
_VECTOR = pa.list_(pa.float32(), 2)


def ensure_demo(directory: str | Path, episodes: int = 2000, seed: int = 0) -> Path:
    """The folder of the demo dataset under `directory`, recorded now if it is not there yet.

    Its name holds the version and the arguments. Safe when several processes ask at once. Two thousand scenes are
    seen a few dozen times each in a demo run; a few hundred are learned by heart instead, and new starts fail.
    """
    target = Path(directory) / f"tabletop-v{VERSION}-episodes{episodes}-seed{seed}"
    return make_once(target, lambda folder: make_demo(folder, episodes, seed))


def make_demo(directory: str | Path, episodes: int = 2000, seed: int = 0) -> None:
    """Records `episodes` demonstrations into `directory` (LeRobot v3.0). The numbers are a function of `seed`.

    Features: `observation.state` and `action` float32 [2] (tip position and position target, metres), two cameras of
    48 x 48 pixels, 10 frames/s. Raises ValueError for fewer than one episode.
    """
    if episodes < 1:
        raise ValueError(f"make_demo: episodes = {episodes}, expected at least 1")
    root = Path(directory)
    rng = np.random.default_rng(seed)
    scenes = tabletop.make_scenes(episodes, rng)
    states, actions, lengths = _record(scenes, rng)

    starts = np.concatenate([[0], np.cumsum(lengths)])
    episode = np.repeat(np.arange(episodes), lengths)
    prompts = scenes.prompts()
    tasks = sorted(set(prompts))
    task_of = np.array([tasks.index(p) for p in prompts])
    frame = np.arange(starts[-1]) - starts[episode]
    columns = {
        "observation.state": states[frame, episode],
        "action": actions[frame, episode],
        "timestamp": (frame / tabletop.FPS).astype(np.float32),
        "frame_index": frame,
        "episode_index": episode,
        "index": np.arange(starts[-1]),
        "task_index": task_of[episode],
    }

    _write_data(root, columns, starts)
    pixels = _write_videos(root, scenes, columns, starts)
    _write_episodes(root, prompts, starts)
    _write_tasks(root, tasks)
    statistics = {name: _statistics(values) for name, values in columns.items()}
    statistics |= {camera: _picture_statistics(values) for camera, values in pixels.items()}
    _write_json(root / "meta" / "stats.json", statistics)
    _write_json(root / "meta" / "info.json", _info(episodes, int(starts[-1]), len(tasks)))


def _record(scenes: tabletop.Scenes, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Runs the expert in all scenes at once: states and actions [t, n, 2], episode lengths [n].

    The arm is pushed a little at each step while the recorded target stays the expert's: the policy sees what to do
    off the straight way, where its own errors will take it.
    """
    states, actions = [], []
    arrived = np.full(len(scenes), -1)  # first frame on the block
    t = 0
    while (arrived < 0).any() or t < arrived.max() + _REST:
        arrived[(arrived < 0) & (np.linalg.norm(scenes.tip - scenes.goals(), axis=-1) < tabletop.STEP / 2)] = t
        states.append(scenes.tip)
        actions.append(tabletop.expert(scenes))
        scenes.step(actions[-1], rng.normal(0, tabletop.PUSH, (len(scenes), 2)))
        t += 1
    return np.stack(states), np.stack(actions), arrived + _REST


def _write_data(root: Path, columns: dict[str, np.ndarray], starts: np.ndarray) -> None:
    arrays = {
        name: pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), type=_VECTOR)
        if values.ndim == 2
        else pa.array(values)
        for name, values in columns.items()
    }
    table = pa.table(arrays)
    for file, (first, last) in enumerate(_files(len(starts) - 1, _EPISODES_PER_DATA_FILE)):
        path = root / _DATA_PATH.format(chunk_index=0, file_index=file)
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table.slice(starts[first], starts[last] - starts[first]), path)


def _write_videos(
    root: Path, scenes: tabletop.Scenes, columns: dict[str, np.ndarray], starts: np.ndarray
) -> dict[str, np.ndarray]:
    """Draws and encodes all frames, a camera in each of two threads; some pictures of each, uint8 [m, h, w, 3]."""
    tips, episode = columns["observation.state"], columns["episode_index"]

    def film(camera: str) -> np.ndarray:
        sampled = []
        for file, (first, last) in enumerate(_files(len(starts) - 1, _EPISODES_PER_VIDEO_FILE)):
            path = root / _VIDEO_PATH.format(video_key=camera, chunk_index=0, file_index=file)
            path.parent.mkdir(parents=True, exist_ok=True)
            writer = VideoWriter(path, tabletop.FPS, _GROUP_OF_PICTURES)
            for begin in range(starts[first], starts[last], _RENDER):
                rows = np.arange(begin, min(begin + _RENDER, starts[last]))
                now = scenes.select(episode[rows])
                now.tip = tips[rows]
                pictures = now.image(camera)
                writer.write(pictures)
                sampled.append(pictures[:: _RENDER // 2])
            writer.close()
        return np.concatenate(sampled)

    with concurrent.futures.ThreadPoolExecutor(len(tabletop.CAMERAS)) as pool:
        return dict(zip(tabletop.CAMERAS, pool.map(film, tabletop.CAMERAS), strict=True))


def _write_episodes(root: Path, prompts: list[str], starts: np.ndarray) -> None:
    n = len(prompts)
    episode = np.arange(n)
    video_file = episode // _EPISODES_PER_VIDEO_FILE
    first_of_file = starts[video_file * _EPISODES_PER_VIDEO_FILE]  # row that is frame 0 of the episode's video file
    zeros = np.zeros(n, np.int64)
    columns: dict = {
        "episode_index": episode,
        "tasks": pa.array([[p] for p in prompts], pa.list_(pa.string())),
        "length": np.diff(starts),
        "data/chunk_index": zeros,
        "data/file_index": episode // _EPISODES_PER_DATA_FILE,
        "dataset_from_index": starts[:-1],
        "dataset_to_index": starts[1:],
    }
    for camera in tabletop.CAMERAS:
        columns[f"videos/{camera}/chunk_index"] = zeros
        columns[f"videos/{camera}/file_index"] = video_file
        columns[f"videos/{camera}/from_timestamp"] = (starts[:-1] - first_of_file) / tabletop.FPS
        columns[f"videos/{camera}/to_timestamp"] = (starts[1:] - first_of_file) / tabletop.FPS
    columns["meta/episodes/chunk_index"] = columns["meta/episodes/file_index"] = zeros
    path = root / "meta" / "episodes" / "chunk-000" / "file-000.parquet"
    path.parent.mkdir(parents=True)
    pq.write_table(pa.table(columns), path)


def _write_tasks(root: Path, tasks: list[str]) -> None:
    """The task text is the table's pandas index, as upstream's reader expects; said in the schema, without pandas."""
    column = {"field_name": "task_index", "name": "task_index", "pandas_type": "int64", "numpy_type": "int64"}
    index = {"field_name": "task", "name": "task", "pandas_type": "unicode", "numpy_type": "object"}
    pandas = {
        "index_columns": ["task"],
        "column_indexes": [],
        "columns": [{**c, "metadata": None} for c in (column, index)],
        "pandas_version": "2.2.0",
    }
    table = pa.table({"task_index": np.arange(len(tasks)), "task": tasks})
    pq.write_table(table.replace_schema_metadata({"pandas": json.dumps(pandas)}), root / "meta" / "tasks.parquet")


def _info(episodes: int, frames: int, tasks: int) -> dict:
    size = tabletop.IMAGE_SIZE
    video = {
        "dtype": "video",
        "shape": [size, size, 3],
        "names": ["height", "width", "channels"],
        "info": {
            "video.height": size,
            "video.width": size,
            "video.codec": "h264",
            "video.pix_fmt": "yuv420p",
            "video.fps": tabletop.FPS,
            "video.channels": 3,
            "video.g": _GROUP_OF_PICTURES,
            "has_audio": False,
            "is_depth_map": False,
        },
    }
    features: dict = {camera: video for camera in tabletop.CAMERAS}
    features["observation.state"] = {"dtype": "float32", "shape": [2], "names": ["tip_x", "tip_y"]}
    features["action"] = {"dtype": "float32", "shape": [2], "names": ["target_x", "target_y"]}
    features["timestamp"] = {"dtype": "float32", "shape": [1], "names": None}
    for name in ("frame_index", "episode_index", "index", "task_index"):
        features[name] = {"dtype": "int64", "shape": [1], "names": None}
    return {
        "codebase_version": "v3.0",
        "robot_type": "tabletop_tip",
        "total_episodes": episodes,
        "total_frames": frames,
        "total_tasks": tasks,
        "chunks_size": 1000,
        "data_files_size_in_mb": 100,
        "video_files_size_in_mb": 200,
        "fps": tabletop.FPS,
        "splits": {"train": f"0:{episodes}"},
        "data_path": _DATA_PATH,
        "video_path": _VIDEO_PATH,
        "features": features,
    }


def _statistics(values: np.ndarray) -> dict[str, list]:
    """Statistics over frames of a column [frames] or [frames, d]; each a list of d numbers."""
    values = values.reshape(len(values), -1).astype(np.float64)
    result = {
        "min": values.min(0),
        "max": values.max(0),
        "mean": values.mean(0),
        "std": values.std(0),
        "count": np.array([len(values)]),
    }
    result |= {name: np.quantile(values, q, axis=0) for name, q in _QUANTILES.items()}
    return {name: value.tolist() for name, value in result.items()}


def _picture_statistics(pictures: np.ndarray) -> dict[str, list]:
    """Statistics per channel of pictures uint8 [m, h, w, 3], scaled to [0, 1]; each of shape [3, 1, 1]."""
    result = _statistics(pictures.reshape(-1, 3) / 255.0)
    shaped = {name: np.reshape(value, (3, 1, 1)).tolist() for name, value in result.items() if name != "count"}
    return {**shaped, "count": [len(pictures)]}


def _files(episodes: int, per_file: int) -> list[tuple[int, int]]:
    """Half-open ranges of episodes, one a file."""
    return [(first, min(first + per_file, episodes)) for first in range(0, episodes, per_file)]


def _write_json(path: Path, content: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
