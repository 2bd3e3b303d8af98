"""A small tabletop that runs in numpy: coloured blocks, an arm tip, two cameras, and a prompt that names one block.

It is a task that needs all three inputs of a robot policy: the prompt says which block, the pictures say where the
blocks are, the state says where the tip is. All environments of a batch advance together, so 200 closed-loop trials
or 500 demonstrations are a handful of array operations.

Geometry, in metres: the table is a square of side 0.6 centred on (0.5, 0.0), x to the right and y upward in both
cameras. The tip is driven by position targets, as a position-controlled arm is: each step of 0.1 s it moves straight
toward the commanded target, at most `STEP`. The expert's target runs ahead of the tip, on the way to the block.

Shapes: n environments, k blocks a scene, c colours.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

FPS = 10
IMAGE_SIZE = 48
CAMERAS = ("observation.images.top", "observation.images.wrist")
COLOURS = {
    "red": (255, 0, 0),
    "green": (0, 255, 0),
    "blue": (0, 0, 255),
    "yellow": (255, 255, 0),
}
COLOUR_NAMES = tuple(COLOURS)
PHRASES = ("reach the {} block", "touch the {} block", "find the {} block")

BLOCKS = 4  # a scene; going to a block at random is right once in four
PLACES = np.array([[-0.14, -0.14], [0.14, -0.14], [-0.14, 0.14], [0.14, 0.14]], np.float32)  # of blocks, from CENTRE
SCATTER = 0.05  # how far from its place a block lies, at most, in x and in y
CENTRE = np.array([0.5, 0.0], np.float32)
TABLE_HALF = 0.3
BLOCK_HALF = 0.05
TIP_RADIUS = 0.026
WRIST_HALF = 0.15  # half the width of what the wrist camera sees
STEP = 0.04  # the furthest that the arm moves in a step
LOOKAHEAD = 0.15  # how far ahead of the tip the expert's target is, at most
PUSH = 0.006  # standard deviation of the disturbance during demonstrations, a step
HOLD = 3  # steps at the end of a trial that must lie on the block
MAX_STEPS = 25  # a trial; the longest straight way takes 19

_TABLE = (128, 126, 124)
_FLOOR = (70, 68, 74)
_TIP = (250, 250, 250)
_TIP_RIM = (15, 15, 15)
_PALETTE = np.array(list(COLOURS.values()), np.float32)


@dataclasses.dataclass
class Scenes:
    """n scenes. `blocks` [n, k, 2] and `tip` [n, 2] float32 metres; `colours` [n, k], `target` [n] (which of the k
    blocks is named) and `phrase` [n] are integers."""

    blocks: np.ndarray
    colours: np.ndarray
    target: np.ndarray
    phrase: np.ndarray
    tip: np.ndarray

    def __len__(self) -> int:
        return len(self.tip)

    def goals(self) -> np.ndarray:
        """Centre of the named block, [n, 2] float32 metres."""
        return self.blocks[np.arange(len(self)), self.target]

    def prompts(self) -> list[str]:
        named = self.colours[np.arange(len(self)), self.target]
        return [PHRASES[p].format(COLOUR_NAMES[c]) for p, c in zip(self.phrase, named, strict=True)]

    def select(self, rows: np.ndarray) -> "Scenes":
        return Scenes(*(getattr(self, f.name)[rows] for f in dataclasses.fields(self)))

    def step(self, target: np.ndarray, disturbance: np.ndarray | float = 0.0) -> None:
        """Moves each tip toward its commanded target [n, 2] (metres), at most STEP, and keeps it on the table."""
        moved = self.tip + _capped(target - self.tip, STEP) + disturbance
        self.tip = np.clip(moved, CENTRE - TABLE_HALF, CENTRE + TABLE_HALF).astype(np.float32)

    def reached(self) -> np.ndarray:
        """Whether each tip is on the named block, bool [n]."""
        return np.abs(self.tip - self.goals()).max(-1) <= BLOCK_HALF

    def images(self) -> dict[str, np.ndarray]:
        """What the two cameras see: {camera: uint8 [n, 48, 48, 3]}."""
        return {camera: self.image(camera) for camera in CAMERAS}

    def image(self, camera: str) -> np.ndarray:
        """What one of CAMERAS sees: uint8 [n, 48, 48, 3]."""
        if camera == CAMERAS[0]:
            return self._render(np.broadcast_to(CENTRE, (len(self), 2)), TABLE_HALF)
        return self._render(self.tip, WRIST_HALF)

    def _render(self, centre: np.ndarray, half: float) -> np.ndarray:
        """Pictures uint8 [n, h, w, 3] of a square of half-width `half` metres around `centre` [n, 2]."""
        pixel = 2 * half / IMAGE_SIZE
        offset = (np.arange(IMAGE_SIZE, dtype=np.float32) + 0.5) * pixel - half
        x = centre[:, :1] + offset  # [n, w]
        y = centre[:, 1:] - offset  # [n, h], row 0 is the far edge

        def square(middle: np.ndarray, size: float) -> np.ndarray:  # share of each pixel that is covered, [n, h, w]
            across = np.clip((size - np.abs(x - middle[:, :1])) / pixel + 0.5, 0, 1)
            down = np.clip((size - np.abs(y - middle[:, 1:])) / pixel + 0.5, 0, 1)
            return down[:, :, None] * across[:, None, :]

        def disc(middle: np.ndarray, radius: float) -> np.ndarray:
            distance = np.sqrt((y - middle[:, 1:])[:, :, None] ** 2 + (x - middle[:, :1])[:, None, :] ** 2)
            return np.clip((radius - distance) / pixel + 0.5, 0, 1)

        # Colours in front: long inner loops, and the sums of one colour stay in cache.
        canvas = np.empty((3, len(self), IMAGE_SIZE, IMAGE_SIZE), np.float32)
        canvas[:] = np.reshape(_FLOOR, (3, 1, 1, 1))

        def paint(cover: np.ndarray, colours: np.ndarray) -> None:  # colours [3] or [n, 3]
            for channel, colour in zip(canvas, np.asarray(colours, np.float32).T, strict=True):
                channel += cover * (colour.reshape(-1, 1, 1) - channel)

        paint(square(np.broadcast_to(CENTRE, (len(self), 2)), TABLE_HALF), np.asarray(_TABLE))
        for k in range(self.blocks.shape[1]):
            paint(square(self.blocks[:, k], BLOCK_HALF), _PALETTE[self.colours[:, k]])
        paint(disc(self.tip, TIP_RADIUS), np.asarray(_TIP_RIM))
        paint(disc(self.tip, TIP_RADIUS * 0.65), np.asarray(_TIP))
        return np.rint(canvas).astype(np.uint8).transpose(1, 2, 3, 0).copy()


def make_scenes(n: int, rng: np.random.Generator) -> Scenes:
    """n random scenes: a block of each colour, one near each of PLACES; a tip that starts away from the goal."""
    blocks = (CENTRE + PLACES + rng.uniform(-SCATTER, SCATTER, (n, BLOCKS, 2))).astype(np.float32)
    colours = np.argsort(rng.random((n, len(COLOURS))), axis=1)[:, :BLOCKS]
    scenes = Scenes(
        blocks=blocks,
        colours=colours,
        target=rng.integers(0, BLOCKS, n),
        phrase=rng.integers(0, len(PHRASES), n),
        tip=np.zeros((n, 2), np.float32),
    )
    goals, todo = scenes.goals(), np.arange(n)
    while len(todo):  # a start on the goal would count as a success for a policy that never moves
        scenes.tip[todo] = CENTRE + rng.uniform(-0.9, 0.9, (len(todo), 2)) * TABLE_HALF
        todo = todo[np.linalg.norm(scenes.tip[todo] - goals[todo], axis=-1) < 0.15]
    return scenes


def expert(scenes: Scenes, goals: np.ndarray | None = None) -> np.ndarray:
    """A position target on the straight way to the named block, or to `goals`; [n, 2] float32 metres."""
    goals = scenes.goals() if goals is None else goals
    return (scenes.tip + _capped(goals - scenes.tip, LOOKAHEAD)).astype(np.float32)


def expert_chunk(scenes: Scenes, horizon: int, goals: np.ndarray | None = None) -> np.ndarray:
    """The expert's targets for `horizon` steps ahead without disturbance, [n, horizon, 2] float32 metres."""
    ahead = dataclasses.replace(scenes, tip=scenes.tip.copy())
    chunk = np.empty((len(scenes), horizon, 2), np.float32)
    for t in range(horizon):
        chunk[:, t] = expert(ahead, goals)
        ahead.step(chunk[:, t])
    return chunk


def observations(scenes: Scenes, prompts: Sequence[str] | None = None) -> list[dict]:
    """What a policy gets, one dict an environment: `images` {camera: uint8 [h, w, 3]}, `state` float32 [2], `task`."""
    images, prompts = scenes.images(), scenes.prompts() if prompts is None else prompts
    return [
        {"images": {c: images[c][i] for c in CAMERAS}, "state": scenes.tip[i].copy(), "task": prompts[i]}
        for i in range(len(scenes))
    ]


def _capped(move: np.ndarray, limit: float) -> np.ndarray:
    length = np.linalg.norm(move, axis=-1, keepdims=True)
    return move * np.minimum(1, limit / np.maximum(length, 1e-9))
