"""`python -m somaspeed_jax.evaluate` on a run of one step: what it writes, and what it refuses."""

import dataclasses
import json

import av
import numpy as np
import pytest
from small_run import run, small_config

from somaspeed_jax.data.split import split_episodes
from somaspeed_jax.evaluate.__main__ import held_out, main
from somaspeed_jax.evaluate.demo import play


@pytest.fixture(scope="module")
def workdir(demo_dataset, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    config = small_config(demo_dataset, data=dict(holdout=0.2))
    run(dataclasses.replace(config, stop_after_seconds=1e-9), folder)
    return folder


def strict(path):
    def refuse(word):
        raise AssertionError(f"{path} holds {word}")

    return json.loads(path.read_text(), parse_constant=refuse)


@pytest.mark.slow
def test_open_loop_is_on_the_held_out_episodes(workdir, capsys):
    main([str(workdir), "--stride", "3", "--batch", "4"])
    report = strict(workdir / "evaluation" / "report.json")
    assert report["open_loop"]["episodes"] == split_episodes(12, 0.2, 0)[1]
    assert report["open_loop"]["dimensions"] == ["target_x", "target_y"]
    assert report["open_loop"]["errors"]["policy"]["mae_by_dimension"][0] > 0
    assert "closed_loop" not in report  # the dataset is a folder, not "demo"
    assert (workdir / "evaluation" / "error_by_step.png").is_file()
    assert "mean absolute error over" in capsys.readouterr().out


def test_chosen_episodes_are_opened_and_compared_with_their_own_mean(demo_dataset):
    config = small_config(demo_dataset, data=dict(path="elsewhere", holdout=0.2))
    dataset, mean = held_out(config, str(demo_dataset), (2, 5))
    assert dataset is not None
    assert [e.index for e in dataset.episodes] == [2, 5]
    np.testing.assert_array_equal(mean, dataset.numeric("action").mean(0))
    assert held_out(small_config(demo_dataset), "", ()) == (None, None)  # nothing was held out


@pytest.mark.slow
def test_the_demo_is_played_and_filmed(workdir, tmp_path):
    results = play(workdir, 4, tmp_path / "film.mp4")
    assert set(results) == {"trained", "untrained", "prompts shuffled", "pictures blanked"}
    assert all(r.n == 4 for r in results.values())
    with av.open(str(tmp_path / "film.mp4")) as film:
        assert len(list(film.decode(video=0))) == 25


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no checkpoints"):
        main([str(tmp_path)])
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--episodes", "one"])
