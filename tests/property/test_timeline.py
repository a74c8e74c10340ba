"""Any timestamps: what is shown when, and what must be decoded."""

from __future__ import annotations

import itertools
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_encoder.media.timeline import Packets, Timeline

packets = st.lists(
    st.tuples(st.integers(-(10**6), 10**6), st.booleans(), st.booleans()), min_size=1, max_size=60
).filter(lambda rows: any(shown for _, _, shown in rows))
rates = st.none() | st.fractions(Fraction(1, 10), Fraction(240))


def timeline(rows: list[tuple[int, bool, bool]], rate: Fraction | None) -> tuple[Packets, Timeline]:
    made = Packets()
    for time, is_key, is_shown in rows:
        made.add(time, is_key=is_key, is_shown=is_shown)
    return made, Timeline(made, Fraction(1, 1000), rate)


@settings(deadline=None)
@given(packets, rates)
def test_what_is_shown(rows: list[tuple[int, bool, bool]], rate: Fraction | None) -> None:
    made, film = timeline(rows, rate)
    shown = sorted(time for time, _, is_shown in rows if is_shown)
    assert film.num_frames == len(shown) and film.fps > 0 and film.seconds > 0
    times = [film.time_of(film.shown_at(index)) for index in range(film.num_frames)]
    assert times == sorted(times)
    for index, time in enumerate(times):
        packet = film.shown_at(index)
        assert made.shown[packet] and 0 <= time <= (index + 0.25) / film.fps + 1e-9
        later = [t for t in shown if t > made.times[packet]]
        assert not later or (later[0] - shown[0]) / 1000 > (index + 0.25) / film.fps - 1e-9


@settings(deadline=None)
@given(packets, rates, st.data())
def test_runs_begin_at_key_frames_and_hold_what_is_wanted(
    rows: list[tuple[int, bool, bool]], rate: Fraction | None, data: st.DataObject
) -> None:
    made, film = timeline(rows, rate)
    wanted = data.draw(st.lists(st.integers(0, len(made) - 1), min_size=1, max_size=20))
    runs = film.runs(wanted)
    for before, after in itertools.pairwise(runs):
        assert before.stop < after.start
    for run in runs:
        assert run.start == 0 or made.keys[run.start]
    for packet in wanted:
        (run,) = [run for run in runs if run.start <= packet < run.stop]
        assert run.start == 0 or made.times[run.start] <= made.times[packet] or run.start < packet


@settings(deadline=None)
@given(st.integers(1, 500), st.sampled_from([Fraction(24_000, 1001), Fraction(25), Fraction(30), Fraction(60)]))
def test_a_constant_rate_shows_each_frame_once(count: int, rate: Fraction) -> None:
    """Also where times are rounded to milliseconds, with and without a rate in the header."""
    rows = [(round(index / rate * 1000), index % 10 == 0, True) for index in range(count)]
    for said in (rate, None):
        _, film = timeline(rows, said)
        assert [film.shown_at(index) for index in range(count)] == list(range(count))
        assert count == 1 or abs(film.fps / float(rate) - 1) < 0.03
