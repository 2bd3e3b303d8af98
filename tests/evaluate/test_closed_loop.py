"""Closed-loop trials: the expert passes, chance and blindness do not, the interval is Wilson's."""

import numpy as np
import pytest

from somaspeed_jax.data import tabletop
from somaspeed_jax.evaluate.closed_loop import evaluate_tabletop, wilson

STARTS, SEED = 200, 11


def seeing_expert(observations):
    """Finds the named block in the top picture by its colour and goes there: needs prompt, pictures and state."""
    goals = []
    for o in observations:
        named = next(c for c in tabletop.COLOUR_NAMES if c in o["task"].split())
        off = np.abs(o["images"][tabletop.CAMERAS[0]].astype(int) - np.array(tabletop.COLOURS[named])).max(-1)
        row, column = np.nonzero(off < 20)
        if len(row) == 0:
            goals.append(o["state"])
            continue
        x, y = ((np.array([column.mean(), 47 - row.mean()]) + 0.5) / 48 * 2 - 1) * tabletop.TABLE_HALF
        goals.append(tabletop.CENTRE + np.array([x, y]))
    tip = np.stack([o["state"] for o in observations])
    return tip[:, None] + np.linspace(0.1, 1, 10)[:, None] * (np.array(goals) - tip)[:, None]


def stay(observations):
    return np.repeat(np.stack([o["state"] for o in observations])[:, None], 10, 1)


def test_a_policy_that_reads_prompt_and_pictures_succeeds_and_fails_without():
    assert evaluate_tabletop(seeing_expert, starts=STARTS, seed=SEED).success > 0.97
    assert evaluate_tabletop(seeing_expert, starts=STARTS, seed=SEED, shuffle_prompts=True).success <= 0.35
    assert evaluate_tabletop(seeing_expert, starts=STARTS, seed=SEED, blank_images=True).success <= 0.05


def test_the_scripted_expert_always_succeeds():
    scenes = tabletop.make_scenes(STARTS, np.random.default_rng(SEED))
    for _ in range(tabletop.MAX_STEPS):
        scenes.step(tabletop.expert(scenes))
    assert scenes.reached().all()


def test_policies_that_know_nothing_stay_below_fifteen_percent():
    rng = np.random.default_rng(0)
    centre = lambda o: np.broadcast_to(tabletop.CENTRE, (len(o), 10, 2))  # noqa: E731
    noise = lambda o: tabletop.CENTRE + 0.15 * rng.normal(size=(len(o), 10, 2))  # noqa: E731
    for act in (stay, centre, noise):
        assert evaluate_tabletop(act, starts=STARTS, seed=SEED).success <= 0.15


def test_going_to_any_block_is_chance():
    scenes = tabletop.make_scenes(STARTS, np.random.default_rng(SEED))
    some = scenes.blocks[np.arange(STARTS), np.random.default_rng(1).integers(0, tabletop.BLOCKS, STARTS)]
    low, high = evaluate_tabletop(lambda o: np.repeat(some[:, None], 10, 1), starts=STARTS, seed=SEED).interval
    assert low < 1 / tabletop.BLOCKS < high


def test_passing_over_the_block_is_no_success():
    scenes = tabletop.make_scenes(STARTS, np.random.default_rng(SEED))
    calls = []

    def to_the_goal_and_away(observations):
        calls.append(1)
        far = tabletop.CENTRE + np.sign(tabletop.CENTRE - scenes.goals()) * 0.29
        return np.repeat((scenes.goals() if len(calls) < tabletop.MAX_STEPS // 5 else far)[:, None], 5, 1)

    assert evaluate_tabletop(to_the_goal_and_away, starts=STARTS, seed=SEED).success < 0.05


def test_equal_seeds_give_equal_trials():
    first, second, third = (evaluate_tabletop(seeing_expert, starts=20, seed=s, execute=10) for s in (1, 1, 2))
    assert first == second
    assert first.distance != third.distance


@pytest.mark.parametrize(
    ("shape", "words"), [((4, 3, 2), "t >= 5"), ((4, 10, 3), r"\[4, t, 2\]"), ((4, 10), r"\[4, t, 2\]")]
)
def test_actions_of_another_shape_are_refused(shape, words):
    with pytest.raises(ValueError, match=words):
        evaluate_tabletop(lambda o: np.zeros(shape), starts=4)


def test_actions_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match="80 values are not finite"):
        evaluate_tabletop(lambda o: np.full((4, 10, 2), np.nan), starts=4)


def test_wilson_interval():
    """Against the published worked figures of Newcombe (1998), table I: 81 of 263 and 0 of 20."""
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)
    with pytest.raises(ValueError, match="5 successes of 4"):
        wilson(5, 4)
