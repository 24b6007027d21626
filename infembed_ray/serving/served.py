"""What an ingress replica answers from: the open releases of all collections, and their metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from infembed_ray.config.serving import ServeSettings
from infembed_ray.serving.release import ENCODER, RERANKER, ReleaseSpec
from infembed_ray.serving.routing.blue_green import Release
from infembed_ray.serving.routing.encoder_calls import EncoderCalls
from infembed_ray.serving.routing.remote import RemoteDeployment
from infembed_ray.serving.routing.reranking import OUTCOMES, RerankStage

COMPACT_AT = ServeSettings.model_fields["compact_at"].default
FULL = 5
"""Multiple of `compact_at` (of its default if it is null) from which documents are refused: compaction does not keep up."""


class Served(NamedTuple):
    """What an ingress replica answers from.

    Attributes:
        spec: its parts.
        fingerprint: of the spec.
        encoders: by application; collections with the same encoder share its calls and its query cache.
        releases: by collection, the default one first.
    """

    spec: ReleaseSpec
    fingerprint: str
    encoders: Mapping[str, EncoderCalls]
    releases: Mapping[str, Release]

    @classmethod
    def open(cls, spec: ReleaseSpec, settings: ServeSettings, supervisor: RemoteDeployment) -> Served:
        """Open a release, whose encoders and shards are the Serve deployments that the spec names."""
        encoders = {
            name: EncoderCalls(
                RemoteDeployment.named(ENCODER, name),
                replicas=settings.max_encoder_replicas or settings.encoder_replicas,
                query_cache_bytes=settings.query_cache_mib * 2**20,
            )
            for name in spec.encoders
        }
        reranker = None
        if spec.rerank and spec.reranker:
            reranker = RerankStage(spec.rerank, RemoteDeployment.named(RERANKER, spec.reranker.application))
        releases = {
            name: Release(
                one,
                encoders[one.encoder.application],
                [RemoteDeployment.named(shard, one.index.application) for shard in one.shards],
                supervisor,
                timeout_s=settings.request_timeout_s,
                shard_replicas=settings.shard_replicas,
                max_changed_documents=FULL * (settings.compact_at or COMPACT_AT),
                ranking=settings.ranking,
                reranker=reranker,
            )
            for name, one in spec.by_name.items()
        }
        return cls(spec, spec.fingerprint, encoders, releases)


class ServedMetrics:
    """Metrics of what an ingress serves now, as a collector of `prometheus_client`."""

    def __init__(self, served: Callable[[], Served | None]) -> None:
        self._served = served

    def collect(self) -> Iterator[Metric]:
        """Yield the current values; those of the query caches start again with a new release."""
        if (served := self._served()) is None:
            return
        caches = [encoder.query_cache for encoder in served.encoders.values()]
        yield GaugeMetricFamily(
            "infembed_query_cache_bytes", "Memory of cached queries.", sum(cache.bytes for cache in caches)
        )
        yield CounterMetricFamily(
            "infembed_query_cache_hits", "Queries that were not encoded.", sum(cache.hits for cache in caches)
        )
        yield CounterMetricFamily(
            "infembed_query_cache_misses", "Queries that were encoded.", sum(cache.misses for cache in caches)
        )
        if stage := next(iter(served.releases.values())).reranker:  # one for all collections
            searches = CounterMetricFamily(
                "infembed_rerank_searches", "Searches to re-rank, by outcome.", labels=["outcome"]
            )
            for outcome in OUTCOMES:
                searches.add_metric([outcome], stage.counts[outcome])
            yield searches
        names = GaugeMetricFamily(
            "infembed_collection_info",
            "1 for each collection: its release, and the application of its shards.",
            labels=["collection", "release", "application", "index_version"],
        )
        for name, spec in served.spec.by_name.items():
            labels = [name, served.fingerprint, spec.index.application, spec.card.index_version]
            names.add_metric(labels, 1)
        yield names
