"""Both clients against a real server: forms of pictures, order, results, failures, bounds."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from spmd_encoder.client import (
    AsyncClient,
    ChunkLimits,
    Client,
    ItemError,
    ItemsFailedError,
    NoReplyInTimeError,
    RefusedError,
    Result,
)
from tests.harness.fake_encoder import FakeEncoder
from tests.harness.world import data_uri, noise_png, png

pytestmark = pytest.mark.timeout(60)

Call = Callable[..., Any]


@pytest.fixture
def server() -> Iterator[FakeEncoder]:
    with FakeEncoder() as server:
        yield server


@pytest.fixture(params=["sync", "async"])
def call(request: pytest.FixtureRequest, server: FakeEncoder) -> Call:
    """`call(method, *args, client={...}, **kwargs)` on a fresh client of either kind."""

    def run(method: str, *args: Any, client: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        if request.param == "sync":
            with Client(server.url, **(client or {})) as blocking:
                return getattr(blocking, method)(*args, **kwargs)

        async def go() -> Any:
            async with AsyncClient(server.url, **(client or {})) as aio:
                return await getattr(aio, method)(*args, **kwargs)

        return asyncio.run(go())

    return run


def picture(width: int, height: int = 9) -> bytes:
    return png(Image.new("RGB", (width, height), (width % 256, 0, 0)))


def test_every_form_of_a_picture_in_one_call(call: Call, server: FakeEncoder, tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(picture(11))
    images = [
        str(file),
        file,
        picture(12),
        bytearray(picture(13)),
        Image.new("RGB", (14, 9)),
        "https://host.example/p.jpg",
        data_uri(picture(15)),
        picture(16),
    ]
    results = call("encode", images)
    widths = [int(result.embedding[0]) for result in results]
    assert widths == [11, 11, 12, 13, 14, len("https://host.example/p.jpg"), 15, 16]
    assert [result.index for result in results] == list(range(8))
    assert [result.name for result in results][:3] == [str(file), str(file), "images[2]"]
    assert results[5].name == "https://host.example/p.jpg"
    assert results[6].name == "images[6]", "a data URI is never shown"
    assert results[0].digest == f"sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}"
    assert (results[0].shape, results[0].dtype, results[0].grid) == ((2,), "float32", (1, 1, 1))
    assert (results[0].num_tokens, results[0].replica, results[0].ok) == (1, "0", True)
    seen = sorted(server.seen, key=lambda request: len(request["items"]))
    assert [request["type"] for request in seen] == [
        "application/octet-stream",
        "application/json",
        "multipart/form-data",
    ]


def test_many_pictures_keep_their_order_and_the_limits(call: Call, server: FakeEncoder) -> None:
    images = [picture(width) for width in range(1, 54)]
    limits = ChunkLimits(items=5)
    results = call("encode", images, client={"limits": limits, "concurrency": 3})
    assert [int(result.embedding[0]) for result in results] == list(range(1, 54))
    assert sorted(len(request["items"]) for request in server.seen) == [3, *[5] * 10]
    assert 1 <= server.peak <= 3
    assert len({request["port"] for request in server.seen}) <= 3, "connections are used again"


def test_a_chunk_is_bounded_in_bytes(call: Call, server: FakeEncoder) -> None:
    images = [noise_png(seed, 32, 32) for seed in range(6)]
    most = max(map(len, images)) * 2
    call("encode", images, client={"limits": ChunkLimits(num_bytes=most)})
    assert sorted(len(request["items"]) for request in server.seen) == [2, 2, 2]
    assert all(sum(request["items"]) <= most for request in server.seen)


def test_options(call: Call, server: FakeEncoder) -> None:
    for images in ([picture(5)], [picture(5), picture(6)], [data_uri(picture(5))]):
        results = call("encode", images, output="tokens", client={"model": "fake"})
        assert results[0].embedding.tolist() == [[5, 9]] * 3
        assert server.seen[-1]["options"] == {"output": "tokens", "model": "fake"}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dtypes(call: Call, server: FakeEncoder, dtype: str) -> None:
    server.dtype = dtype
    (result,) = call("encode", [picture(6, 7)])
    assert result.dtype == dtype
    assert result.embedding.dtype == (np.float16 if dtype == "float16" else np.float32)
    assert result.embedding.tolist() == [6, 7]
    result.embedding[0] = 1  # writable, and the caller's own
    assert result.embedding.tolist() == [6, 7]
    assert np.asarray(result).tolist() == [6, 7]
    assert np.stack([result, result]).shape == (2, 2)
    (result,) = call("encode", [picture(6, 7)], as_="torch")
    assert result.embedding.dtype is getattr(torch, dtype)
    assert result.embedding.tolist() == [6, 7]


def test_embed(call: Call, server: FakeEncoder) -> None:
    vectors = call("embed", [picture(width) for width in (3, 4, 5)])
    assert (vectors.dtype, vectors.tolist()) == (np.float32, [[3, 9], [4, 9], [5, 9]])
    assert server.seen[-1]["options"] == {"output": "pooled"}
    assert call("embed", []).shape == (0, 0)
    assert call("encode", []) == []


def test_bad_pictures_are_named_and_the_others_encoded(call: Call, tmp_path: Path) -> None:
    images = [picture(3), b"junk", str(tmp_path / "missing.png"), b"", tmp_path, picture(4)]
    with pytest.raises(ItemsFailedError) as caught:
        call("encode", images)
    assert [error.index for error in caught.value.errors] == [1, 2, 3, 4]
    assert str(caught.value).startswith("4 of 6 pictures failed: images[1]: the picture cannot be decoded (MEDIA_CORR")
    results: list[Result] = call("encode", images, raise_on_error=False)
    assert [result.error and result.error.code for result in results] == [
        *(None, "MEDIA_CORRUPT", "UNREADABLE", "UNREADABLE", "UNREADABLE", None)
    ]
    assert [int(result.embedding[0]) for result in (results[0], results[5])] == [3, 4]
    assert results[2].name.endswith("missing.png")
    assert "No such file" in str(results[2].error)
    with pytest.raises(ItemError, match="cannot be decoded"):
        _ = results[1].embedding


@pytest.mark.parametrize("images", [[b"junk"], [b"junk", b"more"], ["data:;base64,AAAA"]])
def test_all_pictures_bad_is_no_error_of_the_request(call: Call, images: list[bytes]) -> None:
    results = call("encode", images, raise_on_error=False)
    assert {result.error.code for result in results} == {"MEDIA_CORRUPT"}
    assert {result.error.request_id for result in results} == {"enc-1"}


def test_nothing_is_sent_where_no_file_can_be_read(call: Call, server: FakeEncoder) -> None:
    (result,) = call("encode", ["/nowhere/a.png"], raise_on_error=False)
    assert result.error.code == "UNREADABLE"
    assert server.seen == []


def test_a_refused_request_raises(call: Call) -> None:
    with pytest.raises(RefusedError) as caught:
        call("encode", [picture(3)], client={"model": "other"})
    error = caught.value
    assert (error.status, error.code, error.request_id) == (404, "MODEL_NOT_FOUND", "enc-1")
    assert str(error) == "another model is served (MODEL_NOT_FOUND, HTTP 404, request enc-1)"


def test_one_picture_instead_of_a_list_is_said(call: Call, tmp_path: Path) -> None:
    for single in ("a.png", tmp_path, b"x", Image.new("RGB", (2, 2))):
        with pytest.raises(TypeError, match="put it in a list"):
            call("encode", single)
    with pytest.raises(TypeError, match=r"images\[1\] is a int"):
        call("encode", [picture(1), 7])


def test_state(call: Call, server: FakeEncoder) -> None:
    assert call("models")[0]["id"] == "fake"
    assert call("info")["version"] == "fake"
    assert call("ready") is True
    call("wait_ready", 5)
    server.ready = False
    assert call("ready") is False
    with pytest.raises(NoReplyInTimeError, match=r"within 0.3 s; at last: (HTTP 503|the server was too slow)"):
        call("wait_ready", 0.3)


def test_a_generator_is_read_no_further_than_needed(server: FakeEncoder) -> None:
    taken = 0

    def images() -> Iterator[bytes]:
        nonlocal taken
        for taken in range(1, 101):
            yield picture(taken)

    with Client(server.url, limits=ChunkLimits(items=2), concurrency=3) as client:
        results = client.encode_iter(images())
        assert int(next(results).embedding[0]) == 1
        assert taken <= 2 * 4 + 1, "the window and the picture that closed its last chunk"
        assert [int(result.embedding[0]) for result in results] == list(range(2, 101))
    assert taken == 100


async def test_an_asynchronous_generator_too(server: FakeEncoder) -> None:
    taken = 0

    async def images() -> AsyncIterator[bytes]:
        nonlocal taken
        for taken in range(1, 31):
            yield picture(taken)

    async with AsyncClient(server.url, limits=ChunkLimits(items=2), concurrency=3) as client:
        results = client.encode_iter(images())
        assert int((await anext(results)).embedding[0]) == 1
        assert taken <= 9
        assert [int(result.embedding[0]) async for result in results] == list(range(2, 31))


async def test_calls_at_once_share_the_bound(server: FakeEncoder) -> None:
    async with AsyncClient(server.url, concurrency=2) as client:
        many = await asyncio.gather(*(client.encode([picture(width)]) for width in range(1, 21)))
    assert [int(results[0].embedding[0]) for results in many] == list(range(1, 21))
    assert server.peak <= 2


async def test_cancelling_ends_what_runs(server: FakeEncoder) -> None:
    server.gate.clear()
    async with AsyncClient(server.url) as client:
        task = asyncio.create_task(client.encode([picture(3)]))
        while not server.seen:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        server.gate.set()
        assert len(await client.encode([picture(4)])) == 1


def test_threads_may_share_a_client(server: FakeEncoder) -> None:
    got: dict[int, float] = {}
    with Client(server.url) as client:

        def work(width: int) -> None:
            got[width] = client.encode([picture(width)])[0].embedding[0]

        threads = [threading.Thread(target=work, args=(width,)) for width in range(1, 9)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert got == {width: width for width in range(1, 9)}


def test_errors_survive_a_copy(call: Call) -> None:
    """As when they pass between processes."""
    with pytest.raises(ItemsFailedError) as failed:
        call("encode", [picture(3), b"junk"])
    with pytest.raises(RefusedError) as refused:
        call("encode", [picture(3)], client={"model": "other"})
    for error in (failed.value, failed.value.errors[0], refused.value):
        copied = copy.copy(error)
        assert str(copied) == str(error)
        assert vars(copied).keys() == vars(error).keys()


def test_arguments() -> None:
    for url in ("127.0.0.1:30000", "ftp://host", "http://", "http://host/?a=1", "http://host:port"):
        with pytest.raises(ValueError, match="URL"):
            Client(url)
    for wrong in ({"timeout_s": 0}, {"retries": -1}, {"concurrency": 0}):
        with pytest.raises(ValueError, match="must be"):
            Client(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one picture"):
        ChunkLimits(items=0)


FORKED = """
import os, sys
from spmd_encoder.client import Client
client = Client(sys.argv[1])
data = bytes.fromhex(sys.argv[2])
client.encode([data])
child = os.fork()
for _ in range(3):
    assert client.encode([data])[0].embedding.tolist() == [5, 9]
