"""Closed-loop trials in the demo tabletop: how often does a policy bring the tip to the block that the prompt names?"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from somaspeed_jax.data import tabletop

Act = Callable[[list[dict]], np.ndarray]
"""Observations (see `tabletop.observations`), one an environment -> position targets float [n, t, 2] in metres."""


@dataclasses.dataclass(frozen=True)
class Result:
    """`success` is the share of `n` trials that ended on the named block, `interval` its 95 % Wilson interval;
    `distance` is the mean distance from the named block at the end, metres; `successes` bool, one a trial."""

    success: float
    interval: tuple[float, float]
    n: int
    distance: float
    successes: tuple[bool, ...]

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.success:.1%} of {self.n} (95 % interval {low:.1%} to {high:.1%})"


def evaluate_tabletop(
    act: Act,
    *,
    starts: int = 200,
    seed: int = 1_000_003,
    execute: int = 5,
    shuffle_prompts: bool = False,
    blank_images: bool = False,
    watch: Callable[[tabletop.Scenes], None] | None = None,
) -> Result:
    """Runs `act` from `starts` random scenes at once, `tabletop.MAX_STEPS` steps each.

    The first `execute` steps of each chunk are carried out, then `act` is asked again. A trial succeeds when the tip
    lies on the named block during the last `tabletop.HOLD` steps, so passing over it does not count.

    `shuffle_prompts` gives every environment the prompt of another one and `blank_images` black pictures: a policy
    that reads both must then fall to chance (one in `tabletop.BLOCKS` and about 2 % here). `seed` is far from the
    seeds that demonstrations are made with. `watch` is shown the scenes after each step.

    Raises ValueError when the actions have another shape than [starts, t >= execute, 2] or are not finite.
    """
    rng = np.random.default_rng(seed)
    scenes = tabletop.make_scenes(starts, rng)
    prompts: Sequence[str] = scenes.prompts()
    if shuffle_prompts:
        prompts = [prompts[i] for i in _derangement(starts, rng)]
    held = np.zeros(starts, int)
    for start in range(0, tabletop.MAX_STEPS, execute):
        observations = tabletop.observations(scenes, prompts)
        if blank_images:
            for o in observations:
                o["images"] = {camera: np.zeros_like(image) for camera, image in o["images"].items()}
        chunk = _checked(act(observations), starts, execute)
        for t in range(min(execute, tabletop.MAX_STEPS - start)):
            scenes.step(chunk[:, t])
            held = np.where(scenes.reached(), held + 1, 0)
            if watch is not None:
                watch(scenes)
    successes = held >= tabletop.HOLD
    distance = np.linalg.norm(scenes.tip - scenes.goals(), axis=-1)
    share = float(successes.mean())
    return Result(
        success=share,
        interval=wilson(int(successes.sum()), starts),
        n=starts,
        distance=float(distance.mean()),
        successes=tuple(bool(s) for s in successes),
    )


def wilson(successes: int, n: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's score interval of a binomial share (Wilson 1927); z = 1.96 gives 95 %. Raises ValueError for n < 1."""
    if not 0 <= successes <= n or n < 1:
        raise ValueError(f"wilson: {successes} successes of {n} trials; expected 0 <= successes <= n and n >= 1")
    p = successes / n
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, middle - half), min(1.0, middle + half)


def _checked(actions: np.ndarray, n: int, execute: int) -> np.ndarray:
    actions = np.asarray(actions)
    if actions.ndim != 3 or actions.shape[0] != n or actions.shape[1] < execute or actions.shape[2] != 2:
        raise ValueError(
            f"actions: shape {actions.shape}, expected [{n}, t, 2] with t >= {execute} (position targets in metres); "
            "lower `execute` or give the policy a longer horizon"
        )
    if not np.isfinite(actions).all():
        raise ValueError(f"actions: {int((~np.isfinite(actions)).sum())} values are not finite")
    return actions


def _derangement(n: int, rng: np.random.Generator) -> np.ndarray:
    """A random permutation of n >= 2 that leaves nothing in place: a random cycle."""
    order = rng.permutation(n)
    result = np.empty(n, int)
    result[order] = np.roll(order, 1)
    return result
