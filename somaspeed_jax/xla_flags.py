"""XLA's flags for GPUs, by name, in one place: set before jax starts, printed, overridable; and the compilation cache.

XLA reads its flags once, when the first backend starts, and aborts the process at a flag that it does not know. So
names are checked here, `apply` refuses to come too late, and a flag that the user has put into XLA_FLAGS is left alone.
"""

import dataclasses
import difflib
import importlib.util
import os
import re
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class Option:
    """One knob.

    variable: the XLA flag, or the environment variable where `environment` is true.
    value: what we set; None leaves XLA's own default, so that it is set only by an override.
    why: what it does and why this value.
    """

    variable: str
    value: str | None
    why: str
    environment: bool = False


OPTIONS: dict[str, Option] = {
    "latency_hiding": Option(
        "xla_gpu_enable_latency_hiding_scheduler", "true", "order the program so that collectives overlap products"
    ),
    "pipelined_all_gather": Option(
        "xla_gpu_enable_pipelined_all_gather",
        "true",
        "gather the next layer's weights while this one computes; costs one more gathered layer",
    ),
    "pipelined_reduce_scatter": Option(
        "xla_gpu_enable_pipelined_reduce_scatter", "true", "scatter a layer's gradient while the next one computes"
    ),
    "pipelined_all_reduce": Option(
        "xla_gpu_enable_pipelined_all_reduce", "true", "the same for the sum over replicas of a sharded gradient"
    ),
    "all_gather_combine_bytes": Option(
        "xla_gpu_all_gather_combine_threshold_bytes", None, "gathers up to so many bytes are joined into one"
    ),
    "reduce_scatter_combine_bytes": Option(
        "xla_gpu_reduce_scatter_combine_threshold_bytes", None, "scatters up to so many bytes are joined into one"
    ),
    "all_reduce_combine_bytes": Option(
        "xla_gpu_all_reduce_combine_threshold_bytes", None, "sums up to so many bytes are joined into one"
    ),
    "command_buffer": Option(
        "xla_gpu_enable_command_buffer",
        None,
        "kinds of kernels recorded into CUDA graphs, such as FUSION,CUBLASLT,CUSTOM_CALL; empty: none",
    ),
    "triton_gemm": Option(
        "xla_gpu_enable_triton_gemm",
        "false",
        "products by cuBLASLt: what the plan compiles is what runs, and no minutes of autotuning",
    ),
    "autotune_level": Option("xla_gpu_autotune_level", None, "how hard to search for library algorithms, 0 to 5"),
    "memory_fraction": Option(
        "XLA_PYTHON_CLIENT_MEM_FRACTION",
        "0.92",
        "share of a GPU's memory taken at the start; jax's own 0.75 leaves a quarter unused",
        environment=True,
    ),
}


def expects_gpu() -> bool:
    """Whether jax will look for a GPU: a CUDA plugin is installed and JAX_PLATFORMS does not exclude it."""
    platforms = [p for p in os.environ.get("JAX_PLATFORMS", "").lower().split(",") if p]
    if platforms and not {"cuda", "gpu"} & set(platforms):
        return False
    return any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))


def apply(overrides: Mapping[str, str] | None = None) -> dict[str, str]:
    """Sets the GPU options in os.environ and returns what is in force: name -> value.

    overrides: option name -> value, before ours. XLA_FLAGS and environment variables that the user has set come before
    both, unless an override names the same option: then the two contradict each other and are refused. Where jax will
    not look for a GPU nothing is set and {} is returned.
    Raises ValueError for an unknown option or a contradiction, RuntimeError when jax has started and a change would
    have no effect.
    """
    overrides = dict(overrides or {})
    for name in overrides:
        if name not in OPTIONS:
            close = difflib.get_close_matches(name, OPTIONS, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else "."
            raise ValueError(f"unknown XLA option {name!r}{hint} Known: {', '.join(OPTIONS)}; others go into XLA_FLAGS")
    if not expects_gpu():
        return {}
    flags = os.environ.get("XLA_FLAGS", "").split()
    in_force: dict[str, str] = {}
    changes: dict[str, str] = {}
    for name, option in OPTIONS.items():
        present = _present(option, flags)
        wanted = overrides.get(name, option.value)
        if present is not None:
            if name in overrides and present != wanted:
                where = "the environment" if option.environment else "XLA_FLAGS"
                raise ValueError(f"{option.variable} is {present!r} in {where} but {wanted!r} by override: drop one")
            in_force[name] = present
        elif wanted is not None:
            in_force[name] = wanted
            if option.environment:
                changes[option.variable] = wanted
            else:
                flags.append(f"--{option.variable}={wanted}")
                changes["XLA_FLAGS"] = " ".join(flags)
    if changes and backend_started():
        raise RuntimeError(
            "jax has already started a backend, so XLA flags would have no effect; call xla_flags.apply before the "
            "first use of jax.devices(), jax.jit or an array"
        )
    os.environ.update(changes)
    return in_force


def describe(in_force: Mapping[str, str]) -> str:
    """One line an option: value, what it does, and the flag itself."""
    width = max((len(name) for name in OPTIONS), default=0)
    lines = []
    for name, option in OPTIONS.items():
        value = in_force.get(name, "XLA's default")
        lines.append(f"{name:<{width}}  {value:<14} {option.why} ({option.variable})")
    return "\n".join(lines)


def backend_started() -> bool:
    """Whether jax has started a backend in this process."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bridge is not None and bridge.backends_are_initialized()


def enable_compilation_cache(folder: str | Path | None = None) -> Path | None:
    """Keeps compiled programs on disk, so that a second start skips the compile. Returns the folder.

    folder: default JAX_COMPILATION_CACHE_DIR, else somaspeed_jax/xla under XDG_CACHE_HOME (~/.cache). Off, with None,
    where JAX_ENABLE_COMPILATION_CACHE is false, and with a warning where the folder cannot be written.
    """
    import jax

    settings: Any = jax.config

    if not settings.jax_enable_compilation_cache:
        return None
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    path = Path(folder or settings.jax_compilation_cache_dir or base / "somaspeed_jax" / "xla").expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
        writable = os.access(path, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        warnings.warn(
            f"{path} cannot be written: no compilation cache, so every start compiles anew (a minute or more at full "
            "size); set JAX_COMPILATION_CACHE_DIR to a folder that can",
            stacklevel=2,
        )
        return None
    settings.update("jax_compilation_cache_dir", str(path))
    return path


def _present(option: Option, flags: list[str]) -> str | None:
    """The user's own value of an option; the last one counts, and a bare flag means true."""
    if option.environment:
        return os.environ.get(option.variable)
    found = [re.fullmatch(rf"--{option.variable}(?:=(.*))?", flag) for flag in flags]
    values = [match[1] if match[1] is not None else "true" for match in found if match]
    return values[-1] if values else None
