"""What the pool remembers of items that cost a decoder."""

from spmd_encoder.media.refusals import KEPT_S, MOST_KEPT, Refusals


def test_a_refusal_is_kept_for_its_time() -> None:
    refusals = Refusals()
    assert refusals.reason("a", 0.0) is None
    refusals.add("a", "slow", 5.0)
    assert refusals.reason("a", 5.0 + KEPT_S - 0.1) == "slow"
    assert refusals.reason("b", 5.0) is None
    assert refusals.reason("a", 5.0 + KEPT_S) is None
    assert len(refusals) == 0, "what is over takes no memory"


def test_a_second_offence_counts_anew() -> None:
    refusals = Refusals()
    refusals.add("a", "slow", 0.0)
    refusals.add("a", "died", 100.0)
    assert refusals.reason("a", KEPT_S + 50.0) == "died"


def test_the_oldest_go_first_when_there_are_too_many() -> None:
    refusals = Refusals()
    for number in range(MOST_KEPT):
        refusals.add(str(number), "slow", 0.0)
    refusals.add("0", "slow", 0.0)
    refusals.add("new", "slow", 0.0)
    assert len(refusals) == MOST_KEPT
    assert refusals.reason("1", 1.0) is None
    assert refusals.reason("0", 1.0) == refusals.reason("new", 1.0) == "slow"
