"""Paths and `file:` URLs that may not be read: the answer names the flag, and is the same whether the file exists."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.harness.fake_service import picture_file
from tests.harness.sglang_server import Served, config, serving

pytestmark = pytest.mark.timeout(60)

FLAG = "--allowed-local-media-path"


@pytest.fixture(params=["without the flag", "with it"])
async def served(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Served]:
    (tmp_path / "allowed").mkdir()
    settings = config(allowed_local_media_path=str(tmp_path / "allowed")) if request.param == "with it" else config()
    async with serving(settings) as served:
        yield served


async def told(served: Served, item: str) -> dict[str, tuple[int, str]]:
    """Each route's status and message."""
    own = await served.http.post("/v1/encode", json={"items": [{"image": item}]})
    openai = await served.http.post("/v1/embeddings", json={"input": [item]})
    sglang = await served.encode(f"part {item}", item)
    return {
        "/v1/encode": (own.status_code, own.json()["data"][0]["error"]["message"]),
        "/v1/embeddings": (openai.status_code, openai.json()["error"]["message"]),
        "/encode": (sglang.status_code, sglang.json()["message"]),
    }


@pytest.mark.parametrize("prefix", ["", "file://"])
@pytest.mark.parametrize("name", ["picture", "picture.png"])
async def test_files_outside_are_no_secret_that_is_told(served: Served, tmp_path: Path, prefix: str, name: str) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / name).write_bytes(picture_file(3))
    there = await told(served, f"{prefix}{tmp_path}/there/{name}")
    missing = await told(served, f"{prefix}{tmp_path}/else/{name}")
    assert there == missing
    for route, (status, message) in there.items():
        assert status in (400, 403) and FLAG in message, (route, message)
    assert not served.service.seen


async def test_system_files_are_not_taken_for_base64(served: Served) -> None:
    for item in ("/etc/passwd", "/etc/nonexistent", "/proc/self/environ", "/"):
        for route, (status, message) in (await told(served, item)).items():
            assert status in (400, 403) and FLAG in message, (route, item, message)
