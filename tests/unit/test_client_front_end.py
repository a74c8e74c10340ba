"""The client against the server's own HTTP front end, over a fake service."""

from __future__ import annotations

import asyncio
import hashlib
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from spmd_encoder.api.types import Embedding, ItemOutcome, MediaItem, OutputKind
from spmd_encoder.client import AsyncClient, BusyError, Client, ItemsFailedError, RefusedError
from spmd_encoder.config import Config
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.frontends.http.server import HttpFrontEnd
from tests.harness.fake_service import FakeService, failing, picture, size_embedding
from tests.harness.world import png

pytestmark = pytest.mark.timeout(60)


@dataclass
class Served:
    service: FakeService
    url: str


@pytest.fixture
def served() -> Iterator[Served]:
    service = FakeService()
    sock = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    loop = asyncio.new_event_loop()
    # Made in the loop's thread, as a keeper makes it.
    ready: list[HttpFrontEnd] = []

    async def serve() -> None:
        ready.append(HttpFrontEnd(service, Config(), sock))
        await ready[0].serve()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    with Client(url) as client:
        client.wait_ready(20)
    yield Served(service, url)
    loop.call_soon_threadsafe(ready[0].stop, 1.0)
    thread.join()
    loop.close()
    assert service.reserved == 0


def file(width: int) -> bytes:
    return png(Image.new("RGB", (width, 9)))


def test_all_forms(served: Served, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(file(3))
    with Client(served.url) as client:
        results = client.encode([path, file(4), picture(5), Image.new("RGB", (6, 9))])
        assert [result.embedding.tolist() for result in results] == [[3, 9], [4, 9], [5, 9], [6, 9]]
        assert results[0].digest == f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
        assert (results[0].replica, results[0].grid, results[0].num_tokens) == ("0", (1, 1, 1), 1)
        alone = client.encode([path], output="pooled")
        assert alone[0].embedding.tolist() == [3, 9]
        assert client.embed([file(7), file(8)]).tolist() == [[7, 9], [8, 9]]
    outputs = [request.output for request in served.service.seen]
    assert outputs[-2:] == [OutputKind.POOLED, OutputKind.POOLED]


async def test_asynchronously(served: Served) -> None:
    async with AsyncClient(served.url) as client:
        vectors = await client.embed([file(width) for width in range(1, 40)])
        assert np.array_equal(vectors[:, 0], np.arange(1, 40))
        assert (await client.models())[0]["id"] == "fake"
        assert "layout" in await client.info()


def bfloat16(item: MediaItem) -> ItemOutcome:
    halves = struct.pack("<2f", item.width, item.height)
    good = size_embedding(item)
    assert isinstance(good, Embedding)
    return replace(good, dtype="bfloat16", data=halves[2:4] + halves[6:8])


def test_bfloat16(served: Served) -> None:
    served.service.answer = bfloat16
    with Client(served.url) as client:
        assert client.encode([file(3)])[0].embedding.tolist() == [3, 9]
        assert str(client.encode([file(3)], as_="torch")[0].embedding.dtype) == "torch.bfloat16"


def test_failures(served: Served) -> None:
    served.service.answer = failing(EncoderError(ErrorCode.NON_FINITE, "the model gave NaN"), width=4)
    with Client(served.url) as client:
        with pytest.raises(ItemsFailedError) as caught:
            client.encode([file(3), file(4), b"no picture at all", file(5)])
        assert [(error.index, error.code) for error in caught.value.errors] == [
            (1, "NON_FINITE"),
            (2, "MEDIA_UNSUPPORTED"),
        ]
        for images in ([file(4)], [file(4), file(4)], [b"no picture at all"], ["data:;base64,AAAA"]):
            results = client.encode(images, raise_on_error=False)
            assert all(result.error is not None and result.error.request_id for result in results)


def test_a_wrong_address_is_no_fault_of_the_picture(served: Served) -> None:
    with Client(f"{served.url}/v1") as client:
        for images in ([file(3)], [file(3), file(4)]):
            with pytest.raises(RefusedError, match="no such route") as caught:
                client.encode(images, raise_on_error=False)
            assert caught.value.status == 404


def test_refusals(served: Served) -> None:
    with Client(served.url, model="other") as client, pytest.raises(RefusedError) as caught:
        client.encode([file(3), file(4)])
    assert (caught.value.status, caught.value.code, caught.value.param) == (404, "MODEL_NOT_FOUND", "model")
    served.service.refusal = EncoderError(ErrorCode.QUEUE_FULL, "full", retry_after_s=7)
    with Client(served.url, retries=0) as client, pytest.raises(BusyError) as busy:
        client.encode([file(3)])
    assert (busy.value.code, busy.value.retry_after_s) == ("QUEUE_FULL", 7.0)
