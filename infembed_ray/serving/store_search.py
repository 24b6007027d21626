"""Serve deployment that searches an index in an external engine, in place of the deployments of shards."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from infembed_ray.retrieval.answers import ScoreQuery, ShardAnswer, ShardQuery
from infembed_ray.retrieval.filters import FilterError
from infembed_ray.retrieval.milvus import Milvus, MilvusAddress, StoreFault
from infembed_ray.retrieval.updates.write_ahead_log import Change
from infembed_ray.serving.release import IndexArguments
from infembed_ray.serving.service import Document, ReplicaLost, ShardState

SEARCHES = 8
"""Calls of a replica to the engine at a time."""
RETRY_AFTER_S = 2.0
"""Retry-After while the engine does not answer."""

log = logging.getLogger(__name__)
T = TypeVar("T")


class StoreSearch:
    """A replica that forwards searches and changes to one version in an external engine. It searches as `ShardSearch` does."""

    def __init__(self, arguments: IndexArguments, number: int) -> None:
        address = MilvusAddress.parse(arguments.index, "index", arguments.settings.store_token_env)
        self._store = Milvus(address, arguments.settings.request_timeout_s).open(arguments.version)
        self._threads = ThreadPoolExecutor(SEARCHES, "search")
        self._writer = ThreadPoolExecutor(1, "write")  # Milvus Lite takes one writer at a time

    async def search_many(self, queries: Sequence[ShardQuery]) -> list[ShardAnswer | Exception]:
        """As `ShardSearch.search_many`; each request is a call to the engine."""
        return list(await asyncio.gather(*(self._call(self._threads, self._answer, query) for query in queries)))

    async def scores_many(self, queries: Sequence[ScoreQuery]) -> list[np.ndarray]:
        """As `ShardSearch.scores_many`; each request is a call to the engine."""
        return list(await asyncio.gather(*(self._call(self._threads, self._store.scores, query) for query in queries)))

    async def document(self, id: str) -> Document | None:
        """Return the document with an id."""
        hit = await self._call(self._threads, self._store.get, id)
        return None if hit is None else Document(hit.id, hit.text, hit.metadata)

    async def change(self, changes: Sequence[Change]) -> int:
        """Apply changes; return the sequence from which searches see them."""
        return await self._call(self._writer, self._store.change, changes)

    async def ready(self) -> bool:
        """Return whether the engine would answer."""
        return await self._call(self._threads, self._store.ready)

    async def state(self) -> ShardState:
        """Return a state without faults: an engine that answers applies changes."""
        return ShardState()

    def _answer(self, query: ShardQuery) -> ShardAnswer | Exception:
        try:
            fresh = query.min_sequence > 0
            hits, sequence = self._store.search(query.vectors, query.k, query.filter, fresh)
            return ShardAnswer(hits, max(sequence, query.min_sequence))
        except FilterError as error:
            return error

    async def _call(self, threads: Executor, function: Callable[..., T], *arguments: object) -> T:
        """Call the engine in a thread; raises ReplicaLost if it does not answer, and logs why."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(threads, function, *arguments)
        except StoreFault as fault:
            log.error("the external engine does not answer: %s", fault)
            with contextlib.suppress(StoreFault):
                await loop.run_in_executor(self._threads, self._store.ready)  # a restarted engine may have to load
            raise ReplicaLost(RETRY_AFTER_S) from fault
