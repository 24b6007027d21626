"""Retrieval measures: pure functions of judgements and rankings, one value a query.

nDCG and MAP are trec_eval's, through pytrec_eval. p-MRR, the measure of FollowIR (Weller et al., 2024), is our own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import pytrec_eval

Run = Mapping[str, Mapping[str, float]]
"""Query id -> document id -> score. A ranking is by (score, document id), both descending."""

Qrels = Mapping[str, Mapping[str, int]]
"""Query id -> document id -> relevance; a document that is not named is irrelevant."""

CONVENTIONS = {
    "ranking": "by (score, document id), both descending; ranks are 1-based",
    "nDCG": "trec_eval ndcg_cut: linear gain, log2 discount; a query without results counts 0",
    "MAP": "trec_eval map_cut; a query without results counts 0",
    "p-MRR": "per document whose relevance the changed instruction takes away: R_new / R_og - 1 if R_og >= R_new, else "
    "1 - R_og / R_new; positive = it moved down; a document missing from a ranking has rank length + 1; mean over a "
    "query's documents, then over queries; queries without such documents drop out; shown x100",
}
"""How the figures are computed, as named in every result file."""

_TREC_MEASURES = {"nDCG": "ndcg_cut", "MAP": "map_cut"}


@dataclass(frozen=True)
class Change:
    """A query under two instructions, and the documents relevant under the first that are not under the second."""

    original: str
    """Query id under the first instruction."""
    changed: str
    """Query id under the second."""
    documents: tuple[str, ...]


def trec_measures(qrels: Qrels, run: Run, measures: Sequence[str]) -> dict[str, dict[str, float]]:
    """trec_eval's measures of every query of the judgements.

    Args:
        qrels: judgements; they decide which queries count.
        run: rankings. trec_eval compares scores in single precision: closer ones are ties.
        measures: names with a cut-off: `nDCG@10`, `MAP@1000`.

    Returns:
        query id -> measure -> value in 0..1. A query without results, or without a relevant document, has 0.
    """
    names = {measure: _trec_name(measure) for measure in measures}
    judged = {query: dict(documents) for query, documents in qrels.items()}
    evaluator = pytrec_eval.RelevanceEvaluator(judged, {f"{name}.{cut}" for name, cut in names.values()})
    # pytrec_eval leaves queries out that the run lacks, which would flatter a retriever that finds nothing.
    found = evaluator.evaluate({query: dict(run.get(query, {})) for query in qrels})
    return {
        query: {measure: values[f"{name}_{cut}"] for measure, (name, cut) in names.items()}
        for query, values in found.items()
    }


def p_mrr(changes: Sequence[Change], run: Run) -> dict[str, float]:
    """How far documents move down when a change of the instruction makes them irrelevant (Weller et al., 2024).

    Args:
        changes: at most one an original query.
        run: rankings of the original and the changed queries.

    Returns:
        id of the original query -> mean over its changed documents, in (-1, 1): 0 where nothing moves, positive where
        they move down. Queries without changed documents are left out.
    """
    values = {}
    for change in changes:
        if not change.documents:
            continue
        before, after = run[change.original], run[change.changed]
        ranks_before, ranks_after = ranks(before), ranks(after)
        values[change.original] = fmean(
            rank_change(ranks_before.get(d, len(before) + 1), ranks_after.get(d, len(after) + 1))
            for d in change.documents
        )
    return values


def rank_change(original: int, changed: int) -> float:
    """p-MRR of one document with these 1-based ranks."""
    return changed / original - 1 if original >= changed else 1 - original / changed


def ranks(scores: Mapping[str, float]) -> dict[str, int]:
    """Document id -> 1-based rank, ties broken by document id, descending."""
    ordered = sorted(scores, key=lambda document: (scores[document], document), reverse=True)
    return {document: rank for rank, document in enumerate(ordered, start=1)}


def _trec_name(measure: str) -> tuple[str, int]:
    name, _, cut = measure.partition("@")
    if name not in _TREC_MEASURES or not cut.isdecimal():
        raise ValueError(f"measure {measure!r}: write it as {' or '.join(f'{known}@k' for known in _TREC_MEASURES)}")
    return _TREC_MEASURES[name], int(cut)
