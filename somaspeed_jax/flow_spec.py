"""What differs between the models' flow matching, as data."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class FlowSpec:
    """Flow matching of one model.

    noise_at: the flow time, 0 or 1, at which x is pure noise; the other end is data. The regression target is
      x(1) - x(0): noise - action for noise_at = 1 (π0.5), action - noise for noise_at = 0 (GR00T, MolmoAct2).
    beta, time_scale, time_offset, reflect: t = time_offset + time_scale * s with s ~ Beta(*beta), or
      t = time_offset + time_scale * (1 - s) when `reflect`. One of the two parameters of beta must be 1, which makes
      the inverse distribution function exact.
    buckets: the network sees floor(buckets * t) instead of t (GR00T: 1000), or None.
    steps: Euler steps at inference, on the uniform grid that starts at the noise end.
    zero_padding: noise is zero on padded action dimensions, and x again after every Euler step (MolmoAct2).
    reduction: `elements`: sum over counted elements / their number, over the global batch (π0.5, GR00T);
      `rows`: mean over counted dimensions of each step, then over all steps, flow times and samples, uncounted steps
      included as zeros (MolmoAct2).
    epsilon: added to the denominator (GR00T: 1e-6).
    """

    noise_at: Literal[0, 1]
    beta: tuple[float, float]
    time_scale: float = 1.0
    time_offset: float = 0.0
    reflect: bool = False
    buckets: int | None = None
    steps: int = 10
    zero_padding: bool = False
    reduction: Literal["elements", "rows"] = "elements"
    epsilon: float = 0.0

    def __post_init__(self):
        if 1.0 not in self.beta:
            raise ValueError(f"FlowSpec.beta is {self.beta}: one of the two parameters must be 1")
