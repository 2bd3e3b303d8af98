"""Frame k is frame k: clips that carry their own frame numbers, in every codec, read in any order."""

import multiprocessing
import pickle

import av
import numpy as np
import pytest
from recordings import SIDE, number_in, picture, write_video

from somaspeed_jax.data import video
from somaspeed_jax.data.errors import DataError
from somaspeed_jax.data.video import VideoFile, VideoPool, probe_video

FRAMES = 300
CLIPS = {
    "h264, a key frame every 2": {"codec": "libx264", "group": 2},
    "h264, a key frame every 250": {"codec": "libx264", "group": 250},
    "h264, B-frames": {"codec": "libx264", "group": 250, "b_frames": 3},
    "h264, B-frames, short groups, late start": {"codec": "libx264", "group": 12, "b_frames": 2, "offset": 37},
    "hevc, a key frame every 2": {"codec": "libx265", "group": 2},
    "hevc, B-frames, open groups": {"codec": "libx265", "group": 30, "b_frames": 4},
    "hevc, a key frame every 250": {"codec": "libx265", "group": 250, "b_frames": 3},
    "av1, a key frame every 2": {"codec": "libsvtav1", "group": 2},
    "av1, a key frame every 250": {"codec": "libsvtav1", "group": 250},
    "mpeg4": {"codec": "mpeg4", "group": 12},
}


