"""SGLang's routes over a real server, with real PULL sockets as receivers."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from spmd_encoder.api.types import Embedding, MediaItem, OutputKind
from spmd_encoder.config import Config
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.frontends.http.server import HttpFrontEnd
from tests.harness.fake_service import FakeService, failing, picture, picture_file
from tests.harness.sglang_receiver import Message, Receiver
from tests.harness.sglang_receiver import Modality as TheirModality

pytestmark = pytest.mark.timeout(60)


def rows_of(item: MediaItem) -> Embedding:
    """`width` rows of (width, row number): a test sees whose rows came, and in which order."""
    values = [number for row in range(item.width) for number in (item.width, row)]
    return Embedding(
        modality=item.modality,
        kind=OutputKind.TOKENS,
        shape=(item.width, 2),
        dtype="float32",
        num_tokens=item.width,
        digest=item.digest,
        data=struct.pack(f"<{len(values)}f", *values),
        grid=(1, 2, item.width * 2),
        replica=0,
    )


def wanted(*widths: int) -> np.ndarray[Any, Any]:
    return np.array([(width, row) for width in widths for row in range(width)], np.float32)


@dataclass
class Served:
    service: FakeService
    http: httpx.AsyncClient
    front_end: HttpFrontEnd

    async def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """On a connection of its own: httpx's pool takes seconds to find one among a thousand."""
        raw = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.http.base_url.port)
        try:
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
            writer.write(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
            top, _, rest = (await reader.read()).partition(b"\r\n\r\n")
        finally:
            writer.close()
        return httpx.Response(int(top.split()[1]), content=rest)

    async def encode(self, req_id: str = "r_local_part_0", *items: Any, **fields: Any) -> httpx.Response:
        body = {
            "encoder_idx": 0,
            "encoder_url": "http://encoder",
            "mm_items": list(items) or [picture(3)],
            "num_parts": 2,
            "part_idx": 1,
            "req_id": req_id,
            "modality": "IMAGE",
            "prefill_host": "127.0.0.1",
            "embedding_port": None,
            "time_stats_json": None,
            **fields,
        }
        return await self.post("/encode", body)

    async def register(self, receiver: Receiver, req_id: str = "r_local_part_0", count: int = 1) -> httpx.Response:
        body = {"req_id": req_id, "receive_count": count, "receive_url": receiver.url, "modality": "IMAGE"}
        return await self.post("/scheduler_receive_url", body)

    def later(self, work: Any) -> asyncio.Task[httpx.Response]:
        return asyncio.create_task(work)

    async def idle(self) -> None:
        """Nothing is held any more."""
        while self.service.reserved or self.front_end.shared.dialect.staged_bytes:
            await asyncio.sleep(0.01)


def config(**changes: Any) -> Config:
    default = Config()
    sections: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
        section = next(
            s for s in ("sglang", "limits", "server", "media") if name in type(getattr(default, s)).__annotations__
        )
        sections.setdefault(section, {})[name] = value
    return replace(default, **{s: replace(getattr(default, s), **values) for s, values in sections.items()})


@asynccontextmanager
async def serving(settings: Config) -> AsyncIterator[Served]:
    service = FakeService()
    service.answer = rows_of
    sock = socket.create_server(("127.0.0.1", 0), backlog=2048)
    front_end = HttpFrontEnd(service, settings, sock)
    front_end._config.http.max_connections = 10_000  # type: ignore[union-attr]
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    task = asyncio.create_task(front_end.serve())
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=150, limits=limits, trust_env=False) as http:
        yield Served(service, http, front_end)
    front_end.stop(0.5)
    await task


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    """The default backend, zmq_to_scheduler."""
    async with serving(config()) as served:
        yield served


@pytest.fixture
async def to_tokenizer() -> AsyncIterator[Served]:
    async with serving(config(encoder_transfer_backend="zmq_to_tokenizer")) as served:
        yield served


