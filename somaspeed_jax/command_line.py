"""The command line of the trainer: a configuration file, overrides, a working directory. No jax is imported here."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags
from ml_collections.config_flags import config_flags

from somaspeed_jax.config import Config, ConfigError, field_names, resolve, unknown_field


@dataclasses.dataclass(frozen=True)
class Arguments:
    """What the command line says: the checked configuration, and where the run lives."""

    config: Config
    workdir: Path


def parse(argv: Sequence[str]) -> Arguments:
    """Arguments without the program's name -> configuration and workdir.

    Raises ConfigError for an unknown field, a value of the wrong type, a contradiction or a missing file.
    """
    unknown = [unknown_field(name) for name in _overridden(argv) if name not in field_names()]
    if unknown:
        raise ConfigError("the command line cannot be used:\n  " + "\n  ".join(unknown))
    values, line = flags.FlagValues(), ["somaspeed_jax", *argv]
    config_flags.DEFINE_config_file(
        "config", None, "configs/<model>.py, or configs/<model>.py:<variant>", flag_values=values, sys_argv=line
    )
    flags.DEFINE_string("workdir", "", "where the run lives (default: runs/<model>-<variant>)", flag_values=values)
    _find_configs(_values_of("config", argv))
    try:
        rest = values(line)[1:]
    except ConfigError:
        raise
    except (flags.Error, ValueError, TypeError, AttributeError, KeyError, OSError) as error:
        raise ConfigError(f"the command line cannot be used: {error}") from error
    if rest:
        raise ConfigError(
            f"the command line cannot be used: {' '.join(rest)!r} is not an option; options start with --"
        )
    if values["config"].value is None:
        raise ConfigError("--config is missing; give a file such as --config configs/pi05.py:demo")
    workdir = values["workdir"].value or Path("runs") / _run_name(_values_of("config", argv)[-1])
    return Arguments(resolve(values["config"].value), Path(workdir))


def _overridden(argv: Sequence[str]) -> list[str]:
    """Dotted names of the fields that `--config.name[=value]` sets."""
    return [a.split("=", 1)[0].lstrip("-")[len("config.") :] for a in argv if a.lstrip("-").startswith("config.")]


def _values_of(option: str, argv: Sequence[str]) -> list[str]:
    """Values given to `--option value` or `--option=value`."""
    found = [a.split("=", 1)[1] for a in argv if a.startswith(f"--{option}=")]
    return found + [argv[i + 1] for i, a in enumerate(argv[:-1]) if a == f"--{option}"]


def _find_configs(files: list[str]) -> None:
    """Lets configuration files import each other (`from configs.base import ...`) from any working directory."""
    for file in files:
        root = Path(file.split(":")[0]).resolve().parent.parent
        if (root / "configs" / "base.py").is_file() and str(root) not in sys.path:
            sys.path.insert(0, str(root))


def _run_name(config: str) -> str:
    """configs/pi05.py:demo -> pi05-demo."""
    file, _, variant = config.partition(":")
    return Path(file).stem + (f"-{variant}" if variant else "")
