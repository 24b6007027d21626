"""The batching engine: many concurrent requests, one model, batches under a token budget. No HTTP, no Ray.

Waiting sequences are kept sorted by length. The next batch is the one with the sequence whose turn it is, in the
division of its neighbours into batches that costs least: it pads little where a pass over the model is cheap, and is
large where one is dear. Turns follow fair queueing (start-time fair queueing, Goyal et al. 1996): the i-th sequence of
a request queues i turns behind the present one, so a request of a thousand texts does not keep single ones waiting.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import statistics
import time
from collections.abc import Callable, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import numpy as np

Tokenized = TypeVar("Tokenized", bound=Sized)
"""A tokenised text, of which only the length matters here."""
Embed = Callable[[list[Any]], np.ndarray]
"""Tokenised texts -> (n, d) vectors, in the order given."""

WINDOW = 256
"""Sequences, nearest in length to the one whose turn it is, that are looked at to form its batch."""
_RATE_MEMORY = 0.9
"""Weight of the past in the running estimate of tokens per second."""


class QueueFull(Exception):
    """Too much is waiting already; `retry_after_s` is about how long the queue takes to drain."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__(retry_after_s)  # kept in args, so that it survives pickling
        self.retry_after_s = retry_after_s


class EmptySequence(ValueError):
    """A sequence without tokens has no embedding."""


class _Waiting(NamedTuple):
    """One sequence in the queue, ordered by length; `arrival` is unique, so no later field is ever compared."""

    length: int
    arrival: int
    turn: int
    tokens: Sized
    request: _Request
    row: int


class _Request:
    """One call of `BatchingEngine.embed`; `result` is set when every row has its vector."""

    def __init__(self, rows: int) -> None:
        self.result: asyncio.Future[np.ndarray] = asyncio.get_running_loop().create_future()
        self._vectors: dict[int, np.ndarray] = {}
        self._rows = rows

    def settle(self, row: int, vector: np.ndarray) -> None:
        self._vectors[row] = vector
        if len(self._vectors) == self._rows and not self.result.done():
            self.result.set_result(np.stack([self._vectors[r] for r in range(self._rows)]))

    def fail(self, error: Exception) -> None:
        if not self.result.done():
            self.result.set_exception(error)