def check(message: Message, *widths: int, req_id: str = "r_local_part_0") -> None:
    head = message.head
    assert (head.req_id, head.num_parts, head.part_idx) == (req_id, 2, 1)
    assert (head.modality, head.error_msg) == (TheirModality.IMAGE, None)
    assert head.grid_dim == [[1, 2, width * 2] for width in widths]
    assert np.array_equal(message.values(), wanted(*widths))


def refused(reply: httpx.Response, status: int, *words: str, req_id: str | None = "r_local_part_0") -> str:
    assert reply.status_code == status, reply.text
    body = reply.json()
    assert set(body) == {"status", "message", "req_id"}
    assert (body["status"], body["req_id"]) == ("error", req_id)
    assert all(word in body["message"] for word in words), body["message"]
    return str(body["message"])


def ok(reply: httpx.Response) -> None:
    assert (reply.status_code, reply.json()) == (200, None), reply.text


# -- zmq_to_tokenizer


async def test_to_the_tokenizer_before_the_reply(to_tokenizer: Served) -> None:
    with Receiver() as receiver:
        ok(await to_tokenizer.encode("r_local_part_0", picture(3), picture(5), embedding_port=receiver.port))
        check(await receiver.message(), 3, 5)
        assert await receiver.nothing_more()
    (request,) = to_tokenizer.service.seen
    assert (request.output, request.request_id) == (OutputKind.TOKENS, "r_local_part_0")
    await to_tokenizer.idle()


async def test_to_a_tokenizer_on_ipv6(to_tokenizer: Served) -> None:
    with Receiver(host="::1") as receiver:
        for host in ("::1", "[::1]"):
            ok(await to_tokenizer.encode("r_local_part_0", embedding_port=receiver.port, prefill_host=host, part_idx=1))
            check(await receiver.message(), 3)
            break


async def test_a_tokenizer_that_is_gone_is_a_502(to_tokenizer: Served) -> None:
    with Receiver() as receiver:
        port = receiver.port
    refused(await to_tokenizer.encode(embedding_port=port), 502, f"127.0.0.1:{port}", "cannot be reached")
    await to_tokenizer.idle()


async def test_backends_that_do_not_fit_are_named(to_tokenizer: Served) -> None:
    refused(await to_tokenizer.encode(), 400, "embedding_port", "zmq_to_tokenizer")
    with Receiver() as receiver:
        refused(await to_tokenizer.register(receiver), 400, "zmq_to_tokenizer")


async def test_a_list_of_ports_is_a_copy_each(served: Served) -> None:
    with Receiver() as one, Receiver() as two:
        ok(await served.encode(embedding_port=[one.port, two.port]))
        check(await one.message(), 3)
        check(await two.message(), 3)
        refused(await served.register(one), 400, "embedding_port")


# -- zmq_to_scheduler: who comes first


async def test_registrations_before_the_request(served: Served) -> None:
    with Receiver() as one, Receiver() as two:
        early = [served.later(served.register(one, count=2)), served.later(served.register(two, count=2))]
        while served.front_end.shared.dialect.num_parts == 0:
            await asyncio.sleep(0.01)
        ok(await served.encode())
        for reply in early:
            ok(await reply)
        check(await one.message(), 3)
        check(await two.message(), 3)
        assert await one.nothing_more() and await two.nothing_more()
    await served.idle()


async def test_registrations_while_it_is_encoded_and_after(served: Served) -> None:
    served.service.gate.clear()
    with Receiver() as during, Receiver() as after:
        encode = served.later(served.encode())
        await served.service.arrived.wait()
        ok(await served.register(during, count=2))
        served.service.gate.set()
        check(await during.message(), 3)
        assert not encode.done()
        ok(await served.register(during, count=2))  # said twice, sent once
        ok(await served.register(after, count=2))
        ok(await encode)
        check(await after.message(), 3)
        ok(await served.register(after, count=2))
        assert await during.nothing_more() and await after.nothing_more()
    await served.idle()


