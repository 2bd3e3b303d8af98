"""Normalisation of one vector feature and its inverse, one object for training, evaluation, serving and export.

Four conventions, because four upstream projects disagree in ways that a fine-tuned policy notices. With lo and hi being
q01 and q99 (mode `quantiles`) or min and max (`min_max`):

| | forward | inverse | type |
|---|---|---|---|
| lerobot | 2 (x - lo) / d - 1; d = hi - lo, 1e-8 where that is 0 | (y + 1) d / 2 + lo | float32 |
| openpi | (x - lo) / (hi - lo + 1e-6) 2 - 1 | (y + 1) / 2 (hi - lo + 1e-6) + lo | float64 |
| groot | lerobot's, 0 where hi = lo, then clipped to [-1, 1] | (clip(y) + 1) / 2 (hi - lo) + lo | float32 |
| molmoact2 | lerobot's, clipped; masked dimensions untouched | lerobot's, of clip(y) | float32 |

`mean_std`: (x - mean) / (std + eps), eps 1e-6 for openpi, else 1e-8; inverse y (std + 1e-6) + mean for openpi, else
y std + mean. Sources: lerobot processor/normalize_processor.py, policies/groot/processor_groot.py and MolmoAct2's
processor; openpi transforms.py; Isaac-GR00T data/utils.py.

**Dimensions that hardly move.** Dividing by next to nothing turns sensor noise, or an input of 0 while serving, into
values in the thousands. A dimension is *near-constant* where its spread is at most a thousandth of its magnitude (a few
counts of a 12-bit encoder) or at most 1e-6 (below what any sensor resolves in radians or metres). Where the convention
does not clip, a near-constant dimension normalises to the one value that the upstream formula gives for the constant
itself (-1; 0 for groot and mean_std), whatever the input, and un-normalises to the constant. groot does the same with
clipping on, since it defines constant dimensions as 0; in molmoact2 the clip already bounds the formula. All other
dimensions are the upstream formula to the last bit.
"""

from typing import Literal, NamedTuple

import numpy as np

from somaspeed_jax.data.stats import FeatureStatistics

Mode = Literal["quantiles", "min_max", "mean_std", "identity"]
Convention = Literal["lerobot", "openpi", "groot", "molmoact2"]

RELATIVE_SPREAD = 1e-3
ABSOLUTE_SPREAD = 1e-6
GAUSSIAN_SPREAD = 4.65  # q99 - q01 of a normal distribution, in standard deviations


class NearConstant(NamedTuple):
    """A dimension that does not move enough to be scaled; `value` is what un-normalisation returns."""

    index: int
    name: str
    value: float


class NormalizationError(ValueError):
    """A value that cannot be normalised, or settings that contradict each other."""


def _negligible(spread: np.ndarray, magnitude: np.ndarray) -> np.ndarray:
    return (spread <= RELATIVE_SPREAD * magnitude) | (spread <= ABSOLUTE_SPREAD)


