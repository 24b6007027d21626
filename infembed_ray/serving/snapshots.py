"""Metrics of many processes as one page for Prometheus: each sends snapshots of its own, marked with its name."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.samples import Sample

PUSH_S = 1.0
"""Between two snapshots of a process."""
FORGOTTEN_S = 10.0
"""Without a new snapshot, after which a process counts as gone."""


def snapshot(registry: CollectorRegistry) -> list[Metric]:
    """What a registry holds now, without the times at which its counters were made."""
    metrics = list(registry.collect())
    for metric in metrics:
        metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
    return metrics


class Snapshots:
    """The latest snapshot of every process."""

    def __init__(self) -> None:
        self._latest: dict[str, tuple[float, Sequence[Metric]]] = {}

    def keep(self, replica: str, metrics: Sequence[Metric]) -> None:
        """Take the snapshot of a process in place of its last."""
        self._latest[replica] = time.monotonic(), metrics

    def page(self) -> bytes:
        """All that is known, in Prometheus' text format; every sample has the label `replica`."""
        oldest = time.monotonic() - FORGOTTEN_S
        self._latest = {replica: taken for replica, taken in self._latest.items() if taken[0] >= oldest}
        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry)

    def collect(self) -> Iterator[Metric]:
        """One metric a name, with the samples of all processes; what `prometheus_client` calls a collector."""
        together: dict[str, Metric] = {}
        for replica, (_, metrics) in sorted(self._latest.items()):
            for metric in metrics:
                whole = together.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                whole.samples += [
                    Sample(name, {**labels, "replica": replica}, value) for name, labels, value, *_ in metric.samples
                ]
        yield from together.values()
