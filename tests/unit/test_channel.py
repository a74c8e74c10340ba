"""The orders channel over real sockets: numbered orders, and only for members."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq

from spmd_encoder.api.profiling import ProfileOutcome
from spmd_encoder.distributed.channel import FollowerChannel, LeaderChannel
from spmd_encoder.wire.codec import WireError
from spmd_encoder.wire.orders import FollowerHello, ProfileDone, RunBatch, StopFollower
from spmd_encoder.wire.sockets import Context, new_context

SECRET = "open sesame"


@pytest.fixture
async def contexts() -> AsyncIterator[Iterator[Context]]:
    """A context per process that the test plays."""
    with ExitStack() as stack:

        def fresh() -> Iterator[Context]:
            while True:
                context = new_context()
                stack.callback(context.destroy, linger=0)
                yield context

        yield fresh()


def order(number: int) -> RunBatch:
    return RunBatch(order=number, shards=((),))


async def test_every_follower_gets_every_order_in_turn(contexts: Iterator[Context], tmp_path: Path) -> None:
    leader = LeaderChannel(next(contexts), {1, 2}, SECRET, path=tmp_path / "orders", host="")
    followers = [FollowerChannel(next(contexts), address=leader.address, tp_rank=rank, token=SECRET) for rank in (1, 2)]
    await leader.wait_for_followers(5.0)
    for number in range(50):
        leader.send(order(number))
    leader.send(StopFollower(order=50))
    for follower in followers:
        got = [await asyncio.wait_for(follower.receive(), 30) for _ in range(51)]
        assert got == [*(order(number) for number in range(50)), StopFollower(order=50)]
        follower.close()
    leader.close()


async def test_a_group_of_one_waits_for_nobody(contexts: Iterator[Context], tmp_path: Path) -> None:
    leader = LeaderChannel(next(contexts), set(), SECRET, path=tmp_path / "orders", host="")
    await leader.wait_for_followers(0.01)
    leader.send(order(0))
    leader.close()


async def test_who_is_missing_is_named(contexts: Iterator[Context], tmp_path: Path) -> None:
    leader = LeaderChannel(next(contexts), {1, 2, 3}, SECRET, path=tmp_path / "orders", host="")
    here = [FollowerChannel(next(contexts), address=leader.address, tp_rank=rank, token=SECRET) for rank in (2, 9)]
    with pytest.raises(TimeoutError, match=r"TP ranks \[1, 3\]"):
        await leader.wait_for_followers(0.5)
    leader.close()
    for channel in here:
        channel.close()


async def test_without_the_secret_nobody_is_a_member(contexts: Iterator[Context]) -> None:
    leader = LeaderChannel(next(contexts), {1}, SECRET, path=None, host="127.0.0.1")
    guesser = FollowerChannel(next(contexts), address=leader.address, tp_rank=1, token="guess")
    naked = next(contexts).socket(zmq.DEALER)
    naked.connect(leader.address)
    await naked.send(b"\x82\xa4type\xadFollowerHello\xa7tp_rank\x01")
    with pytest.raises(TimeoutError):
        await leader.wait_for_followers(0.5)
    member = FollowerChannel(next(contexts), address=leader.address, tp_rank=1, token=SECRET)
    await leader.wait_for_followers(5.0)
    for channel in (guesser, member, leader):
        channel.close()


async def test_a_lost_order_is_noticed(contexts: Iterator[Context], tmp_path: Path) -> None:
    leader = LeaderChannel(next(contexts), {1}, SECRET, path=tmp_path / "orders", host="")
    follower = FollowerChannel(next(contexts), address=leader.address, tp_rank=1, token=SECRET)
    await leader.wait_for_followers(5.0)
    leader.send(order(0))
    leader.send(order(2))
    assert await follower.receive() == order(0)
    with pytest.raises(WireError, match="order 2 came where 1 was due"):
        await asyncio.wait_for(follower.receive(), 30)
    leader.close()


async def test_answers_come_back_by_rank_and_from_members_only(contexts: Iterator[Context], tmp_path: Path) -> None:
    leader = LeaderChannel(next(contexts), {1, 2}, SECRET, path=tmp_path / "orders", host="")
    ends = {
        rank: FollowerChannel(next(contexts), address=leader.address, tp_rank=rank, token=SECRET) for rank in (1, 2, 9)
    }
    await leader.wait_for_followers(5.0)
    answers = {rank: ProfileDone(order=rank, outcome=ProfileOutcome(rank=rank, dp_rank=0, tp_rank=0)) for rank in ends}
    for rank in (9, 2):
        ends[rank].send(answers[rank])
    assert await asyncio.wait_for(leader.receive(), 30) == (2, answers[2])
    ends[1]._socket.send(FollowerHello(tp_rank=1))
    ends[1]._socket.send(order(0))
    ends[1].send(answers[1])
    assert await asyncio.wait_for(leader.receive(), 30) == (1, answers[1])
    leader.close()
    for end in ends.values():
        end.close()
