"""Traces of searches, received by a real collector: of a release in this process, and of a real Serve application."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from infembed_ray.config.serving import ServeSettings
from infembed_ray.errors import InputError
from infembed_ray.serving import tracing
from infembed_ray.serving.distributed import serving
from infembed_ray.serving.http.app import create_app
from infembed_ray.serving.http.auth import ApiKeys
from infembed_ray.serving.plan import Plan
from infembed_ray.serving.routing.blue_green import Release
from infembed_ray.serving.routing.proxy import middlewares
from tests.serving.http_client import ask
from tests.serving.routing.test_blue_green import World
from tests.support.collector import Collector, Span, collecting
from tests.support.waiting import wait_until

TRACES = [f"{number:032x}" for number in (7, 8)]
CLIENT = "00000000000000aa"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with collecting() as running:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", running.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        monkeypatch.setattr(tracing, "_tracer", None)  # restored after the test
        yield running


def traceparent(trace: str, sampled: bool = True) -> str:
    return f"00-{trace}-{CLIENT}-{int(sampled):02}"


def play(world: World, *traceparents: str | None, **body: Any) -> None:
    """Send concurrent searches through the edge's middleware to a release in this process."""

    async def scenario(release: Release) -> None:
        app = create_app(release, "f", ApiKeys([]))
        transport = httpx.ASGITransport(tracing.RequestSpan(app))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            headers = [{} if parent is None else {"traceparent": parent} for parent in traceparents]
            calls = [
                client.post("/v1/search", json={"query": f"text {n}", **body}, headers=h) for n, h in enumerate(headers)
            ]
            assert [answer.status_code for answer in await asyncio.gather(*calls)] == [200] * len(calls)

    world.play(scenario, query_cache_bytes=2**20)


def test_concurrent_searches_in_shared_calls_have_a_trace_each(tmp_path: Path, collector: Collector) -> None:
    (processor,) = tracing.processors()
    world = World(tmp_path)
    play(world, *map(traceparent, TRACES), top_k=2)
    assert world.encoder.calls == [2]
    assert processor.force_flush()
    for trace in TRACES:
        found = collector.of(trace)
        (request,), (encode,), (merge,) = found["request POST"], found["encode"], found["merge"]
        assert request.parent == CLIENT
        assert request.attributes["http.response.status_code"] == 200
        assert len(request.attributes["request_id"]) == 32
        assert encode.parent == merge.parent == request.id
        assert encode.attributes.items() >= {"queries": 1, "batch": 2, "tokens": 1}.items()
        assert 0 <= encode.attributes["waiting_ms"] < 1000
        assert {span.attributes["shard"] for span in found["search"]} == {"s0", "s1", "s2"}
        assert {(span.parent, span.attributes["batch"]) for span in found["search"]} == {(request.id, 2)}
        assert "texts" not in found  # they come with the hits


def test_a_search_in_two_phases_has_a_span_of_its_texts(
    tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infembed_ray.serving.routing.fan_out.CONTENTS_PER_CALL", 0)
    (processor,) = tracing.processors()
    play(World(tmp_path), traceparent(TRACES[0]), top_k=5)
    assert processor.force_flush()
    found = collector.of(TRACES[0])
    assert found["texts"][0].parent == found["request POST"][0].id


def test_the_clients_decision_and_the_standard_sampler_decide_what_is_traced(
    tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    (processor,) = tracing.processors()
    play(World(tmp_path), traceparent(TRACES[0]), traceparent(TRACES[1], sampled=False), None)
    assert processor.force_flush()
    assert {span.trace for span in collector.spans} == {TRACES[0]}


def test_without_a_collector_nothing_of_opentelemetry_is_imported_or_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import sys, infembed_ray.serving.routing.proxy as proxy, infembed_ray.serving.routing.blue_green; "
        "from infembed_ray.serving import tracing; "
        "print(len(proxy.middlewares()), tracing.variables(), tracing.span('a') is tracing.span('b'), "
        "[m for m in sys.modules if m.startswith('opentelemetry')])"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    told = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert told.stdout.split("\n")[0] == "3 {} True []"


def test_a_named_collector_needs_the_exporter_and_its_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=secret")
    assert len(middlewares()) == 4
    assert tracing.variables() == {
        "OTEL_SERVICE_NAME": "infembed",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318",
    }
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(InputError, match=r"OTEL_EXPORTER_OTLP_PROTOCOL=grpc: .* port for HTTP \(4318\)"):
        tracing.variables()
    monkeypatch.setattr(tracing, "_EXPORTER", "opentelemetry_without_exporter.http")
    with pytest.raises(InputError, match=r"pip install 'infembed-ray\[tracing\]'"):
        tracing.variables()


@pytest.mark.slow
@pytest.mark.parametrize("ha_proxy", [False, True])
def test_a_search_over_http_is_one_trace_through_serve(
    ha_proxy: bool, ray_cluster: None, settings: ServeSettings, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "search-team")
    settings = settings.model_copy(update={"ha_proxy": ha_proxy})
    assert collector.url in json.dumps(Plan.resolve(settings).config())
    with serving(settings) as api:
        headers = {"traceparent": traceparent(TRACES[0]), "X-Request-Id": "asked-1"}
        assert ask(f"{api}/v1/search", {"query": "diabetes", "top_k": 2}, **headers)[0] == 200
        assert ask(f"{api}/v1/search", {"query": "bread"}, traceparent=traceparent(TRACES[1], sampled=False))[0] == 200
        wait_until(lambda: "request POST" in collector.of(TRACES[0]), 30)
        wait_until(lambda: len(spans_of(collector, "replica_handle_request")) >= 3, 30)
    found = collector.of(TRACES[0])
    (request,), (encode,) = found["request POST"], found["encode"]
    assert (request.parent, request.attributes["request_id"]) == (CLIENT, "asked-1")
    assert encode.attributes["tokens"] > 2
    everything = {span.id: span for spans in found.values() for span in spans}
    assert {span.service for span in everything.values()} == {"search-team"}

    def ancestors(span: Span) -> list[str]:
        return [] if span.parent not in everything else [*ancestors(up := everything[span.parent]), up.name]

    replicas = spans_of(collector, "replica_handle_request")
    by_method = {span.attributes["call_method"]: ancestors(span) for span in replicas}
    assert by_method["embed_many"][0] == by_method["search_many"][0] == "request POST"
    assert "encode" in by_method["embed_many"]
    assert "search" in by_method["search_many"]
    assert "request POST" in ancestors(encode)
    assert TRACES[1] not in {span.trace for span in collector.spans}
    assert "keep" not in by_method  # replicas send their metrics every few seconds: no trace


def spans_of(collector: Collector, name: str) -> list[Span]:
    return [span for span in collector.spans if span.name.startswith(name)]
