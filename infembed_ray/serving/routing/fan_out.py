"""Fan-out of a search to the shards of an index, and the merge of their answers. No Ray.

In one phase every shard answers its hits with their texts. In two phases the shards answer ids and scores, and those that have
winners are asked for their texts, which are cached by `Key`: it names one state of a document for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from infembed_ray.modeling.lru_cache import LruCache
from infembed_ray.retrieval.answers import Behind, Key, MergedRanking, ScoreQuery, ShardQuery, merge, merge_rankings
from infembed_ray.retrieval.shards import Content, shard_of
from infembed_ray.serving.encoder.batching import DeadlineExceeded
from infembed_ray.serving.routing.micro_batching import MicroBatcher
from infembed_ray.serving.routing.retries import RetriedCalls
from infembed_ray.serving.schema import Metadata, SearchHit
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
CONTENTS_PER_CALL = 900
"""Texts that cost the ingress as much CPU as one more call to a shard, 1.45 ms (benchmarks/fan_out.py): two phases pay if they
leave out more for each call."""
CACHED_CHARACTERS = 1 << 25
"""Most characters of cached texts in an ingress replica."""
BEHIND_PAUSE_S = 0.05
"""Pause before a shard that has not applied `min_sequence` is asked again."""


class Ranked(NamedTuple):
    """The merged hits of every vector of a query, and the least sequence of the shards' answers."""

    results: list[list[SearchHit]]
    sequence: int


class FanOut:
    """Searches the shards of one index version. All calls come from one event loop.

    Args:
        shards: by name; each has `search_many(list[ShardQuery])`, `contents_many(list[list[Key]])` and
            `scores_many(list[ScoreQuery])`, which return one answer or exception per item.
        replicas: largest number of replicas per shard.
    """

    def __init__(self, shards: Mapping[str, Deployment], *, replicas: int) -> None:
        self._names = list(shards)
        self._cached = LruCache[tuple[int, Key], Content](CACHED_CHARACTERS, lambda _, content: len(content[0]))

        def batched(shard: Deployment, method: str, most: int, weigh: Callable[[Any], int]) -> MicroBatcher[Any, Any]:
            calls = RetriedCalls(replicas)

            async def send(items: Sequence[Any], deadline: float) -> Any:
                return await calls(lambda: shard(method, items), deadline - now())

            return MicroBatcher(send, max_calls=CALLS_PER_SHARD * replicas, max_weight=most, weigh=weigh)

        self._search = [
            batched(shard, "search_many", MAX_BATCH_QUERIES, lambda query: len(query.vectors))
            for shard in shards.values()
        ]
        self._fetch = [batched(shard, "contents_many", MAX_BATCH_KEYS, len) for shard in shards.values()]
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
        query = replace(query, ranking=self._in_two_phases(query))
        answers = await _all(self._search_shard(number, query, deadline) for number in range(len(self._names)))
        if query.ranking:
            merged = [merge_rankings(answers, n, query.k, hybrid) for n in range(len(query.vectors))]
            results = await self._hits(merged, deadline)
        else:
            by_query = zip(*(answer.hits for answer in answers), strict=True)
            results = [[_hit(*hit) for hit in merge(hits, query.k)] for hits in by_query]
        return Ranked(results, min(answer.sequence for answer in answers))

    async def scores(self, ids: Sequence[str], vectors: np.ndarray, deadline: float) -> dict[str, np.ndarray]:
        """Score passages, as they are stored now, under n query vectors: id -> (n,) float32, without deleted passages."""
        asked: dict[int, list[str]] = {}
        for id in ids:
            asked.setdefault(shard_of(id, len(self._names)), []).append(id)
        answers = await _all(self._score[shard](ScoreQuery(some, vectors), deadline) for shard, some in asked.items())
        scored = zip(asked.values(), answers, strict=True)
        return {id: of for some, all in scored for id, of in zip(some, all.T, strict=True) if np.isfinite(of).all()}

    def _in_two_phases(self, query: ShardQuery) -> bool:
        if query.texts is not None:  # its hits are known after the fusion
            return True
        shards, wanted = len(self._names), len(query.vectors) * query.k
        return wanted * (shards - 1) > CONTENTS_PER_CALL * min(shards, wanted)

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

    async def _hits(self, merged: Sequence[MergedRanking], deadline: float) -> list[list[SearchHit]]:
        """Return the winners of each query with their texts, which are fetched unless they are cached."""
        contents = {winner: self._cached.get(winner) for ranking in merged for winner in _winners(ranking)}
        asked: dict[int, list[Key]] = {}
        for (shard, key), content in contents.items():
            if content is None:
                asked.setdefault(shard, []).append(key)
        fetched = await _all(self._fetch[shard](keys, deadline) for shard, keys in asked.items())
        for (shard, keys), texts in zip(asked.items(), fetched, strict=True):
            for key, content in zip(keys, texts, strict=True):
                contents[shard, key] = content
                self._cached.put((shard, key), content)
        return [
            [
                _hit(id, score, *contents[winner])  # type: ignore[misc]
                for id, score, winner in zip(ranking.ids, ranking.scores, _winners(ranking), strict=True)
            ]
            for ranking in merged
        ]


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


def _winners(merged: MergedRanking) -> Iterator[tuple[int, Key]]:
    """Yield the shard and the key of each winner."""
    for shard, place, id in zip(merged.rankings, merged.places, merged.ids, strict=True):
        yield shard, (place, id)


def _hit(id: str, score: float, text: str, metadata: Mapping[str, Metadata]) -> SearchHit:
    return SearchHit(id=id, score=score, text=text, metadata=metadata)
