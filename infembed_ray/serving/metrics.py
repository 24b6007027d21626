"""What the HTTP API counts of itself, for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
"""Bounds of the histogram of latencies."""


class HttpMetrics:
    """Requests of one process, by route: never by path, so that what clients make up adds no series."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._answered = Counter("infembed_http_requests", "Requests answered.", ("route", "status"), registry=registry)
        self._seconds = Histogram(
            "infembed_http_request_seconds",
            "Time from a request's headers to the end of its answer.",
            ("route",),
            buckets=SECONDS,
            registry=registry,
        )
        self._in_flight = Gauge("infembed_http_in_flight", "Requests being answered now.", registry=registry)

    def begun(self) -> None:
        """A request came in."""
        self._in_flight.inc()

    def ended(self, route: str | None, status: int | None, seconds: float) -> None:
        """It was answered with `status`; None: its client went before that. No route: there is none at its path."""
        self._in_flight.dec()
        self._answered.labels(route or "none", str(status or "gone")).inc()
        self._seconds.labels(route or "none").observe(seconds)
