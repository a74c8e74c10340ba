"""Who may ask by which name: a web page's own name that leads to loopback is no way in."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from dataclasses import replace

import openai
import pytest

from spmd_encoder.frontends.http.hosts import host_rule
from tests.harness.fake_server import fake_server
from tests.unit.test_http_wire import CONFIG, Served, post, serve_fake

pytestmark = pytest.mark.timeout(30)

OWN = ["localhost", "LocalHost:30000", "localhost.", "enc.localhost", "127.0.0.1:80", "10.1.2.3", "[::1]:30000"]
FOREIGN = ["evil.test", "localhost.evil.test", "127.0.0.1.evil.test", "notlocalhost", "2130706433", ""]


def get(path: str, host: str | None, version: str = "1.1", method: str = "GET") -> bytes:
    line = "" if host is None else f"Host: {host}\r\n"
    return f"{method} {path} HTTP/{version}\r\n{line}\r\n".encode()


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serve_fake() as served:
        yield served


async def test_foreign_names_lead_nowhere(served: Served) -> None:
    for host in FOREIGN:
        for path in ("/health/live", "/docs", "/info", "/nowhere"):
            wire = await served.connect()
            wire.send(get(path, host))
            reply = await wire.reply()
            assert (reply.status, reply.code) == (421, "HOST_NOT_ALLOWED"), host
            assert reply.headers["x-spmd-replica"] == "none"
            wire.close()
    wire = await served.connect()
    wire.send(post(b"{}", "Origin: http://evil.test").replace(b"Host: localhost", b"Host: evil.test"))
    assert (await wire.reply()).status == 421
    assert served.service.seen == []


async def test_own_names_do(served: Served) -> None:
    wire = await served.connect()
    for host in OWN:
        wire.send(get("/health/live", host))
        assert (await wire.reply()).status == 200, host
    wire.send(get("/health/live", None, "1.0"))
    assert (await wire.reply()).status == 200


async def test_names_can_be_allowed() -> None:
    config = replace(CONFIG, server=replace(CONFIG.server, allowed_hosts=("Enc.Example.", "other.test")))
    async with serve_fake(config=config) as served:
        wire = await served.connect()
        for host, status in (("enc.example:80", 200), ("other.test", 200), ("localhost", 200), ("evil.test", 421)):
            wire.send(get("/health/live", host))
            assert (await wire.reply()).status == status


@pytest.mark.parametrize(
    ("family", "address", "names", "holds"),
    [
        (socket.AF_INET, "127.0.0.1", (), True),
        (socket.AF_INET, "127.9.9.9", (), True),
        (socket.AF_INET, "0.0.0.0", (), False),
        (socket.AF_INET, "0.0.0.0", ("a.test",), True),
        (socket.AF_INET6, "::1", (), True),
        (socket.AF_INET6, "::ffff:127.0.0.1", (), True),
        (socket.AF_INET6, "::", (), False),
    ],
)
def test_where_the_rule_holds(family: socket.AddressFamily, address: str, names: tuple[str, ...], holds: bool) -> None:
    with socket.socket(family) as sock:
        try:
            sock.bind((address, 0))
        except OSError:
            pytest.skip(f"{address} is no address of this machine")
        assert (host_rule(sock, names) is not None) is holds


async def test_no_reply_leads_to_another_place(served: Served) -> None:
    wire = await served.connect()
    for path in ("/health/", "/v1/encode/", "/docs/", "//evil.test/health/"):
        wire.send(get(path, "localhost"))
        reply = await wire.reply()
        assert (reply.status, "location" in reply.headers) == (404, False)


async def test_head_and_allow(served: Served) -> None:
    wire = await served.connect()
    for path in ("/health", "/health/live", "/health/ready"):
        wire.send(get(path, "localhost", method="HEAD"))
        head = await wire.reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        wire.send(get(path, "localhost", method="DELETE"))
        reply = await wire.reply()
        assert (reply.status, reply.headers["allow"]) == (405, "GET, HEAD")


def test_a_model_by_its_name() -> None:
    with fake_server() as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        assert server.service.model is not None
        for name in ("fake", "Qwen/Qwen2.5-VL", "/models/a b"):
            server.service.model = replace(server.service.model, name=name)
            assert client.models.retrieve(name).id == name
        with pytest.raises(openai.NotFoundError) as missing:
            client.models.retrieve("gpt")
        assert missing.value.code == "model_not_found"
