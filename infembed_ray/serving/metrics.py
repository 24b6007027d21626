"""Metrics of the API: every replica sends a snapshot each second, and one page shows all of them to Prometheus. No Ray."""

import time
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.samples import Sample

PUSH_S = 1.0
"""Seconds between two snapshots of a replica."""
MAX_AGE_S = 10.0
"""Seconds without a new snapshot after which a replica's metrics are dropped."""


def readings(values: Mapping[str, tuple[str, float]]) -> Iterator[Metric]:
    """Yield a metric for each name -> (description, value); names of counters end in `_total`."""
    for name, (description, value) in values.items():
        family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        yield family(name.removesuffix("_total"), description, value)


def snapshot(registry: CollectorRegistry) -> list[Metric]:
    """Return the current metrics of a registry, without the creation times of its counters."""
    metrics = list(registry.collect())
    for metric in metrics:
        metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
    return metrics


class MetricsPage:
    """Holds the latest snapshot of every replica."""

    def __init__(self) -> None:
        self._latest: dict[str, tuple[float, Sequence[Metric]]] = {}

    def update(self, replica: str, metrics: Sequence[Metric]) -> None:
        """Replace the snapshot of a replica."""
        self._latest[replica] = time.monotonic(), metrics

    def text(self) -> bytes:
        """Return all snapshots in Prometheus text format; every sample has the label `replica`."""
        oldest = time.monotonic() - MAX_AGE_S
        self._latest = {replica: snapshot for replica, snapshot in self._latest.items() if snapshot[0] >= oldest}
        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry)

    def collect(self) -> Iterator[Metric]:
        """Yield one metric per name with the samples of all replicas (the collector interface of `prometheus_client`)."""
        merged: dict[str, Metric] = {}
        for replica, (_, metrics) in sorted(self._latest.items()):
            for metric in metrics:
                target = merged.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                target.samples += [
                    Sample(name, {**labels, "replica": replica}, value) for name, labels, value, *_ in metric.samples
                ]
        yield from merged.values()
