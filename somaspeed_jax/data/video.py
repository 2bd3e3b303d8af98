"""Frames of video files by number, exactly.

Frame n of a file is the n-th picture in presentation order. The presentation times of all pictures come from one pass
over the packets, without decoding; reaching a picture means decoding from the last key frame before it until a
picture with that very time comes out. Nothing is ever taken as "the nearest": a picture that does not come is an error.
"""

import bisect
import dataclasses
import os
import threading
from array import array
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import av
import numpy as np
from av.video.reformatter import VideoReformatter

from somaspeed_jax.data.errors import DataError
from somaspeed_jax.data.layout import check_file

# Going back to a key frame throws away what the decoder holds, which costs about as much as decoding this many frames.
SEEK_COST = 8

OPEN_PIXELS = 64e6  # of all open files' pictures together: a decoder holds some ten pictures, 1.5 bytes a pixel
KEPT_TIMES = 4_000_000  # times of pictures kept of files that were closed, 8 bytes each

DECODERS = {"libdav1d": "av1", "libaom-av1": "av1"}  # decoders that are not called by their codec's name


@dataclasses.dataclass(frozen=True)
class VideoInfo:
    """What a file's header says: number of pictures, pictures a second, codec, width and height."""

    frames: int
    rate: float
    codec: str
    width: int
    height: int
    pixel_format: str


def probe_video(path: Path) -> VideoInfo:
    """Reads the header of a video; raises DataError for a file that is missing, a pointer, cut short or not a video."""
    check_file(path)
    check_whole(path)
    container, stream = _open(path)
    with container:
        rate = float(stream.average_rate or 0.0)
        shown = float((stream.duration or 0) * stream.time_base) * rate
        # The header counts pictures that an edit list cuts away, and only mp4 headers count at all: then count packets.
        certain = stream.frames and abs(shown - stream.frames) < 0.5
        return VideoInfo(
            frames=stream.frames if certain else len(_index(container, stream, path).times),
            rate=rate,
            codec=codec_name(stream),
            width=stream.codec_context.width,
            height=stream.codec_context.height,
            pixel_format=stream.codec_context.pix_fmt or "unknown",
        )


def codec_name(stream: Any) -> str:
    """The codec's name as info.json would give it: h264, hevc, av1 …"""
    name = str(stream.codec_context.name)
    return DECODERS.get(name, name)


def check_whole(path: Path) -> None:
    """Raises DataError if the boxes of an mp4 file reach past its end: a header at the front survives being cut."""
    size = path.stat().st_size
    with path.open("rb") as file:
        position = 0
        while position < size:
            file.seek(position)
            head = file.read(16)
            kind = head[4:8]
            if position == 0 and kind not in (b"ftyp", b"moov", b"mdat", b"free", b"wide", b"skip"):
                return  # another container
            length = int.from_bytes(head[:4], "big")
            if length == 1:
                length = int.from_bytes(head[8:16], "big")
            elif length == 0:  # to the end of the file
                return
            if len(head) < 8 or length < 8 or position + length > size:
                raise DataError(
                    f"{path}: is cut short: it has {size} bytes, and its part {kind!r} ends at byte "
                    f"{position + length}. Fetch it again."
                )
            position += length


def _open(path: Path) -> tuple[Any, Any]:
    try:
        container = av.open(str(path))
    except (av.FFmpegError, OSError) as error:
        raise DataError(f"{path}: cannot be opened as a video ({error}). Fetch it again.") from error
    if not container.streams.video:
        container.close()
        raise DataError(f"{path}: holds no video stream.")
    stream = container.streams.video[0]
    # One thread a file: the parallelism is in the workers, and frame threads make every seek wait for a full queue.
    stream.thread_type = "NONE"
    stream.codec_context.thread_count = 1
    return container, stream


class Index(NamedTuple):
    """Sorted times of all pictures shown and of the key frames, and when those are decoded; 64-bit integers."""

    times: array
    key_times: array
    key_decode_times: array


def _index(container: Any, stream: Any, path: Path) -> Index:
    times, keys = [], []
    try:
        for packet in container.demux(stream):
            if packet.size == 0:  # the packet that flushes the decoder
                continue
            if packet.pts is None:
                raise DataError(f"{path}: a packet ({codec_name(stream)}) has no presentation time.")
            if packet.is_keyframe:
                keys.append((packet.pts, packet.dts if packet.dts is not None else packet.pts))
            if not packet.is_discard:  # cut away by an edit list: decoded, never shown
                times.append(packet.pts)
    except av.FFmpegError as error:
        raise DataError(f"{path}: cannot be read to its end ({error}). Fetch it again.") from error
    if len(set(times)) != len(times):
        raise DataError(f"{path}: two pictures ({codec_name(stream)}) have the same presentation time.")
    if not times or not keys:
        raise DataError(f"{path}: holds no picture or no key frame ({codec_name(stream)}).")
    keys.sort()
    return Index(array("q", sorted(times)), array("q", (pts for pts, _ in keys)), array("q", (dts for _, dts in keys)))


