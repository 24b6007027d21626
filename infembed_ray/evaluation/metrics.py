"""Retrieval measures: pure functions of judgements and rankings, with one value per query.

nDCG, MAP, recall, MRR and further ones are trec_eval's, by the names of ir_measures. p-MRR (Weller et al., 2024), Robustness@k
(Oh et al., 2024), right rank (Zhang et al., 2024) and paired accuracy (Weller et al., 2024) are implemented here.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf, isnan
from statistics import fmean

import ir_measures

from infembed_ray.config.base import nearest
from infembed_ray.errors import InputError

Run = Mapping[str, Mapping[str, float]]
"""Query id -> document id -> score. A ranking is by (score, document id), both descending."""

Qrels = Mapping[str, Mapping[str, int]]
"""Query id -> document id -> relevance; documents without a judgement are irrelevant."""

CONVENTIONS = {
    "ranking": "by (score, document id), both descending; ranks are 1-based; trec_eval's measures compare scores in "
    "single precision, p-MRR in double",
    "nDCG": "trec_eval ndcg_cut: linear gain, log2 discount; a query without results counts 0",
    "MAP": "trec_eval map_cut; a query without results counts 0",
    "recall": "trec_eval recall: of a query's relevant documents, those among the first k",
    "MRR": "trec_eval recip_rank, of the first k documents: 1 / rank of the first relevant one, else 0",
    "Robustness": "the least nDCG of a query under its instructions (Oh et al., 2024), then the mean over queries",
    "p-MRR": "per document whose relevance the changed instruction takes away: R_new / R_og - 1 if R_og >= R_new, else "
    "1 - R_og / R_new; positive = it moved down; a document missing from a ranking has rank length + 1; mean over a "
    "query's documents, then over queries; queries without such documents drop out; shown x100",
    "right rank": "1 if the first judged document among the first k is relevant, else 0 (Zhang et al., 2024)",
    "paired accuracy": "share of pairs of queries in which each ranks its own document above the other's (Weller et al., 2024)",
    "pairs reversed": "share of labelled pairs (a document relevant only under the first instruction, one only under the "
    "second) that each instruction puts in its own order",
    "violation": "share of changed queries with a document among the first k that the changed instruction excludes",
}
"""How each measure is computed, as recorded in every result file."""
FURTHER = "trec_eval, by ir_measures' name; a query without results counts 0"
"""Convention of a measure that `CONVENTIONS` does not describe."""

_NAMES = {name.lower(): name for name in reversed(ir_measures.measures.registry)}


@dataclass(frozen=True)
class Change:
    """A query under two instructions, and the documents that are relevant only under the first."""

    original: str
    """Query id under the first instruction."""
    changed: str
    """Query id under the second."""
    documents: tuple[str, ...]


def parse(measure: str) -> ir_measures.Measure:
    """Parse a measure by ir_measures' name, in any case: `nDCG@10`, `MAP@1000`, `recall@100`, `P(rel=2)@5`, `bpref`.

    Raises:
        InputError: trec_eval has no such measure, or its cut-off is missing or below 1.
    """
    name, remedy = family(measure), "write it like nDCG@10, P(rel=2)@5 or bpref"
    if name.lower() not in _NAMES:
        raise InputError.of("measures", measure, "no measure of ir_measures", nearest(name, _NAMES.values()))
    try:
        parsed = ir_measures.parse_measure(_NAMES[name.lower()] + measure[len(name) :])
        usable = ir_measures.pytrec_eval.supports(_uncut(parsed))  # other libraries order ties differently
    except (ValueError, TypeError, AssertionError) as error:
        raise InputError.of("measures", measure, str(error), remedy) from error
    if not usable or parsed.params.get("cutoff", 1) < 1:  # at 0 pytrec_eval aborts the process
        raise InputError.of("measures", measure, "trec_eval cannot compute it", remedy)
    return parsed


def _uncut(measure: ir_measures.Measure) -> ir_measures.Measure:
    """Return the measure that trec_eval computes: its reciprocal rank has no cut-off."""
    return ir_measures.RR(rel=measure["rel"]) if measure.NAME == "RR" else measure


def family(measure: str) -> str:
    """Return the name of a measure without parameters and cut-off: `nDCG` of `nDCG@10`."""
    return re.split(r"[@(]", measure)[0]


def trec_measures(qrels: Qrels, run: Run, measures: Sequence[str]) -> dict[str, dict[str, float]]:
    """Compute measures, named as `parse` takes them, for every query of the judgements; scores compare in single precision.

    Returns:
        query id -> measure -> value; 0 for a query without results or without relevant documents.

    Raises:
        InputError: a score is NaN, or as `parse`.
    """
    parsed = {measure: parse(measure) for measure in measures}
    judged = {query: dict(documents) for query, documents in qrels.items()}
    rankings = {query: _ranking(query, run.get(query, {})) for query in qrels}
    metrics = ir_measures.pytrec_eval.iter_calc(set(map(_uncut, parsed.values())), judged, rankings)
    values = {(metric.query_id, metric.measure): float(metric.value) for metric in metrics}

    def value(query: str, measure: ir_measures.Measure) -> float:
        uncut = values.get((query, _uncut(measure)), 0.0)
        return uncut if measure.NAME != "RR" or uncut >= 1 / measure.params.get("cutoff", inf) else 0.0

    return {query: {name: value(query, measure) for name, measure in parsed.items()} for query in qrels}


def robustness(values: Mapping[str, float], groups: Mapping[str, str]) -> dict[str, float]:
    """Return the worst value of each group of queries, such as one query under several instructions (Oh et al., 2024)."""
    worst: dict[str, float] = {}
    for query, group in groups.items():
        worst[group] = min(worst.get(group, values[query]), values[query])
    return worst


def right_rank(qrels: Qrels, run: Run, measure: str) -> dict[str, float]:
    """Return 1 per query whose first judged document is relevant, otherwise 0; `right rank@10` reads ten documents."""
    depth = int(measure.partition("@")[2] or 0) or None
    values = {}
    for query, judged in qrels.items():
        first = islice(ranks(_ranking(query, run.get(query, {}))), depth)
        values[query] = float(next((judged[document] for document in first if document in judged), 0) > 0)
    return values


def p_mrr(changes: Sequence[Change], run: Run) -> dict[str, float]:
    """Measure how far documents move down when another instruction makes them irrelevant (Weller et al., 2024).

    Args:
        changes: at most one per original query.
        run: rankings of the original and the changed queries; a missing ranking counts as empty.

    Returns:
        id of the original query -> mean over its changed documents, in (-1, 1); queries without any are left out.
    """
    values = {}
    for change in changes:
        if not change.documents:
            continue
        before, after = (_ranking(query, run.get(query, {})) for query in (change.original, change.changed))
        ranks_before, ranks_after = ranks(before), ranks(after)
        values[change.original] = fmean(
            rank_change(ranks_before.get(d, len(before) + 1), ranks_after.get(d, len(after) + 1))
            for d in change.documents
        )
    return values


def rank_change(original: int, changed: int) -> float:
    """Compute p-MRR of one document from its 1-based ranks."""
    return changed / original - 1 if original >= changed else 1 - original / changed


def ranks(scores: Mapping[str, float]) -> dict[str, int]:
    """Return document id -> 1-based rank, best first; ties by document id, descending."""
    ordered = sorted(scores, key=lambda document: (scores[document], document), reverse=True)
    return {document: rank for rank, document in enumerate(ordered, start=1)}


def _ranking(query: str, scores: Mapping[str, float]) -> dict[str, float]:
    """Convert the scores of a query's documents to the Python floats that pytrec_eval requires; reject NaN."""
    ranking = {document: float(score) for document, score in scores.items()}
    for document, score in ranking.items():
        if isnan(score):  # it has no rank
            fault = f"the score of document {document} is NaN"
            raise InputError.of(f"query {query}", None, fault, "the model or its weights are broken")
    return ranking
