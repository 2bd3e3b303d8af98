"""GR00T's picture geometry: enlarge or shrink, cut a window, scale it back, make the sides fit the vision tower.

The first step is fixed and runs on the host, once, into the frame cache. The window is random in training, so the rest
runs on the device (`augment/groot.py`), by the numbers below. `Plan` holds the sizes of every step.
"""

import dataclasses
import math
from typing import Literal, NamedTuple

import cv2
import numpy as np

from somaspeed_jax.data.errors import DataError
from somaspeed_jax.data.images import Size, check_picture

Geometry = Literal["square", "aspect", "lerobot"]
_GEOMETRIES = ("square", "aspect", "lerobot")
_MAX_PIXELS = 16_777_216
_CUBIC = -0.5  # Pillow's and torchvision's (with antialiasing) coefficient


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes (height, width) of one camera: after the host's resize, of the window, of the window scaled back, and of
    the picture that the vision tower gets."""

    prepared: Size
    window: Size
    scaled: Size
    final: Size


@dataclasses.dataclass(frozen=True)
class GrootPictures:
    """Which of upstream's geometries, and its numbers.

    geometry: `square`: Isaac-GR00T without `shortest_image_edge`: everything becomes `target`, OpenCV's INTER_AREA.
      `aspect`: Isaac-GR00T with it: the shorter side becomes `edge` and the proportions stay, INTER_AREA.
      `lerobot`: LeRobot without a checkpoint's processor files: a square of `edge`, bicubic with antialiasing.
    target: (height, width). edge: None: the target's height. crop_fraction: side of the window; 1 for no window.
    letterbox: black bars to a square first. multiple, min_pixels: sides are rounded to multiples of the first, and
      pictures below the second are enlarged (Qwen3-VL's image processor, bicubic); 256x256 needs neither.
    """

    geometry: Geometry = "square"
    target: Size = (256, 256)
    edge: int | None = None
    crop_fraction: float = 230 / 256
    letterbox: bool = False
    multiple: int = 32
    min_pixels: int = 65_536

    def __post_init__(self):
        if self.geometry not in _GEOMETRIES:
            raise DataError(f"groot picture geometry is {self.geometry!r}, expected one of {', '.join(_GEOMETRIES)}")
        if not 0 < self.crop_fraction <= 1:
            raise DataError(f"groot crop_fraction is {self.crop_fraction}, expected above 0 and at most 1")
        if min(self.target) < 1 or (self.edge is not None and self.edge < 1):
            raise DataError(f"groot picture target {self.target} with edge {self.edge}: expected positive sizes")

    @property
    def recipe(self) -> str:
        """Names what `prepare` does, for the frame cache."""
        size = f"{self.target[0]}x{self.target[1]}" if self.geometry == "square" else str(self._edge)
        return f"groot_{self.geometry}({size}{', letterbox' if self.letterbox else ''})"

    @property
    def _edge(self) -> int:
        return self.target[0] if self.edge is None else self.edge

    def prepared_size(self, source: Size) -> Size:
        """Size after the host's operations on a picture of size `source`."""
        if self.letterbox:
            source = (max(source), max(source))
        return self._resized(source)

    def _resized(self, size: Size) -> Size:
        if self.geometry == "square":
            return self.target
        if self.geometry == "lerobot":
            return (self._edge, self._edge)
        scale = self._edge / min(size)
        if scale == 1:
            return size
        return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))

    def plan(self, prepared: Size) -> Plan:
        """All sizes, from the size of a prepared picture."""
        window = prepared
        if self.crop_fraction < 1:
            to_int = round if self.geometry == "lerobot" else int
            window = (
                max(1, to_int(prepared[0] * self.crop_fraction)),
                max(1, to_int(prepared[1] * self.crop_fraction)),
            )
        scaled = self.target if self.geometry == "lerobot" else self._resized(window)
        return Plan(prepared, window, scaled, self._fitted(scaled))

    def _fitted(self, size: Size) -> Size:
        """Qwen2-VL's smart resize: sides rounded to multiples, the number of pixels kept between two bounds."""
        m, (height, width) = self.multiple, size
        if max(size) > 200 * min(size):
            raise DataError(f"groot: a picture of {height}x{width} is too long for the vision tower (over 200 to 1)")
        rows, columns = round(height / m) * m, round(width / m) * m
        if rows * columns > _MAX_PIXELS:
            shrink = math.sqrt(height * width / _MAX_PIXELS)
            return max(m, math.floor(height / shrink / m) * m), max(m, math.floor(width / shrink / m) * m)
        if rows * columns < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            return math.ceil(height * grow / m) * m, math.ceil(width * grow / m) * m
        return rows, columns

    def prepare(self, image: np.ndarray) -> np.ndarray:
        """The fixed operations: uint8 [h, w, 3] -> uint8 [H, W, 3] of `prepared_size`."""
        check_picture(image)
        if self.letterbox:
            image = _letterbox(image)
        height, width = self._resized(image.shape[:2])
        if image.shape[:2] == (height, width):
            return image
        if self.geometry == "lerobot":
            return _bicubic(image, (height, width))
        return cv2.resize(np.ascontiguousarray(image), (width, height), interpolation=cv2.INTER_AREA)


