"""The dispatcher when workers, keepers and probes fail: what is formed anew, and what becomes of the jobs."""

from __future__ import annotations

import asyncio
from pathlib import Path

from spmd_encoder.errors import ErrorCode
from spmd_encoder.wire.messages import Heartbeat, Reform, SchedulerStats, WorkerExited
from tests.harness.dispatcher_world import Scheduler, done, refused, until, world


async def test_a_lost_replicas_jobs_go_to_the_other(tmp_path: Path) -> None:
    async with world(tmp_path, dp=2) as w:
        first, second = await w.up()
        first.held = second.held = True
        task = w.encode(b"aaaa", b"bbbb", b"cccc", b"dddd")
        await until(lambda: len(first.open) == len(second.open) == 2)
        suspect, innocent = first.open
        w.keepers[0].report(0, suspect.job_id)
        await until(lambda: len(second.open) == 4)
        assert {job.job_id: job.alone for job in second.open[2:]} == {suspect.job_id: True, innocent.job_id: False}
        assert w.keepers[0].reforms() == [Reform(replica=0, epoch=1, pause_s=0.0)]
        assert w.keepers[1].reforms() == []
        first.release()  # a late voice from the dead epoch
        await asyncio.sleep(0.05)
        assert not task.done()
        second.release()
        assert await done(task) == [b"aaaa", b"bbbb", b"cccc", b"dddd"]
        assert w.dispatcher.ready_state().ready, "the other one serves"
        assert w.metric("spmd_encoder_items_retried") == 2
        assert w.metric('spmd_encoder_replica_reforms_total{dp_rank="0"}') == 1
        w.scheduler(0, epoch=0)
        again = w.scheduler(0, epoch=1)
        await until(lambda: w.dispatcher.ready_state().replicas_ready == 2)
        assert len(again.jobs) == 1


