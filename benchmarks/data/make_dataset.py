"""Makes the benchmark's dataset: LeRobot v3.0, 20 episodes of 100 frames, two 256 x 256 h264 cameras, 30 fps.

    python benchmarks/data/make_dataset.py out/dataset

Encoded as LeRobot records h264 by default (every second frame a keyframe, crf 30). Pictures have texture, motion and
sensor noise, so that they cost about what a real scene costs to decode.
"""

import json
import sys
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

EPISODES, FRAMES, SIZE, FPS, DIMS = 20, 100, 256, 30, 7
CAMERAS = ("observation.images.front", "observation.images.wrist")
TASKS = ("pick the cube", "place the cube")
DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
ENCODER = {"g": "2", "crf": "30"}


def picture(rng: np.random.Generator, texture: np.ndarray, frame: int) -> np.ndarray:
    """uint8 [SIZE, SIZE, 3]: a texture that drifts under two fixed bars and one that swings, with noise."""
    shown = np.roll(texture, (frame, -2 * frame), (0, 1)).copy()
    shown[40:60, :] = (200, 60, 40)
    shown[:, 180:190] = (30, 120, 220)
    x = int(128 + 90 * np.sin(frame / 9))
    shown[100:200, x : x + 24] = (40, 210, 90)
    return np.clip(shown + rng.normal(0, 3, shown.shape), 0, 255).astype(np.uint8)


def texture(rng: np.random.Generator) -> np.ndarray:
    """float [SIZE, SIZE, 3], smooth over some eight pixels."""
    coarse = rng.uniform(40, 215, (SIZE // 8, SIZE // 8, 3))
    for axis in (0, 1):
        fine = np.repeat(coarse, 8, axis)
        coarse = (fine + np.roll(fine, 4, axis)) / 2
    return coarse


def write_video(path: Path, rng: np.random.Generator) -> None:
    path.parent.mkdir(parents=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=FPS, options=ENCODER)
        stream.width = stream.height = SIZE
        stream.pix_fmt = "yuv420p"
        stream.time_base = Fraction(1, FPS)
        for n in range(EPISODES * FRAMES):
            if n % FRAMES == 0:
                scene = texture(rng)
            frame = av.VideoFrame.from_ndarray(picture(rng, scene, n % FRAMES), format="rgb24")
            frame.pts, frame.time_base = n, Fraction(1, FPS)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def statistics(values: np.ndarray) -> dict[str, list]:
    values = values.reshape(len(values), -1).astype(np.float64)
    quantiles = {f"q{q:02d}": np.quantile(values, q / 100, axis=0).tolist() for q in (1, 10, 50, 90, 99)}
    moments = {name: getattr(values, name)(0).tolist() for name in ("min", "max", "mean", "std")}
    return {**moments, **quantiles, "count": [len(values)]}


def make(root: Path) -> None:
    rng = np.random.default_rng(0)
    total = EPISODES * FRAMES
    episode, frame = np.divmod(np.arange(total), FRAMES)
    state = np.sin(0.05 * frame[:, None] + np.arange(DIMS) + episode[:, None]).astype(np.float32)
    columns = {
        "observation.state": state,
        "action": state + 0.1 * rng.normal(size=state.shape).astype(np.float32),
        "timestamp": (frame / FPS).astype(np.float32),
        "frame_index": frame,
        "episode_index": episode,
        "index": np.arange(total),
        "task_index": episode % len(TASKS),
    }
    arrays = {
        name: pa.FixedSizeListArray.from_arrays(pa.array(v.ravel()), DIMS) if v.ndim == 2 else pa.array(v)
        for name, v in columns.items()
    }
    data = root / DATA_PATH.format(chunk_index=0, file_index=0)
    data.parent.mkdir(parents=True)
    pq.write_table(pa.table(arrays), data)
    for camera in CAMERAS:
        write_video(root / VIDEO_PATH.format(video_key=camera, chunk_index=0, file_index=0), rng)
    _write_meta(root, columns)


def _write_meta(root: Path, columns: dict[str, np.ndarray]) -> None:
    starts = np.arange(EPISODES) * FRAMES
    zeros = np.zeros(EPISODES, np.int64)
    table: dict = {
        "episode_index": np.arange(EPISODES),
        "tasks": pa.array([[TASKS[e % len(TASKS)]] for e in range(EPISODES)]),
        "length": np.full(EPISODES, FRAMES),
        "dataset_from_index": starts,
        "dataset_to_index": starts + FRAMES,
    }
    for name in ("data", "meta/episodes", *(f"videos/{camera}" for camera in CAMERAS)):
        table[f"{name}/chunk_index"] = table[f"{name}/file_index"] = zeros
    for camera in CAMERAS:
        table[f"videos/{camera}/from_timestamp"] = starts / FPS
        table[f"videos/{camera}/to_timestamp"] = (starts + FRAMES) / FPS
    episodes = root / "meta" / "episodes" / "chunk-000" / "file-000.parquet"
    episodes.parent.mkdir(parents=True)
    pq.write_table(pa.table(table), episodes)
    # LeRobot's reader takes the text from the pandas index
    pandas = {"index_columns": ["task"], "column_indexes": [], "pandas_version": "2.2.0", "columns": [
        {"field_name": name, "name": name, "pandas_type": kind, "numpy_type": numpy_type, "metadata": None}
        for name, kind, numpy_type in (("task_index", "int64", "int64"), ("task", "unicode", "object"))
    ]}  # fmt: skip
    tasks = pa.table({"task_index": np.arange(len(TASKS)), "task": TASKS})
    pq.write_table(tasks.replace_schema_metadata({"pandas": json.dumps(pandas)}), root / "meta" / "tasks.parquet")
    vector = {"dtype": "float32", "shape": [DIMS], "names": [f"joint_{i}" for i in range(DIMS)]}
    video = {"dtype": "video", "shape": [SIZE, SIZE, 3], "names": ["height", "width", "channels"], "info": {
        "video.height": SIZE, "video.width": SIZE, "video.codec": "h264", "video.pix_fmt": "yuv420p", "video.fps": FPS,
        "video.channels": 3, "has_audio": False, "is_depth_map": False,
    }}  # fmt: skip
    scalars = {n: {"dtype": str(v.dtype), "shape": [1], "names": None} for n, v in columns.items() if v.ndim == 1}
    info = {
        "codebase_version": "v3.0", "robot_type": "synthetic", "fps": FPS, "total_episodes": EPISODES,
        "total_frames": EPISODES * FRAMES, "total_tasks": len(TASKS), "chunks_size": 1000, "data_files_size_in_mb": 100,
        "video_files_size_in_mb": 200, "splits": {"train": f"0:{EPISODES}"}, "data_path": DATA_PATH,
        "video_path": VIDEO_PATH,
        "features": {**dict.fromkeys(CAMERAS, video), "observation.state": vector, "action": vector, **scalars},
    }  # fmt: skip
    (root / "meta" / "info.json").write_text(json.dumps(info, indent=1))
    stats = {name: statistics(values) for name, values in columns.items()}
    (root / "meta" / "stats.json").write_text(json.dumps(stats, indent=1))


if __name__ == "__main__":
    make(Path(sys.argv[1]))
    print("wrote", sys.argv[1])