def _letterbox(image: np.ndarray) -> np.ndarray:
    """Black bars to a square, an odd pixel at the bottom or the right."""
    height, width = image.shape[:2]
    side = max(height, width)
    top, left = (side - height) // 2, (side - width) // 2
    return np.pad(image, ((top, side - height - top), (left, side - width - left), (0, 0)))


class TwoTaps(NamedTuple):
    """One axis of a linear blend in fixed point: pixels first and second [target] int32 with weights in 1/2048."""

    first: np.ndarray
    second: np.ndarray
    first_weight: np.ndarray
    second_weight: np.ndarray


def enlarging_area_taps(source: int, target: int) -> TwoTaps:
    """OpenCV's INTER_AREA where it enlarges: two pixels, weighted by how much of each the new pixel covers.

    OpenCV computes it for uint8 with weights rounded to 11 bits (modules/imgproc/src/resize.cpp).
    """
    if target < source:
        raise ValueError(f"INTER_AREA from {source} to {target} pixels shrinks; this is for enlarging")
    index = np.arange(target)
    left = np.floor(index * (source / target)).astype(np.int32)
    weight = ((index + 1) - (left + 1) * (target / source)).astype(np.float32)
    weight = np.where(weight <= 0, np.float32(0), weight - np.floor(weight))
    fixed = [np.rint(w * np.float32(2048)).astype(np.int32) for w in (1 - weight, weight)]
    return TwoTaps(left, np.minimum(left + 1, source - 1), *fixed)


def bicubic_matrix(source: int, target: int) -> np.ndarray:
    """float32 [target, source]: one axis of a bicubic resize, antialiased where it shrinks.

    Pillow's and torchvision's; rounded to the 16-bit fixed point in which torch computes it for uint8
    (aten/src/ATen/native/cpu/UpSampleKernel.cpp), so that products with grey levels are exact in float32.
    """
    scale = source / target
    stretch = max(scale, 1.0)
    centre = (np.arange(target) + 0.5) * scale
    first = np.maximum((centre - 2 * stretch + 0.5).astype(int), 0)
    last = np.minimum((centre + 2 * stretch + 0.5).astype(int), source)
    pixels = np.arange(source)
    distance = np.abs((pixels + 0.5 - centre[:, None]) / stretch)
    near = ((_CUBIC + 2) * distance - (_CUBIC + 3)) * distance**2 + 1
    far = ((distance - 5) * distance + 8) * distance * _CUBIC - 4 * _CUBIC
    weights = np.where(distance < 1, near, np.where(distance < 2, far, 0.0))
    weights = np.where((pixels >= first[:, None]) & (pixels < last[:, None]), weights, 0.0)
    weights /= weights.sum(1, keepdims=True)
    bits = math.floor(math.log2((2**15 - 0.5) / weights.max()))
    return (np.sign(weights) * np.floor(np.abs(weights) * 2**bits + 0.5) / 2**bits).astype(np.float32)


def _bicubic(image: np.ndarray, size: Size) -> np.ndarray:
    """uint8 [h, w, 3] -> uint8 [H, W, 3], columns first and rounded between, as torch does."""
    rows, columns = (bicubic_matrix(a, b) for a, b in zip(image.shape[:2], size, strict=True))
    wide = np.matmul(columns, image.astype(np.float32))
    wide = np.clip(np.floor(wide + 0.5), 0, 255)
    tall = np.matmul(rows, wide.reshape(len(wide), -1)).reshape(*size, 3)
    return np.clip(np.floor(tall + 0.5), 0, 255).astype(np.uint8)
