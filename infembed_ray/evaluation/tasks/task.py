"""Retrieval tasks, independent of the benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from infembed_ray.evaluation.metrics import Change, Qrels
from infembed_ray.storage.places import Place

ROBUSTNESS = "Robustness@10"
CORPUS = pa.schema([("id", pa.string()), ("text", pa.string())])


@dataclass(frozen=True)
class Query:
    """A query with at most one instruction."""

    id: str
    query: str
    instruction: str | None = None
    kind: str = ""
    """The task's name for queries of this kind; a figure can be restricted to one kind."""
    group: str | None = None
    """Shared by queries that are not independent, such as one query under several instructions. Robustness@k is over
    groups, and statistics resample whole groups."""


@dataclass(frozen=True)
class Figure:
    """A number of the tables: the mean of a measure over a task's queries, or over those of one kind."""

    name: str
    """Unique in the task: `nDCG@10 (I+,Q+)`."""
    measure: str
    """A name of `metrics`: `nDCG@10`, `MAP@1000`, `recall@100`, `MRR@10`, `Robustness@10`, `p-MRR`."""
    kind: str | None = None
    """Restricts the figure to queries of this kind; not for p-MRR and Robustness, which are over changes and groups."""


@dataclass(frozen=True)
class Task:
    """A corpus, queries and relevance judgements."""

    name: str
    """Its name in `tasks` and in tables: `followir/core17`."""
    corpus: pa.Table
    """(m) `CORPUS`, with unique ids. It may be memory-mapped and is never copied as a whole."""
    queries: tuple[Query, ...]
    qrels: Qrels
    """Judgements for every query; all documents are in the corpus."""
    figures: tuple[Figure, ...]
    """The main figure is the first."""
    changes: tuple[Change, ...] = ()
    candidates: Mapping[str, Sequence[str]] | None = None
    """Query id -> the documents to rank for it; None: the whole corpus."""
    excluded: Mapping[str, AbstractSet[str]] = field(default_factory=dict)
    """Query id -> documents that are never ranked for it."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """Further facts for the result file: repositories, revisions, counts."""
    corpus_file: Place = Path()
    """File of the corpus that all nodes can map into memory, once it is shared (`chunks.share`)."""

    def has_candidates(self, depth: int) -> bool:
        """Whether its candidates are a ranking to re-rank. Longer lists are the part of the corpus a query is about."""
        return self.candidates is not None and max(map(len, self.candidates.values())) <= depth