class VideoFile:
    """One open video file. Safe to call from several threads, one of which decodes at a time.

    `index`: what `index` was of the same file when it was open before, which saves reading all its packets again.
    """

    def __init__(self, path: str | Path, index: Index | None = None):
        self.path = Path(path)
        check_file(self.path)
        self._container, self._stream = _open(self.path)
        self.codec = codec_name(self._stream)
        self.pixels = self._stream.codec_context.width * self._stream.codec_context.height
        self.index = index or _index(self._container, self._stream, self.path)
        self._times, self._key_times, self._key_decode_times = self.index
        self._lock = threading.Lock()
        self._reformatter = VideoReformatter()
        self._decoded: Any = None  # iterator over pictures, where the decoder stands
        self._last = -1  # number of the picture in _image
        self._image: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self._times)

    def seconds(self, number: int) -> float:
        """The time of picture `number` after the file's first one, in seconds."""
        return float((self._times[number] - self._times[0]) * self._stream.time_base)

    def frame(self, number: int) -> np.ndarray:
        """Picture `number` in presentation order, uint8 [h, w, 3] RGB; raises DataError if it cannot be decoded."""
        if not 0 <= number < len(self._times):
            raise DataError(f"{self.path}: asked for frame {number}; the file has frames 0 to {len(self._times) - 1}.")
        with self._lock:
            if number != self._last or self._image is None:
                self._image = self._decode(number)
                self._image.flags.writeable = False  # the same array is given again for the same number
                self._last = number
            return self._image

    def _decode(self, number: int) -> np.ndarray:
        key = bisect.bisect_right(self._key_times, self._times[number]) - 1
        if key < 0:
            raise DataError(f"{self.path}: frame {number} ({self.codec}) comes before the first key frame.")
        key_number = bisect.bisect_left(self._times, self._key_times[key])
        ahead = number - self._last
        try:
            if self._decoded is None or ahead <= 0 or ahead > number - key_number + SEEK_COST:
                # Seeking goes by decode time; the key frame's own names it, whatever the order of the pictures.
                self._container.seek(self._key_decode_times[key], stream=self._stream, backward=True, any_frame=False)
                self._decoded = self._container.decode(self._stream)
            for frame in self._decoded:
                if frame.pts == self._times[number] and not frame.is_corrupt:
                    return self._reformatter.reformat(frame, format="rgb24").to_ndarray()
                if frame.pts is None or frame.pts >= self._times[number]:
                    break
        except av.FFmpegError as error:
            self._decoded = None
            raise DataError(f"{self.path}: frame {number} ({self.codec}) cannot be decoded ({error}).") from error
        self._decoded = None
        raise DataError(
            f"{self.path}: frame {number} ({self.codec}) did not come out of the decoder; is the file damaged?"
        )


class VideoPool:
    """The video files last used, kept open. Pickles without them, and opens its own after a fork.

    At most `capacity` files are open, fewer where their pictures are large. Of a file that was closed the index is
    kept, so that coming back to it costs opening it alone.
    """

    def __init__(self, capacity: int = 128):
        self.capacity = capacity
        self._reset()

    def _reset(self) -> None:
        self._files: OrderedDict[Path, VideoFile] = OrderedDict()
        self._closed: OrderedDict[Path, Index] = OrderedDict()
        self._lock = threading.Lock()
        self._process = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {"capacity": self.capacity}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.capacity = state["capacity"]
        self._reset()

    def open(self, path: Path) -> VideoFile:
        """The open file at `path`; those used longest ago are closed when there are too many."""
        if self._process != os.getpid():  # a forked child shares its parent's file positions
            self._reset()
        with self._lock:
            file = self._files.get(path)
            if file is None:
                file = self._files[path] = VideoFile(path, self._closed.pop(path, None))
                self._make_room()
            self._files.move_to_end(path)
            return file

    def _make_room(self) -> None:
        while len(self._files) > self.capacity or (
            len(self._files) > 1 and sum(file.pixels for file in self._files.values()) > OPEN_PIXELS
        ):
            path, file = self._files.popitem(last=False)  # closed once no thread decodes from it
            self._closed[path] = file.index
        while sum(len(index.times) for index in self._closed.values()) > KEPT_TIMES:
            self._closed.popitem(last=False)