if not child:
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_each_process_after_a_fork_has_its_own_connections(server: FakeEncoder) -> None:
    done = subprocess.run([sys.executable, "-c", FORKED, server.url, picture(5).hex()], timeout=30, check=False)
    assert done.returncode == 0
    assert len({request["port"] for request in server.seen}) == 2


def test_torch_is_imported_only_when_asked_for(server: FakeEncoder) -> None:
    code = (
        "import sys; from spmd_encoder.client import Client\n"
        "got = Client(sys.argv[1]).encode([bytes.fromhex(sys.argv[2])])[0].embedding.tolist()\n"
        "heavy = [m for m in ('torch', 'transformers', 'fastapi', 'zmq') if m in sys.modules]\n"
        "sys.exit(got != [5, 9] or bool(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code, server.url, picture(5).hex()], timeout=30, check=False)
    assert done.returncode == 0


def test_proxies_of_the_environment_are_not_used(server: FakeEncoder) -> None:
    code = "import sys; from spmd_encoder.client import Client; sys.exit(not Client(sys.argv[1]).ready())"
    env = {**os.environ, "HTTP_PROXY": "http://127.0.0.1:1", "ALL_PROXY": "http://127.0.0.1:1"}
    done = subprocess.run([sys.executable, "-c", code, server.url], env=env, timeout=30, check=False)
    assert done.returncode == 0


def test_the_readmes_example(
    server: FakeEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (Path(__file__).parents[2] / "README.md").read_text()
    (source,) = (code for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "client.wait_ready" in code)
    assert "http://localhost:30000" in source
    monkeypatch.chdir(tmp_path)
    Path("photo.jpg").write_bytes(picture(3))
    Path("other.png").write_bytes(picture(4))
    names: dict[str, Any] = {}
    exec(source.replace("http://localhost:30000", server.url), names)
    assert names["vectors"].tolist() == [[3, 9], [4, 9]]
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["photo.jpg", "images[1]"]
