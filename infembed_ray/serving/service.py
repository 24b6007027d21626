"""What the HTTP API and the service behind it exchange: `routing.blue_green.Release` answers. It depends on neither HTTP nor Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from infembed_ray.modeling.formats import Question
from infembed_ray.serving.explaining import Explanation
from infembed_ray.serving.schema import Metadata, SearchHit, Timings


@dataclass(frozen=True)
class Search:
    """A search.

    Attributes:
        query: under its instruction.
        top_k: largest number of hits.
        filter: as `retrieval.filters.parse` takes it; None: no condition.
        min_sequence: wait until the answer reflects the changes up to this sequence number.
        exclude: lower passages that resemble what the instruction excludes; None: as the server is set.
        hybrid: share of BM25 in the score; None: as the server is set.
        explain: say what the instruction did to each hit; `top_k` is at most `explaining.MAX_EXPLAINED_HITS`.
        rerank: re-rank the first hits; None: as the server's settings say.
    """

    query: Question
    top_k: int
    filter: Mapping[str, Any] | None = None
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


class SearchOutcome(NamedTuple):
    """The answer to a search. All of it comes from one release: one model and one version of the index."""

    hits: Sequence[SearchHit]
    """Best first."""
    model: str
    index_version: str
    sequence: int
    """Sequence number of the last change that the answer reflects; the smallest of all shards."""
    timings: Timings
    notes: Sequence[str] = ()
    """What the answer lacks that was asked for, and why, a sentence each."""
    explanation: Explanation | None = None
    """Of the hits; None unless it was asked for."""


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