async def test_registrations_do_not_wait_for_encodes(served: Served) -> None:
    """Hundreds of encodes are stuck; to register takes no notice."""
    served.service.gate.clear()
    encodes = [served.later(served.encode(f"r{n}")) for n in range(300)]
    while len(served.service.seen) < 300:
        await asyncio.sleep(0.01)
    with Receiver() as receiver:
        for n in range(300):
            ok(await served.register(receiver, f"r{n}"))
        assert (await served.http.get("/health")).status_code == 200
        served.service.gate.set()
        for encode in encodes:
            ok(await encode)
        assert {(await receiver.message()).head.req_id for _ in range(300)} == {f"r{n}" for n in range(300)}


async def test_receivers_that_contradict(served: Served) -> None:
    served.service.gate.clear()
    with Receiver() as one, Receiver() as two:
        encode = served.later(served.encode())
        await served.service.arrived.wait()
        ok(await served.register(one, count=1))
        refused(await served.register(two, count=2), 400, "receive_count")
        refused(await served.register(two, count=1), 400, "all 1 receivers")
        served.service.gate.set()
        ok(await encode)
        assert await two.nothing_more(1)


# -- failures


async def test_an_error_reaches_every_rank_whenever_it_registers(served: Served) -> None:
    served.service.answer = failing(EncoderError(ErrorCode.WORKER_DIED, "it died twice"), width=4)
    served.service.gate.clear()
    with Receiver() as one, Receiver() as two, Receiver() as three:
        early = served.later(served.register(one, count=3))
        while served.front_end.shared.dialect.num_parts == 0:
            await asyncio.sleep(0.01)
        encode = served.later(served.encode("r_local_part_0", picture(3), picture(4)))
        await served.service.arrived.wait()
        ok(await early)
        ok(await served.register(two, count=3))
        served.service.gate.set()
        message = refused(await encode, 500, "mm_items[1]", "it died twice")
        ok(await served.register(three, count=3))
        for receiver in (one, two, three):
            got = await receiver.message()
            assert (got.head.error_msg, got.head.error_code, got.rows) == (message, 500, None)
            assert (got.head.req_id, got.head.part_idx) == ("r_local_part_0", 1)
            assert await receiver.nothing_more(20)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (ErrorCode.QUEUE_FULL, 503),
        (ErrorCode.NOT_READY, 503),
        (ErrorCode.DRAINING, 503),
        (ErrorCode.DEADLINE_EXCEEDED, 504),
        (ErrorCode.INTERNAL, 500),
    ],
)
async def test_what_the_service_refuses(served: Served, code: ErrorCode, status: int) -> None:
    served.service.refusal = EncoderError(code, "not now")
    refused(await served.encode(), status, "not now")
    with Receiver() as late:
        ok(await served.register(late))
        assert (await late.message()).head.error_code == status


async def test_an_error_without_words_is_an_error(served: Served) -> None:
    served.service.refusal = EncoderError(ErrorCode.INTERNAL, "")
    message = refused(await served.encode(), 500)
    assert message
    with Receiver() as late:
        await served.register(late)
        assert (await late.message()).head.error_msg == message


async def test_a_fault_of_the_server(served: Served) -> None:
    served.service.refusal = RuntimeError("secret")
    message = refused(await served.encode(), 500)
    assert "secret" not in message


async def test_a_failure_may_be_tried_again(served: Served) -> None:
    served.service.refusal = EncoderError(ErrorCode.QUEUE_FULL, "full")
    refused(await served.encode(), 503)
    served.service.refusal = None
    encode = served.later(served.encode())
    while len(served.service.seen) < 2:
        await asyncio.sleep(0.01)
    with Receiver() as receiver:
        ok(await served.register(receiver))
        ok(await encode)
        check(await receiver.message(), 3)


