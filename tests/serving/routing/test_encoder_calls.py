"""The query cache against an encoder that draws vectors from the texts."""

import numpy as np
import pytest

from infembed_ray.modeling.formats import Question
from infembed_ray.serving.encoder.batching import Embedded, QueueFull
from infembed_ray.serving.routing.encoder_calls import EncoderInputs, QueryCache

DIMENSION = 8


def vector(query: Question) -> np.ndarray:
    drawn = np.random.default_rng(list(f"{query.instruction}|{query.query}".encode()))
    return drawn.standard_normal(DIMENSION).astype(np.float32)


class Encoder:
    """Encoder that records its calls."""

    def __init__(self) -> None:
        self.calls: list[list[Question]] = []
        self.failing: list[Exception] = []

    async def __call__(self, inputs: EncoderInputs, deadline: float) -> Embedded:
        queries = [Question(*both) for both in zip(inputs.texts, inputs.instructions or (), strict=True)]
        self.calls.append(queries)
        if self.failing:
            raise self.failing.pop()
        return Embedded(np.stack([vector(query) for query in queries]), len(queries))


async def test_a_query_is_encoded_once_under_each_instruction() -> None:
    encoder = Encoder()
    cache = QueryCache(encoder)
    queries = [Question("q", "I"), Question("q", "J"), Question("q"), Question("q", "I")]
    for _ in range(2):
        np.testing.assert_array_equal(await cache(queries, 1e9), [vector(query) for query in queries])
    assert encoder.calls == [queries[:3]]
    assert (cache.hits, cache.misses) == (5, 3)


async def test_an_error_goes_to_the_caller_and_is_not_kept() -> None:
    encoder = Encoder()
    cache = QueryCache(encoder)
    encoder.failing = [QueueFull(1.0)]
    with pytest.raises(QueueFull):
        await cache([Question("q")], 1e9)
    np.testing.assert_array_equal(await cache([Question("q")], 1e9), [vector(Question("q"))])
    assert len(encoder.calls) == 2


async def test_the_least_recently_used_query_leaves_when_the_memory_is_full() -> None:
    size = 4 * DIMENSION + 4 + 512  # a vector, a character and the constant
    encoder = Encoder()
    cache = QueryCache(encoder, max_bytes=2 * size)
    for text in ("a", "b", "a", "c", "a", "b"):  # c takes the place of b
        await cache([Question(text)], 1e9)
    assert [query.query for (query,) in encoder.calls] == ["a", "b", "c", "b"]
    assert cache.bytes == 2 * size
