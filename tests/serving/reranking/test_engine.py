"""The reranker's engine over a scorer whose scores and speed the tests know."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import numpy as np

from infembed_ray.modeling.pair_scorer import PairScorer
from infembed_ray.serving.encoder.batching import DeadlineExceeded
from infembed_ray.serving.reranking.engine import RerankEngine


class ByLength(PairScorer):
    """Scores a passage by its length and the query's; a pair has one token per character."""

    def __init__(self) -> None:
        self.busy = threading.Event()
        self.open = threading.Event()
        self.open.set()
        self.batches: list[int] = []

    def tokenize(self, query: str, instruction: str | None, texts: Sequence[str]) -> list[str]:
        return [f"{query}{instruction or ''}|{text}" for text in texts]

    def cost(self, pair: str) -> int:
        return len(pair)

    def relevance(self, pairs: Sequence[str]) -> np.ndarray:
        self.busy.set()
        self.open.wait()
        self.batches.append(max(map(len, pairs)) * len(pairs))
        return np.array([np.nan if "broken" in pair else len(pair) for pair in pairs], dtype=np.float32)


def engine(scorer: ByLength, **settings: int) -> RerankEngine:
    return RerankEngine(scorer, **settings)


def test_concurrent_searches_get_their_own_scores_in_batches_of_tokens() -> None:
    made = engine(scorer := ByLength(), batch_tokens=64)

    async def run() -> list[np.ndarray]:
        return await asyncio.gather(
            *(made.score("q" * n, None, [f"{'x' * m}" for m in range(1, 9)], 10) for n in range(1, 9)),
            made.score("q", "i", [], 10),
        )

    *scores, none = asyncio.run(run())
    for n, found in enumerate(scores, start=1):
        np.testing.assert_array_equal(found, [n + 1 + m for m in range(1, 9)])
        assert found.dtype == np.float32
    assert none.shape == (0,)
    assert max(scorer.batches) <= 64
    assert sum(scorer.batches) >= sum(n + 1 + m for n in range(1, 9) for m in range(1, 9))
    assert made.counters.texts == 64


def test_a_score_that_is_not_finite_fails_only_its_own_search() -> None:
    made = engine(ByLength())

    async def run() -> list[np.ndarray | BaseException]:
        calls = (made.score("q", None, ["fine", "also"], 10), made.score("q", None, ["broken", "fine"], 10))
        return await asyncio.gather(*calls, return_exceptions=True)

    fine, broken = asyncio.run(run())
    np.testing.assert_array_equal(fine, [6, 6])
    assert isinstance(broken, ValueError)
    assert "not finite" in str(broken)


def test_a_late_search_is_dropped() -> None:
    made = engine(scorer := ByLength(), batch_tokens=96)
    scorer.open.clear()

    async def run() -> list[np.ndarray | BaseException]:
        first = asyncio.ensure_future(made.score("q", None, ["a" * 40] * 2, 60))
        while not scorer.busy.is_set():  # the model is held
            await asyncio.sleep(0.01)
        late = asyncio.ensure_future(made.score("q", None, ["b" * 40], 0.5))
        filling = [asyncio.ensure_future(made.score("q", None, ["c" * 40], 60)) for _ in range(7)]
        while made.waiting < 8:
            await asyncio.sleep(0.01)
        await asyncio.wait([late])
        scorer.open.set()
        return await asyncio.gather(first, late, *filling, return_exceptions=True)

    first, late, *others = asyncio.run(run())
    np.testing.assert_array_equal(first, [42, 42])
    assert isinstance(late, DeadlineExceeded)
    assert late.timeout_s == 0.5
    assert [list(found) for found in others] == [[42]] * 7  # type: ignore[arg-type]
    assert made.counters.expired == 1
    assert len(scorer.batches) == 5  # two pairs each; the late one is in none
