"""How much memory sounds and films take that are made to take much: each in a process of its own."""

from __future__ import annotations

import io
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from tests.harness.media import film, sound, tone, wav

SCRIPT = """
import sys
from pathlib import Path
from spmd_encoder.errors import EncoderError
from spmd_encoder.media import audio, video
from spmd_encoder.media.base import FilmLimits

def kib(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))

LIMITS = FilmLimits(max_pixels=10**6, max_seconds=7200, max_chosen=100, max_walked=1000, max_bytes=2**26)

def decode(path):
    try:
        if sys.argv[1] == "sound":
            audio.decode(Path(path).read_bytes(), 16_000, 600)
        else:
            video.decode(Path(path).read_bytes(), lambda info: range(0, info.num_frames, 100), LIMITS)
    except EncoderError as error:
        return error.code
    return "decoded"

decode(sys.argv[2])  # what a first decode loads
before = kib("VmRSS")
print(decode(sys.argv[3]), (kib("VmHWM") - before) / 1024)
"""


def told(kind: str, small: bytes, large: bytes, folder: Path) -> tuple[str, float]:
    """What became of the large one, and the MiB that it took."""
    paths = [folder / "small", folder / "large"]
    for path, data in zip(paths, (small, large), strict=True):
        path.write_bytes(data)
    command = [sys.executable, "-c", SCRIPT, kind, *map(str, paths)]
    code, mib = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return code, float(mib)


def long_opus(seconds: int) -> bytes:
    """Of 6 kb/s: one second's packets, over and over."""
    with av.open(io.BytesIO(sound("ogg", "libopus", 48_000, tone(48_000, 48_000), {"b": "6k"}))) as file:
        packets: list[Any] = [bytes(packet) for packet in file.demux(audio=0) if packet.size]
        extradata = file.streams.audio[0].codec_context.extradata
    out = io.BytesIO()
    with av.open(out, "w", format="ogg") as file:
        stream: Any = file.add_stream("libopus", rate=48_000, layout="mono")
        stream.codec_context.extradata = extradata
        for index in range(seconds * 50):
            packet = av.Packet(packets[index % len(packets)])
            packet.pts = packet.dts = index * 960
            packet.duration, packet.time_base, packet.stream = 960, stream.time_base or 1, stream
            file.mux(packet)
    return out.getvalue()


def test_a_small_file_does_not_become_gigabytes(tmp_path: Path) -> None:
    """Twenty minutes take 230 MB, and the ten of the limit 38 MB as they are returned."""
    data = long_opus(1200)
    assert len(data) < 2 * 2**20
    code, mib = told("sound", long_opus(1), data, tmp_path)
    assert code == "TOO_LARGE" and mib < 120


def test_a_sound_is_resampled_as_it_is_decoded(tmp_path: Path) -> None:
    """Five minutes of 96 kHz in stereo: 115 MB, and as many while it is read; 19 MB at 16 kHz."""
    data = wav(np.zeros((300 * 96_000, 2), np.int16), 96_000)
    code, mib = told("sound", wav(np.zeros(1000, np.int16), 96_000), data, tmp_path)
    assert code == "decoded" and mib < 2 * len(data) / 2**20 + 120


def test_frames_that_are_not_chosen_are_not_kept(tmp_path: Path) -> None:
    """600 frames of 640 x 480 pixels are 0.5 GB."""
    pictures = [np.full((480, 640, 3), index % 251, np.uint8) for index in range(600)]
    data = film("mp4", "libx264", pictures, options={"preset": "ultrafast"})
    code, mib = told("film", film("mp4", "libx264", pictures[:3]), data, tmp_path)
    assert code == "decoded" and mib < 120


def forged(kind: bytes, count: int) -> bytes:
    """A film whose table says that it has `count` samples."""
    muxer = {"movflags": "frag_keyframe+empty_moov"} if kind == b"trun" else {}
    data = bytearray(film("mp4", "libx264", [np.zeros((32, 32, 3), np.uint8)] * 9, muxer=muxer))
    at = data.index(kind) + 4
    if kind == b"trun":  # no field of any sample is there: all are as the fragment says
        struct.pack_into(">II", data, at, 0, count)
    else:  # all of one byte
        struct.pack_into(">III", data, at, 0, 1, count)
        chunks = data.index(b"stsc") + 4
        struct.pack_into(">I", data, chunks + 12, count)
    return bytes(data)


@pytest.mark.parametrize("kind", [b"stsz", b"trun"])
@pytest.mark.parametrize("count", [10**7, 80_000_000, 2**31, 2**32 - 1])
def test_a_forged_table_does_not_become_gigabytes(kind: bytes, count: int, tmp_path: Path) -> None:
    small = film("mp4", "libx264", [np.zeros((32, 32, 3), np.uint8)] * 3)
    _, mib = told("film", small, forged(kind, count), tmp_path)
    assert mib < 700
