"""The load generator: what is drawn and worked out, against known answers; and its loops against a real server."""

from __future__ import annotations

import asyncio
import collections
import io
import itertools
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from benchmarks.load_generator import Arrivals, LoadPlan, Sample, Tally, run_load
from benchmarks.load_generator.__main__ import main
from benchmarks.load_generator.chaos import BadInput, all_chaos
from benchmarks.load_generator.mix import Item, Turn, parse_sizes, turns
from benchmarks.load_generator.progress import status_line
from benchmarks.load_generator.requests import error_code, file_of, stages_ms, unlike
from benchmarks.load_generator.schedule import due_times
from benchmarks.load_generator.tally import latency_ms, percentile
from benchmarks.pictures import make_pictures
from spmd_encoder.api.types import EncodeRequest, ItemOutcome
from tests.harness.fake_server import fake_server
from tests.harness.fake_service import FakeService

PICTURES = make_pictures([(32, 24)], 3)


def first(count: int, source: Iterator[float]) -> list[float]:
    return list(itertools.islice(source, count))


# -- when


def test_fixed_arrivals_are_evenly_spaced() -> None:
    assert first(4, due_times(4.0, Arrivals.FIXED, seed=0)) == [0.0, 0.25, 0.5, 0.75]


def test_poisson_arrivals_have_exponential_gaps_of_the_mean() -> None:
    due = list(itertools.islice(due_times(50.0, Arrivals.POISSON, seed=3), 20_001))
    gaps = [b - a for a, b in itertools.pairwise(due)]
    assert statistics.mean(gaps) == pytest.approx(0.02, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(0.02, rel=0.05)
    assert min(gaps) >= 0


def test_equal_seeds_give_equal_arrivals_and_others_do_not() -> None:
    def drawn(seed: int) -> list[float]:
        return first(10, due_times(5.0, Arrivals.POISSON, seed))

    assert drawn(1) == drawn(1) != drawn(2)


# -- what


def test_without_reuse_every_item_is_new() -> None:
    drawn = itertools.islice(turns(shares=[1.0], items_per_request=2), 50)
    assert [item for turn in drawn for item in turn.items] == [Item(0, serial) for serial in range(100)]


def test_with_all_reuse_only_the_first_is_new() -> None:
    drawn = list(itertools.islice(turns(shares=[1.0], reuse=1.0), 5))
    assert drawn == [Turn((Item(0, 0),)), *[Turn((Item(0, 0, again=True),))] * 4]


@given(st.integers(0, 2**32), st.sampled_from([0.2, 0.5, 0.95]), st.integers(1, 20))
def test_what_comes_again_is_one_of_the_last_new_ones(seed: int, reuse: float, window: int) -> None:
    new: list[Item] = []
    for turn in itertools.islice(turns(shares=[3.0, 1.0], reuse=reuse, window=window, seed=seed), 200):
        (item,) = turn.items
        if item.again:
            assert Item(item.kind, item.serial) in new[-window:]
        else:
            assert item.serial == len(new)
            new.append(item)


def test_shares_reuse_and_chaos_are_as_asked_for() -> None:
    drawn = list(itertools.islice(turns(shares=[8.0, 2.0], reuse=0.3, chaos=0.1, num_chaos=3), 20_000))
    items = [turn.items[0] for turn in drawn if turn.items]
    assert len(items) / len(drawn) == pytest.approx(0.9, abs=0.01)
    assert sum(item.again for item in items) / len(items) == pytest.approx(0.3, abs=0.015)
    assert sum(item.kind == 0 for item in items if not item.again) / sum(not i.again for i in items) == pytest.approx(
        0.8, abs=0.015
    )
    bad = [turn.chaos for turn in drawn if turn.chaos is not None]
    assert bad[:4] == [0, 1, 2, 0]


def test_sizes_are_read_with_their_shares() -> None:
    assert parse_sizes("224x224:0.8, 1024x768:0.2,8x9") == ([(224, 224), (1024, 768), (8, 9)], [0.8, 0.2, 1.0])


@pytest.mark.parametrize("text", ["", "224", "224x", "224x224:", "224x224:-1", "224x224:0"])
def test_senseless_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_sizes(text)


def test_a_file_made_unlike_is_the_same_picture() -> None:
    def pixels(file: bytes) -> bytes:
        return Image.open(io.BytesIO(file)).convert("RGB").tobytes()

    png = io.BytesIO()
    Image.new("RGB", (5, 4), "red").save(png, "PNG")
    for file in (PICTURES[0], png.getvalue()):
        one, other = unlike(file, 1), unlike(file, 2)
        assert len({file, one, other}) == 3
        assert one == unlike(file, 1)
        assert pixels(one) == pixels(other) == pixels(file)


def test_equal_items_have_equal_files_and_others_have_not() -> None:
    files = [file_of(Item(0, serial), [PICTURES]) for serial in range(7)]
    assert len(set(files)) == 7
    assert file_of(Item(0, 3, again=True), [PICTURES]) == files[3]
    assert file_of(Item(0, 3), [PICTURES], seed=1) not in files


# -- what came of it


@pytest.mark.parametrize(
    ("percent", "value"), [(50, 50), (90, 90), (99, 99), (99.9, 100), (1, 1), (0.5, 1), (100, 100)]
)
def test_percentiles_are_nearest_ranks(percent: float, value: float) -> None:
    assert percentile(list(range(1, 101)), percent) == value


def test_latency_counts_from_when_a_request_was_due() -> None:
    """One client, a request due every second, and a first answer that takes ten: the others waited for it."""
    samples = [Sample(float(n), max(n, 10.0), max(n, 10.0) + 0.001) for n in range(10)]
    tally = Tally([Sample(0.0, 0.0, 10.0), *samples[1:]], wall_s=10.01)
    report = tally.report()
    assert report["service_ms"]["p50"] == pytest.approx(1.0)
    assert report["latency_ms"]["p50"] == pytest.approx(5001.0)  # the fifth of ten: what was due at 5 s
    assert report["latency_ms"]["max"] == pytest.approx(10_000.0)


def test_errors_count_by_code_and_chaos_apart() -> None:
    tally = Tally(
        [
            Sample(0, 0, 1),
            Sample(0, 0, 1, "QUEUE_FULL"),
            Sample(0, 0, 1, "QUEUE_FULL"),
            Sample(0, 0, 1, "MEDIA_CORRUPT", chaos="cut off"),
            Sample(0, 0, 1, "INTERNAL", chaos="cut off", expected=False),
        ],
        wall_s=2.0,
    )
    report = tally.report()
    assert report["errors"] == {"QUEUE_FULL": 2}
    assert report["chaos"] == {"cut off": {"MEDIA_CORRUPT": 1, "!INTERNAL": 1}}
    assert (report["requests"], report["answered"], report["ok"]) == (5, 5, 1)
    assert (report["answered_per_s"], report["ok_per_s"], report["ok_items_per_s"]) == (2.5, 0.5, 0.5)


def test_no_answers_are_no_percentiles() -> None:
    assert latency_ms([]) == {}
    assert "no answers" in status_line(1.0, 0, [], 1.0)


def test_progress_tells_of_the_last_second() -> None:
    line = status_line(3.0, 40, [Sample(0, 0, 0.010), Sample(0, 0, 0.030), Sample(0, 0, 1, "QUEUE_FULL")], 0.5)
    assert line == "   3.0 s: 40 answered, 4.0/s, p50 10.0 ms, p99 30.0 ms, 1 errors"


def test_stages_are_read_from_server_timing() -> None:
    assert stages_ms("total;dur=12.50, queue;dur=0.25,forward;dur=7") == {"total": 12.5, "queue": 0.25, "forward": 7.0}
    assert stages_ms("") == {}


def test_an_error_without_a_code_is_named_by_its_status() -> None:
    assert error_code(429, b'{"error": {"code": "QUEUE_FULL"}}') == "QUEUE_FULL"
    assert error_code(502, b"<html>") == error_code(502, b"[]") == "HTTP_502"


@pytest.mark.parametrize(
    "wrong",
    [
        {"pools": []},
        {"pools": [[]]},
        {"shares": [1.0, 1.0]},
        {"reuse": 1.1},
        {"chaos": -0.1},
        {"clients": None},
        {"clients": 0},
        {"rate": 0.0},
        {"rate": float("nan")},
        {"rate": float("inf")},
        {"duration_s": float("nan")},
        {"duration_s": 0.0},
        {"timeout_s": 0.0},
        {"give_up_s": 0.0},
        {"items_per_request": 0},
        {"window": 0},
    ],
)
def test_senseless_plans_are_refused(wrong: dict[str, object]) -> None:
    arguments: dict[str, object] = {"pools": [PICTURES], "clients": 1, **wrong}
    with pytest.raises(ValueError):
        LoadPlan(**arguments)  # type: ignore[arg-type]


# -- the loops


@pytest.mark.parametrize(
    "loop",
    [{"clients": 3}, {"rate": 500.0}, {"rate": 500.0, "clients": 2, "arrivals": Arrivals.FIXED}],
    ids=["closed", "open", "open, bounded"],
)
def test_every_request_is_sent_once_and_answered(loop: dict[str, object]) -> None:
    seen: collections.Counter[int] = collections.Counter()
    plan = LoadPlan(
        pools=[PICTURES],
        num_requests=20,
        on_reply=lambda turn, body: seen.update(item.serial for item in turn.items),
        **loop,  # type: ignore[arg-type]
    )
    with fake_server() as server:
        tally = asyncio.run(run_load(server.url, plan))
    assert not tally.errors()
    assert seen == dict.fromkeys(range(20), 1)
    assert all(sample.due <= sample.sent <= sample.ended for sample in tally.samples)
    assert {sample.replica for sample in tally.samples} == {"0"}
    stages = tally.samples[0].stages_ms
    assert (stages["queue"], stages["preprocess"], stages["forward"]) == (1.0, 2.0, 3.0)
    assert stages["total"] > 0


def test_forms_hold_several_items() -> None:
    plan = LoadPlan(pools=[PICTURES], clients=1, num_requests=2, items_per_request=3)
    with fake_server() as server:
        tally = asyncio.run(run_load(server.url, plan))
    assert (tally.errors(), tally.report()["ok"], sum(s.items for s in tally.good())) == ({}, 2, 6)


def test_a_bounded_open_loop_sends_what_is_overdue_and_counts_its_wait() -> None:
    """Twenty are due within 20 ms, one client, and every answer takes 20 ms: the last waits for all before it."""

    class Slow(FakeService):
        async def encode(self, request: EncodeRequest) -> Sequence[ItemOutcome]:
            await asyncio.sleep(0.02)
            return await super().encode(request)

    plan = LoadPlan(pools=[PICTURES], clients=1, rate=1000.0, arrivals=Arrivals.FIXED, duration_s=0.0195)
    with fake_server(Slow()) as server:
        tally = asyncio.run(run_load(server.url, plan))
    assert len(tally.good()) == 20
    assert max(s.latency for s in tally.samples) > 19 * 0.02 - 0.02
    assert all(s.latency >= s.service for s in tally.samples)


def test_bad_inputs_get_the_answers_that_they_should() -> None:
    plan = LoadPlan(pools=[PICTURES], clients=2, chaos=1.0, num_requests=len(all_chaos(PICTURES[0])))
    with fake_server() as server:
        tally = asyncio.run(run_load(server.url, plan))
        good = asyncio.run(run_load(server.url, LoadPlan(pools=[PICTURES], clients=1, num_requests=1)))
    # The fake decodes nothing, so that what only a decoder finds is taken for good.
    only_decoders = {"cut off"}
    wrong = {s.chaos: s.code for s in tally.samples if not s.expected and s.chaos not in only_decoders}
    assert not wrong
    assert {s.chaos for s in tally.samples} == {chaos.name for chaos in all_chaos(PICTURES[0])}
    assert any(isinstance(chaos, BadInput) for chaos in all_chaos(PICTURES[0]))
    assert not good.errors()


def test_a_server_that_is_not_there_is_an_error_by_name() -> None:
    tally = asyncio.run(run_load("http://127.0.0.1:9", LoadPlan(pools=[PICTURES], clients=1, num_requests=2)))
    assert tally.errors() == {"ClientConnectorError": 2}
    assert tally.report()["answered"] == 0 and not tally.server_ended


@pytest.mark.parametrize(
    "loop",
    [{"clients": 2}, {"rate": 200.0}, {"clients": 2, "chaos": 1.0}],
    ids=["closed", "open", "bad things only"],
)
def test_a_load_on_a_server_that_is_gone_ends_early(loop: dict[str, object]) -> None:
    plan = LoadPlan(pools=[PICTURES], give_up_s=0.1, **loop)  # type: ignore[arg-type]
    tally = asyncio.run(run_load("http://127.0.0.1:9", plan))
    assert tally.server_ended and tally.wall_s < plan.duration_s
    assert len(tally.samples) > 1 and not tally.good()


def test_a_server_that_takes_its_time_is_there() -> None:
    class Stuck(FakeService):
        async def encode(self, request: EncodeRequest) -> Sequence[ItemOutcome]:
            await asyncio.sleep(3600)
            raise AssertionError

    plan = LoadPlan(pools=[PICTURES], clients=1, num_requests=3, timeout_s=0.1, give_up_s=0.01)
    with fake_server(Stuck()) as server:
        tally = asyncio.run(run_load(server.url, plan))
    assert tally.errors() == {"TimeoutError": 3} and not tally.server_ended


@pytest.mark.parametrize("loop", [[], ["--rate", "5"]])
def test_no_clients_at_all_is_a_sentence(
    loop: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["load_generator", "http://127.0.0.1:9", "--clients", "0", *loop])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "clients at least 1" in capsys.readouterr().err


def test_a_result_that_cannot_be_written_is_told_before_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "missing" / "out.json"
    monkeypatch.setattr("sys.argv", ["load_generator", "http://127.0.0.1:9", "--json", str(path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert f"--json: {path}: No such file" in capsys.readouterr().err


@pytest.mark.parametrize("loop", [{"clients": 2}, {"rate": 500.0}], ids=["closed", "open"])
def test_a_load_that_is_cut_off_tells_what_was_answered(loop: dict[str, object]) -> None:
    answered = 0

    async def cut_off(url: str) -> Tally:
        def count(turn: Turn, body: bytes) -> None:
            nonlocal answered
            answered += 1
            if answered == 3:
                task.cancel()

        plan = LoadPlan(pools=[PICTURES], on_reply=count, **loop)  # type: ignore[arg-type]
        task = asyncio.ensure_future(run_load(url, plan))
        return await task

    with fake_server() as server:
        tally = asyncio.run(cut_off(server.url))
    report = tally.report()
    assert report["interrupted"] and report["ok"] >= 2
    assert report["errors"] == {}, "what was under way is nobody's error"


@pytest.mark.parametrize("url", ["nonsense", "ftp://127.0.0.1"])
def test_a_url_that_is_none_is_a_sentence(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["load_generator", url])
    assert main() == 2
    assert "must look like http://" in capsys.readouterr().err
