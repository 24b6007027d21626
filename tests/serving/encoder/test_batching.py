import asyncio
import pickle
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infembed_ray.serving.encoder.batching import (
    BatchingEngine,
    DeadlineExceeded,
    QueueFull,
)
from tests.serving.debug import debug_embed
from tests.support.waiting import wait_until_async


class Model:
    """Records its batches; stands still while `gate` is shut."""

    def __init__(self) -> None:
        self.batches: list[list[list[int]]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.running = 0
        self.most_running = 0

    def __call__(self, sequences: list[list[int]]) -> np.ndarray:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        self.batches.append(sequences)
        assert self.gate.wait(timeout=30)
        self.running -= 1
        return debug_embed(sequences)


def sequence(length: int, first: int = 0) -> list[int]:
    return [first, *[7] * (length - 1)]


async def occupy_model(model: Model, engine: BatchingEngine) -> asyncio.Task[np.ndarray]:
    """Start a batch that lasts until `model.gate` opens, so that later requests queue."""
    model.gate.clear()
    task = asyncio.create_task(engine.embed([sequence(3, first=99)]))
    await wait_until_async(lambda: len(model.batches) == 1)
    return task


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=40), min_size=1, max_size=6), max_size=20),
    st.integers(1, 100),
)
def test_every_request_gets_the_vectors_of_its_sequences(requests: list[list[list[int]]], batch_tokens: int) -> None:
    model = Model()

    async def run() -> list[np.ndarray]:
        engine = BatchingEngine(model, batch_tokens=batch_tokens)
        return await asyncio.gather(*[engine.embed(request) for request in requests])

    for request, vectors in zip(requests, asyncio.run(run()), strict=True):
        np.testing.assert_array_equal(vectors, debug_embed(request))
    for batch in model.batches:
        assert len(batch) * max(map(len, batch)) <= batch_tokens or len(batch) == 1
    assert sorted(s for batch in model.batches for s in batch) == sorted(s for r in requests for s in r)
    assert model.most_running <= 1


async def test_sequences_that_queue_while_the_model_is_busy_are_batched_by_length() -> None:
    model = Model()
    engine = BatchingEngine(model, batch_tokens=200)
    first = await occupy_model(model, engine)
    lengths = [100, 10, 98, 11, 9, 10, 10, 12]
    rest = [asyncio.create_task(engine.embed([sequence(n)])) for n in lengths]
    await wait_until_async(lambda: engine.waiting == len(lengths))
    model.gate.set()
    await asyncio.gather(first, *rest)
    # The oldest, of 100 tokens, is not padded out with short ones; those share a batch of their own.
    assert [sorted(map(len, batch)) for batch in model.batches[1:]] == [[98, 100], [9, 10, 10, 10, 11, 12]]


async def test_a_large_request_does_not_delay_single_ones() -> None:
    model = Model()
    engine = BatchingEngine(model, batch_tokens=40)
    large = asyncio.create_task(engine.embed([sequence(10)] * 200))
    await wait_until_async(lambda: len(model.batches) >= 3)
    before = len(model.batches)
    await engine.embed([sequence(30)])  # too long to share a batch
    assert len(model.batches) - before <= 4
    assert not large.done()
    assert len(await large) == 200


async def test_sequences_of_all_lengths_make_progress() -> None:
    """A long sequence is answered although short ones, which batch better, keep coming."""
    model = Model()
    engine = BatchingEngine(model, batch_tokens=60)
    stop = asyncio.Event()

    async def short() -> None:
        while not stop.is_set():
            await engine.embed([sequence(5)])

    clients = [asyncio.create_task(short()) for _ in range(20)]
    await wait_until_async(lambda: len(model.batches) >= 3)
    await asyncio.wait_for(engine.embed([sequence(50)]), timeout=30)
    stop.set()
    await asyncio.gather(*clients)


async def test_a_cancelled_request_never_reaches_the_model() -> None:
    model = Model()
    engine = BatchingEngine(model)
    first = await occupy_model(model, engine)
    kept = asyncio.create_task(engine.embed([sequence(4, first=1)]))
    gone = asyncio.create_task(engine.embed([sequence(4, first=2), sequence(5, first=2)]))
    await wait_until_async(lambda: engine.waiting == 3)
    gone.cancel()
    await wait_until_async(lambda: engine.waiting == 1)
    model.gate.set()
    await asyncio.gather(first, kept)
    assert [s[0] for batch in model.batches for s in batch] == [99, 1]
    with pytest.raises(asyncio.CancelledError):
        await gone


