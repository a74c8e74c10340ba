"""Runs scenarios and keeps what they found: JSON, a page and a picture each, and the summary of all."""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.circumstances import MachineWatch, circumstances, measured_commit
from benchmarks.render import record_page, summary_page
from benchmarks.scenario import Options, Scenario
from benchmarks.scenarios import SCENARIOS

RESULTS = Path(__file__).parent / "results"
SUMMARY = "SUMMARY.md"


def check_folder(results: Path, *, is_made: bool) -> None:
    """See before anything is measured that files can be written there. Raises OSError. `is_made`: if it is missing."""
    if is_made:
        results.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=results):
        pass


def measure(scenario: Scenario[Any], options: Options, *, quick: bool, results: Path) -> dict[str, Any]:
    """Runs one and writes its files. Returns the record."""
    watch, where = MachineWatch.start(), circumstances("benchmarks")
    report = scenario.run(options)
    measured = {
        "scenario": scenario.name,
        "about": scenario.about,
        **where,
        "command": shlex.join(scenario.command(options, quick=quick)),
        "quick": quick,
        **watch.until_now(),
        **report.to_dict(),
    }
    results.mkdir(parents=True, exist_ok=True)
    text = json.dumps(measured, indent=1)
    (results / f"{scenario.name}.json").write_text(text + "\n")
    record: dict[str, Any] = json.loads(text)
    write_page(record, results)
    return record


def measure_all(names: Sequence[str], *, quick: bool, again: bool, results: Path) -> list[str]:
    """Runs each that has no record of this commit yet (with `again`: each). Returns the names of those that failed."""
    failed = []
    for name in names:
        if not again and is_done(_read(results / f"{name}.json"), measured_commit(), quick=quick):
            print(f"{name}: there is a record of this commit", file=sys.stderr)
            continue
        print(f"{name}: {SCENARIOS[name].about}", file=sys.stderr, flush=True)
        try:
            scenario = SCENARIOS[name]
            record = measure(scenario, scenario.quick if quick else scenario.full, quick=quick, results=results)
        except Exception:
            traceback.print_exc()
            failed.append(name)
        else:
            print(f"{name}: {record['elapsed_s']:.0f} s", file=sys.stderr, flush=True)
        summarise(results)
    return failed


def is_done(record: Mapping[str, Any] | None, commit: str, *, quick: bool) -> bool:
    """Whether a record is of this commit and of at least what is wanted; one of changed files never is."""
    if record is None or commit.endswith("-dirty"):
        return False
    return bool(record["commit"] == commit and (quick or not record["quick"]))


def summarise(results: Path) -> Path:
    """Writes the summary, and every page anew, from the records that are there."""
    records = [record for name in SCENARIOS if (record := _read(results / f"{name}.json")) is not None]
    for record in records:
        write_page(record, results)
    path = results / SUMMARY
    path.write_text(summary_page(records))
    return path


def write_page(record: Mapping[str, Any], results: Path) -> None:
    """A record's page, and its picture where there is matplotlib."""
    pictures = []
    if record["plots"] and importlib.util.find_spec("matplotlib"):
        from benchmarks.plots import draw

        pictures = [f"{record['scenario']}.png"]
        draw(record["plots"], results / pictures[0])
    elif record["plots"]:
        print("no plots: matplotlib is missing (pip install -e '.[bench]')", file=sys.stderr)
    (results / f"{record['scenario']}.md").write_text(record_page(record, pictures))


def _read(path: Path) -> dict[str, Any] | None:
    try:
        record: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return record