class Normalizer:
    """Normalises one vector feature.

    Args:
      statistics: of the feature; [n], or [t, n] for chunks with statistics per step.
      mode: which statistics; `identity` passes values through.
      convention: whose formula (see the module's table).
      mask: [n] bool, false where a dimension passes through (molmoact2: such values must lie in [-1, 1]).
      clip: groot only: false lets normalised inputs leave [-1, 1], which it does for the groups of a state that it
        normalises by mean and std. Its inverse always clips.

    Attributes:
      near_constant: the dimensions that hardly move, for the start-up report.
    """

    def __init__(
        self,
        statistics: FeatureStatistics,
        mode: Mode,
        convention: Convention,
        *,
        mask: np.ndarray | None = None,
        clip: bool = True,
    ):
        if mode not in ("quantiles", "min_max", "mean_std", "identity"):
            raise NormalizationError(
                f"{statistics.feature}: mode {mode!r}, expected quantiles, min_max, mean_std or identity"
            )
        if convention not in ("lerobot", "openpi", "groot", "molmoact2"):
            raise NormalizationError(
                f"{statistics.feature}: convention {convention!r}, expected lerobot, openpi, groot or molmoact2"
            )
        if convention == "molmoact2" and mode == "mean_std":
            raise NormalizationError(
                f"{statistics.feature}: molmoact2 has no mean_std mode; use quantiles, min_max or identity"
            )
        self.statistics, self.mode, self.convention = statistics, mode, convention
        self.feature, self.size, self.space = statistics.feature, statistics.size, statistics.space
        self.mask = np.ones(self.size, bool) if mask is None else np.array(mask, bool)
        if self.mask.shape != (self.size,):
            raise NormalizationError(f"{self.feature}: mask of shape {self.mask.shape} for {self.size} dimensions")
        self._clips_output = convention in ("groot", "molmoact2")
        self._clips_input = self._clips_output and (clip or convention == "molmoact2")
        self.near_constant: list[NearConstant] = []
        if mode != "identity":
            self._prepare()

    def _prepare(self) -> None:
        """Shift, scale and the near-constant rule, in the type in which upstream computes."""
        s, wide = self.statistics, np.float64 if self.convention == "openpi" else np.float32
        if self.mode == "mean_std":
            low, scale = s.require("mean"), s.require("std")
            magnitude, spread, constant = np.abs(low), GAUSSIAN_SPREAD * scale, low
            self._low, self._range = low.astype(wide), scale.astype(wide)
            self._divisor = self._range + wide(1e-6 if self.convention == "openpi" else 1e-8)
            # lerobot multiplies back by the bare std, openpi by what it divided by
            self._back = self._divisor if self.convention == "openpi" else self._range
            fixed = 0.0
        else:
            low, high = (s.require(f) for f in (("q01", "q99") if self.mode == "quantiles" else ("min", "max")))
            magnitude, spread = np.maximum(np.abs(low), np.abs(high)), high - low
            constant = low + spread / 2
            self._low, self._range = low.astype(wide), high.astype(wide) - low.astype(wide)
            if self.convention == "openpi":
                self._divisor = self._range + 1e-6
            else:
                self._divisor = np.where(self._range == 0, wide(1e-8), self._range)
            self._back = self._range if self.convention == "groot" else self._divisor
            fixed = 0.0 if self.convention == "groot" else -1.0
        still = _negligible(spread, magnitude)
        self._constant = constant.astype(np.float32)
        self._fixed = np.float32(fixed)
        # the clip alone bounds molmoact2, whose upstream formula stays
        self._still = still & self.mask & (self.convention != "molmoact2")
        every_step = (still if still.ndim == 1 else still.all(0)) & self.mask
        first = self._constant if self._constant.ndim == 1 else self._constant[0]
        self.near_constant = [NearConstant(int(i), s.names[i], float(first[i])) for i in np.flatnonzero(every_step)]

    def report(self) -> list[str]:
        """A line for each near-constant dimension: the constant it is taken for, and what is lost by that."""
        lines = []
        for index, name, value in self.near_constant:
            line = f"{self.feature}[{index}] ({name}) hardly moves: taken as the constant {value:.6g}"
            s = self.statistics
            if self.mode == "quantiles" and s.min is not None and s.max is not None:
                low, high = (np.atleast_2d(v)[:, index] for v in (s.min, s.max))
                if not _negligible(high - low, np.maximum(np.abs(low), np.abs(high))).all():
                    line += (
                        f". In fewer than 2 % of the frames it moves, from {low.min():.6g} to {high.max():.6g}: "
                        "to learn that, normalise by min_max"
                    )
            lines.append(line)
        return lines

    def _check(self, x: np.ndarray, what: str) -> np.ndarray:
        x = np.asarray(x)
        if x.dtype != np.float32:
            raise NormalizationError(f"{self.feature}: {what} has type {x.dtype}, expected float32")
        if x.ndim < 1 or x.shape[-1] != self.size:
            raise NormalizationError(
                f"{self.feature}: {what} has shape {x.shape}, the statistics have {self.size} dimensions"
            )
        steps = self.statistics.steps
        if steps is not None and self.mode != "identity" and (x.ndim < 2 or x.shape[-2] > steps):
            raise NormalizationError(
                f"{self.feature}: {what} has shape {x.shape}, the statistics are per step for at most {steps} steps"
            )
        if not np.isfinite(x).all():
            where = tuple(np.argwhere(~np.isfinite(x))[0].tolist())
            raise NormalizationError(
                f"{self.feature}: {what}{list(where)} ({self.statistics.names[where[-1]]}) is {x[where]}, "
                "expected a finite number"
            )
        return x

    def _rows(self, array: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Statistics per step, cut to a chunk that is shorter than they are."""
        return array[: x.shape[-2]] if array.ndim == 2 else array

    def normalise(self, x: np.ndarray) -> np.ndarray:
        """float32 [..., n] ([..., t, n] where the statistics are per step) in robot units -> normalised float32."""
        x = self._check(x, "input")
        if self.mode == "identity":
            return x
        low, divisor = self._rows(self._low, x), self._rows(self._divisor, x)
        with np.errstate(over="ignore"):  # a near-constant dimension may overflow before it is replaced
            if self.mode == "mean_std":
                y = (x - low) / divisor
            elif self.convention == "openpi":
                y = (x - low) / divisor * 2.0 - 1.0
            else:
                y = np.float32(2) * (x - low) / divisor - np.float32(1)
            y = y.astype(np.float32)
        y = np.where(self._rows(self._still, x), self._fixed, y)
        if self._clips_input:
            y = np.clip(y, np.float32(-1), np.float32(1))
        return y if self.mask.all() else np.where(self.mask, y, self._pass_through(x))

    def unnormalise(self, y: np.ndarray) -> np.ndarray:
        """Inverse of `normalise`: float32 [..., n] model output -> float32 in robot units."""
        y = self._check(y, "model output")
        if self.mode == "identity":
            return y
        if self._clips_output:
            y = np.clip(y, np.float32(-1), np.float32(1))
        low, back = self._rows(self._low, y), self._rows(self._back, y)
        if self.mode == "mean_std":
            x = y * back + low
        elif self.convention == "openpi":
            x = (y + 1.0) / 2.0 * back + low
        elif self.convention == "groot":
            x = (y + np.float32(1)) * np.float32(0.5) * back + low
        else:
            x = (y + np.float32(1)) * back / np.float32(2) + low
        x = np.where(self._rows(self._still, y), self._rows(self._constant, y), x.astype(np.float32))
        return x if self.mask.all() else np.where(self.mask, x, y)

    def _pass_through(self, x: np.ndarray) -> np.ndarray:
        outside = ~self.mask & (np.abs(x) > 1)
        if self.convention == "molmoact2" and outside.any():
            where = tuple(np.argwhere(outside)[0].tolist())
            raise NormalizationError(
                f"{self.feature}: dimension {where[-1]} ({self.statistics.names[where[-1]]}) is not normalised and "
                f"must lie in [-1, 1], found {x[where]}. Normalise it (normalize_gripper=true) or rescale the dataset"
            )
        return x
