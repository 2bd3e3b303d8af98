"""What this machine has, what is missing, and how to get it: `python -m somaspeed_jax.doctor`.

Exit status 0 when a training run can start, 1 when something that it needs is missing.
"""

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from somaspeed_jax import xla_flags
from somaspeed_jax.scaling import devices as facts

PACKAGE = "somaspeed-jax"
NEEDED = (
    "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "ml_collections", "safetensors",
    "tokenizers", "sentencepiece", "huggingface_hub", "pyarrow", "av", "opencv-python-headless", "rich", "matplotlib",
    "tensorboardX",
)  # fmt: skip
# Package -> the extra that installs it, and what it is for.
OPTIONAL = {
    "wandb": ("wandb", "logging to Weights & Biases"),
    "nbclient": ("notebooks", "running the notebooks"),
}
CODECS = ("h264", "hevc", "av1")


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report. `missing` stops a run; `note` is worth knowing. `fix` is what to do about it."""

    topic: str
    status: Literal["ok", "note", "missing"]
    text: str
    fix: str = ""


def examine(in_force: dict[str, str]) -> list[Finding]:
    """Every finding, in the order of the report. Starts jax's backend; `in_force` is what xla_flags.apply returned."""
    sections: list[Callable[[], Iterator[Finding]]] = [
        versions, gpu_support, jax_devices, links, decoder, lambda: memory(in_force), shared_memory, compilation_cache,
        planning,
    ]  # fmt: skip
    return [finding for section in sections for finding in section()]


def versions() -> Iterator[Finding]:
    """Python and packages."""
    yield Finding("python", "ok", f"{sys.version.split()[0]} ({sys.executable})")
    found = {name: _version(name) for name in NEEDED}
    have = ", ".join(f"{name} {version}" for name, version in found.items() if version)
    yield Finding("packages", "ok", have)
    for name, version in found.items():
        if version is None:
            yield Finding("packages", "missing", f"{name} is not installed", f"pip install {PACKAGE}")
    for name, (extra, purpose) in OPTIONAL.items():
        if _version(name) is None:
            text = f"{name} is not installed: needed only for {purpose}"
            yield Finding("packages", "note", text, f"pip install '{PACKAGE}[{extra}]'")


def gpu_support() -> Iterator[Finding]:
    """The driver against jax's CUDA plugin: the usual reason for training on the CPU by accident."""
    cards = _cards()
    plugins = [f"jax-cuda{v}-plugin {version}" for v in (12, 13) if (version := _version(f"jax-cuda{v}-plugin"))]
    if not cards:
        yield Finding("driver", "note", "no NVIDIA driver answers (nvidia-smi): this machine trains on its CPU")
        return
    yield Finding("driver", "ok", f"{len(cards)} GPU(s): {'; '.join(cards)}")
    if plugins:
        yield Finding("cuda plugin", "ok", ", ".join(plugins))
    else:
        text = f"jax has no CUDA plugin, so it cannot see the {len(cards)} GPU(s) that the driver has"
        yield Finding("cuda plugin", "missing", text, f"pip install '{PACKAGE}[cuda12]' (or [cuda13])")
    versions = {name: _version(name) for name in ("jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin")}
    if len({v for v in versions.values() if v}) > 1:
        text = ", ".join(f"{name} {v}" for name, v in versions.items() if v) + " do not match"
        yield Finding("cuda plugin", "missing", text, f"pip install -U '{PACKAGE}[cuda12]'")


def jax_devices() -> Iterator[Finding]:
    """What jax sees, and the peak that MFU is measured against."""
    import jax

    try:
        found = jax.devices()
    except RuntimeError as error:
        yield Finding("devices", "missing", f"jax cannot start: {error}", "unset JAX_PLATFORMS, or see the lines above")
        return
    if found[0].platform == "cpu" and _cards():
        text = "jax runs on the CPU although the driver has GPUs"
        yield Finding("devices", "missing", text, f"unset JAX_PLATFORMS; pip install '{PACKAGE}[cuda12]'")
    kinds = sorted({device.device_kind for device in found})
    yield Finding("devices", "ok", f"{len(found)} x {', '.join(kinds)} ({found[0].platform})")
    for kind in kinds:
        known = facts.of_kind(kind)
        if known:
            text = f"{known.peak / 1e12:g} TFLOP/s bfloat16, {known.bandwidth / 1e12:g} TB/s, {known.link_name}"
            yield Finding("devices", "ok", f"{kind}: {text}")
        elif found[0].platform != "cpu":
            yield Finding("devices", "note", f"{kind} is not in the table of device facts: MFU will not be shown")


