"""Checkpoints: what was trained, the optimiser, the average, and what the frozen rest was. Whole or absent.

`<workdir>/checkpoints/<step>/` holds `state` (orbax arrays), `config` and `frozen` (JSON). orbax writes under a
temporary name, renames when everything is on disk, and removes an old checkpoint only after the new one is whole; a
half-written folder is never offered.
"""

import json
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from somaspeed_jax.config import Config, ConfigError, field_names, from_json, get, to_json
from somaspeed_jax.state import TrainState

# Fields whose change makes the saved state or its data order meaningless.
BINDING = (
    "seed",
    "model.name",
    "model.size",
    "model.horizon",
    "tune.preset",
    "tune.trainable",
    "data.path",
    "data.mixture",
    "data.episodes",
    "data.holdout",
    "data.tail",
    "data.relative_actions",
    "batch.global_batch",
    "groot.embodiment",
)


class CheckpointError(ValueError):
    """A checkpoint cannot be written, read or continued from."""


def _tree(state: TrainState, include_frozen: bool) -> dict[str, Any]:
    tree = {
        "step": state.step,
        "healthy": state.healthy,
        "trainable": state.trainable,
        "opt_state": state.opt_state,
        "ema": state.ema,
    }
    return {**tree, "frozen": state.frozen} if include_frozen else tree


class Checkpoints:
    """The checkpoints of one run. Use as a context manager: leaving waits for the last save."""

    def __init__(self, workdir: Path, keep: int):
        self.directory = workdir / "checkpoints"
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True, enable_async_checkpointing=True)
        self._manager = ocp.CheckpointManager(self.directory.absolute(), options=options)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind, error, trace) -> None:
        try:
            self.wait()
        finally:
            self._manager.close()

    @property
    def latest(self) -> int | None:
        """The newest complete step, or None."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, config: Config, frozen: dict[str, Any], include_frozen: bool) -> None:
        """Starts a save in the background. Reports a failure of the one before it."""
        self.check()
        try:
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(_tree(state, include_frozen)),
                    config=ocp.args.JsonSave(json.loads(to_json(config))),
                    frozen=ocp.args.JsonSave(frozen),
                ),
                force=True,
            )
        except Exception as error:
            raise self._failed(error) from error

    def check(self) -> None:
        """Raises CheckpointError if a background save has failed."""
        try:
            self._manager.check_for_errors()
        except Exception as error:
            raise self._failed(error) from error

    def wait(self) -> None:
        """Returns when every save is whole on disk."""
        try:
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
        except Exception as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"saving under {self.directory} failed: {error}. The last complete checkpoint is step {self.latest}; "
            "free space or choose another --workdir, then run the same command again to resume from it"
        )

    def config(self, step: int) -> Config:
        """The configuration that a checkpoint was written with."""
        return from_json(json.dumps(self._json(step, "config")))

    def frozen(self, step: int) -> dict[str, Any]:
        """What the frozen parameters were: source and fingerprint."""
        return self._json(step, "frozen")

    def _json(self, step: int, item: str) -> Any:
        restored = self._manager.restore(step, args=ocp.args.Composite(**{item: ocp.args.JsonRestore()}))
        return restored[item]

    def restore(self, step: int, like: TrainState, include_frozen: bool) -> TrainState:
        """The state of a step, on the shardings of `like` (abstract for all but `frozen`, which holds arrays unless
        the checkpoint includes them)."""
        tree = self._manager.restore(
            step, args=ocp.args.Composite(state=ocp.args.StandardRestore(_tree(like, include_frozen)))
        )["state"]
        frozen = tree["frozen"] if include_frozen else like.frozen
        return TrainState(tree["step"], tree["trainable"], frozen, tree["opt_state"], tree["ema"], tree["healthy"])


def differences(old: Config, new: Config) -> list[tuple[str, Any, Any]]:
    """Fields that differ, with both values."""
    return [(name, get(old, name), get(new, name)) for name in field_names() if get(old, name) != get(new, name)]


def check_resume(old: Config, new: Config) -> list[str]:
    """Lines to print about what changed since the checkpoint. Raises ConfigError for binding changes not allowed by
    `checkpoint.allow_changes`."""
    changed = differences(old, new)
    refused = [c for c in changed if c[0] in BINDING and c[0] not in new.checkpoint.allow_changes]
    if refused:
        listed = "\n  ".join(f"config.{name}: {was!r} -> {now!r}" for name, was, now in refused)
        raise ConfigError(
            f"the run in this workdir was made with another configuration:\n  {listed}\n"
            "Its state means nothing under these values. Use another --workdir, set them back, or name them in "
            f"--config.checkpoint.allow_changes={tuple(name for name, _, _ in refused)}"
        )
    return [f"config.{name}: {was!r} -> {now!r}" for name, was, now in changed]
