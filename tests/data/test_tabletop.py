"""The tabletop: scenes that can be solved, pictures that show them, motion that obeys its limits."""

import numpy as np
import pytest

from somaspeed_jax.data import tabletop


@pytest.fixture
def scenes():
    return tabletop.make_scenes(40, np.random.default_rng(0))


def test_scenes_are_solvable_and_not_solved(scenes):
    assert not scenes.reached().any()
    for blocks, colours in zip(scenes.blocks, scenes.colours, strict=True):
        assert len(set(colours)) == tabletop.BLOCKS
        apart = np.abs(blocks[:, None] - blocks[None]).max(-1)[np.triu_indices(tabletop.BLOCKS, 1)]
        assert apart.min() > 2 * tabletop.BLOCK_HALF  # no place is on two blocks
    assert np.abs(scenes.blocks - tabletop.CENTRE).max() + tabletop.BLOCK_HALF < tabletop.TABLE_HALF


def test_pictures_show_the_named_block_where_it_is(scenes):
    top = scenes.images()[tabletop.CAMERAS[0]]
    assert top.shape == (40, 48, 48, 3)
    assert top.dtype == np.uint8
    for i, (goal, prompt) in enumerate(zip(scenes.goals(), scenes.prompts(), strict=True)):
        colour = np.array(tabletop.COLOURS[next(c for c in tabletop.COLOUR_NAMES if c in prompt.split())])
        row, column = np.nonzero(np.abs(top[i].astype(int) - colour).max(-1) < 12)
        x = tabletop.CENTRE[0] + ((column.mean() + 0.5) / 48 * 2 - 1) * tabletop.TABLE_HALF
        y = tabletop.CENTRE[1] - ((row.mean() + 0.5) / 48 * 2 - 1) * tabletop.TABLE_HALF
        assert np.hypot(x - goal[0], y - goal[1]) < 0.0125  # a pixel; the tip may hide a corner of the block


def test_the_wrist_camera_moves_with_the_tip(scenes):
    wrist = scenes.images()[tabletop.CAMERAS[1]]
    assert (wrist[:, 23:25, 23:25] >= 240).all()  # the white tip is in the middle of every picture
    scenes.tip = scenes.goals()
    near = scenes.images()[tabletop.CAMERAS[1]]
    colours = np.array(list(tabletop.COLOURS.values()))[scenes.colours[np.arange(40), scenes.target]]
    np.testing.assert_array_equal(near[:, 24, 29], colours)  # 3.4 cm beside the tip: past its rim, still the block
    assert (near[:, 24, 34] != colours).any(-1).all()  # 6.6 cm: past the block


def test_motion_is_capped_and_stays_on_the_table(scenes):
    before = scenes.tip.copy()
    scenes.step(np.full((40, 2), 9.0))
    assert np.linalg.norm(scenes.tip - before, axis=-1).max() <= tabletop.STEP + 1e-6
    for _ in range(60):
        scenes.step(np.full((40, 2), 9.0))
    np.testing.assert_allclose(scenes.tip, np.broadcast_to(tabletop.CENTRE + tabletop.TABLE_HALF, (40, 2)), rtol=1e-6)


def test_a_chunk_is_the_expert_step_by_step(scenes):
    start = scenes.tip.copy()
    chunk = tabletop.expert_chunk(scenes, 40)
    np.testing.assert_array_equal(scenes.tip, start)  # planning moves nothing
    np.testing.assert_array_equal(chunk[:, 0], tabletop.expert(scenes))
    np.testing.assert_allclose(chunk[:, -1], scenes.goals(), atol=1e-6)


def test_observations_hold_what_a_policy_gets(scenes):
    observation = tabletop.observations(scenes, ["do this"] * 40)[7]
    assert set(observation) == {"images", "state", "task"}
    assert set(observation["images"]) == set(tabletop.CAMERAS)
    assert observation["state"].dtype == np.float32
    assert observation["task"] == "do this"
