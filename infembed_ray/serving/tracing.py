"""OpenTelemetry traces of the API, sent as OTLP over HTTP. They are off unless the standard variables name a collector.

Ray Serve makes spans of its proxy, routers and replicas, and carries their context in its calls. This module starts the trace
of a request at the edge, and adds the steps of a search. Serve's own sampler only follows the decision made at the edge, so
the calls that replicas make for themselves (metrics, probes) make no traces. No Ray.
"""

from __future__ import annotations

import contextvars
import importlib.util
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from infembed_ray.errors import InputError

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
"""Standard variables with the collector's address; one of them switches tracing on."""
PREFIX = "OTEL_"
_EXPORTER = "opentelemetry.exporter.otlp.proto.http"
_NO_SPAN = nullcontext()
_tracer: Any = None  # of a process that Serve has set up for tracing


def requested() -> bool:
    """Return whether this process's environment names a collector."""
    return any(os.environ.get(name) for name in ENDPOINTS)


def variables() -> dict[str, str]:
    """Return the variables that Serve's processes need besides Serve's own, without headers: those may hold credentials.

    Raises:
        InputError: a collector is named, and the exporter is not installed or is asked for another protocol.
    """
    if not requested():
        return {}
    if _tracing_extra_missing():
        raise InputError(f"{ENDPOINTS[0]}: needs the exporter; pip install 'infembed-ray[tracing]', or unset it")
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    if protocol != "http/protobuf":
        raise InputError(
            f"OTEL_EXPORTER_OTLP_PROTOCOL={protocol}: traces are sent as http/protobuf; unset it, and name the collector's "
            "port for HTTP (4318)"
        )
    found = {name: value for name, value in os.environ.items() if name.startswith(PREFIX) and "HEADERS" not in name}
    return {"OTEL_SERVICE_NAME": "infembed", **found}


def processors() -> list[Any]:
    """Return Serve's span processor; Serve calls this function once in each of its processes."""
    global _tracer
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    processor = BatchSpanProcessor(OTLPSpanExporter())
    provider = TracerProvider()  # its service name and its sampler come from the standard variables
    provider.add_span_processor(processor)
    _tracer = provider.get_tracer("infembed_ray")
    return [processor]


def span(name: str, **attributes: str | int) -> AbstractContextManager[Any]:
    """Return a context manager around a step of a traced request; it does nothing outside of one."""
    if _tracer is None:
        return _NO_SPAN
    from opentelemetry import trace

    if not trace.get_current_span().get_span_context().is_valid:
        return _NO_SPAN
    step: AbstractContextManager[Any] = _tracer.start_as_current_span(name, attributes=attributes)
    return step


def note(**attributes: float) -> None:
    """Set attributes of the current span."""
    if _tracer is not None:
        from opentelemetry import trace

        trace.get_current_span().set_attributes(attributes)


def detached() -> contextvars.Context:
    """Return a context that keeps the caller's span and nothing else.

    For work that several requests share: with the whole context of the first one, Serve would cancel it together with that.
    """
    context = contextvars.Context()
    if _tracer is not None:
        from opentelemetry import context as opentelemetry_context

        context.run(opentelemetry_context.attach, opentelemetry_context.get_current())
    return context


class RequestSpan:
    """ASGI middleware at the edge: a span of each request, which continues the client's trace (W3C `traceparent`)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with the span's context in its headers."""
        if scope["type"] != "http" or _tracer is None:
            return await self._app(scope, receive, send)
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        own = TraceContextTextMapPropagator()
        carrier: dict[str, str] = {}
        parent = own.extract({name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]})
        # No path: it may hold a document's id.
        with _tracer.start_as_current_span(
            f"request {scope['method']}", context=parent, kind=SpanKind.SERVER
        ) as request:
            own.inject(carrier)
            headers = [header for header in scope["headers"] if header[0] not in (b"traceparent", b"tracestate")]
            headers += [(name.encode(), value.encode("latin-1")) for name, value in carrier.items()]

            async def send_and_note(message: Message) -> None:
                if message["type"] == "http.response.start":
                    request.set_attribute("http.response.status_code", message["status"])
                    answered = dict(message["headers"])
                    request.set_attribute("request_id", answered.get(b"x-request-id", b"").decode("latin-1"))
                await send(message)

            await self._app({**scope, "headers": headers}, receive, send_and_note)


def _tracing_extra_missing() -> bool:
    try:
        return importlib.util.find_spec(_EXPORTER) is None
    except ModuleNotFoundError:  # not even its namespace
        return True
