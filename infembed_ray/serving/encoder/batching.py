"""Continuous batching: many concurrent requests, one model, batches under a token budget. It depends on neither HTTP nor Ray.

The order follows start-time fair queueing (Goyal et al. 1996): the i-th sequence of a request gets a turn i places behind
the current one, so a request of a thousand texts does not delay single ones. A model that reads packed sequences gets them
in order of their turns. For a model that pads, sequences of similar length are batched: the waiting sequences around the
one whose turn it is are divided into batches of least total cost, and the batch that contains it runs next.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import statistics
import time
from collections.abc import Callable, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np

Tokenized = TypeVar("Tokenized", bound=Sized)
"""A tokenised text; only its length matters here."""
Embed = Callable[[list[Any]], np.ndarray]
"""Tokenised texts -> (n, d) vectors, in order."""

WINDOW = 256
"""Number of waiting sequences, nearest in length to the one whose turn it is, that are considered for its batch."""
MAX_WAIT_S = 4.0
"""Longest predicted wait of a request with a time-out; a longer one is rejected. A request whose own work takes longer may
wait that long, but never longer than half of its time-out."""
_RATE_DECAY = 0.9
"""Decay per batch of the exponential moving average of the model's throughput."""


class Embedded(NamedTuple):
    """Vectors of the texts of a request."""

    vectors: np.ndarray
    """(inputs, d) float32 unit vectors."""
    tokens: int
    """Tokens of all inputs, including special tokens and instructions."""


class QueueFull(Exception):
    """The queue is too long; `retry_after_s` estimates when it has drained."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__(retry_after_s)  # kept in args, so that it survives pickling
        self.retry_after_s = retry_after_s


class DeadlineExceeded(Exception):
    """A request was not answered within `timeout_s`; work on it has stopped."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self.timeout_s = timeout_s

    def __str__(self) -> str:
        return f"not answered within {self.timeout_s:g} s"


class EmptySequence(ValueError):
    """A sequence without tokens has no embedding."""


class _Waiting(NamedTuple):
    """A sequence in the queue, ordered by cost; `arrival` is unique, so no later field is compared."""

    cost: int
    arrival: int
    turn: int
    tokens: Sized
    request: _Request
    row: int


class _Request:
    """A call of `BatchingEngine.embed`; `result` is set when every row has its vector."""

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


@dataclass
class Counters:
    """Totals since the engine started. `seconds` is the time in the model."""

    batches: int = 0
    texts: int = 0
    tokens: int = 0
    """Computed tokens; cached ones are not counted."""
    seconds: float = 0.0
    failed: int = 0
    """Sequences for which the model raised."""
    refused: int = 0
    """Requests rejected because they would have waited too long."""
    expired: int = 0
    """Requests that timed out."""
    cancelled: int = 0
    """Requests whose caller was cancelled."""


