"""Small LeRobot datasets made on the spot, whose numbers and pictures say which episode and frame they are."""

import io
import json
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

CAMERA = "observation.images.top"
SIDE = 64  # pixels; svt-av1 takes nothing smaller
CELL = 16

PATHS = {
    "v2": (
        "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    ),
    "v3": (
        "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
    ),
}


def picture(number: int) -> np.ndarray:
    """uint8 [64, 64, 3]: sixteen black or white cells, the bits of `number`."""
    bits = (number >> np.arange(16)) & 1
    grey = np.kron(bits.reshape(4, 4), np.full((CELL, CELL), 200)) + 20
    return np.repeat(grey[..., None], 3, axis=2).astype(np.uint8)


def number_in(image: np.ndarray) -> int:
    """The number that `picture` drew."""
    cells = image.reshape(4, CELL, 4, CELL, 3).mean(axis=(1, 3, 4)).reshape(16)
    return int(((cells > 120) << np.arange(16)).sum())


def write_video(
    path: Path,
    numbers: Sequence[int],
    fps: float,
    codec: str = "libx264",
    group: int = 2,
    b_frames: int = 0,
    offset: int = 0,
) -> None:
    """Pictures of `numbers` at `fps`, a key frame every `group` frames, the first picture at frame time `offset`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    options = {"g": str(group), "crf": "28"}
    if codec == "libx264":
        options |= {
            "bf": str(b_frames),
            "x264-params": f"scenecut=0:b-adapt=0:bframes={b_frames}",
            "preset": "ultrafast",
        }
    if codec == "libx265":
        options["x265-params"] = (
            f"log-level=none:scenecut=0:bframes={b_frames}:b-adapt=0:keyint={group}:min-keyint={group}"
        )
        options["preset"] = "ultrafast"
    if codec == "libsvtav1":
        options |= {"preset": "9", "crf": "8"}  # coarser settings lose whole cells
    with av.open(str(path), "w") as container:
        rate = Fraction(fps).limit_denominator(1000)
        stream = container.add_stream(codec, rate=rate, options=options)
        stream.width = stream.height = SIDE
        stream.pix_fmt = "yuv420p"
        stream.time_base = stream.codec_context.time_base = 1 / rate
        for index, number in enumerate(numbers):
            frame = av.VideoFrame.from_ndarray(picture(number), format="rgb24")
            frame.pts, frame.time_base = index + offset, 1 / rate
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def code(episode: int, frame: int) -> int:
    """The number in the picture of one frame."""
    return episode * 256 + frame


def values(episode: int, frames: np.ndarray, dims: int) -> np.ndarray:
    """float32 [frames, dims]: dimension 0 is the episode, 1 the frame, and the others their sum and more."""
    columns = [np.full(len(frames), episode), frames, *(episode + frames * 0.1 * d for d in range(2, dims))]
    return np.stack(columns, axis=1).astype(np.float32)


def png(number: int) -> dict[str, Any]:
    buffer = io.BytesIO()
    Image.fromarray(picture(number)).save(buffer, format="PNG")
    return {"bytes": buffer.getvalue(), "path": "hint.png"}


def write_dataset(
    root: Path,
    lengths: Sequence[int],
    version: str = "v3.0",
    fps: float = 10,
    cameras: Sequence[str] = (CAMERA,),
    stored_as: str = "video",
    episodes_a_data_file: int = 1000,
    episodes_a_video_file: int = 1000,
    chunks_size: int = 1000,
    state_dims: int = 6,
) -> Path:
    """A healthy dataset in folder `root`: episode e has lengths[e] frames and the prompt "episode e"."""
    v3 = version == "v3.0"
    data_path, video_path = PATHS["v3" if v3 else "v2"]
    if not v3:
        episodes_a_data_file = episodes_a_video_file = 1
    rows: list[dict[str, Any]] = []
    for e in range(len(lengths)):
        place = {
            "chunk_index": e // episodes_a_data_file // chunks_size,
            "file_index": e // episodes_a_data_file % chunks_size,
        }
        rows.append({"episode_index": e, "tasks": [f"episode {e}"], "length": lengths[e]})
        if v3:
            start = sum(lengths[:e])
            rows[e] |= {f"data/{key}": value for key, value in place.items()}
            rows[e] |= {"dataset_from_index": start, "dataset_to_index": start + lengths[e], "stats/action/mean": [0.0]}

    for first in range(0, len(lengths), episodes_a_data_file):
        episodes = range(first, min(first + episodes_a_data_file, len(lengths)))
        file = first // episodes_a_data_file
        where = {"chunk_index": file // chunks_size, "file_index": file % chunks_size}
        where |= {"episode_chunk": first // chunks_size, "episode_index": first}
        path = root / data_path.format(**where)
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(_table(episodes, lengths, fps, state_dims, cameras if stored_as == "image" else ()), path)

    for camera in cameras if stored_as == "video" else ():
        for first in range(0, len(lengths), episodes_a_video_file):
            file = first // episodes_a_video_file
            where = {"chunk_index": file // chunks_size, "file_index": file % chunks_size}
            where |= {"episode_chunk": first // chunks_size, "episode_index": first}
            numbers: list[int] = []
            for e in range(first, min(first + episodes_a_video_file, len(lengths))):
                if v3:
                    times = {"from_timestamp": len(numbers) / fps, "to_timestamp": (len(numbers) + lengths[e]) / fps}
                    found = {"chunk_index": where["chunk_index"], "file_index": where["file_index"]} | times
                    rows[e] |= {f"videos/{camera}/{key}": value for key, value in found.items()}
                numbers += [code(e, frame) for frame in range(lengths[e])]
            write_video(root / video_path.format(video_key=camera, **where), numbers, fps)

    _write_meta(root, rows, version, fps, cameras, stored_as, chunks_size, state_dims)
    return root


def _table(episodes: range, lengths: Sequence[int], fps: float, dims: int, images: Sequence[str]) -> pa.Table:
    frames = [np.arange(lengths[e]) for e in episodes]
    state = np.concatenate([values(e, f, dims) for e, f in zip(episodes, frames, strict=True)])
    action = np.concatenate([values(e, f, dims) + 0.5 for e, f in zip(episodes, frames, strict=True)])
    numbers = np.concatenate([np.full(lengths[e], e) for e in episodes])
    frame_index = np.concatenate(frames)
    columns = {
        "observation.state": pa.FixedSizeListArray.from_arrays(pa.array(state.reshape(-1)), dims),
        "action": pa.array(list(action.astype(np.float64)), pa.list_(pa.float64())),
        "timestamp": pa.array((frame_index / fps).astype(np.float32)),
        "frame_index": pa.array(frame_index),
        "episode_index": pa.array(numbers),
        "index": pa.array(np.arange(len(numbers)) + sum(lengths[: episodes[0]])),
        "task_index": pa.array(numbers),
    }
    for key in images:
        columns[key] = pa.array([png(code(int(e), int(f))) for e, f in zip(numbers, frame_index, strict=True)])
    return pa.table(columns)


def _write_meta(
    root: Path,
    rows: list[dict[str, Any]],
    version: str,
    fps: float,
    cameras: Sequence[str],
    stored_as: str,
    chunks_size: int,
    dims: int,
) -> None:
    data_path, video_path = PATHS["v3" if version == "v3.0" else "v2"]
    vector = {"dtype": "float32", "shape": [dims], "names": [f"joint_{d}.pos" for d in range(dims)]}
    scalars = {
        "timestamp": "float32",
        "frame_index": "int64",
        "episode_index": "int64",
        "index": "int64",
        "task_index": "int64",
    }
    features: dict[str, Any] = {"observation.state": vector, "action": vector}
    features |= {key: {"dtype": dtype, "shape": [1], "names": None} for key, dtype in scalars.items()}
    for camera in cameras:
        features[camera] = {"dtype": stored_as, "shape": [SIDE, SIDE, 3], "names": ["height", "width", "channels"]}
    info = {
        "codebase_version": version,
        "fps": fps,
        "features": features,
        "total_episodes": len(rows),
        "total_frames": sum(row["length"] for row in rows),
        "chunks_size": chunks_size,
        "data_path": data_path,
        "video_path": video_path if stored_as == "video" else None,
    }
    meta = root / "meta"
    meta.mkdir(parents=True, exist_ok=True)
    (meta / "info.json").write_text(json.dumps(info))
    (meta / "stats.json").write_text("{}")
    tasks = [{"task_index": e, "task": f"episode {e}"} for e in range(len(rows))]
    if version == "v3.0":
        (meta / "episodes/chunk-000").mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows), meta / "episodes/chunk-000/file-000.parquet")
        pq.write_table(pa.Table.from_pylist(tasks), meta / "tasks.parquet")
    else:
        write_lines(meta / "episodes.jsonl", rows)
        write_lines(meta / "tasks.jsonl", tasks)


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def edit_info(root: Path, **changes: Any) -> None:
    """Replaces fields of info.json."""
    path = root / "meta" / "info.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_column(path: Path, name: str, change: Any) -> None:
    """Rewrites one column of a parquet file: `change` takes the list of its values and returns the new one."""
    table = pq.read_table(path)
    position = table.column_names.index(name)
    field = table.schema.field(position)
    new = pa.array(change(table[name].to_pylist()), field.type)
    pq.write_table(table.set_column(position, field.name, new), path)
