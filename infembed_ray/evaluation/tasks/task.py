"""A retrieval task, whatever benchmark it comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from infembed_ray.evaluation.metrics import Change, Qrels

CORPUS = pa.schema([("id", pa.string()), ("text", pa.string())])


@dataclass(frozen=True)
class Query:
    """One query under at most one instruction."""

    id: str
    query: str
    instruction: str | None = None
    kind: str = ""
    """The task's own name for queries of its sort: figures can be over one kind only."""
    group: str | None = None
    """What it shares with queries that are not independent of it: above all, the same one under other instructions.
    Robustness@k is over groups, and statistics resample them whole."""


@dataclass(frozen=True)
class Figure:
    """A number of the tables: the mean of a measure over a task's queries, or those of one kind."""

    name: str
    """Unique in its task: `nDCG@10 (I+,Q+)`."""
    measure: str
    """As `metrics` names it: `nDCG@10`, `MAP@1000`, `recall@100`, `MRR@10`, `Robustness@10`, `p-MRR`."""
    kind: str | None = None
    """Only queries of this kind count. Not for p-MRR and Robustness, which are over changes and groups."""


@dataclass(frozen=True)
class Task:
    """What is searched, what is asked, and what is right."""

    name: str
    """As the catalogue and the tables call it: `followir/core17`."""
    corpus: pa.Table
    """(m) `CORPUS`: ids all different. It may be memory-mapped: it is never copied whole."""
    queries: tuple[Query, ...]
    qrels: Qrels
    """Of every query; documents of the corpus."""
    figures: tuple[Figure, ...]
    """What is shown, the main one first."""
    changes: tuple[Change, ...] = ()
    candidates: Mapping[str, Sequence[str]] | None = None
    """Query id -> the documents that are ranked for it, where the benchmark says so (re-ranking)."""
    excluded: Mapping[str, AbstractSet[str]] = field(default_factory=dict)
    """Query id -> documents that never stand in its ranking."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """What the result file says of it besides: data set, revision, files, numbers."""
