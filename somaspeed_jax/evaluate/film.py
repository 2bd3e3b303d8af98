"""A video of closed-loop trials: the first sixteen side by side, framed in green while the tip is on its block."""

from pathlib import Path

import numpy as np

from somaspeed_jax.data import tabletop
from somaspeed_jax.data.video_writer import VideoWriter

_ROWS, _COLUMNS, _ZOOM, _FRAME = 4, 4, 3, 4


class Film:
    """Pass the film itself as `watch` to `evaluate_tabletop`, then `close` it."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self._writer = path, VideoWriter(path, tabletop.FPS)

    def __call__(self, scenes: tabletop.Scenes) -> None:
        shown = scenes.select(np.arange(min(len(scenes), _ROWS * _COLUMNS)))
        tiles = shown.images()[tabletop.CAMERAS[0]].repeat(_ZOOM, 1).repeat(_ZOOM, 2)
        colour = np.where(shown.reached()[:, None], (60, 220, 60), (40, 40, 40)).astype(np.uint8)
        framed = np.broadcast_to(
            colour[:, None, None], (len(tiles), tiles.shape[1] + 2 * _FRAME, tiles.shape[2] + 2 * _FRAME, 3)
        ).copy()
        framed[:, _FRAME:-_FRAME, _FRAME:-_FRAME] = tiles
        wall = np.zeros((_ROWS * _COLUMNS, *framed.shape[1:]), np.uint8)
        wall[: len(framed)] = framed
        height, width = framed.shape[1:3]
        wall = wall.reshape(_ROWS, _COLUMNS, height, width, 3).swapaxes(1, 2)
        self._writer.write(wall.reshape(1, _ROWS * height, _COLUMNS * width, 3))

    def close(self) -> None:
        self._writer.close()
