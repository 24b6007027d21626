"""What stands behind the HTTP API: the calls it makes, what they give and how they fail. No HTTP and no Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from infembed_ray.serving.engine import Embedded
from infembed_ray.serving.schema import InputType, Metadata, Model, SearchHit, Timings


class Query(NamedTuple):
    """A query under an instruction."""

    text: str
    instruction: str | None = None


class Document(NamedTuple):
    """A passage of the index."""

    id: str
    text: str
    metadata: Mapping[str, Metadata] = {}
    """Field -> value; what is left out is null. Dates are ISO 8601 strings."""


class Found(NamedTuple):
    """The answer to a search. All of it comes from one generation: one model and one version of the index."""

    results: Sequence[Sequence[SearchHit]]
    """Hits of every query, best first, in the order of the queries."""
    model: str
    index_version: str
    sequence: int
    """All changes of documents up to this one are in the answer; of several shards, the least that one of them had."""
    timings: Timings
    missing_shards: Sequence[str] = ()
    """Shards that did not answer; none unless a partial answer was allowed."""


class ReplicaLost(Exception):
    """What would have answered is gone, or not there yet; worth another try after `retry_after_s`."""

    def __init__(self, retry_after_s: float = 1.0) -> None:
        super().__init__(retry_after_s)  # kept in args, so that it survives pickling
        self.retry_after_s = retry_after_s


class ReadOnly(Exception):
    """Documents are neither put nor deleted here."""


class Stuck(Exception):
    """Changes of documents are not applied; the text is the reason, in one line."""


class Service(Protocol):
    """What answers the requests. A call is cancelled when it takes longer than the API allows.

    Every call belongs to one generation from its first statement to its end: the one whose `card` the API saw just
    before. Besides their answers the calls give `engine.QueueFull`, `engine.DeadlineExceeded`, `engine.EmptySequence`,
    `retrieval.filters.FilterError`, `ReplicaLost`, `ReadOnly` and `Stuck`; anything else is a fault of the server.
    """

    @property
    def card(self) -> Model:
        """The model and the index that a call made now is answered from."""

    async def embed(
        self, inputs: list[str] | list[list[int]], input_type: InputType, instruction: str | None
    ) -> Embedded:
        """Vectors of texts or token arrays."""

    async def search(
        self, queries: Sequence[Query], top_k: int, filter: Mapping[str, Any] | None, allow_partial: bool
    ) -> Found:
        """Up to `top_k` passages a query that pass the filter.

        Args:
            queries: at least one.
            top_k: most hits of a query.
            filter: as `retrieval.filters.parse` takes it; None lets every passage pass.
            allow_partial: answer even if some shards do not, and say which.
        """

    async def put(self, documents: Sequence[Document]) -> int:
        """Add documents, or replace those of the same id: durable before it returns.

        Args:
            documents: with ids of their own, and metadata that suits the card's fields.

        Returns:
            The sequence from which on searches find them.
        """

    async def delete(self, ids: Sequence[str]) -> int:
        """Delete documents, those that are not there included; returns the sequence from which on they are gone."""

    async def document(self, id: str) -> Document | None:
        """The document as it is now; None if there is none."""

    async def ready(self) -> bool:
        """Would a request be answered now?"""

    async def fault(self) -> str | None:
        """Why changes of documents are not applied, in one line; None: they are."""

    async def metrics(self) -> bytes:
        """Metrics of all that serve, in Prometheus' text format."""