async def test_a_rank_that_is_gone_fails_the_part_and_the_others_have_it(served: Served) -> None:
    with Receiver() as gone:
        url = gone.url
    served.service.gate.clear()
    encode = served.later(served.encode())
    await served.service.arrived.wait()
    with Receiver() as good:
        body = {"req_id": "r_local_part_0", "receive_count": 2, "receive_url": url}
        ok(await served.http.post("/scheduler_receive_url", json=body))
        ok(await served.register(good, count=2))
        served.service.gate.set()
        refused(await encode, 502, url)
        check(await good.message(), 3)
        assert await good.nothing_more(50), "one message for a part, not an error after its rows"
    await served.idle()


async def test_missing_registrations_end_in_time() -> None:
    async with serving(config(send_timeout_s=0.5)) as served:
        with Receiver() as one:
            encode = served.later(served.encode())
            await served.service.arrived.wait()
            ok(await served.register(one, count=2))
            refused(await encode, 504, "1 of 2 receivers have registered", "--send-timeout-s")
            check(await one.message(), 3)
        refused(await served.encode("other"), 504, "no receiver has registered", req_id="other")
        await served.idle()
        while served.front_end.shared.dialect.num_parts:
            await asyncio.sleep(0.05)


async def test_registrations_without_a_request_end_and_are_forgotten() -> None:
    async with serving(config(request_timeout_s=0.5)) as served:
        with Receiver() as receiver:
            early = [served.later(served.register(receiver, f"never{n}")) for n in range(50)]
            early.append(
                served.later(served.http.post("/scheduler_receive_meta_data", json={"req_id": "no", "part_idx": 0}))
            )
            assert {(await reply).status_code for reply in early} == {504}
        assert served.front_end.shared.dialect.num_parts == 0
        assert not served.front_end.shared.dialect._lives


async def test_who_hangs_up_while_waiting_leaves_nothing_behind(served: Served) -> None:
    with Receiver() as receiver:
        early = served.later(served.register(receiver))
        while served.front_end.shared.dialect.num_parts == 0:
            await asyncio.sleep(0.01)
        early.cancel()
        while served.front_end.shared.dialect.num_parts:
            await asyncio.sleep(0.01)
        assert not served.front_end.shared.dialect._lives


# -- duplicates and lost callers


async def test_an_equal_request_waits_for_the_first(served: Served) -> None:
    served.service.gate.clear()
    first = served.later(served.encode(time_stats_json="1", encoder_idx=0))
    await served.service.arrived.wait()
    second = served.later(served.encode(time_stats_json="2", encoder_idx=1))
    refused(await served.encode("r_local_part_0", picture(7)), 409, "another body")
    with Receiver() as receiver:
        ok(await served.register(receiver))
        served.service.gate.set()
        ok(await first)
        ok(await second)
        check(await receiver.message(), 3)
        ok(await served.encode())  # a late retry: the same answer, and no second copy
        assert await receiver.nothing_more()
    assert len(served.service.seen) == 1
    ok_again = served.later(served.encode("r_local_part_0", picture(7)))  # an id may be used again after its end
    with Receiver() as receiver:
        while len(served.service.seen) < 2:
            await asyncio.sleep(0.01)
        ok(await served.register(receiver))
        ok(await ok_again)
        check(await receiver.message(), 7)


async def test_a_client_that_timed_out_and_tries_again_loses_nothing(served: Served) -> None:
    served.service.gate.clear()
    first = served.later(served.encode())
    await served.service.arrived.wait()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    second = served.later(served.encode())
    with Receiver() as receiver:
        ok(await served.register(receiver))
        served.service.gate.set()
        ok(await second)
        check(await receiver.message(), 3)
    assert len(served.service.seen) == 1
    assert not served.service.cancelled


async def test_what_nobody_waits_for_is_cancelled(served: Served) -> None:
    served.front_end.shared.dialect._parts._limits = replace(
        served.front_end.shared.dialect._parts._limits, lonely_s=0.2
    )
    served.service.gate.clear()
    encode = served.later(served.encode())
    await served.service.arrived.wait()
    encode.cancel()
    while not served.service.cancelled:
        await asyncio.sleep(0.01)
    await served.idle()
    with Receiver() as late:
        ok(await served.register(late))
        assert (await late.message()).head.error_code == 503


