"""What an ingress replica answers from: the open releases of all collections, and their metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from infembed_ray.config.serving import ServeSettings
from infembed_ray.serving.arguments import ENCODER, RERANKER
from infembed_ray.serving.routing.blue_green import CollectionSpec, Release, ReleaseSpec
from infembed_ray.serving.routing.encoder_calls import EncoderCalls
from infembed_ray.serving.routing.outcomes import Outcomes
from infembed_ray.serving.routing.remote import RemoteDeployment
from infembed_ray.serving.routing.reranking import OUTCOMES, RerankStage


def open_encoder(application: str, settings: ServeSettings) -> EncoderCalls:
    """Return the calls to the encoder of a Serve application."""
    return EncoderCalls(
        RemoteDeployment.named(ENCODER, application),
        timeout_s=settings.request_timeout_s,
        replicas=settings.max_encoder_replicas or settings.encoder_replicas,
        query_cache_bytes=settings.query_cache_mib * 2**20,
    )


def open_release(
    spec: CollectionSpec,
    encoder: EncoderCalls,
    settings: ServeSettings,
    metrics: RemoteDeployment,
    outcomes: Outcomes | None = None,
) -> Release:
    """Return a release of one collection whose shards are the Serve deployments that a spec names."""
    return Release(
        spec,
        encoder,
        [RemoteDeployment.named(shard, spec.index) for shard in spec.shards],
        metrics,
        timeout_s=settings.request_timeout_s,
        shard_replicas=settings.shard_replicas,
        max_changed_documents=settings.max_changed_documents,
        ranking=settings.ranking,
        outcomes=outcomes,
        reranker=RerankStage(spec.rerank, RemoteDeployment.named(RERANKER, spec.rerank.application))
        if spec.rerank
        else None,
    )


class Served(NamedTuple):
    """What an ingress replica answers from.

    Attributes:
        spec: its parts.
        encoders: by application.
        releases: by collection, the default one first.
        canary: another release of the default collection; None: there is none.
    """

    spec: ReleaseSpec
    encoders: Mapping[str, EncoderCalls]
    releases: Mapping[str, Release]
    canary: Release | None

    @classmethod
    def open(
        cls,
        spec: ReleaseSpec,
        settings: ServeSettings,
        metrics: RemoteDeployment,
        outcomes: Outcomes,
    ) -> Served:
        """Open a release; the collections with the same encoder share its calls and its query cache."""
        encoders = {one.encoder: open_encoder(one.encoder, settings) for one in spec.by_name.values()}
        releases = {
            name: open_release(one, encoders[one.encoder], settings, metrics, outcomes)
            for name, one in spec.by_name.items()
        }
        canary = None
        if spec.canary is not None:  # with calls of its own: the query cache of the current release would favour it
            trial = spec.canary.release
            canary = open_release(trial, open_encoder(trial.encoder, settings), settings, metrics, outcomes)
        return cls(spec, encoders, releases, canary)


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
        if stages := [release.reranker for release in served.releases.values() if release.reranker]:
            searches = CounterMetricFamily(
                "infembed_rerank_searches", "Searches to re-rank, by outcome.", labels=["outcome"]
            )
            for outcome in OUTCOMES:
                searches.add_metric([outcome], sum(stage.counts[outcome] for stage in stages))
            yield searches
        names = GaugeMetricFamily(
            "infembed_collection_info",
            "1 for each collection: its release, and the application of its shards.",
            labels=["collection", "release", "application", "index_version"],
        )
        for name, spec in served.spec.by_name.items():
            names.add_metric([name, spec.fingerprint, spec.index, spec.card.index_version], 1)
        yield names
