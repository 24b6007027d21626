"""The batching engine: many concurrent requests, one model, batches under a token budget. No HTTP, no Ray.

Turns follow fair queueing (start-time fair queueing, Goyal et al. 1996): the i-th sequence of a request queues i turns
behind the present one, so a request of a thousand texts does not keep single ones waiting. A model that reads packed
sequences gets them in turn. For one that pads, waiting sequences are kept sorted by length: the next batch is the one
with the sequence whose turn it is, in the division of its neighbours into batches that costs least. It pads little where
a pass over the model is cheap, and is large where one is dear.
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
"""A tokenised text, of which only the length matters here."""
Embed = Callable[[list[Any]], np.ndarray]
"""Tokenised texts -> (n, d) vectors, in the order given."""

WINDOW = 256
"""Sequences, nearest in length to the one whose turn it is, that are looked at to form its batch."""
MAX_WAIT_S = 4.0
"""A request that would wait longer for those before it is refused, if its answer is of use for a limited time only. One
that is more work than that may wait as long as it takes itself; and none longer than half the time that it has."""
_RATE_MEMORY = 0.9
"""Weight of the past, at every batch, in the running estimate of how fast the model works."""


class Embedded(NamedTuple):
    """The answer to texts that were to be embedded."""

    vectors: np.ndarray
    """(inputs, d) float32 unit vectors."""
    tokens: int
    """Tokens the model reads for all of them, special tokens and instructions included."""


class QueueFull(Exception):
    """Too much is waiting already; `retry_after_s` is about how long the queue takes to drain."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__(retry_after_s)  # kept in args, so that it survives pickling
        self.retry_after_s = retry_after_s


