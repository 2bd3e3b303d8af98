"""`python -m somaspeed_jax.main --config configs/<model>.py[:variant] [--config.a.b=value ...] [--workdir DIR]`

Reads the configuration, then trains. Exit status: 0 done; 2 the configuration or the data was refused; 3 the loss or
the gradient was not finite; 75 stopped by a signal after saving, start the same command again to go on.
"""

import sys


def main(argv: list[str] | None = None) -> int:
    # Imports live here: worker processes import this module again and need none of them.
    from somaspeed_jax import xla_flags
    from somaspeed_jax.command_line import parse

    try:
        arguments = parse(sys.argv[1:] if argv is None else argv)
        options = xla_flags.apply()  # before jax starts
    except ValueError as error:
        return _refused(error, 2)

    from somaspeed_jax.checkpoint import CheckpointError
    from somaspeed_jax.train import STOPPED, UnhealthyRun, train

    if options:
        print(xla_flags.describe(options))
    xla_flags.enable_compilation_cache()
    try:
        outcome = train(arguments.config, arguments.workdir)
    except UnhealthyRun as error:
        return _refused(error, 3)
    except (ValueError, CheckpointError) as error:
        return _refused(error, 2)
    return STOPPED if outcome.stopped else 0


def _refused(error: Exception, status: int) -> int:
    print(f"error: {error}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