class BatchingEngine:
    """Embeds the token sequences of concurrent callers in common batches. All calls come from one event loop.

    Args:
        embed: the model; runs in one worker thread, never twice at a time.
        batch_tokens: most padded tokens (sequences x longest) in a batch; a longer sequence is a batch of its own.
        max_queue: no request is taken while this many sequences wait. The request taken last may overshoot it, so
            that one larger than the queue can be served at all.
        overhead_tokens: fixed cost of a batch, as the number of tokens that cost as much; see `measured_overhead`.
    """

    def __init__(
        self, embed: Embed, *, batch_tokens: int = 4096, max_queue: int = 512, overhead_tokens: float = 64.0
    ) -> None:
        self._embed = embed
        self._batch_tokens = batch_tokens
        self._max_queue = max_queue
        self._overhead_tokens = overhead_tokens
        self._waiting: list[_Waiting] = []  # sorted by (length, arrival)
        self._arrivals = itertools.count()
        self._turn = 0
        self._tokens_per_s: float | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="embed")
        self._drain: asyncio.Task[None] | None = None  # runs while anything waits

    @property
    def waiting(self) -> int:
        """Sequences in the queue; those in the model are not counted."""
        return len(self._waiting)

    async def embed(self, sequences: Sequence[Sized]) -> np.ndarray:
        """(len(sequences), d) vectors, in the order given. A cancelled call leaves the queue.

        Raises:
            QueueFull: `max_queue` sequences wait already.
            EmptySequence: one of them has no tokens.
            Exception: what the model raised on a batch with one of these sequences.
        """
        if not sequences:
            raise ValueError("no sequences to embed")
        if not all(sequences):
            raise EmptySequence(f"input {[bool(s) for s in sequences].index(False)} has no tokens")
        if len(self._waiting) >= self._max_queue:
            raise QueueFull(self._drain_time_s())
        request = _Request(len(sequences))
        for row, tokens in enumerate(sequences):
            arrival = next(self._arrivals)
            bisect.insort(self._waiting, _Waiting(len(tokens), arrival, self._turn + row, tokens, request, row))
        if self._drain is None or self._drain.done():
            self._drain = asyncio.get_running_loop().create_task(self._run())
        try:
            return await request.result
        except BaseException:  # cancelled, or one batch failed: the rest of the request is not worth computing
            self._waiting = [w for w in self._waiting if w.request is not request]
            raise

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            batch = self._next_batch()
            start = time.perf_counter()
            try:
                vectors = await loop.run_in_executor(self._thread, self._embed, [w.tokens for w in batch])
                for waiting, vector in zip(batch, vectors, strict=True):
                    waiting.request.settle(waiting.row, vector)
            except Exception as error:
                for waiting in batch:
                    waiting.request.fail(error)
            else:
                self._measure(sum(w.length for w in batch), time.perf_counter() - start)
            await asyncio.sleep(0)  # who was just answered may ask again: in time for the next batch

    def _next_batch(self) -> list[_Waiting]:
        """Take the sequence whose turn it is, with its companions in the cheapest division of its neighbourhood."""
        waiting = self._waiting
        anchor = min(range(len(waiting)), key=lambda i: (waiting[i].turn, waiting[i].arrival))
        self._turn = waiting[anchor].turn
        start = max(0, anchor - WINDOW // 2)
        lengths = [w.length for w in waiting[start : start + WINDOW]]
        low, high = next(
            (start + low, start + high)
            for low, high in cheapest_batches(lengths, self._batch_tokens, self._overhead_tokens)
            if low <= anchor - start < high
        )
        batch = waiting[low:high]
        del waiting[low:high]
        return batch

    def _measure(self, tokens: int, seconds: float) -> None:
        past, now = self._tokens_per_s, tokens / seconds
        self._tokens_per_s = now if past is None else _RATE_MEMORY * past + (1 - _RATE_MEMORY) * now

    def _drain_time_s(self) -> float:
        return sum(w.length for w in self._waiting) / self._tokens_per_s if self._tokens_per_s else 1.0


def cheapest_batches(lengths: Sequence[int], batch_tokens: int, overhead_tokens: float) -> list[tuple[int, int]]:
    """Divide sorted sequences into batches of least total cost, by dynamic programming over their ends.

    A batch of n sequences costs overhead + n x longest tokens. Batches of neighbours in length are never worse than
    others, so only such are looked at.

    Args:
        lengths: tokens of every sequence, ascending.
        batch_tokens: most n x longest of a batch of more than one.
        overhead_tokens: fixed cost of a batch.

    Returns:
        (low, high) of every batch, so that it holds the sequences low to high - 1; ascending.
    """
    costs = np.zeros(len(lengths) + 1)  # of the first n sequences
    lows = np.zeros(len(lengths) + 1, dtype=np.int64)  # where the last of their batches begins
    for high in range(1, len(lengths) + 1):
        longest = lengths[high - 1]
        first = max(0, high - max(1, batch_tokens // longest))
        totals = costs[first:high] + longest * np.arange(high - first, 0, -1)
        best = int(totals.argmin())
        costs[high], lows[high] = totals[best] + overhead_tokens, first + best
    batches = []
    high = len(lengths)
    while high:
        batches.append((int(lows[high]), high))
        high = int(lows[high])
    return batches[::-1]


def measured_overhead(embed: Embed, of_length: Callable[[int], Tokenized], batch_tokens: int) -> float:
    """The fixed cost of a batch in tokens, from the times of a tiny and a larger batch; also warms the model up.

    With time = a + b x tokens it is a / b, clipped to [16, batch_tokens]: tens of tokens on a CPU; on a GPU, where
    512 tokens cost hardly more than 8, the whole budget.

    Args:
        embed: the model.
        of_length: makes a text of so many tokens.
        batch_tokens: most tokens of a batch.
    """

    def seconds(sequences: list[Tokenized]) -> float:
        times = []
        for _ in range(4):
            start = time.perf_counter()
            embed(sequences)
            times.append(time.perf_counter() - start)
        return statistics.median(times[1:])  # the first one warms up

    tiny = seconds([of_length(8)])
    per_token = max((seconds([of_length(64)] * 8) - tiny) / (8 * 64 - 8), 1e-9)
    return float(np.clip(tiny / per_token - 8, 16, batch_tokens))