def links() -> Iterator[Finding]:
    """How the GPUs are joined."""
    matrix = _run("nvidia-smi", "topo", "-m")
    if matrix is None:
        return
    rows = [line for line in matrix.splitlines() if line.startswith("GPU")]
    yield Finding(
        "links", "ok", "NV: NVLink; PIX, PXB: one PCIe switch or several; SYS: across sockets\n" + "\n".join(rows)
    )
    if len(rows) > 1 and not any("NV" in row for row in rows):
        text = "the GPUs are joined by PCIe alone: keep frozen weights whole on each (config.mesh.frozen='replicate')"
        yield Finding("links", "note", text)


def decoder() -> Iterator[Finding]:
    """Whether frames come out of the codecs that LeRobot datasets use."""
    if importlib.util.find_spec("av") is None:
        return
    import av

    have = [codec for codec in CODECS if _decodes(codec)]
    library = ".".join(map(str, av.library_versions["libavcodec"]))
    yield Finding("decoder", "ok", f"av {av.__version__}, libavcodec {library}: {', '.join(have) or 'none'}")
    for codec in CODECS:
        if codec not in have:
            fix = "pip install -U av (the wheels from PyPI have it)"
            yield Finding("decoder", "missing", f"libavcodec here has no decoder for {codec}", fix)


def memory(in_force: dict[str, str]) -> Iterator[Finding]:
    """Memory of the devices, and how much of it jax takes."""
    import jax

    if jax.default_backend() == "cpu":
        yield Finding("memory", "ok", f"host: {_host_memory() / 2**30:.1f} GiB")
        return
    share = in_force.get("memory_fraction", "?")
    for device in jax.local_devices():
        stats = device.memory_stats() or {}
        limit, used = stats.get("bytes_limit", 0), stats.get("bytes_in_use", 0)
        text = f"{device}: {limit / 2**30:.1f} GiB for jax (memory_fraction {share}), {used / 2**30:.2f} GiB in use"
        yield Finding("memory", "ok", text)


def shared_memory() -> Iterator[Finding]:
    """Loader workers hand batches over in /dev/shm; a container's default of 64 MB ends in a bus error."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return
    size = shutil.disk_usage(folder).total
    text = f"/dev/shm has {size / 2**30:.1f} GiB"
    if size < 2**30:
        fix = "start the container with --shm-size=8g (or --ipc=host), or set config.data.workers=0"
        yield Finding("shared memory", "note", text + ": loader workers may run out of it", fix)
    else:
        yield Finding("shared memory", "ok", text)


def compilation_cache() -> Iterator[Finding]:
    """Where compiled programs are kept."""
    path = xla_flags.enable_compilation_cache()
    if path is None:
        yield Finding("compile cache", "note", "off", "set JAX_COMPILATION_CACHE_DIR to a folder that can be written")
    else:
        size = sum(f.stat().st_size for f in path.iterdir() if f.is_file())
        yield Finding("compile cache", "ok", f"{path} ({size / 1e6:.0f} MB)")


def planning() -> Iterator[Finding]:
    """Whether tools/plan.py can compile for a GPU that is not here."""
    if any(importlib.util.find_spec(f"jax_cuda{v}_plugin") for v in (12, 13)):
        yield Finding("plan", "ok", "tools/plan.py compiles for A40, A100, H100 and H200")
    else:
        text = "without the CUDA plugin tools/plan.py compiles for the CPU and estimates memory from above"
        yield Finding("plan", "note", text, f"pip install '{PACKAGE}[plan]'")


def report(findings: list[Finding], options: str) -> str:
    """The findings as text, then the GPU options."""
    mark = {"ok": " ok ", "note": "note", "missing": "MISS"}
    lines = []
    for finding in findings:
        head, *rest = finding.text.splitlines()
        lines.append(f"[{mark[finding.status]}] {finding.topic}: {head}")
        lines += [f"       {line}" for line in rest]
        if finding.fix:
            lines.append(f"       -> {finding.fix}")
    return "\n".join([*lines, "", options])


def main() -> int:
    argparse.ArgumentParser(prog="python -m somaspeed_jax.doctor", description=__doc__).parse_args()
    in_force = xla_flags.apply()
    findings = examine(in_force)
    options = "GPU options:\n" + xla_flags.describe(in_force)
    print(report(findings, options if in_force else "GPU options: none set, because jax will not look for a GPU here"))
    missing = [finding for finding in findings if finding.status == "missing"]
    print(f"\n{len(missing)} thing(s) missing." if missing else "\nNothing is missing.")
    return 1 if missing else 0


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cards() -> list[str]:
    """The GPUs that the driver has: name, driver version, memory."""
    listed = _run("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
    return listed.splitlines() if listed else []


def _run(*command: str) -> str | None:
    """Output of a program; None where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def _decodes(codec: str) -> bool:
    from av.codec import Codec
    from av.error import FFmpegError

    try:
        Codec(codec, "r")
    except (ValueError, FFmpegError):
        return False
    return True


def _host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


if __name__ == "__main__":
    sys.exit(main())