async def test_receivers_keep_a_part_whose_caller_has_gone(served: Served) -> None:
    served.front_end.shared.dialect._parts._limits = replace(
        served.front_end.shared.dialect._parts._limits, lonely_s=0.1
    )
    served.service.gate.clear()
    encode = served.later(served.encode())
    await served.service.arrived.wait()
    with Receiver() as receiver:
        ok(await served.register(receiver))
        encode.cancel()
        await asyncio.sleep(0.6)
        served.service.gate.set()
        check(await receiver.message(), 3)
    assert not served.service.cancelled


# -- bounds


async def test_staged_embeddings_are_bounded_in_bytes() -> None:
    async with serving(config(max_staged_bytes=100)) as served:
        first = served.later(served.encode("a", picture(10)))  # 80 bytes
        while not served.front_end.shared.dialect.staged_bytes:
            await asyncio.sleep(0.01)
        refused(await served.encode("b", picture(10)), 503, "--max-staged-bytes", req_id="b")
        with Receiver() as receiver:
            ok(await served.register(receiver, "a"))
            ok(await first)
            again = served.later(served.encode("b", picture(10)))
            while not served.front_end.shared.dialect.staged_bytes:
                await asyncio.sleep(0.01)
            ok(await served.register(receiver, "b"))
            ok(await again)
        await served.idle()


async def test_media_are_let_go_of_before_receivers_come(served: Served) -> None:
    encode = served.later(served.encode())
    while not served.front_end.shared.dialect.staged_bytes:
        await asyncio.sleep(0.01)
    assert served.service.reserved == 0
    with Receiver() as receiver:
        ok(await served.register(receiver))
    await encode


async def test_requests_in_hand_are_bounded_in_number() -> None:
    async with serving(config(max_queued_items=3)) as served:
        served.service.gate.clear()
        encodes = [served.later(served.encode(f"r{n}")) for n in range(3)]
        while len(served.service.seen) < 3:
            await asyncio.sleep(0.01)
        with Receiver() as receiver:
            early = served.later(served.register(receiver, "more"))
            while served.front_end.shared.dialect.num_parts < 4:
                await asyncio.sleep(0.01)
            refused(await served.encode("more"), 503, "too many", req_id="more")
            ok(await early)
            assert (await receiver.message()).head.error_code == 503
        for encode in encodes:
            encode.cancel()


@pytest.mark.timeout(200)
async def test_a_thousand_at_once_are_all_answered(served: Served) -> None:
    """Early, late, doubled and missing registrations together; every call gets an answer, no part comes twice."""
    receivers = [Receiver() for _ in range(2)]
    count = 1000

    async def one(n: int) -> tuple[int, int]:
        part_id = f"r{n}_local_part_0"
        registrations = [served.register(r, part_id, 2) for r in receivers]
        if n % 10 == 9:  # the second rank never comes
            registrations.pop().close()  # a coroutine that is not begun
        if n % 3 == 0:  # a rank says it twice
            registrations.append(served.register(receivers[0], part_id, 2))
        encode = served.later(served.encode(part_id, picture(2)))
        if n % 2:
            await asyncio.sleep(0.05 * (n % 7))
        replies = await asyncio.gather(*registrations)
        assert {reply.status_code for reply in replies} <= {200, 400}
        return n, (await encode).status_code

    try:
        # Long beside a slow machine: only the missing wait for it.
        settings = replace(served.front_end.shared.dialect._parts._limits, staged_s=40.0)
        served.front_end.shared.dialect._parts._limits = settings
        answers = dict(await asyncio.gather(*(one(n) for n in range(count))))
        assert answers == {n: 504 if n % 10 == 9 else 200 for n in range(count)}
        for place, receiver in enumerate(receivers):
            due = count if place == 0 else count - count // 10
            got = [(await receiver.message()).head.req_id for _ in range(due)]
            assert len(set(got)) == due
            assert await receiver.nothing_more(1)
    finally:
        for receiver in receivers:
            receiver.close()
    await served.idle()


