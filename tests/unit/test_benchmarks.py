"""What the benchmarks work out, and how they keep and show it, against known answers. Nothing is measured here."""

from __future__ import annotations

import argparse
import json
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest

from benchmarks.__main__ import main
from benchmarks.checkpoints import Tower
from benchmarks.circumstances import noise_of
from benchmarks.connection import tensor_bytes
from benchmarks.estimates import batch_aligned_rate, cpu_at_sizes, greedy_makespan, mean_batch
from benchmarks.processes import file_pages, memory_of, process_cpu_s
from benchmarks.render import summary_page
from benchmarks.report import Check, Plot, Report, Table, rounded
from benchmarks.scenario import Options, Scenario
from benchmarks.scenarios import SCENARIOS
from benchmarks.suite import is_done, measure, summarise


@pytest.fixture(autouse=True)
def handler_is_put_back() -> Iterator[None]:
    """The command sets one for SIGTERM, as it is a process of its own elsewhere."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


# -- estimates


def test_a_rate_is_counted_between_the_ends_of_batches() -> None:
    """Batches of 8 every 4 s, of which the window cuts off the first and the last in the middle: 2 per second."""
    answers = [(4.0 * batch + 0.01 * item, 3.9) for batch in range(5) for item in range(8)]
    assert batch_aligned_rate(answers[3:]) == pytest.approx(2.0)
    assert batch_aligned_rate(reversed(answers)) == pytest.approx(2.0)


def test_a_rate_of_single_items_is_their_number_over_time() -> None:
    assert batch_aligned_rate([(0.1 * n, 0.1) for n in range(11)]) == pytest.approx(10.0)


def test_one_batch_is_too_few_for_a_rate() -> None:
    with pytest.raises(ValueError, match="1 batches"):
        batch_aligned_rate([(0.0, 1.0), (0.1, 1.0)])


@pytest.mark.parametrize(
    ("seconds", "machines", "makespan"),
    [([1, 1, 1, 1], 2, 2), ([1, 1, 4], 2, 5), ([4, 1, 1], 2, 4), ([3], 2, 3), ([2, 2, 2], 1, 6), ([], 2, 0)],
)
def test_items_go_to_whoever_is_free_first(seconds: list[float], machines: int, makespan: float) -> None:
    assert greedy_makespan(seconds, machines) == makespan


def test_batches_are_weighed_by_their_items() -> None:
    assert mean_batch({1: 2, 8: 1}) == pytest.approx(10 / 3)
    assert mean_batch({}) == 0
    assert cpu_at_sizes({1: 2, 8: 1}, {1: 0.5, 2: 9.0, 8: 0.25}) == pytest.approx(2 * 0.5 + 8 * 0.25)


def test_a_process_own_cpu_is_read_finely() -> None:
    import os

    before, own = process_cpu_s(os.getpid()), time.process_time()
    while time.process_time() < own + 0.003:
        pass
    assert 0.003 <= process_cpu_s(os.getpid()) - before < 1.0
    assert 0 < memory_of(os.getpid())["Uss"] <= memory_of(os.getpid())["Pss"] <= memory_of(os.getpid())["Rss"]


def test_pages_of_files_are_counted_without_what_was_written_to_them() -> None:
    smaps = """\