class DeadlineExceeded(Exception):
    """A request was not answered within `timeout_s`, and is no longer worked on."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self.timeout_s = timeout_s

    def __str__(self) -> str:
        return f"not answered within {self.timeout_s:g} s"


class EmptySequence(ValueError):
    """A sequence without tokens has no embedding."""


class _Waiting(NamedTuple):
    """One sequence in the queue, ordered by cost; `arrival` is unique, so no later field is ever compared."""

    cost: int
    arrival: int
    turn: int
    tokens: Sized
    request: _Request
    row: int


class _Request:
    """One call of `BatchingEngine.embed`; `result` is set when every row has its vector."""

    def __init__(self, rows: int) -> None:
        self.result: asyncio.Future[np.ndarray] = asyncio.get_running_loop().create_future()
        self.waiting = rows
        """Its sequences in the queue."""
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
    """What an engine has done since it started. `seconds` are those the model worked."""

    batches: int = 0
    texts: int = 0
    tokens: int = 0
    """Those that were computed: what is cached is not counted."""
    seconds: float = 0.0
    failed: int = 0
    """Sequences on which the model failed."""
    refused: int = 0
    """Requests for which the queue was full."""
    expired: int = 0
    """Requests that got no answer in time."""
    cancelled: int = 0
    """Requests whose caller went away."""


class BatchingEngine:
    """Embeds the token sequences of concurrent callers in common batches. All calls come from one event loop.

    Nothing waits for company: an idle engine starts at once, a busy one gathers what comes while it works.

    Args:
        embed: the model; runs in one worker thread, never twice at a time.
        batch_tokens: most tokens (sequences x longest, where they are padded) in a batch; a longer sequence is a batch
            of its own.
        max_queue: no request is taken while this many sequences wait. The request taken last may overshoot it, so
            that one larger than the queue can be served at all; and a large one fills no more than an eighth of it,
            however long it is, so that others are still taken beside it.
        overhead_tokens: fixed cost of a batch, as the number of tokens that cost as much; see `measured_overhead`.
        padded: the model pads the sequences of a batch to the longest.
        cost: of a sequence: how many tokens the model has to compute.
    """

    def __init__(
        self,
        embed: Embed,
        *,
        batch_tokens: int = 4096,
        max_queue: int = 512,
        overhead_tokens: float = 64.0,
        padded: bool = True,
        cost: Callable[[Any], int] = len,
    ) -> None:
        self._embed = embed
        self._batch_tokens = batch_tokens
        self._max_queue = max_queue
        self._largest_share = max(1, max_queue // 8)
        self._overhead_tokens = overhead_tokens
        self._padded = padded
        self._cost = cost
        self._waiting: list[_Waiting] = []  # sorted by (cost, arrival)
        self._occupied = 0  # of max_queue
        self._in_model = 0  # cost of what the model has
        self._arrivals = itertools.count()
        self._turn = 0
        self._done = self._done_s = 0.0  # of late, in tokens; that of a batch is its overhead besides
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="embed")
        self._drain: asyncio.Task[None] | None = None  # runs while anything waits
        self.counters = Counters()

    @property
    def waiting(self) -> int:
        """Sequences in the queue; those in the model are not counted."""
        return len(self._waiting)

    def require_room(self, sequences: int = 1, timeout_s: float | None = None, ahead: int = 0) -> None:
        """QueueFull if a request would be refused now.

        Args:
            sequences: of it.
            timeout_s: how long its answer is of use; None: however long it takes, so it may wait as long.
            ahead: so many others came before it that are not in the queue yet.
        """
        wait = self._wait_s(sequences)
        limit = float("inf") if timeout_s is None else min(max(MAX_WAIT_S, self._work_s(sequences)), timeout_s / 2)
        if self._occupied + ahead >= self._max_queue or wait > limit:
            self.counters.refused += 1
            raise QueueFull(wait or 1.0)

    async def embed(self, sequences: Sequence[Sized], timeout_s: float | None = None) -> np.ndarray:
        """(len(sequences), d) vectors, in the order given. A call that is cancelled or expires leaves the queue.

        Args:
            sequences: at least one.
            timeout_s: how long the answer is of use; None: however long it takes.

        Raises:
            QueueFull: `max_queue` sequences wait already, or it would wait too long.
            EmptySequence: one of them has no tokens.
            DeadlineExceeded: there was no answer within `timeout_s`.
            Exception: what the model raised on one of these sequences.
        """
        if not sequences:
            raise ValueError("no sequences to embed")
        if not all(sequences):
            raise EmptySequence(f"input {[bool(s) for s in sequences].index(False)} has no tokens")
        if timeout_s is not None and timeout_s <= 0:
            self.counters.expired += 1
            raise DeadlineExceeded(timeout_s)
        self.require_room(len(sequences), timeout_s)
        loop = asyncio.get_running_loop()
        request = _Request(len(sequences))
        self._occupied += min(request.waiting, self._largest_share)
        for row, tokens in enumerate(sequences):
            arrival = next(self._arrivals)
            waiting = _Waiting(self._cost(tokens), arrival, self._turn + row, tokens, request, row)
            bisect.insort(self._waiting, waiting)
        if self._drain is None or self._drain.done():
            self._drain = loop.create_task(self._run())
        expiry = None if timeout_s is None else loop.call_later(timeout_s, request.fail, DeadlineExceeded(timeout_s))
        try:
            return await request.result
        except BaseException as error:  # what is left of the request is not worth computing
            self.counters.expired += isinstance(error, DeadlineExceeded)
            self.counters.cancelled += isinstance(error, asyncio.CancelledError)
            self._take([w for w in self._waiting if w.request is request])
            raise
        finally:
            if expiry is not None:
                expiry.cancel()

    def _take(self, sequences: list[_Waiting]) -> None:
        """Remove sequences from the queue."""
        gone = {w.arrival for w in sequences}
        if gone:
            self._waiting = [w for w in self._waiting if w.arrival not in gone]
        for w in sequences:
            w.request.waiting -= 1
            self._occupied -= w.request.waiting < self._largest_share

    async def _run(self) -> None:
        while self._waiting:
            batch = [w for w in self._next_batch() if not w.request.result.done()]
            if batch:
                self._in_model = sum(w.cost for w in batch)
                await self._answer(batch)
                self._in_model = 0
            await asyncio.sleep(0)  # who was just answered may ask again: in time for the next batch

    async def _answer(self, batch: list[_Waiting]) -> None:
        """Run the model on a batch. One that fails is tried again in halves, so that only what is at fault fails."""
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
        """Take the sequence whose turn it is, and its company."""
        batch = self._cheapest() if self._padded else self._in_turn()
        self._turn = min(w.turn for w in batch)
        self._take(batch)
        return batch

    def _in_turn(self) -> list[_Waiting]:
        """Those whose turn comes next, as many as a batch holds."""
        batch: list[_Waiting] = []
        tokens = 0
        for waiting in sorted(self._waiting, key=lambda w: (w.turn, w.arrival)):
            tokens += waiting.cost
            if batch and tokens > self._batch_tokens:
                break
            batch.append(waiting)
        return batch

    def _cheapest(self) -> list[_Waiting]:
        """The one whose turn it is, with its companions in the cheapest division of its neighbourhood."""
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
        self._done = _RATE_MEMORY * self._done + tokens + self._overhead_tokens
        self._done_s = _RATE_MEMORY * self._done_s + seconds

    def _wait_s(self, sequences: int) -> float:
        """For what comes before the last of so many more; 0 while that is no more than a batch of them or two."""
        last = self._turn + sequences
        tokens = sum(w.cost for w in self._waiting if w.turn < last)
        if tokens <= self._batch_tokens or not self._done:
            return 0.0
        batches = 1 + tokens / self._batch_tokens
        return (self._in_model + tokens + batches * self._overhead_tokens) * self._done_s / self._done

    def _work_s(self, sequences: int) -> float:
        """For so many of the usual length."""
        return sequences * self.counters.seconds / max(self.counters.texts, 1)


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