# -- items


async def sent(served: Served, *items: Any, **fields: Any) -> httpx.Response:
    with Receiver() as receiver:
        return await served.encode("r_local_part_0", *items, embedding_port=receiver.port, **fields)


def good_forms(folder: Path) -> dict[str, Any]:
    data = picture_file(3)
    file = folder / "a b.png"
    file.write_bytes(data)
    digest = "sha256:" + hashlib.sha256(data).hexdigest()
    text = base64.b64encode(data).decode()
    return {
        "data URI": picture(3),
        "bare base64": text,
        "object": {"url": picture(3)},
        "object with options": {"url": picture(3), "detail": "auto", "max_dynamic_patch": 4},
        "object with its digest": {"url": text, "content_hash": digest},
        "digest in capitals": {"url": text, "content_hash": "sha256:" + digest[7:].upper()},
        "nested": [[picture(3)]],
        "file URL": "file://" + str(file).replace(" ", "%20"),
        "path": str(file),
    }


async def test_forms_of_items(tmp_path: Path) -> None:
    async with serving(config(allowed_local_media_path=str(tmp_path))) as served:
        for name, item in good_forms(tmp_path).items():
            reply = await sent(served, item)
            assert reply.status_code == 200, (name, reply.text)
        ok(await sent(served, mm_items=picture(3)))  # a scalar
        ok(await sent(served, [picture(3), picture(5)], [picture(4)]))
        assert [item.width for item in served.service.seen[-1].items] == [3, 5, 4]


async def test_jpeg_base64_begins_like_a_path(served: Served) -> None:
    refused(await sent(served, base64.b64encode(b"\xff\xd8\xff\xe0 no picture").decode()), 400, "mm_items[0]")


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ({"url": picture(3), "content_hash": "sha256:" + "0" * 64}, ["mm_items[0]", "content_hash"]),
        ({"url": picture(3), "content_hash": "md5:1"}, ["mm_items[0]", "sha256:"]),
        ({"image": picture(3)}, ["mm_items[0]", "url"]),
        ({"url": 5}, ["mm_items[0]", "url"]),
        ([], ["mm_items"]),
        (5, ["mm_items[0]"]),
        ("", ["mm_items[0]"]),
        ("!!!", ["mm_items[0]", "base64"]),
        ("/etc/passwd.png", ["mm_items[0]", "--allowed-local-media-path"]),
        ("file:///etc/passwd", ["mm_items[0]", "--allowed-local-media-path"]),
        ("photo.png", ["mm_items[0]", "absolute"]),
        ("http://127.0.0.1:1/x.png?token=SECRET", ["mm_items[0]"]),
        ("data:image/png;base64,AAAA", ["mm_items[0]"]),
        ([[[[[[[[[[picture(3)]]]]]]]]]], ["nested"]),
        (None, ["mm_items[0]"]),
    ],
)
async def test_bad_items_are_a_400_that_echoes_nothing(served: Served, item: Any, words: list[str]) -> None:
    message = refused(await sent(served, item), 400, *words)
    assert "SECRET" not in message and "passwd" not in message
    assert not served.service.seen
    await served.idle()


async def test_an_errors_text_holds_no_media(served: Served) -> None:
    text = "data:image/png;base64," + "QUJD" * 1000
    assert "QUJD" not in refused(await sent(served, text), 400)


async def test_one_bad_item_fails_the_part_before_work(served: Served) -> None:
    refused(await sent(served, picture(3), "data:,x", picture(4)), 400, "mm_items[1]")
    assert not served.service.seen


@pytest.mark.parametrize("modality", ["VIDEO", "audio"])
async def test_other_modalities(served: Served, modality: str) -> None:
    refused(await sent(served, modality=modality), 400, modality.upper(), "not served", "IMAGE")
    with Receiver() as receiver:
        served.later(served.encode("v", modality=modality))
        while served.front_end.shared.dialect.num_parts < 2:
            await asyncio.sleep(0.01)
        ok(await served.register(receiver, "v"))
        head = (await receiver.message()).head
        assert (head.error_code, head.modality.name) == (400, modality.upper())


