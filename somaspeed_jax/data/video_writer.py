"""Pictures into an mp4 file."""

from fractions import Fraction
from pathlib import Path

import av
import numpy as np


class VideoWriter:
    """h264 in mp4, `fps` frames a second, one whole picture in every `group`: a random frame costs few decodes.

    The size is that of the first pictures written, which must be even. One thread, so that equal pictures give equal
    files.
    """

    def __init__(self, path: Path, fps: int, group: int = 12):
        self._container = av.open(str(path), "w")
        self._stream = self._container.add_stream("libx264", rate=fps)
        self._stream.pix_fmt = "yuv420p"
        self._stream.thread_count = 1
        self._stream.options = {"g": str(group), "bf": "0", "crf": "10", "preset": "veryfast"}
        self._time_base = Fraction(1, fps)
        self._frames = 0

    def write(self, pictures: np.ndarray) -> None:
        """Appends uint8 [n, h, w, 3]."""
        for picture in pictures:
            if self._frames == 0:
                self._stream.height, self._stream.width = picture.shape[:2]
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts, frame.time_base = self._frames, self._time_base
            self._frames += 1
            self._container.mux(self._stream.encode(frame))

    def close(self) -> None:
        self._container.mux(self._stream.encode())
        self._container.close()
