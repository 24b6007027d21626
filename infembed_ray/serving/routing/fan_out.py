"""Fan-out of a search to the shards of an index, and the merge of their answers. No Ray."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from infembed_ray.retrieval.answers import Behind, ScoreQuery, ShardAnswer, ShardQuery, merge
from infembed_ray.retrieval.shards import shard_of
from infembed_ray.serving.encoder.batching import DeadlineExceeded
from infembed_ray.serving.routing.micro_batching import MicroBatcher
from infembed_ray.serving.routing.retries import RetriedCalls
from infembed_ray.serving.schema import SearchHit
from infembed_ray.serving.service import NotApplied

T = TypeVar("T")
Deployment = Callable[..., Awaitable[Any]]
"""Calls a method of one of a deployment's replicas, by its name and arguments, as `remote.RemoteDeployment` does."""

MAX_BATCH_QUERIES = 64
"""Queries in one call to a shard."""
MAX_BATCH_KEYS = 1024
"""Documents in one call to a shard."""
CALLS_PER_SHARD = 2
"""Calls in flight per replica of a shard."""
BEHIND_PAUSE_S = 0.05
"""Pause before a shard that has not applied `min_sequence` is asked again."""


class Ranked(NamedTuple):
    """The merged hits of every vector of a query, and the least sequence of the shards' answers."""

    results: list[list[SearchHit]]
    sequence: int


class FanOut:
    """Searches the shards of one index version. All calls come from one event loop.

    Args:
        shards: by name; each has `search_many(list[ShardQuery])` and `scores_many(list[ScoreQuery])`, which return one answer or
            exception per item.
        replicas: largest number of replicas per shard.
    """

    def __init__(self, shards: Mapping[str, Deployment], *, replicas: int) -> None:
        self._names = list(shards)

        def batched(shard: Deployment, method: str, most: int, weigh: Callable[[Any], int]) -> MicroBatcher[Any, Any]:
            calls = RetriedCalls(replicas)

            async def send(items: Sequence[Any], deadline: float) -> Any:
                return await calls(lambda: shard(method, items), deadline - now())

            return MicroBatcher(send, max_calls=CALLS_PER_SHARD * replicas, max_weight=most, weigh=weigh)

        self._search = [
            batched(shard, "search_many", MAX_BATCH_QUERIES, lambda query: len(query.vectors))
            for shard in shards.values()
        ]
        self._score = [
            batched(shard, "scores_many", MAX_BATCH_KEYS, lambda query: len(query.ids)) for shard in shards.values()
        ]

    async def search(self, query: ShardQuery, deadline: float, hybrid: float = 0.0) -> Ranked:
        """Search all shards and merge their hits.

        The deadline is by the event loop's time; `hybrid` is the weight of words in the scores of a query with texts.

        Raises:
            NotApplied: a shard has not applied `min_sequence` by the deadline.
            Exception: of a shard that did not answer.
        """
        answers: list[ShardAnswer] = await _all(self._search_shard(n, query, deadline) for n in range(len(self._names)))
        merged = [merge(answers, number, query.k, hybrid) for number in range(len(query.vectors))]
        results = [[SearchHit(**hit._asdict()) for hit in hits] for hits in merged]
        return Ranked(results, min(answer.sequence for answer in answers))

    async def scores(self, ids: Sequence[str], vectors: np.ndarray, deadline: float) -> dict[str, np.ndarray]:
        """Score passages, as they are stored now, under n query vectors: id -> (n,) float32, without deleted passages."""
        asked: dict[int, list[str]] = {}
        for id in ids:
            asked.setdefault(shard_of(id, len(self._names)), []).append(id)
        answers = await _all(self._score[shard](ScoreQuery(some, vectors), deadline) for shard, some in asked.items())
        scored = zip(asked.values(), answers, strict=True)
        return {id: of for some, all in scored for id, of in zip(some, all.T, strict=True) if np.isfinite(of).all()}

    async def _search_shard(self, number: int, query: ShardQuery, deadline: float) -> Any:
        """Search one shard; wait until it has applied the sequence that the query asks for."""
        behind: Behind | None = None
        while behind is None or now() + BEHIND_PAUSE_S <= deadline:
            if behind is not None:
                await asyncio.sleep(BEHIND_PAUSE_S)
            try:
                return await self._search[number](query, deadline)
            except Behind as error:
                behind = error
            except DeadlineExceeded:  # the pause took longer on a busy machine
                if behind is None:
                    raise
                break
        raise NotApplied(query.min_sequence, self._names[number], behind.args[0]) from behind


def now() -> float:
    """Return the event loop's time."""
    return asyncio.get_running_loop().time()


async def _all(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Return all answers; the first error cancels the other calls."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
