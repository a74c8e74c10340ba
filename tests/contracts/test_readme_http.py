"""The README's curl commands, run to the letter against a real server over a fake service."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy
from PIL import Image
from safetensors import safe_open

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
    """With the pictures that the commands name, and a configuration that leads curl to the server."""
    Image.new("RGB", (31, 7)).save(tmp_path / "photo.jpg")
    Image.new("RGB", (32, 7)).save(tmp_path / "other.png")
    (tmp_path / ".curlrc").write_text(
        f'connect-to = "localhost:30000:127.0.0.1:{server.port}"\nnoproxy = "*"\nfail-with-body\n'
    )
    return tmp_path


def run(command: str, folder: Path) -> str:
    """The output of one line. Any failure, an HTTP status too, raises."""
    environ = {**os.environ, "CURL_HOME": str(folder), "HOME": str(folder)}
    done = subprocess.run(
        ["bash", "-euc", command], cwd=folder, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout


def test_the_readme_shows_every_way_in_and_out() -> None:
    for way in ("@request.json", "-F image=@", "--data-binary @photo.jpg", "Accept: ", "/v1/embeddings", "?output="):
        assert any(way in command for command in CURLS), way


def test_every_command_works_as_it_is_written(server: FakeServer, folder: Path) -> None:
    replies: dict[str, str] = {}
    for command in COMMANDS:
        replies[command] = run(command, folder)
    for command in CURLS:
        pictures = command.count("-F image=@") or 1
        if "/v1/lookup" in command:
            (found,) = json.loads(replies[command])["data"]
            assert found["held"] is False
        elif "-o out.safetensors" in command:
            assert replies[command] == ""
            check_safetensors(folder / "out.safetensors", pictures)
        else:
            check_json(json.loads(replies[command]), pictures)
    assert len(server.service.seen) == sum("/v1/lookup" not in command for command in CURLS)


def test_the_safetensors_example_reads_what_curl_saved(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(next(command for command in CURLS if "-o out.safetensors" in command), folder)
    (source,) = [code for code in re.findall(r"```python\n(.*?)```", INTERFACE, re.DOTALL) if "safe_open" in code]
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {}
    exec(compile(source, str(README), "exec"), names)
    assert names["first"].tolist() == [31, 7]
    check_json(json.loads(names["reply"]), 2)


def check_json(reply: Any, num_pictures: int) -> None:
    assert "error" not in reply
    assert len(reply["data"]) == num_pictures
    if "usage" in reply:
        assert reply["data"][0]["embedding"] == [31.0, 7.0]
    else:
        assert [entry["status"] for entry in reply["data"]] == ["ok"] * num_pictures


def check_safetensors(file: Path, num_pictures: int) -> None:
    tensors = safetensors.numpy.load_file(file)
    assert [tensors[str(index)].tolist() for index in range(num_pictures)] == [[31, 7], [32, 7]]
    with safe_open(file, "np") as opened:
        check_json(json.loads(opened.metadata()["response"]), num_pictures)
