"""Outcomes of the searches of each release, as Prometheus metrics that the driver of a canary reads. No Ray."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.parser import text_string_to_metric_families

from infembed_ray.retrieval.filters import FilterError
from infembed_ray.serving.service import NotApplied

LATENCY_BUCKETS = tuple(round(0.001 * 1.25**step, 6) for step in range(48))
"""Upper bounds of the latency histogram, 1 ms to 36 s."""
QUANTILE = 0.95
_REQUESTS, _SECONDS = "infembed_release_requests", "infembed_release_seconds"


class Outcomes:
    """Prometheus metrics of the searches of each release. Faults of the client are not counted, nor is waiting for a change in vain."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "infembed_release_requests", "Searches of a release by outcome.", ("release", "outcome"), registry=registry
        )
        self._seconds = Histogram(
            "infembed_release_seconds",
            "Latency of answered searches.",
            ("release",),
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )

    def clear(self) -> None:
        """Forget all releases."""
        self._requests.clear()
        self._seconds.clear()

    @contextmanager
    def counted(self, release: str) -> Iterator[None]:
        """Count the search that the block answers.

        Args:
            release: fingerprint.
        """
        start = time.perf_counter()
        try:
            yield
        except (FilterError, NotApplied):
            raise
        except Exception:
            self._requests.labels(release, "failed").inc()
            raise
        self._requests.labels(release, "answered").inc()
        self._seconds.labels(release).observe(time.perf_counter() - start)


class Window(NamedTuple):
    """The searches that a release answered, over all replicas: `slower` counts the answers above each bound of `LATENCY_BUCKETS`."""

    answered: int = 0
    failed: int = 0
    slower: tuple[int, ...] = (0,) * len(LATENCY_BUCKETS)

    @classmethod
    def of_page(cls, page: str, release: str) -> Window:
        """Read the totals of a release from a page in Prometheus text format."""
        counts = {"answered": 0.0, "failed": 0.0}
        within = dict.fromkeys(LATENCY_BUCKETS, 0.0)
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.labels.get("release") != release:
                    continue
                if sample.name == f"{_REQUESTS}_total":
                    counts[sample.labels["outcome"]] += sample.value
                elif sample.name == f"{_SECONDS}_bucket" and (bound := float(sample.labels["le"])) in within:
                    within[bound] += sample.value
        answered = int(counts["answered"])
        return cls(answered, int(counts["failed"]), tuple(answered - int(within[bound]) for bound in LATENCY_BUCKETS))

    def since(self, before: Window) -> Window:
        """Return what came after an earlier window; nothing if counters fell because a replica was lost."""
        if self.answered < before.answered or self.failed < before.failed:
            return Window()
        slower = tuple(now - then for now, then in zip(self.slower, before.slower, strict=True))
        return Window(self.answered - before.answered, self.failed - before.failed, slower)

    @property
    def failures(self) -> float:
        """Share of the searches that failed."""
        return self.failed / max(1, self.answered + self.failed)

    @property
    def latency_s(self) -> float:
        """p95 latency, interpolated in its bucket: two buckets can differ by more than the releases."""
        most = (1 - QUANTILE) * self.answered
        low, above = 0.0, self.answered
        for bound, slower in zip(LATENCY_BUCKETS, self.slower, strict=True):
            if slower <= most:
                return low + (bound - low) * (above - most) / max(1, above - slower)
            low, above = bound, slower
        return float("inf")