7f00-7f10 r--p 00000000 fe:00 12 /lib/a.so
Rss:                  40 kB
Anonymous:             8 kB
VmFlags: rd mr
7f10-7f20 rw-p 00001000 fe:00 12 /lib/a.so
Rss:                   4 kB
Anonymous:             4 kB
7f20-7f30 rw-p 00000000 00:00 0
Rss:                 100 kB
Anonymous:           100 kB
7f30-7f40 rw-p 00000000 00:00 0 [heap]
Rss:                 100 kB
7f40-7f50 r--s 00000000 fe:00 13 /a model/b.safetensors
Rss:                  12 kB
"""
    assert file_pages(smaps) == {"/lib/a.so": 32 * 1024, "/a model/b.safetensors": 12 * 1024}


def test_tensors_without_their_header() -> None:
    head = b'{"__metadata__":{}}'
    assert tensor_bytes(len(head).to_bytes(8, "little") + head + b"values") == b"values"


# -- records


@dataclass(frozen=True, kw_only=True)
class Own(Options):
    items: int = 10
    towers: tuple[str, ...] = ("a", "b")
    seconds: float = 2.0


def found(options: Own) -> Report:
    return Report(
        checks=[Check(name="ratio", measured=options.items / 8, target=1.1), Check(name="rate", measured=1.23456)],
        tables=[Table("numbers", ["x", "y"], [["a", 1.23456], ["b", 20]])],
        plots=[Plot(kind="bars", title="t", x_label="x", y_label="y", series={"s": [("a", 1.0)]}, target=2.0)],
    )


SCENARIO = Scenario(name="own", about="about it", full=Own(), quick=Own(items=1), run=found)


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    SCENARIO.add_flags(parser)
    return parser.parse_args(words)


def test_options_are_flags_over_the_full_or_the_quick_ones() -> None:
    assert SCENARIO.options(parsed(), quick=False) == Own()
    assert SCENARIO.options(parsed(), quick=True) == Own(items=1)
    given = parsed("--items", "3", "--towers", "c", "--seconds", "0.5")
    assert SCENARIO.options(given, quick=True) == Own(items=3, towers=("c",), seconds=0.5)


@dataclass(frozen=True, kw_only=True)
class Named(Options):
    towers: tuple[Tower, ...] = ("tiny",)
    percents: tuple[int, ...] = (0, 50)
    count: int = 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--towers", "tiny", "nosuch"], "invalid choice: 'nosuch'"),
        (["--count", "0"], "--count: 0 is not above 0"),
        (["--count", "x"], "--count: invalid int value: 'x'"),
        (["--percents", "-1"], "--percents: -1 is not at least 0"),
    ],
)
def test_options_that_cannot_be_are_a_sentence(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    Scenario(name="named", about="", full=Named(), quick=Named(), run=lambda options: Report(checks=[])).add_flags(
        parser
    )
    assert parser.parse_args(["--towers", "mid", "tiny", "--percents", "0"]).towers == ["mid", "tiny"]
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("scenario", ["summary", "burst", "all"])
def test_results_that_cannot_be_written_are_told_before_anything_is_measured(
    scenario: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "results"
    monkeypatch.setattr("sys.argv", ["benchmarks", scenario, "--results", str(folder)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert f"--results: {folder}: Not a directory" in capsys.readouterr().err


def test_a_summary_makes_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["benchmarks", "summary", "--results", str(tmp_path / "missing")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and not (tmp_path / "missing").exists()
    assert "missing: No such file" in capsys.readouterr().err


def test_every_tower_that_a_scenario_has_is_one() -> None:
    for name, scenario in SCENARIOS.items():
        parser = argparse.ArgumentParser()
        scenario.add_flags(parser)
        flags = [action for action in parser._actions if action.dest in ("tower", "towers")]
        assert [action.choices for action in flags] == [get_args(Tower)], name


def test_a_record_s_command_measures_the_same_again() -> None:
    options = SCENARIO.options(parsed("--items", "3", "--towers", "c", "d"), quick=True)
    command = SCENARIO.command(options, quick=True)
    assert command == ["python", "-m", "benchmarks", "own", "--quick", "--items", "3", "--towers", "c", "d"]
    assert SCENARIO.options(parsed(*command[5:]), quick=True) == options


@pytest.mark.parametrize(
    ("check", "met"),
    [
        (Check(name="", measured=1.0, target=1.0), True),
        (Check(name="", measured=1.1, target=1.0), False),
        (Check(name="", measured=1.0, target=1.0, at_least=True), True),
        (Check(name="", measured=0.9, target=1.0, at_least=True), False),
        (Check(name="", measured=1.0), None),
    ],
)
def test_a_target_is_met_or_not_or_there_is_none(check: Check, met: bool | None) -> None:
    assert check.met is met


def test_a_record_has_its_circumstances_and_its_page(tmp_path: Path) -> None:
    record = measure(SCENARIO, Own(), quick=False, results=tmp_path)
    assert record == json.loads((tmp_path / "own.json").read_text())
    wanted = {"date", "hardware", "command", "commit", "load_average_1_min", "quiet", "noise", "quick", "checks"}
    assert wanted <= record.keys()
    assert set(record["load_average_1_min"]) == {"before", "after"}
    page = (tmp_path / "own.md").read_text()
    assert "| ratio | 1.25 | ≤ 1.1 | **not met** |" in page
    assert "| rate | 1.235 | - | no target |" in page
    assert "| a | 1.235 |" in page
    assert "![own](own.png)" in page
    assert (tmp_path / "own.png").read_bytes().startswith(b"\x89PNG")


def test_the_summary_counts_targets_and_tells_of_doubts(tmp_path: Path) -> None:
    record = measure(SCENARIO, Own(), quick=True, results=tmp_path)
    record |= {"quiet": False, "commit": "abc-dirty"}
    page = summary_page([record])
    assert "0 of 1 targets are met." in page
    assert "quick: too little was measured; the machine was not quiet; of changed files" in page
    quiet = summary_page([record | {"quick": False, "quiet": True, "commit": "abc"}])
    assert "| [own](own.md) | rate | 1.235 | - | no target |  |" in quiet


def test_a_summary_of_nothing_is_written(tmp_path: Path) -> None:
    assert "0 of 0 targets" in summarise(tmp_path).read_text()


@pytest.mark.parametrize(
    ("record", "commit", "quick", "done"),
    [
        (None, "abc", False, False),
        ({"commit": "abc", "quick": False}, "abc", False, True),
        ({"commit": "abc", "quick": False}, "abc", True, True),
        ({"commit": "abc", "quick": True}, "abc", False, False),
        ({"commit": "abc", "quick": True}, "abc", True, True),
        ({"commit": "abc", "quick": False}, "def", False, False),
        ({"commit": "abc-dirty", "quick": False}, "abc-dirty", False, False),
    ],
)
def test_only_a_record_of_this_commit_is_not_measured_again(
    record: dict[str, Any] | None, commit: str, quick: bool, done: bool
) -> None:
    assert is_done(record, commit, quick=quick) is done


def test_a_machine_is_quiet_or_it_is_said_why_not() -> None:
    assert noise_of(0.01) == []
    assert noise_of(0.5) == ["other processes had 50% of the cores"]


@pytest.mark.parametrize(
    ("value", "shown"), [(1.23456, 1.235), (0.000123456, 0.0001235), (123456.7, 123457), (7, 7), ("x", "x"), (0.0, 0.0)]
)
def test_numbers_are_rounded_to_four_digits(value: Any, shown: Any) -> None:
    assert rounded(value) == shown


def test_scenarios_have_names_of_their_own_and_quick_measures_less() -> None:
    assert len(SCENARIOS) == 12
    for name, scenario in SCENARIOS.items():
        assert scenario.name == name
        assert scenario.quick != scenario.full
        scenario.add_flags(argparse.ArgumentParser())