async def test_a_model_without_tokens(served: Served) -> None:
    assert served.service.model is not None
    served.service.model = replace(served.service.model, outputs=(OutputKind.POOLED,))
    refused(await sent(served), 400, "tokens")


async def test_items_that_do_not_fit_together(served: Served) -> None:
    def answer(item: MediaItem) -> Embedding:
        made = rows_of(item)
        return replace(made, dtype="float16" if item.width == 4 else "float32")

    served.service.answer = answer
    refused(await sent(served, picture(3), picture(4)), 500, "one table")


# -- bodies


@pytest.mark.parametrize(
    ("changes", "word", "req_id"),
    [
        ({"req_id": None}, "req_id", None),
        ({"req_id": ""}, "req_id", None),
        ({"req_id": 5}, "req_id", None),
        ({"req_id": "x" * 513}, "req_id", None),
        ({"modality": None}, "modality", "r_local_part_0"),
        ({"modality": "SMELL"}, "modality", "r_local_part_0"),
        ({"mm_items": None}, "mm_items", "r_local_part_0"),
        ({"mm_items": []}, "mm_items", "r_local_part_0"),
        ({"num_parts": 0}, "num_parts", "r_local_part_0"),
        ({"num_parts": True}, "num_parts", "r_local_part_0"),
        ({"num_parts": "2"}, "num_parts", "r_local_part_0"),
        ({"part_idx": 2}, "part_idx", "r_local_part_0"),
        ({"part_idx": -1}, "part_idx", "r_local_part_0"),
        ({"part_idx": False}, "part_idx", "r_local_part_0"),
        ({"embedding_port": 0}, "port", "r_local_part_0"),
        ({"embedding_port": 65536}, "port", "r_local_part_0"),
        ({"embedding_port": "80"}, "port", "r_local_part_0"),
        ({"embedding_port": []}, "port", "r_local_part_0"),
        ({"embedding_port": 80, "prefill_host": None}, "prefill_host", "r_local_part_0"),
        ({"embedding_port": 80, "prefill_host": "a b"}, "host", "r_local_part_0"),
        ({"embedding_port": 80, "prefill_host": "a/b"}, "host", "r_local_part_0"),
    ],
)
async def test_fields_of_encode(served: Served, changes: dict[str, Any], word: str, req_id: str | None) -> None:
    refused(
        await served.encode(**changes) if "req_id" not in changes else await _with(served, changes),
        400,
        word,
        req_id=req_id,
    )
    assert not served.service.seen


async def _with(served: Served, changes: dict[str, Any]) -> httpx.Response:
    body = {"mm_items": [picture(3)], "num_parts": 1, "part_idx": 0, "modality": "IMAGE", **changes}
    return await served.http.post("/encode", json=body)


@pytest.mark.parametrize("path", ["/encode", "/scheduler_receive_url", "/scheduler_receive_meta_data", "/send"])
async def test_bodies_that_are_no_object(served: Served, path: str) -> None:
    for body in (b"", b"[]", b"nonsense", b'{"req_id": "x"', b"\xff", b"[" * 60_000):
        reply = await served.http.post(path, content=body, headers={"content-type": "application/json"})
        refused(reply, 422, "JSON object", req_id=None)
    reply = await served.http.post(path, content=b"{}", headers={"content-type": "text/plain"})
    refused(reply, 415, "application/json", req_id=None)