class BatchingEngine:
    """Embeds the token sequences of concurrent callers in shared batches. All calls come from one event loop.

    No sequence is delayed to fill a batch: an idle engine starts at once, a busy one gathers what arrives meanwhile.

    Args:
        embed: the model; runs in one worker thread, one call at a time.
        batch_tokens: largest number of tokens in a batch (for padded batches sequences x longest). A longer sequence
            gets a batch of its own.
        overhead_tokens: fixed cost of a batch in tokens; see `measured_overhead`.
        padded: the model pads the sequences of a batch to the longest.
        cost: returns the number of tokens of a sequence that the model has to compute.
    """

    def __init__(
        self,
        embed: Embed,
        *,
        batch_tokens: int = 4096,
        overhead_tokens: float = 64.0,
        padded: bool = True,
        cost: Callable[[Any], int] = len,
    ) -> None:
        self._embed = embed
        self._batch_tokens = batch_tokens
        self._overhead_tokens = overhead_tokens
        self._padded = padded
        self._cost = cost
        self._waiting: list[_Waiting] = []  # sorted by (cost, arrival)
        self._in_model = 0  # cost of the running batch
        self._arrivals = itertools.count()
        self._turn = 0
        self._done = self._done_s = 0.0  # moving averages of tokens (with overhead) and seconds
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="embed")
        self._drain: asyncio.Task[None] | None = None  # runs while sequences wait
        self.counters = Counters()

    @property
    def waiting(self) -> int:
        """Number of sequences in the queue, without the running batch."""
        return len(self._waiting)

    def require_capacity(self, sequences: int, timeout_s: float | None = None) -> None:
        """QueueFull if a request of this many sequences would wait too long; without a time-out it may wait for any time."""
        wait = self._wait_s(sequences)
        if timeout_s is not None and wait > min(max(MAX_WAIT_S, self._work_s(sequences)), timeout_s / 2):
            self.counters.refused += 1
            raise QueueFull(wait)

    async def embed(self, sequences: Sequence[Sized], timeout_s: float | None = None) -> np.ndarray:
        """Embed sequences; returns (len(sequences), d) vectors in order. A cancelled or expired call leaves the queue.

        Args:
            sequences: at least one.
            timeout_s: time-out of the request; None: no limit.

        Raises:
            QueueFull: the request would wait too long.
            EmptySequence: a sequence has no tokens.
            DeadlineExceeded: no answer within `timeout_s`.
            Exception: what the model raised for one of these sequences.
        """
        if not sequences:
            raise ValueError("no sequences to embed")
        if not all(sequences):
            raise EmptySequence(f"input {[bool(s) for s in sequences].index(False)} has no tokens")
        if timeout_s is not None and timeout_s <= 0:
            self.counters.expired += 1
            raise DeadlineExceeded(timeout_s)
        self.require_capacity(len(sequences), timeout_s)
        loop = asyncio.get_running_loop()
        request = _Request(len(sequences))
        for row, tokens in enumerate(sequences):
            arrival = next(self._arrivals)
            waiting = _Waiting(self._cost(tokens), arrival, self._turn + row, tokens, request, row)
            bisect.insort(self._waiting, waiting)
        if self._drain is None or self._drain.done():
            self._drain = loop.create_task(self._run())
        expiry = None if timeout_s is None else loop.call_later(timeout_s, request.fail, DeadlineExceeded(timeout_s))
        try:
            return await request.result
        except BaseException as error:  # drop the rest of the request
            self.counters.expired += isinstance(error, DeadlineExceeded)
            self.counters.cancelled += isinstance(error, asyncio.CancelledError)
            self._take([w for w in self._waiting if w.request is request])
            raise
        finally:
            if expiry is not None:
                expiry.cancel()

    def _take(self, sequences: list[_Waiting]) -> None:
        """Remove sequences from the queue."""
        if gone := {w.arrival for w in sequences}:
            self._waiting = [w for w in self._waiting if w.arrival not in gone]

    async def _run(self) -> None:
        while self._waiting:
            batch = [w for w in self._next_batch() if not w.request.result.done()]
            if batch:
                self._in_model = sum(w.cost for w in batch)
                await self._answer(batch)
                self._in_model = 0
            await asyncio.sleep(0)  # answered callers may ask again before the next batch

    async def _answer(self, batch: list[_Waiting]) -> None:
        """Run the model on a batch. Retry a failing batch in halves, so that only the faulty sequences fail."""
        start = time.perf_counter()
        try:
            vectors = await asyncio.get_running_loop().run_in_executor(
                self._thread, self._embed, [w.tokens for w in batch]
            )
            for waiting, vector in zip(batch, vectors, strict=True):
                waiting.request.settle(waiting.row, vector)
        except Exception as error:
            if len(batch) == 1:
                self.counters.failed += 1
                batch[0].request.fail(error)
                return
            middle = len(batch) // 2
            for half in (batch[:middle], batch[middle:]):
                if rest := [w for w in half if not w.request.result.done()]:
                    await self._answer(rest)
        else:
            self._count(len(batch), sum(w.cost for w in batch), time.perf_counter() - start)

    def _next_batch(self) -> list[_Waiting]:
        """Take the next batch from the queue."""
        batch = self._cheapest() if self._padded else self._in_turn()
        self._turn = min(w.turn for w in batch)
        self._take(batch)
        return batch

    def _in_turn(self) -> list[_Waiting]:
        """Return the sequences whose turn comes next, as many as a batch holds."""
        batch: list[_Waiting] = []
        tokens = 0
        for waiting in sorted(self._waiting, key=lambda w: (w.turn, w.arrival)):
            tokens += waiting.cost
            if batch and tokens > self._batch_tokens:
                break
            batch.append(waiting)
        return batch

    def _cheapest(self) -> list[_Waiting]:
        """Return the batch of the sequence whose turn it is, in the cheapest division of the sequences around it."""
        waiting = self._waiting
        anchor = min(range(len(waiting)), key=lambda i: (waiting[i].turn, waiting[i].arrival))
        start = max(0, anchor - WINDOW // 2)
        costs = [w.cost for w in waiting[start : start + WINDOW]]
        return next(
            waiting[start + low : start + high]
            for low, high in cheapest_batches(costs, self._batch_tokens, self._overhead_tokens)
            if low <= anchor - start < high
        )

    def _count(self, texts: int, tokens: int, seconds: float) -> None:
        self.counters.batches += 1
        self.counters.texts += texts
        self.counters.tokens += tokens
        self.counters.seconds += seconds
        self._done = _RATE_DECAY * self._done + tokens + self._overhead_tokens
        self._done_s = _RATE_DECAY * self._done_s + seconds

    def _wait_s(self, sequences: int) -> float:
        """Predict the wait of a new request with this many sequences; 0 if less than a batch is ahead of it."""
        last = self._turn + sequences
        tokens = sum(w.cost for w in self._waiting if w.turn < last)
        if tokens <= self._batch_tokens or not self._done:
            return 0.0
        batches = 1 + tokens / self._batch_tokens
        return (self._in_model + tokens + batches * self._overhead_tokens) * self._done_s / self._done

    def _work_s(self, sequences: int) -> float:
        """Predict the time in the model of this many sequences of average length."""
        return sequences * self.counters.seconds / max(self.counters.texts, 1)


def cheapest_batches(lengths: Sequence[int], batch_tokens: int, overhead_tokens: float) -> list[tuple[int, int]]:
    """Divide sorted sequences into batches of least total cost, by dynamic programming over the batch ends.

    A batch of n sequences costs overhead + n x longest tokens. Some optimal division consists of runs of consecutive
    lengths, so only those are considered.

    Args:
        lengths: tokens of every sequence, ascending.
        batch_tokens: largest n x longest of a batch of more than one sequence.
        overhead_tokens: fixed cost of a batch.

    Returns:
        (low, high) per batch, ascending: it holds the sequences low to high - 1.
    """
    costs = np.zeros(len(lengths) + 1)  # least cost of the first n sequences
    lows = np.zeros(len(lengths) + 1, dtype=np.int64)  # start of the last batch of the first n
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
    """Measure the fixed cost of a batch in tokens, from the times of a tiny and a larger batch; also warms the model up.

    With time = a + b x tokens it is a / b, clipped to [16, batch_tokens]. It is tens of tokens on a CPU. On a GPU, where
    512 tokens cost hardly more than 8, it is the whole budget.

    Args:
        embed: the model.
        of_length: makes a text with the given number of tokens.
        batch_tokens: largest number of tokens in a batch.
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
