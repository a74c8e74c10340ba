"""The README's curl commands, run to the letter against a real server over a fake service."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from PIL import Image
from safetensors import safe_open

from tests.harness import media
from tests.harness.fake_server import FakeServer, fake_server
from tests.harness.readme import README

pytestmark = [
    pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed"),
    pytest.mark.timeout(60),
]

INTERFACE = README.read_text().split("\n## The HTTP interface\n")[1].split("\n## ")[0]
BLOCKS = [block for block in re.findall(r"```bash\n(.*?)```", INTERFACE, re.DOTALL) if "curl " in block]
COMMANDS = [line for block in BLOCKS for line in block.splitlines()]
CURLS = [line for line in COMMANDS if line.startswith("curl ")]


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with fake_server() as server:
        yield server


@pytest.fixture
def folder(server: FakeServer, tmp_path: Path) -> Path:
    return fill(tmp_path, server.port)


def fill(folder: Path, port: int) -> Path:
    """With the files that the commands name, and a configuration that leads curl to the server at `port`."""
    Image.new("RGB", (31, 7)).save(folder / "photo.jpg")
    Image.new("RGB", (32, 7)).save(folder / "other.png")
    (folder / "talk.wav").write_bytes(media.wav(media.tone(8000, 16_000).astype(np.float32), 16_000))
    frames = [np.full((56, 84, 3), 6 * index, np.uint8) for index in range(40)]
    (folder / "clip.mp4").write_bytes(media.film("mp4", "libx264", frames, time_base=Fraction(1, 10)))
    (folder / ".curlrc").write_text(f'connect-to = "localhost:30000:127.0.0.1:{port}"\nnoproxy = "*"\nfail-with-body\n')
    return folder


def run(command: str, folder: Path) -> str:
    """The output of one line. Any failure, an HTTP status too, raises."""
    environ = {**os.environ, "CURL_HOME": str(folder), "HOME": str(folder)}
    done = subprocess.run(
        ["bash", "-euc", command], cwd=folder, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout


def test_the_readme_shows_every_way_in_and_out() -> None:
    ways = ["@request.json", "-F image=@", "--data-binary @photo.jpg", "Accept: ", "/v1/embeddings", "?output="]
    for way in (*ways, "@talk.wav", "@clip.mp4", "-F audio=@", "-F video=@"):
        assert any(way in command for command in CURLS), way


def test_every_command_works_as_it_is_written(server: FakeServer, folder: Path) -> None:
    replies: dict[str, str] = {}
    for command in COMMANDS:
        replies[command] = run(command, folder)
    for command in CURLS:
        items = len(re.findall(r"-F \w+=@", command)) or 1
        if "/v1/lookup" in command:
            (found,) = json.loads(replies[command])["data"]
            assert found["held"] is False
        elif "-o out.safetensors" in command:
            assert replies[command] == ""
            check_safetensors(folder / "out.safetensors", items)
        else:
            check_json(json.loads(replies[command]), items)
    assert len(server.service.seen) == sum("/v1/lookup" not in command for command in CURLS)


def test_the_safetensors_example_reads_what_curl_saved(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(next(command for command in CURLS if "-o out.safetensors" in command), folder)
    (source,) = [code for code in re.findall(r"```python\n(.*?)```", INTERFACE, re.DOTALL) if "safe_open" in code]
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {}
    exec(compile(source, str(README), "exec"), names)
    assert names["first"].tolist() == [31, 7]
    check_json(json.loads(names["reply"]), 2)


def check_json(reply: Any, num_items: int) -> None:
    assert "error" not in reply
    assert len(reply["data"]) == num_items
    if "usage" in reply:
        assert reply["data"][0]["embedding"] == [31.0, 7.0]
    else:
        assert [entry["status"] for entry in reply["data"]] == ["ok"] * num_items


def check_safetensors(file: Path, num_pictures: int) -> None:
    tensors = safetensors.numpy.load_file(file)
    assert [tensors[str(index)].tolist() for index in range(num_pictures)] == [[31, 7], [32, 7]]
    with safe_open(file, "np") as opened:
        check_json(json.loads(opened.metadata()["response"]), num_pictures)