@pytest.mark.parametrize(
    "changes",
    [
        {"receive_url": "nohost"},
        {"receive_url": "host:0"},
        {"receive_url": "host:99999"},
        {"receive_url": "a b:80"},
        {"receive_url": "[::1:80"},
        {"receive_url": None},
        {"receive_count": 0},
        {"receive_count": None},
        {"receive_count": True},
        {"receive_count": 10**9},
        {"req_id": None},
    ],
)
async def test_fields_of_a_registration(served: Served, changes: dict[str, Any]) -> None:
    body = {"req_id": "r", "receive_count": 1, "receive_url": "127.0.0.1:80", **changes}
    reply = await served.http.post("/scheduler_receive_url", json=body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["status"] == "error"
    assert served.front_end.shared.dialect.num_parts == 0


async def test_a_control_body_is_small(served: Served) -> None:
    reply = await served.http.post("/scheduler_receive_url", json={"req_id": "r", "x": "y" * 100_000})
    refused(reply, 413, req_id=None)


async def test_too_many_items() -> None:
    async with serving(config(max_items_per_request=2)) as served:
        refused(await sent(served, picture(1), picture(2), picture(3)), 400, "--max-items-per-request")


# -- the other routes


async def test_metadata_waits_for_the_rows(served: Served) -> None:
    served.service.gate.clear()
    ask: Callable[[str], Any] = lambda part_id: served.http.post(  # noqa: E731
        "/scheduler_receive_meta_data", json={"req_id": part_id, "part_idx": 1}
    )
    before = served.later(ask("r_local_part_0"))
    while not served.front_end.shared.dialect.num_parts:
        await asyncio.sleep(0.01)
    with Receiver() as receiver:
        encode = served.later(served.encode("r_local_part_0", picture(3), picture(5), embedding_port=receiver.port))
        await served.service.arrived.wait()
        during = served.later(ask("r_local_part_0"))
        served.service.gate.set()
        await encode
        want = {"req_id": "r_local_part_0", "part_idx": 1, "embedding_size": 64, "embedding_len": 8, "embedding_dim": 2}
        for reply in (await before, await during, await ask("r_local_part_0")):
            assert (reply.status_code, reply.json()) == (200, want)
    served.service.refusal = EncoderError(ErrorCode.INTERNAL, "broken")
    refused(await served.encode("bad"), 500, req_id="bad")
    refused(await ask("bad"), 500, "broken", req_id="bad")


async def test_send_names_the_backend(served: Served) -> None:
    reply = await served.http.post("/send", json={"req_id": "r", "session_id": "s", "buffer_address": 1})
    refused(reply, 400, "mooncake", "zmq_to_scheduler", req_id="r")


async def test_health_generate_says_what_health_says(served: Served) -> None:
    for ready, status in ((True, 200), (False, 503)):
        served.service.state = replace(served.service.state, ready=ready)
        assert (await served.http.get("/health_generate")).status_code == status
        assert (await served.http.get("/health")).status_code == status


async def test_transfers_are_measured(served: Served) -> None:
    with Receiver() as receiver:
        await served.encode(embedding_port=receiver.port)
    text = (await served.http.get("/metrics")).text
    assert 'spmd_encoder_transfer_seconds_count{backend="zmq_to_scheduler",outcome="ok"} 1.0' in text


async def test_the_end_of_the_server_is_told_to_all(served: Served) -> None:
    with Receiver() as receiver:
        early = served.later(served.register(receiver, "never"))
        waiting = served.later(served.encode("staged"))
        while not served.front_end.shared.dialect.staged_bytes:
            await asyncio.sleep(0.01)
        ok(await served.register(receiver, "staged", count=2))
        check(await receiver.message(), 3, req_id="staged")
        served.service.gate.clear()
        encoding = served.later(served.encode("encoding"))
        while len(served.service.seen) < 2:
            await asyncio.sleep(0.01)
        ok(await served.register(receiver, "encoding"))
        served.front_end.stop(0.2)
        for call, req_id in ((early, "never"), (waiting, "staged"), (encoding, "encoding")):
            refused(await call, 503, req_id=req_id)
        head = (await receiver.message()).head
        assert (head.req_id, head.error_code) == ("encoding", 503)


def test_every_code_has_a_status() -> None:
    from spmd_encoder.frontends.sglang.refusal import STATUS

    assert set(STATUS) == set(ErrorCode)
