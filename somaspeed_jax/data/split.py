"""Which episodes are trained on and which are held out."""

import hashlib
from collections.abc import Iterable


def split_episodes(episodes: int | Iterable[int], holdout: float, seed: int = 0) -> tuple[list[int], list[int]]:
    """(training episodes, held-out episodes), each sorted; whole episodes, so no chunk reaches from one to the other.

    `episodes` is a number n (0 to n - 1) or episode numbers; `holdout` is the share held out: 0 for none, otherwise at
    least one episode and never all. An episode's rank is a digest of (seed, episode), so that the choice is the same
    on every machine and version. Raises ValueError for a share outside [0, 1), repeated episodes, or too few.
    """
    numbers = list(range(episodes)) if isinstance(episodes, int) else [int(episode) for episode in episodes]
    if len(set(numbers)) != len(numbers):
        raise ValueError(f"episodes to split are repeated: {sorted(n for n in set(numbers) if numbers.count(n) > 1)}")
    if not 0 <= holdout < 1:
        raise ValueError(f"data.holdout is {holdout}; expected a share from 0 up to, not including, 1")
    if holdout == 0:
        return sorted(numbers), []
    if len(numbers) < 2:
        raise ValueError(f"data.holdout is {holdout}, but there are {len(numbers)} episodes; two or more can be split")
    count = min(max(1, round(holdout * len(numbers))), len(numbers) - 1)
    ranked = sorted(numbers, key=lambda episode: hashlib.sha256(f"{seed}/{episode}".encode()).digest())
    return sorted(ranked[count:]), sorted(ranked[:count])
