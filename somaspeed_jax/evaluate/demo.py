"""The end of a demo run: how often the policy reaches the named block, and whether it reads words and pictures."""

from pathlib import Path

from somaspeed_jax.evaluate.closed_loop import Result, evaluate_tabletop
from somaspeed_jax.evaluate.film import Film
from somaspeed_jax.policy import load_policy, untrained_policy


def play(workdir: Path, starts: int, video: Path | None = None) -> dict[str, Result]:
    """Plays `starts` unseen starts with the trained policy, with the parameters it started from, with every prompt
    swapped for another start's, and with black pictures. `video`: where to film the trained policy."""
    trained = load_policy(workdir)
    untrained = untrained_policy(trained.config, workdir)
    film = None if video is None else Film(video)
    results = {
        "trained": evaluate_tabletop(trained.act_batch, starts=starts, watch=film),
        "untrained": evaluate_tabletop(untrained.act_batch, starts=starts),
        "prompts shuffled": evaluate_tabletop(trained.act_batch, starts=starts, shuffle_prompts=True),
        "pictures blanked": evaluate_tabletop(trained.act_batch, starts=starts, blank_images=True),
    }
    if film is not None:
        film.close()
    return results
