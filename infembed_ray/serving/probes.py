"""Probe set: queries with known answers that a new release must rank as well as the current one. No Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from statistics import fmean
from typing import NamedTuple

from infembed_ray.serving.release import Probe, ProbeSet
from infembed_ray.serving.schema import SearchRequest, SearchResponse

TOP_K = 100
"""Hits per probe; a passage that is not among them has rank TOP_K + 1."""
QUERIES_AT_ONCE = 32
_NDCG = "nDCG@10"


class ProbeFigures(NamedTuple):
    """Means over the probes, x100."""

    ndcg: float
    """nDCG@10 over all queries, those under the changed instruction too."""
    p_mrr: float | None
    """p-MRR over the probes whose changed instruction takes relevance away; None if there are none."""


def worse_rankings(current: ProbeFigures, new: ProbeFigures, limits: ProbeSet) -> str | None:
    """Return why the new release must not replace the current one; None if its rankings are good enough."""
    if current.ndcg == new.ndcg == 0:
        return (
            "neither release finds a relevant passage of `probes` among its first ten; give the ids of indexed passages"
        )
    drops = [("nDCG@10", current.ndcg, new.ndcg, limits.max_ndcg_drop, "max_ndcg_drop")]
    if current.p_mrr is not None and new.p_mrr is not None:
        drops.append(("p-MRR", current.p_mrr, new.p_mrr, limits.max_p_mrr_drop, "max_p_mrr_drop"))
    for measure, before, after, allowed, setting in drops:
        if after < before - allowed:
            return (
                f"its {measure} on the probes is {after:.1f}, the current release's {before:.1f}; "
                f"{setting}={allowed:g} less is allowed"
            )
    return None


async def probe(search: Callable[[SearchRequest], Awaitable[SearchResponse]], probes: Sequence[Probe]) -> ProbeFigures:
    """Search all probes and measure the rankings."""
    from infembed_ray.evaluation.metrics import Change, p_mrr, trec_measures  # only the supervisor measures

    queries = list(_queries(probes))
    run: dict[str, dict[str, float]] = {}
    for start in range(0, len(queries), QUERIES_AT_ONCE):
        some = queries[start : start + QUERIES_AT_ONCE]
        answers = await asyncio.gather(*(search(request) for _, request in some))
        run |= {name: {hit.id: hit.score for hit in a.hits} for (name, _), a in zip(some, answers, strict=True)}
    judged = {f"{n}": p.relevant for n, p in enumerate(probes)}
    judged |= {f"{n} changed": p.changed_relevant for n, p in enumerate(probes) if p.changed_relevant}
    ndcg = trec_measures({name: dict.fromkeys(ids, 1) for name, ids in judged.items()}, run, [_NDCG])
    changes = [
        Change(f"{n}", f"{n} changed", tuple(set(p.relevant) - set(p.changed_relevant)))
        for n, p in enumerate(probes)
        if p.changed_instruction is not None
    ]
    moved = p_mrr(changes, run)
    return ProbeFigures(
        100 * fmean(values[_NDCG] for values in ndcg.values()), 100 * fmean(moved.values()) if moved else None
    )


def _queries(probes: Sequence[Probe]) -> Iterator[tuple[str, SearchRequest]]:
    """Yield a name and the search, for both instructions of each probe."""
    for number, item in enumerate(probes):
        yield f"{number}", SearchRequest(query=item.query, instruction=item.instruction, top_k=TOP_K)
        if item.changed_instruction is not None:
            changed = SearchRequest(query=item.query, instruction=item.changed_instruction, top_k=TOP_K)
            yield f"{number} changed", changed
