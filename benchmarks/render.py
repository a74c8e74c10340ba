"""Records as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.report import rounded

_MET = {True: "met", False: "**not met**", None: "no target"}


def record_page(record: Mapping[str, Any], pictures: Sequence[str]) -> str:
    """One scenario's page; `pictures` are files beside it."""
    lines = [f"# {record['scenario']}", "", record["about"], "", *_circumstances(record), ""]
    lines += _table(["what", "measured", "target", ""], [_check_row(check) for check in record["checks"]])
    for table in record["tables"]:
        lines += ["", f"## {table['title']}", "", *_table(table["columns"], table["rows"])]
    for picture in pictures:
        lines += ["", f"![{record['scenario']}]({picture})"]
    return "\n".join(lines) + "\n"


def summary_page(records: Sequence[Mapping[str, Any]]) -> str:
    """All checks of all records, in their order."""
    rows = []
    for record in records:
        where = f"[{record['scenario']}]({record['scenario']}.md)"
        for check in record["checks"]:
            rows.append([where, *_check_row(check), _trust(record)])
    made = "Written by `python -m benchmarks summary`; each scenario's page has its circumstances, tables and plots."
    counted = [check["met"] for record in records for check in record["checks"] if check["met"] is not None]
    lines = ["# What was measured", "", made, "", f"{sum(counted)} of {len(counted)} targets are met.", ""]
    return "\n".join([*lines, *_table(["scenario", "what", "measured", "target", "", "but"], rows)]) + "\n"


def _check_row(check: Mapping[str, Any]) -> list[str]:
    unit = f" {check['unit']}" if check["unit"] else ""
    target = "-"
    if check["target"] is not None:
        target = f"{'≥' if check['at_least'] else '≤'} {_number(check['target'])}{unit}"
    return [check["name"], f"{_number(check['measured'])}{unit}", target, _MET[check["met"]]]


def _trust(record: Mapping[str, Any]) -> str:
    """Why these numbers are not to be taken for the last word."""
    doubts = ["quick: too little was measured"] if record["quick"] else []
    doubts += [] if record["quiet"] else ["the machine was not quiet"]
    doubts += ["of changed files"] if record["commit"].endswith("-dirty") else []
    return "; ".join(doubts)


def _circumstances(record: Mapping[str, Any]) -> list[str]:
    load = record["load_average_1_min"]
    lines = [
        f"- `{record['command']}`",
        f"- {record['date']}, commit {record['commit']}, {record['hardware']}, Python {record['python']}",
        f"- load average {load['before']} before and {load['after']} after, {record['elapsed_s']:.0f} s",
    ]
    if record["noise"]:
        lines.append(f"- **the machine was not quiet**: {'; '.join(record['noise'])}")
    return lines


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    def line(cells: Sequence[Any]) -> str:
        return "| " + " | ".join(_number(cell) for cell in cells) + " |"

    return [line(columns), line(["---"] * len(columns)), *map(line, rows)]


def _number(value: Any) -> str:
    return f"{rounded(value):g}" if isinstance(value, float) else str(value)
