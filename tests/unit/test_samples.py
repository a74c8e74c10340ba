"""Measurements that wait are in every scrape, and never many."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, generate_latest

from spmd_encoder.observability.samples import Samples


def test_a_scrape_has_everything() -> None:
    registry = CollectorRegistry()
    samples = Samples(registry)
    counter = Counter("things", "Things", ["kind"], registry=registry)
    for _ in range(5):
        samples.add(lambda kind, by=1: counter.labels(kind).inc(by), "new", by=2)
    assert 'things_total{kind="new"} 10.0' in generate_latest(registry).decode()
    samples.add(lambda: counter.labels("old").inc())
    text = generate_latest(registry).decode()
    assert 'things_total{kind="new"} 10.0' in text
    assert 'things_total{kind="old"} 1.0' in text


def test_without_a_scrape_they_do_not_pile_up() -> None:
    samples, counted = Samples(CollectorRegistry()), list[int]()
    for number in range(1000):
        samples.add(counted.append, number)
        assert number - len(counted) < 64
    assert counted == list(range(len(counted)))
    assert len(counted) > 900


def test_several_in_one_registry() -> None:
    registry = CollectorRegistry()
    first, second = Samples(registry), Samples(registry)
    counted: list[str] = []
    first.add(counted.append, "a")
    second.add(counted.append, "b")
    generate_latest(registry)
    assert counted == ["a", "b"]
