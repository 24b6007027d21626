"""Fan-out of a search to the shards of an index, in one phase or two, and the merge of their answers. No Ray.

In one phase every shard answers its hits with their texts. Of many shards or many hits the merge drops most of them, so in two
phases the shards answer ids and scores, and those that have winners are asked for their texts. Texts are cached by `Key`, which
names one state of a document for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from infembed_ray.modeling.lru_cache import LruCache
from infembed_ray.retrieval.answers import Behind, Key, MergedRanking, ScoreQuery, ShardQuery, merge, merge_rankings
from infembed_ray.retrieval.shards import Content, shard_of
from infembed_ray.serving.encoder.batching import DeadlineExceeded
from infembed_ray.serving.routing.micro_batching import MicroBatcher
from infembed_ray.serving.routing.retries import RetriedCalls
from infembed_ray.serving.schema import Metadata, SearchHit
from infembed_ray.serving.service import NotApplied, ReplicaLost

T = TypeVar("T")

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
PARTIAL_PATIENCE_S = 1.0
"""How long a search that may be partial waits for the other shards after the first has answered."""
BEHIND_PAUSE_S = 0.05
"""Pause before a shard that has not applied `min_sequence` is asked again."""


class Deployment(Protocol):
    """Calls a method of one of a deployment's replicas.

    Raises `ReplicaLost` if the replica is lost, else what the method raised.
    """

    def __call__(self, method: str, *arguments: Any) -> Awaitable[Any]: ...


class Ranked(NamedTuple):
    """The merged hits of every vector of a query, the least sequence of the answers, and the shards that did not answer."""

    results: list[list[SearchHit]]
    sequence: int
    missing: list[str]


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
            return MicroBatcher(
                partial(_call, calls, shard, method),
                max_calls=CALLS_PER_SHARD * replicas,
                max_weight=most,
                weigh=weigh,
            )

        self._search = [
            batched(shard, "search_many", MAX_BATCH_QUERIES, lambda query: len(query.vectors))
            for shard in shards.values()
        ]
        self._fetch = [batched(shard, "contents_many", MAX_BATCH_KEYS, len) for shard in shards.values()]
        self._score = [
            batched(shard, "scores_many", MAX_BATCH_KEYS, lambda query: len(query.ids)) for shard in shards.values()
        ]

    async def search(self, query: ShardQuery, deadline: float, allow_partial: bool, hybrid: float = 0.0) -> Ranked:
        """Search all shards and merge their hits.

        Args:
            query: its `ranking` is set here.
            deadline: by the event loop's time.
            allow_partial: answer without shards that do not, if at least one does.
            hybrid: weight of words in the scores of a query with texts.

        Raises:
            NotApplied: a shard has not applied `min_sequence` by the deadline.
            Exception: of a shard that did not answer.
        """
        query = replace(query, ranking=self._in_two_phases(query))
        calls = {number: self._search_shard(number, query, deadline) for number in range(len(self._names))}
        answers, error = await _ask(calls, allow_partial)
        while answers:
            lost: set[int] = set()
            if query.ranking:
                merged = [merge_rankings(list(answers.values()), n, query.k, hybrid) for n in range(len(query.vectors))]
                results, lost, error = await self._hits(list(answers), merged, deadline, allow_partial)
            else:
                by_query = zip(*(answer.hits for answer in answers.values()), strict=True)
                results = [[_hit(*hit) for hit in merge(hits, query.k)] for hits in by_query]
            if not lost:
                missing = [name for number, name in enumerate(self._names) if number not in answers]
                return Ranked(results, min(answer.sequence for answer in answers.values()), missing)
            answers = {number: answer for number, answer in answers.items() if number not in lost}
        raise error or ReplicaLost()

    async def scores(
        self, ids: Sequence[str], vectors: np.ndarray, deadline: float, allow_partial: bool
    ) -> dict[str, np.ndarray]:
        """Score passages, as they are stored now, under n query vectors.

        Returns:
            id -> (n,) float32 scores. Deleted passages are left out, and with `allow_partial` those whose shard does not answer.
        """
        asked: dict[int, list[str]] = {}
        for id in ids:
            asked.setdefault(shard_of(id, len(self._names)), []).append(id)
        calls = {shard: self._score[shard](ScoreQuery(some, vectors), deadline) for shard, some in asked.items()}
        answers, _ = await _ask(calls, allow_partial)
        scored = {id: of for shard, all in answers.items() for id, of in zip(asked[shard], all.T, strict=True)}
        return {id: of for id, of in scored.items() if np.isfinite(of).all()}

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
            except Behind as found:
                behind = found
            except DeadlineExceeded:  # the pause took longer on a busy machine
                if behind is None:
                    raise
                break
        raise NotApplied(query.min_sequence, self._names[number], behind.args[0]) from behind

    async def _hits(
        self, shards: Sequence[int], merged: Sequence[MergedRanking], deadline: float, allow_partial: bool
    ) -> tuple[list[list[SearchHit]], set[int], Exception | None]:
        """Fetch the winners' texts: the hits; or the shards that did not give theirs, and the error of one."""
        contents: dict[tuple[int, Key], Content | None] = {}
        asked: dict[int, list[Key]] = {}
        for of_query in merged:
            for winner in _keys(shards, of_query):
                contents[winner] = self._cached.get(winner)
        for (shard, key), content in contents.items():
            if content is None:
                asked.setdefault(shard, []).append(key)
        fetched, error = await _ask(
            {shard: self._fetch[shard](keys, deadline) for shard, keys in asked.items()}, allow_partial
        )
        for shard, found in fetched.items():
            for key, content in zip(asked[shard], found, strict=True):
                contents[shard, key] = content
                self._cached.put((shard, key), content)
        if lost := asked.keys() - fetched.keys():
            return [], lost, error
        results = []
        for of_query in merged:
            ranking = zip(of_query.ids, of_query.scores, _keys(shards, of_query), strict=True)
            results.append([_hit(id, score, *contents[winner]) for id, score, winner in ranking])  # type: ignore[misc]
        return results, set(), None


