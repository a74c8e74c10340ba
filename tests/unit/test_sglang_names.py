"""Our numbers under SGLang's names."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from spmd_encoder.api.types import ReadyState, StageTimes
from spmd_encoder.config import Config, ObservabilityConfig
from spmd_encoder.dispatcher.metrics import DispatcherMetrics
from spmd_encoder.frontends.http.app import create_app
from spmd_encoder.observability.sglang_names import sglang_text
from spmd_encoder.wire.messages import SchedulerStats
from tests.harness.fake_service import FakeService, picture

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(text: str) -> Samples:
    families = text_string_to_metric_families(text)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for f in families for s in f.samples}


def value(got: Samples, name: str, **labels: str) -> float:
    return got["sglang:encoder_" + name, tuple(sorted({"model_name": "m", "dp_rank": "", **labels}.items()))]


def test_what_replicas_report() -> None:
    metrics = DispatcherMetrics(range(2))
    metrics.item_completed(StageTimes(queue_s=0.5, preprocess_s=0.25, forward_s=0.125))
    stats = SchedulerStats(
        queue_items=3, running_items=2, batches=5, cache_hits=4, cache_misses=6, cache_evictions=1, cache_entries=7,
        cache_bytes=3 * 2**20, batch_size_counts=((1, 2), (8, 3)),
    )  # fmt: skip
    metrics.replica_stats(1, 0, stats)
    metrics.gauges(ReadyState(ready=True, started=True, draining=False, replicas_ready=2, replicas=2), jobs=0,
                   tokens=0, inflight_bytes=0, retried=0, joined=0)  # fmt: skip
    got = samples(sglang_text(metrics.text().decode(), "m").decode())
    assert not [labels for _, labels in got if "modality" in dict(labels)], "these are of pictures, sounds and films"
    for stage, seconds in (("queue_wait", 0.5), ("preprocess", 0.25), ("model_forward", 0.125)):
        assert value(got, f"{stage}_seconds_count") == 1
        assert value(got, f"{stage}_seconds_sum") == seconds
        assert value(got, f"{stage}_seconds_bucket", le="+Inf") == 1
    assert value(got, "dp_pending_requests", dp_rank="1") == 5
    assert value(got, "cache_hit_files_total", dp_rank="1") == 4
    assert value(got, "cache_total_files_total", dp_rank="1") == 10
    assert value(got, "cache_evictions_total", dp_rank="1") == 1
    assert value(got, "cache_entries", dp_rank="1") == 7
    assert value(got, "cache_size_mb", dp_rank="1") == 3
    assert value(got, "mm_items_per_batch_bucket", dp_rank="1", le="7.0") == 2
    assert value(got, "mm_items_per_batch_bucket", dp_rank="1", le="8.0") == 5
    assert value(got, "mm_items_per_batch_count", dp_rank="1") == 5
    assert value(got, "mm_items_per_batch_sum", dp_rank="1") == 26


def test_nothing_measured_is_no_line_and_no_error() -> None:
    assert samples(sglang_text("", "m").decode()) == {}


@pytest.fixture
async def client(request: pytest.FixtureRequest) -> AsyncIterator[httpx.AsyncClient]:
    config = replace(Config(), observability=ObservabilityConfig(metrics_names=request.param))
    transport = httpx.ASGITransport(create_app(FakeService(), config))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


@pytest.mark.parametrize("client", ["sglang"], indirect=True)
async def test_calls_over_http(client: httpx.AsyncClient) -> None:
    body = {
        "req_id": "r", "modality": "IMAGE", "num_parts": 1, "part_idx": 0, "mm_items": [picture(3), picture(3)],
        "prefill_host": "127.0.0.1", "embedding_port": 9,
    }  # fmt: skip
    assert (await client.post("/encode", json=body)).status_code == 500  # the fake has no rows
    got = samples((await client.get("/metrics")).text)
    labels = {"model_name": Config().served_name, "modality": "image"}
    assert value(got, "requests_received_total", **labels) == 1
    assert value(got, "requests_total", status="error", **labels) == 1
    assert value(got, "mm_items_per_request_sum", **labels) == 2
    assert value(got, "request_e2e_latency_seconds_count", **labels) == 1


@pytest.mark.parametrize("client", ["own"], indirect=True)
async def test_only_where_asked_for(client: httpx.AsyncClient) -> None:
    assert "sglang:" not in (await client.get("/metrics")).text
