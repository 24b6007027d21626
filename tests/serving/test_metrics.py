import pickle

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families

from infembed_ray.serving import metrics
from infembed_ray.serving.metrics import MAX_AGE_S, MetricsPage, snapshot


def a_process(count: int) -> list:
    """Return a snapshot as it arrives from another process."""
    registry = CollectorRegistry()
    Counter("requests", "Of them.", ("route",), registry=registry).labels("/").inc(count)
    Gauge("waiting", "Now.", registry=registry).set(count)
    Histogram("seconds", "Each.", buckets=(1, 10), registry=registry).observe(count)
    return pickle.loads(pickle.dumps(snapshot(registry)))


def test_samples_of_all_replicas_are_on_one_page_with_a_label() -> None:
    page = MetricsPage()
    page.update("one", a_process(3))
    page.update("two", a_process(40))
    page.update("one", a_process(5))
    families = {family.name: family for family in text_string_to_metric_families(page.text().decode())}
    assert set(families) == {"requests", "waiting", "seconds"}
    assert families["seconds"].type == "histogram"
    assert [(s.name, s.labels, s.value) for s in families["requests"].samples] == [
        ("requests_total", {"route": "/", "replica": "one"}, 5),
        ("requests_total", {"route": "/", "replica": "two"}, 40),
    ]
    buckets = {(s.labels["replica"], s.labels["le"]): s.value for s in families["seconds"].samples if "le" in s.labels}
    assert buckets[("one", "10.0")] == 1
    assert buckets[("two", "10.0")] == 0


def test_a_replica_without_new_snapshots_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    page = MetricsPage()
    now = 1000.0
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now)
    page.update("one", a_process(1))
    now += MAX_AGE_S - 1
    page.update("two", a_process(1))
    assert page.text().count(b'replica="one"') > 0
    now += 2
    assert page.text().count(b'replica="one"') == 0
    assert page.text().count(b'replica="two"') > 0
