"""Interface between the HTTP API and the encoder and index behind it. It depends on neither HTTP nor Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from infembed_ray.serving.encoder.batching import Embedded
from infembed_ray.serving.explaining import Explanation
from infembed_ray.serving.schema import InputType, Metadata, Model, SearchHit, Timings


class Query(NamedTuple):
    """A query under an instruction."""

    text: str
    instruction: str | None = None


@dataclass(frozen=True)
class Search:
    """A search of one or several queries.

    Attributes:
        queries: at least one.
        top_k: largest number of hits per query.
        filter: as `retrieval.filters.parse` takes it; None: no condition.
        allow_partial: answer even if some shards do not; the answer lists them.
        min_sequence: wait until the answer reflects the changes up to this sequence number.
        exclude: lower passages that resemble what the instruction excludes; None: as the server is set.
        hybrid: share of BM25 in the score; None: as the server is set.
        explain: say what the instruction of the only query did to each hit; `top_k` is at most `explaining.MAX_EXPLAINED_HITS`.
        rerank: re-rank the first hits; None: as the server's settings say.
    """

    queries: Sequence[Query]
    top_k: int
    filter: Mapping[str, Any] | None = None
    allow_partial: bool = False
    min_sequence: int = 0
    exclude: bool | None = None
    hybrid: float | None = None
    explain: bool = False
    rerank: bool | None = None


class Document(NamedTuple):
    """A passage of the index."""

    id: str
    text: str
    metadata: Mapping[str, Metadata] = {}
    """Field -> value; missing fields are null. Dates are ISO 8601 strings."""


class Found(NamedTuple):
    """The answer to a search. All of it comes from one release: one model and one version of the index."""

    results: Sequence[Sequence[SearchHit]]
    """Hits of every query, best first, in the order of the queries."""
    model: str
    index_version: str
    sequence: int
    """Sequence number of the last change that the answer reflects; the smallest of all shards."""
    timings: Timings
    missing_shards: Sequence[str] = ()
    """Shards that did not answer; empty unless a partial answer was allowed."""
    notes: Sequence[str] = ()
    """What the answer lacks that was asked for, and why, a sentence each."""
    explanation: Explanation | None = None
    """Of the hits of the only query; None unless it was asked for."""


class ReplicaLost(Exception):
    """The replica that would have answered is lost or has not started; retry after `retry_after_s`."""

    def __init__(self, retry_after_s: float = 1.0) -> None:
        super().__init__(retry_after_s)  # kept in args, so that it survives pickling
        self.retry_after_s = retry_after_s


class ReadOnly(Exception):
    """The index is read-only."""


class Stuck(Exception):
    """The shards do not apply changes of documents; the text is the reason, in one line."""


class TooManyChanges(Exception):
    """As many documents differ from the index version as may; the arguments are how many do and how many may."""


class NotApplied(Exception):
    """A shard has not applied the changes up to `min_sequence` in time; the arguments are that, the shard and its sequence."""


class ShardState(NamedTuple):
    """The state of a shard's changes."""

    fault: str | None = None
    """Why the shard applies no changes, in one line; None: it applies them."""
    changed: int = 0
    """Documents that differ from its index version."""


class Service(Protocol):
    """Answers the requests of the HTTP API, which cancels a call that exceeds the request time-out.

    The API reads the service once per request. The calls raise `QueueFull`, `DeadlineExceeded`, `EmptySequence`,
    `FilterError`, `ReplicaLost`, `ReadOnly`, `Stuck`, `TooManyChanges` and `NotApplied`; any other exception is an
    internal error.
    """

    @property
    def card(self) -> Model:
        """The model and the index that answer a call made now."""

    async def embed(
        self, inputs: list[str] | list[list[int]], input_type: InputType, instruction: str | None
    ) -> Embedded:
        """Embed texts or token arrays."""

    async def search(self, search: Search) -> Found:
        """Search up to `top_k` passages per query that satisfy the filter."""

    async def put(self, documents: Sequence[Document]) -> int:
        """Add documents, or replace those with the same ids. The change is durable when the call returns.

        Args:
            documents: with distinct ids and metadata that matches the card's fields.

        Returns:
            The sequence number from which searches find them.
        """

    async def delete(self, ids: Sequence[str]) -> int:
        """Delete documents; unknown ids are ignored. Returns the sequence number from which searches omit them."""

    async def document(self, id: str) -> Document | None:
        """Return the current document; None if there is none."""

    async def ready(self) -> bool:
        """Return whether a request would be answered now."""

    async def fault(self) -> str | None:
        """Return why changes of documents are not applied, in one line; None: they are applied."""

    async def metrics(self) -> bytes:
        """Return the metrics of all replicas in Prometheus text format."""
