"""The re-ranking stage over a reranker that is too slow, full, lost or broken."""

import asyncio
from typing import Any

import numpy as np
import pytest

from infembed_ray.config.serving import RerankSettings
from infembed_ray.modeling.formats import Question
from infembed_ray.serving.encoder.batching import DeadlineExceeded, QueueFull
from infembed_ray.serving.routing.reranking import RerankStage
from infembed_ray.serving.schema import SearchHit
from infembed_ray.serving.service import ReplicaLost

SETTINGS = RerankSettings(kind="late_interaction", depth=3, budget_ms=200)
HITS = [SearchHit(id=f"p{n}", score=0.9 - n / 10, text=f"text {n}") for n in range(5)]
RELEVANCE = {"text 0": 0.1, "text 1": 0.3, "text 2": 0.2, "text 3": 9.0, "text 4": 9.0}
QUERY = Question("q", "i")


class Reranker:
    def __init__(self, error: BaseException | None = None, seconds: float = 0.0) -> None:
        self.error, self.seconds = error, seconds
        self.calls: list[Any] = []
        self.cancelled = False

    async def __call__(self, method: str, *arguments: Any) -> Any:
        if method == "ready":
            if self.error:
                raise self.error
            return True
        _, _, texts, _ = arguments
        self.calls.append(arguments)
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        if self.error:
            raise self.error
        return np.array([RELEVANCE[text] for text in texts], dtype=np.float32)


def rerank(reranker: Reranker, left_s: float = 10.0, **changes: Any) -> tuple[RerankStage, Any]:
    stage = RerankStage(SETTINGS.model_copy(update=changes), reranker)

    async def run() -> Any:
        return await stage(QUERY, HITS, asyncio.get_running_loop().time() + left_s)

    return stage, asyncio.run(run())


def test_the_first_hits_are_in_the_rerankers_order_and_the_others_follow() -> None:
    stage, reranked = rerank(reranker := Reranker())
    assert [hit.id for hit in reranked.hits] == ["p1", "p2", "p0", "p3", "p4"]
    assert [hit.rerank_score for hit in reranked.hits] == pytest.approx([0.3, 0.2, 0.1, None, None])
    assert [hit.score for hit in reranked.hits] == pytest.approx([0.8, 0.7, 0.9, 0.6, 0.5])  # still the cosine
    assert reranked.note is None
    ((*asked, timeout_s),) = reranker.calls
    assert asked == ["q", "i", ["text 0", "text 1", "text 2"]]
    assert 0 < timeout_s <= 0.2
    assert dict(stage.counts) == {"reranked": 1, "late": 0, "full": 0, "lost": 0, "failed": 0}


@pytest.mark.parametrize(
    ("reranker", "outcome", "reason"),
    [
        (Reranker(seconds=9), "late", "did not answer within its budget of 50 ms"),
        (Reranker(DeadlineExceeded(0.05)), "late", "did not answer within its budget of 50 ms"),
        (Reranker(QueueFull(1)), "full", "too many passages wait for the reranker"),
        (Reranker(ReplicaLost()), "lost", "the reranker is not available"),
        (Reranker(RuntimeError("weights")), "failed", "the reranker failed"),
    ],
)
def test_without_an_answer_in_time_the_order_is_the_retrievals_and_a_note_says_why(
    reranker: Reranker, outcome: str, reason: str
) -> None:
    stage, reranked = rerank(reranker, budget_ms=50)
    assert reranked.hits == HITS
    assert reason in reranked.note
    assert "retrieval's order" in reranked.note
    assert stage.counts[outcome] == sum(stage.counts.values()) == 1
    assert reranker.cancelled == (reranker.seconds > 0)


@pytest.mark.parametrize("error", [DeadlineExceeded(0.05), QueueFull(1), ReplicaLost(), RuntimeError("weights")])
def test_given_passages_are_scored_or_the_failure_is_raised(error: Exception) -> None:
    async def score(reranker: Reranker, timeout_s: float = 1.0) -> Any:
        return await RerankStage(SETTINGS, reranker).score(QUERY, list(RELEVANCE), timeout_s)

    assert asyncio.run(score(Reranker())).tolist() == pytest.approx(list(RELEVANCE.values()))
    with pytest.raises(type(error)):
        asyncio.run(score(Reranker(error)))
    with pytest.raises(DeadlineExceeded):
        asyncio.run(score(slow := Reranker(seconds=9), 0.05))
    assert slow.cancelled


def test_the_deadline_of_the_search_limits_the_budget() -> None:
    _, reranked = rerank(reranker := Reranker(seconds=9), left_s=0.05, budget_ms=60_000)
    assert reranked.note
    assert reranker.cancelled
    _, reranked = rerank(reranker := Reranker(), left_s=-1)
    assert "Not re-ranked" in reranked.note
    assert reranker.calls == []
