"""What `benchmarks.load` works out of what it measured, against known answers."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.load import CLOCKS, line_through, summary_of


def run(gb: float, *, fixed: float) -> dict[str, dict[str, Any]]:
    """A read of 0.1 s per GB and a load of half as much again beside what it takes for any size."""
    size = int(gb * 1e9)
    load = fixed + 0.15 * gb
    before = {f"{clock}_before_sum": fixed for clock in CLOCKS}
    return {
        "read": {"wall": 0.1 * gb, "cpu": 0.1 * gb, "bytes": size},
        "load": {"wall": load, "cpu": load, **before, "bytes": size},
    }


def test_the_fixed_part_is_told_from_what_a_gigabyte_adds() -> None:
    small, large = (summary_of([run(gb, fixed=0.2)] * 3) for gb in (1.0, 4.0))
    assert small["cpu"]["ratio"] == pytest.approx(3.5)
    assert large["cpu"]["ratio"] == pytest.approx(2.0)
    assert small["wall"]["build_and_check_s"] == pytest.approx(0.2)
    found = line_through([small, large], "cpu")
    assert found["load"] == {"fixed_s": pytest.approx(0.2, abs=2e-3), "per_gb_s": pytest.approx(0.15, abs=2e-3)}
    assert found["read"]["fixed_s"] == pytest.approx(0.0, abs=2e-3)
    assert found["ratio_per_gb"] == pytest.approx(1.5, abs=0.02)


def test_a_load_of_other_tensors_than_were_read_is_no_measure() -> None:
    both = run(1.0, fixed=0.2)
    both["read"]["bytes"] += 1
    with pytest.raises(RuntimeError, match="did not read the same tensors"):
        summary_of([both])
