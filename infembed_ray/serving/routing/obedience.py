"""Log of obedience: how far instructions move the rankings of live searches, as Prometheus metrics. No Ray.

Of a share of the instructed searches, the same query is searched again in the background, with its instruction and without. The
figures of both rankings are counted for the release that answered. A model that stops following instructions lets them fall.
No text of a query is kept or logged.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import Awaitable, Callable, Sequence
from statistics import fmean

from prometheus_client import CollectorRegistry, Counter, Histogram

from infembed_ray.serving.encoder.batching import DeadlineExceeded, QueueFull
from infembed_ray.serving.service import Found, Query, Search

TOP = 10
"""First hits that are compared."""
DEPTH = 100
"""Ranks without the instruction that are known; a hit beyond them counts as if it were the next."""


def replaced_share(instructed: Sequence[str], plain: Sequence[str]) -> float:
    """Return the share of the first `TOP` ids of the instructed ranking that are not among those of the plain one."""
    first = instructed[:TOP]
    return len(set(first) - set(plain[:TOP])) / len(first)


def mean_move(instructed: Sequence[str], plain: Sequence[str]) -> float:
    """Return the mean absolute difference of the ranks of the first `TOP` ids of the instructed ranking in both.

    Args:
        plain: at most `DEPTH` ids; others have rank `DEPTH` + 1.
    """
    ranks = {id: rank for rank, id in enumerate(plain, start=1)}
    return fmean(abs(ranks.get(id, DEPTH + 1) - rank) for rank, id in enumerate(instructed[:TOP], start=1))


class ObedienceLog:
    """Samples instructed searches. All calls come from one event loop.

    Args:
        registry: holds the metrics.
        share: of the instructed searches, in [0, 1].
    """

    def __init__(self, registry: CollectorRegistry, share: float) -> None:
        self._share = share
        self._running: asyncio.Task[None] | None = None
        self._samples = Counter(
            "infembed_obedience_samples",
            "Sampled instructed searches by outcome: measured, empty (no hits), dropped for load, or failed.",
            ("release", "outcome"),
            registry=registry,
        )
        self._replaced = Histogram(
            "infembed_obedience_replaced",
            "Share of the first ten hits that are not among the first ten without the instruction.",
            ("release",),
            buckets=[tenth / 10 for tenth in range(11)],
            registry=registry,
        )
        self._moves = Histogram(
            "infembed_obedience_moves",
            "Mean absolute difference of the ranks of the first ten hits with and without the instruction.",
            ("release",),
            buckets=(0, 0.5, 1, 2, 5, 10, 20, 50, 100),
            registry=registry,
        )

    def clear(self) -> None:
        """Forget all releases."""
        for metric in (self._samples, self._replaced, self._moves):
            metric.clear()

    def sample(self, release: str, search: Search, ask: Callable[[Search], Awaitable[Found]]) -> None:
        """Measure an answered search in the background, if chance chooses it. One is measured at a time; others are dropped.

        Args:
            release: fingerprint.
            ask: searches in the same release.
        """
        query = next((query for query in search.queries if query.instruction), None)
        if query is None or search.background or random.random() >= self._share:
            return
        if self._running is not None and not self._running.done():
            self._samples.labels(release, "dropped").inc()
            return
        both = Search([query, Query(query.text)], DEPTH, search.filter, background=True)
        # In a context of its own: with that of the request, Serve would cancel it together with the request.
        start = asyncio.get_running_loop().create_task
        self._running = contextvars.Context().run(start, self._measure(release, both, ask))

    async def _measure(self, release: str, both: Search, ask: Callable[[Search], Awaitable[Found]]) -> None:
        try:
            instructed, plain = ([hit.id for hit in hits] for hits in (await ask(both)).results)
        except (QueueFull, DeadlineExceeded):
            outcome = "dropped"
        except Exception:  # any, and without its text, which may quote the query
            outcome = "failed"
        else:
            outcome = "measured" if instructed else "empty"
            if instructed:
                self._replaced.labels(release).observe(replaced_share(instructed, plain))
                self._moves.labels(release).observe(mean_move(instructed, plain))
        self._samples.labels(release, outcome).inc()