async def test_at_two_deaths_the_item_is_given_up_and_the_rest_is_served(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        (scheduler,) = await w.up()
        scheduler.held = True
        task = w.encode(b"evil", b"good")
        for epoch in (0, 1):
            await until(lambda: scheduler.open)  # noqa: B023
            evil = next(job for job in scheduler.open if scheduler.media[job.job_id] == b"evil")
            assert evil.alone is bool(epoch)
            w.keepers[0].report(epoch, evil.job_id)
            await until(lambda: len(w.keepers[0].reforms()) == epoch + 1)  # noqa: B023
            scheduler = w.scheduler(0, epoch=epoch + 1)
            scheduler.held = epoch == 0
        assert await done(task) == [ErrorCode.WORKER_DIED, b"good"]
        assert await done(w.encode(b"evil")) == [ErrorCode.WORKER_DIED]
        assert w.dispatcher.ready_state().ready


async def test_a_followers_death_waits_for_the_leaders_word(tmp_path: Path) -> None:
    async with world(tmp_path, tp=2) as w:
        (scheduler,) = await w.up()
        scheduler.held = True
        task = w.encode(b"aaaa", b"bbbb")
        await until(lambda: len(scheduler.open) == 2)
        w.keepers[1].report(0)
        await until(lambda: all(keeper.reforms() for keeper in w.keepers))
        assert w.outstanding() == [2], "nobody has said yet what was being worked on"
        w.keepers[0].report(0, scheduler.open[1].job_id)
        await until(lambda: w.outstanding() == [0])
        again = w.scheduler(0, epoch=1)
        assert await done(task) == [b"aaaa", b"bbbb"]
        assert [job.alone for job in again.real_jobs] == [False, True]


async def test_a_keepers_loss_settles_its_replicas_jobs(tmp_path: Path) -> None:
    async with world(tmp_path, dp=2) as w:
        first, second = await w.up()
        first.held = True
        task = w.encode(b"aaaa", b"bbbb")
        await until(lambda: len(first.open) == 1)
        await w.keepers[0].close()
        assert await done(task) == [b"aaaa", b"bbbb"]
        assert len(second.real_jobs) == 2
        assert w.dispatcher.ready_state().replicas_ready == 1
        await w.keepers[1].close()
        await until(lambda: w.dispatcher.ready_state().replicas_ready == 0)
        await refused(w.encode(b"cccc"), ErrorCode.NOT_READY)


async def test_a_failed_probe_forms_the_replica_anew(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        keeper = await w.keeper(0)
        bad = w.scheduler(0)
        bad.probe_error = ErrorCode.NON_FINITE
        await until(lambda: keeper.reforms() == [Reform(replica=0, epoch=1, pause_s=0.5)])
        assert not w.dispatcher.ready_state().started
        keeper.report(0)
        w.scheduler(0, epoch=1)
        await until(lambda: w.dispatcher.ready_state().ready)


async def beating(*schedulers: Scheduler, pause_s: float = 0.02) -> None:
    """As schedulers do, only more often."""
    while True:
        for scheduler in schedulers:
            scheduler.socket.send(Heartbeat(stats=SchedulerStats()))
        await asyncio.sleep(pause_s)


async def test_an_idle_replica_is_probed_and_a_busy_one_is_not(tmp_path: Path) -> None:
    async with world(tmp_path, dp=2, probe_interval_s=0.15) as w, asyncio.TaskGroup() as tasks:
        idle, busy = await w.up()
        beats = tasks.create_task(beating(idle, busy))
        busy.held = idle.held = True
        task = w.encode(b"aaaa", b"bbbb")
        await until(lambda: idle.open and busy.open)
        idle.release()
        await until(lambda: sum(job.probe for job in idle.jobs) >= 3)
        assert sum(job.probe for job in busy.jobs) == 1
        idle.probe_error = ErrorCode.INTERNAL
        await until(lambda: w.keepers[0].reforms())
        busy.release()
        assert await done(task) == [b"aaaa", b"bbbb"]
        beats.cancel()


async def test_probes_are_in_no_number_of_items(tmp_path: Path) -> None:
    async with world(tmp_path, probe_interval_s=0.1) as w:
        (scheduler,) = await w.up()
        await until(lambda: sum(job.probe for job in scheduler.jobs) >= 3)
        await done(w.encode(b"aaaa"))
        assert w.metric('spmd_encoder_items_total{outcome="ok"}') == 1
        assert w.metric('spmd_encoder_stage_seconds_count{stage="forward"}') == 1


async def test_a_probe_whose_decoder_had_no_processor_costs_no_replica(tmp_path: Path) -> None:
    """Such a decoder was replaced already, and the next probe tells."""
    async with world(tmp_path, probe_interval_s=0.1) as w:
        (scheduler,) = await w.up()
        scheduler.probe_error = ErrorCode.OVERLOADED
        before = sum(job.probe for job in scheduler.jobs)
        await until(lambda: sum(job.probe for job in scheduler.jobs) >= before + 3)
        assert w.keepers[0].reforms() == []
        assert w.dispatcher.ready_state().ready


async def test_a_world_that_does_not_come_up_ends(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        keeper = await w.keeper(0)
        for epoch in range(5):
            keeper.stream.send(
                WorkerExited(rank=0, epoch=epoch, code=1, reason="no model there", last_lines=("line one",))
            )
        stop = await asyncio.wait_for(asyncio.shield(w.dispatcher.ended), 30)
        assert stop.exit_code == 1
        assert all(text in stop.reason for text in ("replica 0", "no model there", "line one"))
        assert [reform.pause_s for reform in keeper.reforms()] == [0.5, 1.0, 2.0, 4.0]


async def test_a_worker_that_never_says_hello_is_replaced(tmp_path: Path) -> None:
    async with world(tmp_path, load_timeout_s=0.1) as w:
        keeper = await w.keeper(0)
        await until(lambda: keeper.reforms())
        assert keeper.reforms()[0] == Reform(replica=0, epoch=1, pause_s=0.5)


async def test_counters_do_not_jump_back_over_epochs(tmp_path: Path) -> None:
    name = 'spmd_encoder_scheduler_batches_total{dp_rank="0"}'
    async with world(tmp_path) as w:
        (old,) = await w.up()
        old.socket.send(Heartbeat(stats=SchedulerStats(batches=5)))
        await until(lambda: name in w.dispatcher.metrics_text().decode() and w.metric(name) == 5)
        w.keepers[0].report(0)
        await until(lambda: w.keepers[0].reforms())
        old.socket.send(Heartbeat(stats=SchedulerStats(batches=99)))
        new = w.scheduler(0, epoch=1)
        await until(lambda: w.dispatcher.ready_state().ready)
        assert w.metric(name) == 5
        new.socket.send(Heartbeat(stats=SchedulerStats(batches=2)))
        await until(lambda: w.metric(name) == 7)
