"""Replica of the Serve deployment that re-ranks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import numpy as np
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from infembed_ray.errors import in_one_line
from infembed_ray.serving import startup
from infembed_ray.serving.encoder.batching import DeadlineExceeded, QueueFull
from infembed_ray.serving.release import RerankerArguments
from infembed_ray.serving.replicas import MetricsReporter
from infembed_ray.serving.reranking.engine import RerankEngine, load

log = logging.getLogger(__name__)


class Reranker:
    """A replica of the reranker."""

    def __init__(self, arguments: RerankerArguments) -> None:
        self._engine = RerankEngine(startup.in_background(lambda: load(arguments)))
        registry = CollectorRegistry()
        registry.register(self)
        self._metrics = MetricsReporter(registry)

    async def score_many(
        self, items: Sequence[tuple[str, str | None, list[str]]], timeout_s: float
    ) -> list[np.ndarray]:
        """Score the passages of the queries of a search: one (passages) float32 per (query, instruction, passages).

        Raises:
            QueueFull, DeadlineExceeded: of one of the queries.
            RuntimeError: the model raised; the log has the details.
        """
        self._metrics.start()
        try:
            return list(await asyncio.gather(*(self._engine.score(*item, timeout_s) for item in items)))
        except (QueueFull, DeadlineExceeded):
            raise
        except Exception as error:  # the ingress does not have the model's libraries
            log.error("passages could not be scored", exc_info=error)
            raise RuntimeError(in_one_line(error)) from None

    async def ready(self) -> bool:
        """Return True once the model is loaded."""
        self._metrics.start()
        return True

    def collect(self) -> Iterator[Metric]:
        """Yield the engine's metrics, as a collector of `prometheus_client`."""
        yield GaugeMetricFamily("infembed_reranker_waiting", "Passages in the queue.", self._engine.waiting)
        for name, total in asdict(self._engine.counters).items():
            description = f"{name.replace('_', ' ')} so far; a text is a pair".capitalize()
            yield CounterMetricFamily(f"infembed_reranker_{name}", description, total)
