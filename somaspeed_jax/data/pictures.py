"""Which cameras of a dataset can be used, and where each episode's pictures are in the video files."""

import dataclasses
import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from somaspeed_jax.data.errors import DataError
from somaspeed_jax.data.layout import EpisodeMeta, Feature, Layout, check_file
from somaspeed_jax.data.rows import Place
from somaspeed_jax.data.video import VideoFile, VideoInfo, probe_video

RATE_TOLERANCE = 0.02  # relative; a header's rate is the number of pictures over a rounded duration


@dataclasses.dataclass(frozen=True)
class Span:
    """Rows of one episode seen by one camera: row t is picture `first + t` of `path`.

    `from_timestamp` is where the metadata says that picture `start` of the file is, in seconds.
    """

    path: Path
    first: int
    start: int
    from_timestamp: float


def choose_cameras(
    layout: Layout, asked: Sequence[str] | None, stored: set[str], episodes: list[int], notes: list[str]
) -> tuple[str, ...]:
    """The cameras to read: those asked for, or (None) all that are declared and have pictures.

    Raises DataError if a camera asked for is not in the dataset or has no pictures, listing both sets of names, and if
    none of the declared cameras has pictures. A declared camera that is left out is noted.
    """
    problems = {name: _why_unusable(layout, name, stored, episodes) for name in layout.cameras}
    usable = [name for name, problem in problems.items() if problem is None]
    if asked is None:
        for name, problem in problems.items():
            if problem:
                notes.append(f"camera {name!r} is left out: {problem}")
        if problems and not usable:
            raise DataError(
                f"{layout.root}: no declared camera can be used: "
                + " ".join(f"{n!r}: {p}" for n, p in problems.items())
            )
        return tuple(usable)
    if len(set(asked)) != len(asked):
        raise DataError(f"data.cameras names a camera twice: {list(asked)}.")
    for name in asked:
        if name not in problems or problems[name]:
            why = f"cannot be used: {problems[name]}" if name in problems else "is not a camera of this dataset."
            raise DataError(
                f"{layout.root}: data.cameras asks for {list(asked)}; {name!r} {why} The dataset's cameras are "
                f"{usable}. Give their full names, in the model's order, in data.cameras."
            )
    return tuple(asked)


def _why_unusable(layout: Layout, name: str, stored: set[str], episodes: list[int]) -> str | None:
    feature = layout.features[name]
    if feature.depth:
        return "it is a depth map, not RGB."
    if feature.dtype == "image":
        return None if name in stored else "it is declared, but the parquet files have no such column."
    spans = [span for e in episodes if (span := layout.episodes[e].videos.get(name))]
    if not spans:
        return "it is declared, but meta/episodes has no videos/ columns for it."
    if not any((layout.root / span.path).exists() or (layout.root / span.path).is_symlink() for span in spans):
        return f"it is declared, but none of its files exists (expected {layout.root / spans[0].path})."
    return None


def present(layout: Layout, meta: EpisodeMeta) -> bool:
    """Whether anything of an episode was fetched. Where only a part was, opening it fails with that file's name."""
    paths = [meta.data_path] if layout.shared_files else [meta.data_path, *(span.path for span in meta.videos.values())]
    return any((layout.root / path).exists() or (layout.root / path).is_symlink() for path in paths)