def now() -> float:
    """Return the event loop's time."""
    return asyncio.get_running_loop().time()


async def _call(calls: RetriedCalls, shard: Deployment, method: str, items: Sequence[Any], deadline: float) -> Any:
    return await calls(lambda: shard(method, items), deadline - now())


async def _ask(calls: Mapping[int, Awaitable[T]], allow_partial: bool) -> tuple[dict[int, T], Exception | None]:
    """Answers by shard. If partial answers are allowed, those of the shards that answered, and an error of the others."""
    tasks = {number: asyncio.ensure_future(call) for number, call in calls.items()}
    try:
        if not allow_partial:
            return dict(zip(tasks, await asyncio.gather(*tasks.values()), strict=True)), None
        pending = set(tasks.values())
        while pending and not any(map(_succeeded, tasks.values())):  # a lost shard fails at once
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        if pending:
            await asyncio.wait(pending, timeout=PARTIAL_PATIENCE_S)
        errors = [task.exception() for task in tasks.values() if task.done() and not task.cancelled()]
        answered = {n: task.result() for n, task in tasks.items() if _succeeded(task)}
        return answered, next((error for error in errors if isinstance(error, Exception)), None)
    finally:
        for task in tasks.values():
            task.cancel()


def _succeeded(task: asyncio.Future[Any]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def _keys(shards: Sequence[int], merged: MergedRanking) -> Iterator[tuple[int, Key]]:
    """The shard and the key of each winner."""
    for ranking, place, id in zip(merged.rankings, merged.places, merged.ids, strict=True):
        yield shards[ranking], (place, id)


def _hit(id: str, score: float, text: str, metadata: Mapping[str, Metadata]) -> SearchHit:
    return SearchHit(id=id, score=score, text=text, metadata=metadata)
