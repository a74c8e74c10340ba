"""The dispatcher's sockets: strangers, noise, and replies that are none."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import zmq

from spmd_encoder.api.types import OutputKind, StageTimes
from spmd_encoder.errors import ErrorCode
from spmd_encoder.wire.messages import PROTOCOL_VERSION, Completed, Reform
from tests.harness.dispatcher_world import done, until, world


async def test_strangers_on_the_work_socket_disturb_nothing(tmp_path: Path) -> None:
    async with world(tmp_path, dp=2) as w:
        bad = [
            w.scheduler(0, secret="wrong"),
            w.scheduler(0, secret="ü"),
            w.scheduler(0, protocol=PROTOCOL_VERSION + 1),
            w.scheduler(0, config_digest="other"),
            w.scheduler(0, epoch=1),
            w.scheduler(7),
            w.scheduler(-1),
        ]
        nobody = w.context.socket(zmq.DEALER)
        nobody.connect(w.endpoint.work_address)
        await nobody.send_multipart([b"x" * 1000] * 5)
        raw = w.context.socket(zmq.DEALER)
        raw.plain_username, raw.plain_password = b"member", w.endpoint.token.encode()
        raw.connect(w.endpoint.work_address)
        deep = b"\x82\xa1x" + b"\x91" * 50_000 + b"\x90" + b"\xa4type\xa6Cancel"
        for frames in ([b""], [b"", b""], [b"\xc1"], [os.urandom(100)], [b"\x80"] * 5, [deep]):
            await raw.send_multipart(frames)
        schedulers = await w.up()
        for scheduler in schedulers:
            scheduler.held = True
        task = w.encode(b"aaaa")
        await until(lambda: any(s.open for s in schedulers))
        stolen = next(job for s in schedulers for job in s.open)
        bad[0].media[stolen.job_id] = b"fake"
        bad[0].complete(stolen)
        other = next(s for s in schedulers if not s.open)
        other.media[stolen.job_id] = b"fake"
        other.complete(stolen)  # a replica that does not have it in hand
        await asyncio.sleep(0.05)
        assert not task.done()
        for scheduler in schedulers:
            scheduler.release()
        assert await done(task) == [b"aaaa"]
        assert not any(stranger.jobs for stranger in bad)
        raw.close(linger=0)


async def test_strangers_on_the_control_socket_disturb_nothing(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        path = w.endpoint.control_address.removeprefix("unix:")
        for data in (b"", b"GET / HTTP/1.0\r\n\r\n", b"\xff" * 8, b"\0\0\0\1\xc1"):
            _, writer = await asyncio.open_unix_connection(path)
            writer.write(data)
            await writer.drain()
            writer.close()
        strangers = [
            await w.keeper(0, token="wrong"),
            await w.keeper(0, protocol=PROTOCOL_VERSION + 1),
            await w.keeper(9),
            await w.keeper(-1),
        ]
        await until(lambda: all(stranger.ended for stranger in strangers))
        await w.up()
        assert await done(w.encode(b"aaaa")) == [b"aaaa"]
        assert w.keepers[0].got == []


async def test_a_keeper_that_sends_noise_is_lost_and_may_come_back(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await w.up()
        w.keepers[0].stream._writer.write(b"\0\0\0\1\xc1")
        await until(lambda: w.dispatcher.ready_state().replicas_ready == 0)
        await until(lambda: w.keepers[0].ended)
        back = await w.keeper(0)
        await until(lambda: back.reforms() == [Reform(replica=0, epoch=1, pause_s=0.5)])
        w.scheduler(0, epoch=1)
        await until(lambda: w.dispatcher.ready_state().ready)


async def test_a_result_without_its_tensor_fails_its_item_alone(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        (scheduler,) = await w.up()
        scheduler.held = True
        task = w.encode(b"aaaa")
        await until(lambda: scheduler.open)
        scheduler.media[scheduler.open[0].job_id] = b""
        completed = Completed(
            job_id=scheduler.open[0].job_id,
            kind=OutputKind.TOKENS,
            shape=(),
            dtype="uint8",
            num_tokens=0,
            grid=None,
            times=StageTimes(),
        )
        scheduler.socket.send(completed)
        assert await done(task) == [ErrorCode.INTERNAL]
        scheduler.held = False
        assert await done(w.encode(b"bbbb")) == [b"bbbb"]
