"""The re-ranking stage of a search: a deadline budget, and the retrieval's order when it is used up. No Ray."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from infembed_ray.config.serving import RerankSettings
from infembed_ray.modeling.formats import Question
from infembed_ray.serving.encoder.batching import DeadlineExceeded, QueueFull
from infembed_ray.serving.routing.fan_out import Deployment, now
from infembed_ray.serving.schema import SearchHit
from infembed_ray.serving.service import ReplicaLost

RERANKED, LATE, FULL, LOST, FAILED = OUTCOMES = ("reranked", "late", "full", "lost", "failed")
_REASONS = {
    LATE: "the reranker did not answer within its budget of {budget:g} ms",
    FULL: "too many passages wait for the reranker",
    LOST: "the reranker is not available",
    FAILED: "the reranker failed; the server's log has the details",
}

log = logging.getLogger(__name__)


class Reranked(NamedTuple):
    """The hits, a note if they are in the retrieval's order, and the duration."""

    hits: list[SearchHit]
    note: str | None
    ms: float


class RerankStage:
    """Re-orders the first hits of searches, and counts searches by outcome. All calls come from one event loop.

    The reranker has `score(query, instruction, texts, timeout_s) -> array` and `ready()`.
    """

    def __init__(self, settings: RerankSettings, reranker: Deployment) -> None:
        self.settings = settings
        self.counts: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self._reranker = reranker

    async def __call__(self, query: Question, hits: Sequence[SearchHit], deadline: float) -> Reranked:
        """Re-order the first `depth` hits, best first; the others follow in the retrieval's order.

        The deadline is that of the search, by the event loop's time.
        """
        start = time.perf_counter()
        budget_s = min(self.settings.budget_ms / 1e3, deadline - now())
        first, others = hits[: self.settings.depth], hits[self.settings.depth :]
        outcome, scores = await self._scores(query, [(hit.chunk or hit).text for hit in first], budget_s)
        self.counts[outcome] += 1
        note, ordered = None, list(hits)
        if scores is None:
            reason = _REASONS[outcome].format(budget=self.settings.budget_ms)
            note = f"Not re-ranked: {reason}. The hits are in the retrieval's order."
        else:
            scored = [h.model_copy(update={"rerank_score": float(s)}) for h, s in zip(first, scores, strict=True)]
            ordered = [scored[place] for place in np.argsort(-scores, kind="stable")] + list(others)
        return Reranked(ordered, note, 1e3 * (time.perf_counter() - start))

    async def score(self, query: Question, texts: Sequence[str], timeout_s: float) -> np.ndarray:
        """Score passages for a query under its instruction: (len(texts)) float32.

        Raises:
            QueueFull: too many passages wait.
            DeadlineExceeded: no scores within `timeout_s`.
            ReplicaLost: the reranker is not available.
        """
        call = self._reranker("score", query.query, query.instruction, texts, timeout_s)
        try:  # a call that is cut off is cancelled, also on the replica
            return await asyncio.wait_for(call, timeout_s)
        except asyncio.TimeoutError:
            raise DeadlineExceeded(timeout_s) from None

    async def ready(self) -> bool:
        """Return whether the reranker answers; ReplicaLost if it has no replica."""
        return bool(await self._reranker("ready"))

    async def _scores(self, query: Question, texts: list[str], budget_s: float) -> tuple[str, np.ndarray | None]:
        """Return the outcome, and the scores if it is `RERANKED`."""
        if budget_s <= 0:
            return LATE, None
        try:
            return RERANKED, await self.score(query, texts, budget_s)
        except (DeadlineExceeded, QueueFull, ReplicaLost) as error:
            return {DeadlineExceeded: LATE, QueueFull: FULL, ReplicaLost: LOST}[type(error)], None
        except Exception:  # the search has its hits, whatever happened to the reranker
            log.exception("a search was not re-ranked")
            return FAILED, None
