"""Settings of `infembed serve`."""

import re
from typing import Any, Literal

from pydantic import Field, field_validator

from infembed_ray.config.base import IndexPath, ModelName, Settings, runtime_field

DEFAULT_COLLECTION = "index"
"""Name of the collection that `index` names; requests without a collection go to it."""


def collection_name(name: str) -> str:
    """Return the name of a collection; ValueError if it is none."""
    if not re.fullmatch(r"[a-z0-9_-]{1,64}", name):
        raise ValueError(f"{name!r} is no name of a collection; give 1 to 64 lower-case letters, digits, - or _")
    return name


class RankingSettings(Settings):
    """How searches are scored. A request can override `hybrid`."""

    hybrid: float = Field(0.0, ge=0, le=1, description="share of BM25 in the score; needs an index with lexical=true")


class RerankSettings(Settings):
    """Re-ranking of the first hits of a search by a model that reads them with the query and its instruction."""

    kind: Literal["late_interaction", "cross_encoder"] = Field(
        description="late_interaction: MaxSim over the token vectors of an encoder; cross_encoder: a model that reads query and passage together"
    )
    model: ModelName | dict[str, Any] | None = runtime_field(
        None,
        description="late_interaction: an encoder's checkpoint, null: the served one; cross_encoder: a directory or hub name of a classifier that reads `{instruction} {query}`, or the settings of another cross-encoder (kind, model, instructed_query, ...), as in `models` of `infembed evaluate`",
    )
    depth: int = Field(50, ge=1, le=1000, description="first hits of every query to re-rank")
    budget_ms: float = Field(
        1000.0, gt=0, description="milliseconds until a search is answered in the retrieval's order, without re-ranking"
    )
    replicas: int = Field(1, ge=1, description="replicas of the reranker, with the CPUs and GPUs of the encoder's")


class ServeSettings(Settings):
    """`infembed serve`: checkpoint + index -> HTTP API on Ray Serve."""

    index: IndexPath = runtime_field(description="a published index, or milvus+http://HOST:PORT/ALIAS")
    collections: dict[str, str] = runtime_field({}, description="further collections of the API: name -> index")
    model: ModelName | None = runtime_field(None, description="encoder; null: the one that built the index")
    host: str = Field("127.0.0.1", description="address to bind; all but loopback need API keys")
    port: int = Field(8000, ge=1, le=65535, description="HTTP port")
    api_keys_env: str | None = Field(
        "INFEMBED_API_KEYS", description="environment variable with comma-separated API keys; unset: no key needed"
    )
    api_keys_file: str | None = Field(None, description="file of hashed API keys that `infembed serve key` writes")
    ha_proxy: bool = Field(
        False,
        description="use HAProxy as the proxy: 2.1 times as many plain searches per second, 1.3 times as many with instructions; its statistics listen on all interfaces",
    )
    ingress_replicas: int = Field(1, ge=1, description="replicas of the HTTP API")
    encoder_replicas: int = Field(1, ge=1, description="replicas of the encoder; with autoscaling, the minimum")
    max_encoder_replicas: int | None = Field(
        None, ge=1, description="autoscale the encoder up to this number of replicas; null: no autoscaling"
    )
    shard_replicas: int = Field(1, ge=1, description="replicas of every shard")
    gpus_per_encoder: float = Field(0.0, ge=0, description="GPUs per encoder replica")
    gpus_per_shard: float = Field(0.0, ge=0, description="GPUs per shard replica, for search on GPUs (faiss-gpu)")
    cpus_per_encoder: float = Field(1.0, gt=0, description="CPUs and threads per encoder replica")
    cpus_per_shard: float = Field(0.1, gt=0, description="CPUs per shard replica; each has at least one thread")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="precision of the encoder; auto: bfloat16 on GPUs and on CPUs with bfloat16 instructions"
    )
    request_timeout_s: float = Field(30.0, gt=0, description="time-out of a request, answered with 504")
    writable: bool = Field(True, description="allow documents to be put and deleted through the API")
    compact_at: int | None = Field(
        10_000,
        ge=1,
        description="number of changed documents per shard at which the API compacts the index and serves the new version; at five times this number, further documents are rejected with 507; null: never compact",
    )
    ranking: RankingSettings = Field(RankingSettings(), description="how searches are scored")
    probes: str | None = runtime_field(
        None,
        description="file of queries with their relevant passages (query, instruction, relevant, changed_instruction, changed_relevant) that a new release must answer as well as the current one before it takes over; null: none",
    )
    max_ndcg_drop: float = runtime_field(
        1.0, ge=0, description="maximum loss of nDCG@10 (x100) on the probes, against the current release"
    )
    max_p_mrr_drop: float = runtime_field(
        2.0, ge=0, description="maximum loss of p-MRR (x100) on the probes, against the current release"
    )
    rerank: RerankSettings | None = Field(None, description="re-ranking of the first hits; null: none")
    config_file: str | None = runtime_field(None, description="write this file for `serve deploy` and start nothing")
    wait: bool = runtime_field(True, description="stay in the foreground; false: leave the API running")

    @field_validator("collections")
    @classmethod
    def _are_named(cls, collections: dict[str, str]) -> dict[str, str]:
        if DEFAULT_COLLECTION in map(collection_name, collections):
            raise ValueError(f"{DEFAULT_COLLECTION!r} is the collection of the setting `index`; choose another name")
        return collections

    @property
    def indexes(self) -> dict[str, str]:
        """Collection -> its index; the first is the default collection."""
        return {DEFAULT_COLLECTION: self.index, **self.collections}
