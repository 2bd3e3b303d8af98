"""Picture geometry on the host: uint8 in, uint8 out, each function equal to one upstream's within one grey level."""

import cv2
import numpy as np
from PIL import Image

Size = tuple[int, int]  # (height, width)


def check_picture(image: np.ndarray, camera: str = "image") -> None:
    """Raises ValueError, naming the camera, unless `image` is uint8 [h, w, 3] (red, green, blue)."""
    if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        found = f"{image.dtype} {list(image.shape)}" if isinstance(image, np.ndarray) else type(image).__name__
        raise ValueError(f"camera {camera}: expected a uint8 picture [height, width, 3] in RGB, found {found}")


def fitted_size(source: Size, target: Size) -> Size:
    """The largest size with the aspect ratio of `source` inside `target`, each side rounded down.

    lerobot `resize_with_pad_torch` and openpi `resize_with_pad` compute it alike.
    """
    ratio = max(source[1] / target[1], source[0] / target[0])
    return int(source[0] / ratio), int(source[1] / ratio)


def pad_to(image: np.ndarray, target: Size) -> np.ndarray:
    """uint8 [h, w, 3] centred in a black [H, W, 3]; an odd pixel goes to the bottom or the right."""
    height, width = image.shape[:2]
    top, left = (target[0] - height) // 2, (target[1] - width) // 2
    canvas = np.zeros((*target, 3), np.uint8)
    canvas[top : top + height, left : left + width] = image
    return canvas


def resize_with_pad(image: np.ndarray, target: Size) -> np.ndarray:
    """Bilinear without antialiasing, pixel centres at half integers, then black bars: uint8 [h, w, 3] -> [H, W, 3].

    Equals lerobot's π0.5 `resize_with_pad_torch` (torch `interpolate`, align_corners=False), which works on floats in
    [0, 1] and never rounds: the result here is its value rounded to the nearest grey level.
    """
    check_picture(image)
    if image.shape[:2] == target:
        return image
    height, width = fitted_size(image.shape[:2], target)
    # cv2 interpolates uint8 with 11-bit weights; float32 keeps the exact ones.
    resized = cv2.resize(image.astype(np.float32), (width, height), interpolation=cv2.INTER_LINEAR)
    return pad_to(np.rint(resized).astype(np.uint8), target)


def resize_with_pad_antialias(image: np.ndarray, target: Size) -> np.ndarray:
    """Pillow's bilinear, which averages when it shrinks, then black bars: uint8 [h, w, 3] -> [H, W, 3].

    Equals openpi's `openpi_client.image_tools.resize_with_pad`, bit for bit.
    """
    check_picture(image)
    if image.shape[:2] == target:
        return image
    height, width = fitted_size(image.shape[:2], target)
    resized = Image.fromarray(image).resize((width, height), resample=Image.Resampling.BILINEAR)
    return pad_to(np.asarray(resized), target)
