"""`python -m spmd_encoder.client` against a real server: what it takes, writes, says, and goes on with."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from PIL import Image

from spmd_encoder.client.__main__ import main
from spmd_encoder.client.inputs import InputError, named_items, printable
from tests.harness.fake_encoder import FakeEncoder
from tests.harness.world import png

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def server() -> Iterator[FakeEncoder]:
    with FakeEncoder() as server:
        yield server


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`photos/a.png` (3 wide), `photos/b.JPG` (4), `photos/deep/c.png` (5) and a text; the working folder is above."""
    monkeypatch.chdir(tmp_path)
    deep = tmp_path / "photos" / "deep"
    deep.mkdir(parents=True)
    for name, width in (("a.png", 3), ("b.JPG", 4), ("deep/c.png", 5)):
        (tmp_path / "photos" / name).write_bytes(png(Image.new("RGB", (width, 9))))
    (tmp_path / "photos" / "notes.txt").write_text("no picture")
    (tmp_path / "folder.safetensors").mkdir()
    return tmp_path / "photos"


def widths(path: Path) -> dict[str, int]:
    return {name: int(tensor.flatten()[0]) for name, tensor in safetensors.torch.load_file(path).items()}


def index(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "index.jsonl").read_text().splitlines()]


def test_encode_to_one_file(server: FakeEncoder, photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server.dtype = "bfloat16"
    argv = ["encode", "photos", "--recursive", "--url", server.url, "--out", "out.safetensors", "--output", "tokens"]
    assert main(argv) == 0
    assert widths(Path("out.safetensors")) == {"photos/a.png": 3, "photos/b.JPG": 4, "photos/deep/c.png": 5}
    tensor = safetensors.torch.load_file("out.safetensors")["photos/a.png"]
    assert (tensor.dtype, tensor.shape) == (torch.bfloat16, (3, 2))
    with safetensors.safe_open("out.safetensors", "pt") as file:
        assert file.metadata() == {"model": "fake", "output": "tokens"}
    said = capsys.readouterr()
    assert said.err == "3 items encoded, 0 failed: out.safetensors\n", "no progress bar where there is no terminal"
    assert said.out == ""


def test_failures_are_named_and_end_with_1(
    server: FakeEncoder, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (photos / "bad.png").write_bytes(b"junk")
    (photos / "empty.png").touch()
    argv = ["encode", "photos/*.png", "photos/b.JPG", "--url", server.url, "--out", "out.safetensors"]
    assert main(argv) == 1
    assert widths(Path("out.safetensors")) == {"photos/a.png": 3, "photos/b.JPG": 4}
    assert capsys.readouterr().err.splitlines() == [
        "failed: photos/bad.png: the picture cannot be decoded (MEDIA_CORRUPT)",
        "failed: photos/empty.png: it is empty (UNREADABLE)",
        "2 items encoded, 2 failed: out.safetensors",
    ]


def test_embed_to_npy(server: FakeEncoder, photos: Path) -> None:
    (photos / "bad.png").write_bytes(b"junk")
    argv = ["embed", "photos/a.png", "photos/bad.png", "photos/b.JPG", "--url", server.url, "--out", "v.npy"]
    assert main(argv) == 1
    rows = np.load("v.npy")
    assert rows.dtype == np.float32
    assert rows[0].tolist() == [3, 9]
    assert np.isnan(rows[1]).all()
    assert rows[2].tolist() == [4, 9]
    assert Path("v.npy.txt").read_text().splitlines() == ["photos/a.png", "photos/bad.png", "photos/b.JPG"]
    assert {request["options"]["output"] for request in server.seen} == {"pooled"}


def test_pipes_and_devices_fail_alone(server: FakeEncoder, photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(photos / "pipe.jpg")
    (photos / "zero.png").symlink_to("/dev/zero")
    argv = ["photos", "photos/pipe.jpg", "/dev/zero"]
    assert main(["encode", *argv, "--recursive", "--url", server.url, "--out", "out.safetensors"]) == 1
    assert widths(Path("out.safetensors")) == {"photos/a.png": 3, "photos/b.JPG": 4, "photos/deep/c.png": 5}
    assert capsys.readouterr().err.splitlines() == [
        "failed: photos/pipe.jpg: it is no regular file (UNREADABLE)",
        "failed: photos/zero.png: it is no regular file (UNREADABLE)",
        "failed: /dev/zero: it is no regular file (UNREADABLE)",
        "3 items encoded, 3 failed: out.safetensors",
    ]


@pytest.mark.parametrize(
    ("out", "written", "stopper"),
    [
        ("o.safetensors", "o.safetensors", ".o.safetensors.part"),
        ("v.npy", "v.npy", ".v.npy.part"),
        ("v.npy", "v.npy.txt", ".v.npy.txt.part"),
        ("out", "out/00000.safetensors", "out/.00000.safetensors.part"),
    ],
)
def test_a_full_disk_is_said_with_its_file(
    server: FakeEncoder, photos: Path, capsys: pytest.CaptureFixture[str], out: str, written: str, stopper: str
) -> None:
    (photos / "bad.png").write_bytes(b"junk")
    assert main(["embed", "photos/bad.png", "--url", server.url, "--out", out]) == 1
    Path(stopper).symlink_to("/dev/full")
    capsys.readouterr()
    assert main(["embed", "photos/a.png", "--url", server.url, "--out", out]) == 1
    assert capsys.readouterr().err == f"error: {written} cannot be written: No space left on device\n"
    if out == "out":
        assert [line["path"] for line in index(Path(out))] == ["photos/bad.png"]
        assert main(["embed", "photos/a.png", "--url", server.url, "--out", out]) == 0, "it goes on"


def test_a_folder_of_shards_goes_on(server: FakeEncoder, photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = photos / "bad.png"
    bad.write_bytes(b"junk")
    argv = ["encode", "photos", "--recursive", "--url", server.url, "--out", "out", "--items-per-file", "2"]
    assert main(argv) == 1
    out = Path("out")
    assert widths(out / "00000.safetensors") == {"photos/a.png": 3, "photos/b.JPG": 4}
    assert widths(out / "00001.safetensors") == {"photos/deep/c.png": 5}
    lines = index(out)
    assert [line["path"] for line in lines] == [
        f"photos/{name}" for name in ("a.png", "b.JPG", "bad.png", "deep/c.png")
    ]
    assert lines[0]["shard"] == "00000.safetensors"
    assert lines[0]["digest"].startswith("sha256:")
    assert lines[2]["error"] == {"code": "MEDIA_CORRUPT", "message": "the picture cannot be decoded"}

    bad.write_bytes(png(Image.new("RGB", (6, 9))))
    with (out / "index.jsonl").open("a") as file:
        file.write('{"path": "photos/x')  # a run that was cut off while it wrote
    (out / "00002.safetensors").write_bytes(b"and its shard")
    server.seen.clear()
    assert main(argv) == 0
    assert "3 of 4 items are done already" in capsys.readouterr().err
    assert len(server.seen) == 1
    assert widths(out / "00002.safetensors") == {"photos/bad.png": 6}
    assert index(out)[-1]["shard"] == "00002.safetensors"
    assert len(index(out)) == 5

    server.seen.clear()
    assert main(argv) == 0
    assert server.seen == []
    assert main([*argv, "--output", "tokens"]) == 2
    assert "holds another job" in capsys.readouterr().err


def test_what_was_encoded_before_an_interrupt_is_kept(server: FakeEncoder, photos: Path) -> None:
    """The sixth of eleven requests stays in the server; Ctrl-C leaves those before it in the folder."""
    for width in range(10, 90):
        (photos / f"{width}.png").write_bytes(png(Image.new("RGB", (width, 9))))
    argv = ["encode", "photos", "--recursive", "--jobs", "1", "--url", server.url, "--out", "out"]
    # As a shell starts it: the tests themselves may run in the background, where Ctrl-C is ignored.
    command = ["env", "--default-signal=INT", sys.executable, "-m", "spmd_encoder.client", *argv]
    server.free = 5
    server.gate.clear()
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.held.wait(60)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said == "interrupted\n"
    assert len(index(Path("out"))) == 5 * 8
    server.gate.set()
    assert main(argv) == 0
    assert len({line["path"] for line in index(Path("out"))}) == len(index(Path("out"))) == 83


def test_wait(server: FakeEncoder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["wait", "--url", server.url, "--timeout-s", "10"]) == 0
    server.ready = False
    assert main(["wait", "--url", server.url, "--timeout-s", "0.1"]) == 1
    assert "not ready within 0.1 s" in capsys.readouterr().err


def test_a_server_that_refuses_ends_the_command(
    server: FakeEncoder, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["encode", "photos/a.png", "--url", server.url, "--out", "o.safetensors", "--model", "other"]
    assert main(argv) == 1
    assert "another model is served (MODEL_NOT_FOUND" in capsys.readouterr().err
    assert not Path("o.safetensors").exists()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["encode", "photos", "--out", "o.safetensors"], "photos is a folder; give --recursive"),
        (["encode", "nothing.png", "--out", "o.safetensors"], "there is no file nothing.png"),
        (["encode", "*.nope", "--out", "o.safetensors"], "no file matches *.nope"),
        (["encode", "photos/a.png", "--out", "o.npy"], "only `embed` writes .npy"),
        (["encode", "photos/a.png", "--out", "o.zip"], "the suffix is not known"),
        (["encode", "photos/a.png", "--out", "no/o.safetensors"], "there is no folder no"),
        (["encode", "photos/a.png", "--out", "photos"], "is not empty"),
        (["encode", "photos/a.png", "--out", "/dev/full"], "--out /dev/full is there already and is no folder"),
        (["encode", "photos/a.png", "--out", "folder.safetensors"], "--out folder.safetensors is a folder"),
        (["encode", "photos/a.png", "--out", "o", "--header", "key"], "--header takes NAME:VALUE"),
        (["encode", "photos/a.png", "--out", "o", "--jobs", "0"], "concurrency must be a whole number, at least 1"),
        (["encode", "photos/a.png", "--out", "o", "--url", "host:1"], "must look like http://"),
    ],
)
def test_usage(
    server: FakeEncoder, photos: Path, capsys: pytest.CaptureFixture[str], argv: list[str], said: str
) -> None:
    assert main([argv[0], "--url", server.url, *argv[1:]]) == 2
    assert said in capsys.readouterr().err
    assert server.seen == []


def test_pictures(photos: Path) -> None:
    names = named_items(["photos/deep/c.png", "photos", "https://h/x.jpg", "photos/notes.txt"], ["image"])
    assert names == ["photos/deep/c.png", "photos/a.png", "photos/b.JPG", "https://h/x.jpg", "photos/notes.txt"]
    assert named_items(["photos/**/*.png"], None) == ["photos/a.png", "photos/deep/c.png"]
    (photos / "deep" / "loop").symlink_to(photos)
    assert len(named_items(["photos"], ["image"])) == 3
    (photos / "none").mkdir()
    with pytest.raises(InputError, match="holds no file with a suffix that the model takes"):
        named_items(["photos/none"], ["image"])


def test_a_folder_gives_what_the_model_takes(photos: Path) -> None:
    for name in ("d.WAV", "e.mp4", "f.flac"):
        (photos / name).touch()
    assert named_items(["photos"], ["audio"]) == ["photos/d.WAV", "photos/f.flac"]
    assert named_items(["photos"], ["video", "image"])[:3] == ["photos/a.png", "photos/b.JPG", "photos/e.mp4"]


def test_a_name_that_is_no_utf8(server: FakeEncoder, photos: Path) -> None:
    name = os.fsdecode(b"photos/\xff.png")
    Path(name).write_bytes(png(Image.new("RGB", (7, 9))))
    assert printable(name) == "photos/\\xff.png"
    assert main(["encode", name, "--url", server.url, "--out", "out"]) == 0
    assert widths(Path("out/00000.safetensors")) == {"photos/\\xff.png": 7}
    assert main(["encode", name, "--url", server.url, "--out", "out"]) == 0
    assert len(server.seen) == 1


def test_progress_is_shown_on_a_terminal(server: FakeEncoder, photos: Path) -> None:
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    argv = [sys.executable, "-m", "spmd_encoder.client", "encode", "photos/a.png", "photos/b.JPG", "--url", server.url]
    process = subprocess.Popen([*argv, "--out", "o.safetensors"], stderr=theirs)
    os.close(theirs)
    said = b""
    with contextlib.suppress(OSError):  # EIO: the other end is closed
        while piece := os.read(ours, 4096):
            said += piece
    os.close(ours)
    assert process.wait(30) == 0
    assert b"100%" in said
    assert b"2/2" in said
