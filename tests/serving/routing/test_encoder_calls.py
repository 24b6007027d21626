"""The query cache against an encoder that draws vectors from the texts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from infembed_ray.serving.encoder.batching import Embedded, QueueFull
from infembed_ray.serving.routing.encoder_calls import QueryCache
from infembed_ray.serving.service import Query

DIMENSION = 8


def vector(query: Query) -> np.ndarray:
    drawn = np.random.default_rng(list(f"{query.instruction}|{query.text}".encode()))
    return drawn.standard_normal(DIMENSION).astype(np.float32)


class Encoder:
    """Encoder that records its calls, and takes a moment for each."""

    def __init__(self) -> None:
        self.calls: list[list[Query]] = []
        self.cancelled = 0
        self.failing: list[Exception] = []
        self.seconds = 0.01

    async def __call__(self, queries: list[Query], deadline: float) -> Embedded:
        self.calls.append(queries)
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.failing:
            raise self.failing.pop()
        return Embedded(np.stack([vector(query) for query in queries]), len(queries))


def play(scenario: Callable[[QueryCache, Encoder], Awaitable[None]], max_bytes: int = 2**20) -> None:
    async def run() -> None:
        encoder = Encoder()
        await scenario(QueryCache(encoder, max_bytes), encoder)

    asyncio.run(run())


def test_a_query_is_encoded_once_under_each_instruction() -> None:
    async def scenario(cache: QueryCache, encoder: Encoder) -> None:
        queries = [Query("q", "I"), Query("q", "J"), Query("q"), Query("q", "I")]
        for _ in range(2):
            np.testing.assert_array_equal(await cache(queries, 1e9), [vector(query) for query in queries])
        assert encoder.calls == [queries[:3]]
        assert (cache.hits, cache.misses) == (5, 3)

    play(scenario)


def test_identical_concurrent_queries_share_one_encoding() -> None:
    async def scenario(cache: QueryCache, encoder: Encoder) -> None:
        query = Query("q", "I")
        for found in await asyncio.gather(*(cache([query], 1e9) for _ in range(20))):
            np.testing.assert_array_equal(found, [vector(query)])
        assert encoder.calls == [[query]]
        assert (cache.hits, cache.misses) == (19, 1)

    play(scenario)


def test_a_cancelled_caller_leaves_the_encoding_to_the_others_and_the_last_one_cancels_it() -> None:
    async def scenario(cache: QueryCache, encoder: Encoder) -> None:
        query = Query("q")
        first, second = (asyncio.create_task(cache([query], 1e9)) for _ in range(2))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        first.cancel()
        np.testing.assert_array_equal(await second, [vector(query)])
        assert (len(encoder.calls), encoder.cancelled) == (1, 0)

        other = Query("other")
        alone = asyncio.create_task(cache([other], 1e9))
        await asyncio.sleep(0.001)
        alone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await alone
        np.testing.assert_array_equal(await cache([other], 1e9), [vector(other)])  # no caller joins a cancelled one
        assert (len(encoder.calls), encoder.cancelled) == (3, 1)

    play(scenario)


def test_an_error_goes_to_every_caller_and_is_not_kept() -> None:
    async def scenario(cache: QueryCache, encoder: Encoder) -> None:
        encoder.failing = [QueueFull(1.0)]
        found = await asyncio.gather(*(cache([Query("q")], 1e9) for _ in range(3)), return_exceptions=True)
        assert [type(answer) for answer in found] == [QueueFull] * 3
        np.testing.assert_array_equal(await cache([Query("q")], 1e9), [vector(Query("q"))])
        assert len(encoder.calls) == 2

    play(scenario)


def test_the_least_recently_used_query_leaves_when_the_memory_is_full() -> None:
    size = 4 * DIMENSION + 4 + 512  # a vector, a character and the constant

    async def scenario(cache: QueryCache, encoder: Encoder) -> None:
        for text in ("a", "b", "a", "c", "a", "b"):  # c takes the place of b
            await cache([Query(text)], 1e9)
        assert [query.text for (query,) in encoder.calls] == ["a", "b", "c", "b"]
        assert cache.bytes == 2 * size

    play(scenario, max_bytes=2 * size)


def test_without_memory_every_query_is_encoded() -> None:
    async def scenario(cache: QueryCache, encoder: Encoder) -> None:
        await asyncio.gather(*(cache([Query("q")], 1e9) for _ in range(3)))
        assert len(encoder.calls) == 3
        assert (cache.hits, cache.misses, cache.bytes) == (0, 3, 0)

    play(scenario, max_bytes=0)


def test_any_order_of_requests_and_cancellations_gives_the_vectors_of_the_encoder() -> None:
    async def scenario(cache: QueryCache, encoder: Encoder) -> None:
        rng = random.Random(0)
        encoder.seconds = 0.002

        async def one() -> None:
            queries = [Query(str(rng.randrange(12)), rng.choice([None, "I"])) for _ in range(rng.randint(1, 3))]
            await asyncio.sleep(rng.random() / 50)
            call = asyncio.create_task(cache(queries, 1e9))
            if rng.random() < 0.3:
                await asyncio.sleep(rng.random() / 300)
                call.cancel()
            try:
                np.testing.assert_array_equal(await call, [vector(query) for query in queries])
            except asyncio.CancelledError:
                assert call.cancelled()

        await asyncio.gather(*(one() for _ in range(300)))
        assert not cache._flights
        assert len(encoder.calls) < 300
        assert cache.bytes <= 5000

    play(scenario, max_bytes=5000)