@pytest.mark.parametrize("name", CLIPS)
def test_U02_every_frame_is_the_right_one_in_any_order(name, tmp_path):
    """A decoder that seeks to the wrong place, or that repeats its first frame, reads the wrong number."""
    clip = CLIPS[name]
    if clip["codec"] not in av.codecs_available:
        pytest.skip(f"no encoder {clip['codec']} here")
    path = tmp_path / "clip.mp4"
    write_video(path, range(FRAMES), fps=30, **clip)
    file = VideoFile(path)
    assert len(file) == FRAMES == probe_video(path).frames
    with av.open(str(path)) as container:
        packets = [packet for packet in container.demux(video=0) if packet.size]
    assert sum(packet.is_keyframe for packet in packets) == -(-FRAMES // clip["group"])
    assert any(packet.pts != packet.dts for packet in packets) == ("b_frames" in clip)
    random = np.random.default_rng(0)
    forward = list(range(0, FRAMES, 7))
    order = [FRAMES - 1, 0, *forward, *forward[::-1], *range(100, 120), *random.integers(0, FRAMES, 60)]
    assert [number_in(file.frame(int(n))) for n in order] == order


def test_U02_all_frames_in_sequence(tmp_path):
    path = tmp_path / "clip.mp4"
    write_video(path, range(40), fps=10, group=16, b_frames=3)
    file = VideoFile(path)
    assert [number_in(file.frame(n)) for n in range(40)] == list(range(40))
    assert file.seconds(0) == 0 and file.seconds(39) == pytest.approx(3.9)


class Counting:
    """A container that counts its seeks and the pictures decoded."""

    def __init__(self, container):
        self.container, self.seeks, self.decoded = container, 0, 0

    def seek(self, *args, **options):
        self.seeks += 1
        self.container.seek(*args, **options)

    def decode(self, stream):
        for frame in self.container.decode(stream):
            self.decoded += 1
            yield frame


@pytest.mark.parametrize("group", [2, 100])
def test_reading_in_order_goes_back_to_no_key_frame(group, tmp_path):
    path = tmp_path / "clip.mp4"
    write_video(path, range(100), fps=10, group=group)
    file = VideoFile(path)
    file._container = counting = Counting(file._container)
    for n in range(100):
        file.frame(n)
        file.frame(n)  # kept
    assert (counting.seeks, counting.decoded) == (1, 100)
    file.frame(50)
    file.frame(56)
    assert counting.decoded == 100 + (7 if group == 2 else 57)  # the key frame before 50, and on from there
    file.frame(98)
    assert counting.seeks == (3 if group == 2 else 2)  # a key frame near the target is worth a seek


def test_leading_pictures_cut_by_an_edit_list_are_not_counted(tmp_path):
    """Frame 0 is the first picture that a player shows, though decoding starts before it."""
    path, cut = tmp_path / "clip.mp4", tmp_path / "cut.mp4"
    write_video(path, range(40), fps=10, group=20)
    with av.open(str(path)) as source, av.open(str(cut), "w") as target:
        stream = source.streams.video[0]
        copy = target.add_stream_from_template(stream)
        half_a_second = int(0.5 / stream.time_base)
        for packet in source.demux(stream):
            if packet.size:
                # Times before zero become an edit list that starts inside the first group.
                packet.pts, packet.dts = packet.pts - half_a_second, packet.dts - half_a_second
                packet.stream = copy
                target.mux(packet)
    file = VideoFile(cut)
    assert probe_video(cut).frames == len(file) < 40
    shown = [number_in(frame.to_ndarray(format="rgb24")) for frame in av.open(str(cut)).decode(video=0)]
    assert shown[0] > 0, "the file must have pictures that are decoded and not shown"
    assert [number_in(file.frame(n)) for n in range(len(file))] == shown
    assert [number_in(file.frame(n)) for n in (20, 0, 3)] == [shown[20], shown[0], shown[3]]


def test_colours_stay_in_their_channels(tmp_path):
    path = tmp_path / "red.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=10)
        stream.width = stream.height = SIDE
        stream.pix_fmt = "yuv420p"
        red = np.zeros((SIDE, SIDE, 3), np.uint8)
        red[..., 0] = 255
        container.mux(stream.encode(av.VideoFrame.from_ndarray(red, format="rgb24")))
        container.mux(stream.encode())
    image = VideoFile(path).frame(0)
    assert image.shape == (SIDE, SIDE, 3) and image.dtype == np.uint8
    np.testing.assert_allclose(image[SIDE // 2, SIDE // 2].astype(int), [255, 0, 0], atol=6)


def test_a_frame_beyond_the_end_is_refused_by_number(tmp_path):
    path = tmp_path / "clip.mp4"
    write_video(path, range(5), fps=10)
    with pytest.raises(DataError, match=r"clip\.mp4: asked for frame 5; the file has frames 0 to 4"):
        VideoFile(path).frame(5)


def test_damaged_pictures_are_refused_not_repeated(tmp_path):
    """Zeros in the middle of the file: no frame may come out as another one."""
    path = tmp_path / "clip.mp4"
    write_video(path, range(100), fps=10, group=100)
    data = bytearray(path.read_bytes())
    start = data.index(b"mdat") + 4
    middle = start + (len(data) - start) // 3
    data[middle : middle + 400] = bytes(400)
    path.write_bytes(data)
    file = VideoFile(path)
    refused = 0
    for n in range(0, 100, 5):
        try:
            assert number_in(file.frame(n)) == n
        except DataError as error:
            assert "clip.mp4" in str(error) and "h264" in str(error)
            refused += 1
    assert refused


def test_the_pool_keeps_few_files_open_and_survives_pickling_and_new_processes(tmp_path):
    paths = [tmp_path / f"{n}.mp4" for n in range(3)]
    for n, path in enumerate(paths):
        write_video(path, range(10 * n, 10 * n + 4), fps=10)
    pool = VideoPool(capacity=2)
    assert [number_in(pool.open(path).frame(1)) for path in paths] == [1, 11, 21]
    assert pool.open(paths[2]) is pool.open(paths[2])
    assert len(pool._files) == 2
    copy = pickle.loads(pickle.dumps(pool))
    assert copy.capacity == 2 and number_in(copy.open(paths[0]).frame(3)) == 3
    with multiprocessing.get_context("spawn").Pool(1) as workers:
        assert workers.apply(_read_in_child, (paths[2],)) == 23
    assert number_in(pool.open(paths[2]).frame(0)) == 20


def test_a_file_opened_again_is_not_indexed_again(tmp_path, monkeypatch):
    paths = [tmp_path / f"{n}.mp4" for n in range(4)]
    for n, path in enumerate(paths):
        write_video(path, range(10 * n, 10 * n + 4), fps=10, group=4, b_frames=2)
    indexed, index = [], video._index
    monkeypatch.setattr(video, "_index", lambda c, s, path: indexed.append(path) or index(c, s, path))
    pool = VideoPool(capacity=2)
    for _ in range(3):
        assert [number_in(pool.open(path).frame(2)) for path in paths] == [2, 12, 22, 32]
    assert indexed == paths
    assert set(pool._closed).isdisjoint(pool._files) and len(pool._files) == 2

    # indices of closed files are bounded too: two of four pictures each fit, the one closed longest ago goes
    monkeypatch.setattr(video, "KEPT_TIMES", 8)
    pool = VideoPool(capacity=1)
    for path in paths:
        pool.open(path)
    assert list(pool._closed) == paths[1:3]


def test_large_pictures_leave_fewer_files_open(tmp_path, monkeypatch):
    paths = [tmp_path / f"{n}.mp4" for n in range(4)]
    for path in paths:
        write_video(path, range(2), fps=10)
    monkeypatch.setattr(video, "OPEN_PIXELS", 2 * SIDE * SIDE)
    pool = VideoPool()
    for path in paths:
        pool.open(path)
    assert list(pool._files) == paths[2:]


def _read_in_child(path):
    return number_in(VideoPool().open(path).frame(3))


def test_the_test_pictures_survive_their_own_round_trip():
    assert [number_in(picture(n)) for n in (0, 1, 777, 65535)] == [0, 1, 777, 65535]
