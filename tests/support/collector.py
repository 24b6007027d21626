"""An OpenTelemetry collector: takes traces as OTLP over HTTP and keeps their spans."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Span(NamedTuple):
    trace: str
    id: str
    parent: str
    name: str
    service: str
    attributes: dict[str, Any]


class Collector:
    """The spans that have arrived at `url`."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.spans: list[Span] = []

    def of(self, trace: str) -> dict[str, list[Span]]:
        """Return the spans of a trace by name."""
        found: dict[str, list[Span]] = {}
        for span in self.spans:
            if span.trace == trace:
                found.setdefault(span.name, []).append(span)
        return found

    def add(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = _values(resource.resource.attributes)["service.name"]
            for scope in resource.scope_spans:
                self.spans += [
                    Span(
                        s.trace_id.hex(),
                        s.span_id.hex(),
                        s.parent_span_id.hex(),
                        s.name,
                        service,
                        _values(s.attributes),
                    )
                    for s in scope.spans
                ]


def _values(attributes: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in attributes}


@contextmanager
def collecting() -> Iterator[Collector]:
    """Run a collector."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.path == "/v1/traces"
            collector.add(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = Collector(f"http://127.0.0.1:{server.server_port}")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield collector
        server.shutdown()