async def test_a_sequence_on_which_the_model_raises_fails_alone() -> None:
    """The model fails on any batch with it; who shared the batch is answered."""
    seen: list[list[int]] = []

    def model(sequences: list[list[int]]) -> np.ndarray:
        seen.append([s[0] for s in sequences])
        if 13 in seen[-1]:
            raise RuntimeError("out of memory")
        return debug_embed(sequences)

    engine = BatchingEngine(model, batch_tokens=1000)
    requests = [[sequence(5, first=n)] for n in range(8)] + [[sequence(5, first=13), sequence(5, first=9)]]
    *good, bad = await asyncio.gather(*map(engine.embed, requests), return_exceptions=True)
    for n, vectors in enumerate(good):
        np.testing.assert_array_equal(vectors, debug_embed([sequence(5, first=n)]))
    assert isinstance(bad, RuntimeError)
    assert seen[-1] != [9]  # nothing is computed for a request that failed already
    assert len(seen) <= 1 + 2 * 4  # halves of ten, not one by one
    assert (engine.counters.failed, engine.counters.texts, engine.waiting) == (1, 8, 0)
    np.testing.assert_array_equal(await engine.embed([sequence(2)]), debug_embed([sequence(2)]))


async def test_a_request_that_expires_in_the_queue_never_reaches_the_model() -> None:
    model = Model()
    engine = BatchingEngine(model)
    first = await occupy_model(model, engine)
    patient = asyncio.create_task(engine.embed([sequence(4, first=1)], timeout_s=60))
    with pytest.raises(DeadlineExceeded, match=r"not answered within 0\.01 s") as expired:
        await engine.embed([sequence(4, first=2)] * 3, timeout_s=0.01)
    assert pickle.loads(pickle.dumps(expired.value)).timeout_s == 0.01
    assert engine.waiting == 1
    model.gate.set()
    await asyncio.gather(first, patient)
    with pytest.raises(DeadlineExceeded):
        await engine.embed([sequence(4, first=3)], timeout_s=0)  # an idle engine would have begun at once
    assert [s[0] for batch in model.batches for s in batch] == [99, 1]
    assert engine.counters.expired == 2


async def test_packed_sequences_are_batched_in_turn() -> None:
    model = Model()
    engine = BatchingEngine(model, batch_tokens=100, padded=False)
    first = await occupy_model(model, engine)
    lengths = [90, 5, 10, 80, 20, 300, 1]
    rest = [asyncio.create_task(engine.embed([sequence(n)])) for n in lengths]
    await wait_until_async(lambda: engine.waiting == len(lengths))
    model.gate.set()
    await asyncio.gather(first, *rest)
    assert [list(map(len, batch)) for batch in model.batches[1:]] == [[90, 5], [10, 80], [20], [300], [1]]


async def test_cached_tokens_do_not_count_for_batches() -> None:
    model = Model()
    engine = BatchingEngine(model, batch_tokens=100, padded=False, cost=lambda s: len(s) - 40)
    first = await occupy_model(model, engine)
    rest = [asyncio.create_task(engine.embed([sequence(50)])) for _ in range(12)]
    await wait_until_async(lambda: engine.waiting == 12)
    model.gate.set()
    await asyncio.gather(first, *rest)
    assert list(map(len, model.batches[1:])) == [10, 2]


async def test_a_request_that_would_wait_too_long_is_rejected_and_the_next_is_not() -> None:
    model = Model()
    engine = BatchingEngine(model, batch_tokens=40)
    await engine.embed([sequence(10)])
    model.batches.clear()
    first = await occupy_model(model, engine)
    engine._done, engine._done_s = 100.0, 1.0  # whatever this machine did
    engine.counters.texts, engine.counters.seconds = 10, 1.0
    crowd = [asyncio.create_task(engine.embed([sequence(10)], timeout_s=60)) for _ in range(30)]
    await wait_until_async(lambda: engine.waiting == 30)  # three seconds' work
    engine.require_capacity(1, timeout_s=60)
    engine.require_capacity(1)
    with pytest.raises(QueueFull) as refusal:
        await engine.embed([sequence(10)], timeout_s=5)
    assert 3 <= refusal.value.retry_after_s < 4
    assert pickle.loads(pickle.dumps(refusal.value)).retry_after_s == refusal.value.retry_after_s
    crowd += [asyncio.create_task(engine.embed([sequence(10)])) for _ in range(20)]
    await wait_until_async(lambda: engine.waiting == 50)
    with pytest.raises(QueueFull):  # longer than anybody should wait
        engine.require_capacity(1, timeout_s=60)
    engine.require_capacity(60, timeout_s=60)  # but for one that takes as long itself
    for task in crowd[:-5]:
        task.cancel()
    await wait_until_async(lambda: engine.waiting == 5)
    bulk = asyncio.create_task(engine.embed([sequence(10)] * 400, timeout_s=60))
    await wait_until_async(lambda: engine.waiting == 405)
    engine.require_capacity(1, timeout_s=5)  # whose turn is next, however much is behind it
    bulk.cancel()
    model.gate.set()
    await asyncio.gather(first, *crowd[-5:])