def place_pictures(
    layout: Layout,
    cameras: Sequence[str],
    places: list[Place],
    first_times: Sequence[float],
    fps: float,
    trust_timestamps: bool,
    notes: list[str],
) -> dict[tuple[str, int], Span]:
    """{(camera, episode): Span} for the cameras stored as video, after checking every file's header.

    `first_times` holds each episode's first timestamp in seconds. Raises DataError for a missing or broken file, a
    codec that does not decode, a file whose rate is not `fps`, an episode that reaches past the end of its file, and
    episodes that overlap in a shared file. `trust_timestamps` lets a file of one episode have another rate, if it has
    exactly one picture a row.

    In a file of its own, an episode's row t is picture t. Where timestamps start at k/fps and the file has the pictures
    for it, the first k of them lie before the first row, and row t is picture t + k. Both are noted.
    """
    wanted = [(camera, place) for camera in cameras for place in places if layout.features[camera].dtype == "video"]
    for camera, place in wanted:
        if camera not in layout.episodes[place.episode].videos:
            raise DataError(
                f"{layout.root}: meta/episodes says no video file of {camera!r} for episode {place.episode}."
            )
    files = {layout.root / layout.episodes[place.episode].videos[camera].path: camera for camera, place in wanted}
    for path in files:
        check_file(path)
    with ThreadPoolExecutor(4) as pool:
        headers = dict(zip(files, pool.map(probe_video, files), strict=True))
    for path in {camera: path for path, camera in files.items()}.values():
        VideoFile(path).frame(0)

    found: list[str] = []
    for path, camera in files.items():
        _check_header(path, layout.features[camera], headers[path], found)
    spans: dict[tuple[str, int], Span] = {}
    odd: dict[tuple[str, str], list[int]] = {}
    times = {place.episode: time for place, time in zip(places, first_times, strict=True)}
    for camera, place in wanted:
        meta = layout.episodes[place.episode].videos[camera]
        path = layout.root / meta.path
        header = headers[path]
        own_file = not layout.shared_files
        _check_rate(path, camera, header, fps, own_file and trust_timestamps and header.frames == place.length)
        start = round(meta.from_timestamp * fps)
        before = round(times[place.episode] * fps)
        shift = before if own_file and header.frames >= before + place.length else 0
        if before:
            how = f"row t is picture t + {shift}" if shift else "row t is picture t"
            odd.setdefault((camera, f"timestamps start at {before}/fps, {how}"), []).append(place.episode)
        first = start + shift
        if first < 0 or first + place.length > header.frames:
            raise DataError(
                f"{path}: episode {place.episode}, camera {camera!r}: asks for {first / fps:.3f} s to "
                f"{(first + place.length) / fps:.3f} s (frames {first} to {first + place.length - 1}), but the file "
                f"has 0 s to {header.frames / fps:.3f} s ({header.frames} frames). Its start time in meta/episodes is "
                f"wrong, or the video is incomplete: convert or fetch the dataset again, or leave the episode out."
            )
        if own_file and header.frames > first + place.length:
            odd.setdefault((camera, "the video goes on after the last row"), []).append(place.episode)
        spans[camera, place.episode] = Span(path, first, start, meta.from_timestamp)
    _check_overlap(spans, {place.episode: place.length for place in places}, fps)
    notes.extend(dict.fromkeys(found))
    for (camera, what), episodes in odd.items():
        notes.append(f"camera {camera!r}: {what} (episodes: {len(episodes)}, the first is {episodes[0]}).")
    return spans


def _check_header(path: Path, feature: Feature, header: VideoInfo, notes: list[str]) -> None:
    """Compares a file's header with what info.json declares."""
    if header.pixel_format.startswith("gray1"):
        raise DataError(f"{path}: camera {feature.name!r} is stored as {header.pixel_format} (depth), not as RGB.")
    if feature.codec and feature.codec != header.codec:
        notes.append(f"camera {feature.name!r}: meta/info.json declares {feature.codec}, the files are {header.codec}.")
    if {header.height, header.width} - set(feature.shape):
        size = f"{header.height} x {header.width}"
        notes.append(f"camera {feature.name!r}: pictures are {size}, the declared shape is {list(feature.shape)}.")


def _check_rate(path: Path, camera: str, header: VideoInfo, fps: float, one_picture_a_row: bool) -> None:
    tolerance = RATE_TOLERANCE + 1 / header.frames
    if header.frames > 1 and abs(header.rate / fps - 1) > tolerance and not one_picture_a_row:
        raise DataError(
            f"{path}: camera {camera!r} is recorded at {header.rate:.4g} frames a second, but the rows are at {fps:g} "
            f"(meta/info.json, or the timestamps if they are trusted). Correct meta/info.json, or set "
            f"data.trust_timestamps=true if only the declared rate is wrong."
        )


def _check_overlap(spans: dict[tuple[str, int], Span], lengths: dict[int, int], fps: float) -> None:
    """Two episodes may share all their pictures, as relabelled copies do, but not some of them."""
    by_file: dict[Path, list[tuple[int, int]]] = {}
    for (_, episode), span in spans.items():
        by_file.setdefault(span.path, []).append((span.first, episode))
    for path, starts in by_file.items():
        starts.sort()
        for (first, episode), (next_first, following) in itertools.pairwise(starts):
            same = first == next_first and lengths[episode] == lengths[following]
            if next_first < first + lengths[episode] and not same:
                raise DataError(
                    f"{path}: episode {episode} has {first / fps:.3f} s to {(first + lengths[episode]) / fps:.3f} s, "
                    f"and episode {following} starts within it at {next_first / fps:.3f} s. A start time in "
                    f"meta/episodes is wrong: convert the dataset again, or leave one of the two out (data.episodes)."
                )
