"""Continuous batching: many concurrent requests, one model, batches under a token budget. It depends on neither HTTP nor Ray.

The order follows start-time fair queueing (Goyal et al. 1996): the i-th sequence of a request gets a turn i places behind
the current one, so a request of a thousand texts does not delay single ones. A model that pads gets sequences of similar
length.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from infembed_ray.retrieval.chunks import Bounds

PADDING = 32
"""Tokens by which the lengths in a padded batch may differ, or half of the first one's: about the fixed cost of a batch on a CPU."""
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
    chunks: list[Bounds] | None = None
    """The chunks of each passage, if passages were cut: the vectors are of all chunks, in order."""


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


class _Waiting(NamedTuple):
    """A sequence in the queue, ordered by turn; `arrival` is unique, so no later field is compared."""

    turn: int
    arrival: int
    cost: int
    tokens: Sized
    request: _Request
    row: int


class _Request:
    """A call; `result` is set when every row has its vector."""

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
    """Sequences for which the model raised; the others count requests."""
    refused: int = 0
    expired: int = 0
    cancelled: int = 0


class BatchingEngine:
    """Embeds the token sequences of concurrent callers in shared batches. All calls come from one event loop.

    No sequence is delayed to fill a batch: an idle engine starts at once, a busy one gathers what arrives meanwhile.

    Args:
        embed: the model, tokenised texts -> (n, d) vectors; runs in one worker thread, one call at a time.
        batch_tokens: largest number of tokens in a batch (for padded batches sequences x longest). A longer sequence
            gets a batch of its own.
        padded: the model pads the sequences of a batch to the longest.
        cost: returns the number of tokens of a sequence that the model has to compute.
    """

    def __init__(
        self,
        embed: Callable[[list[Any]], np.ndarray],
        *,
        batch_tokens: int = 4096,
        padded: bool = True,
        cost: Callable[[Any], int] = len,
    ) -> None:
        self._embed = embed
        self._batch_tokens = batch_tokens
        self._padded = padded
        self._cost = cost
        self._waiting: list[_Waiting] = []
        self._in_model = 0  # cost of the running batch
        self._arrivals = itertools.count()
        self._turn = 0
        self._done = self._done_s = 0.0  # moving averages of tokens and seconds
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
        work = sequences * self.counters.seconds / max(self.counters.texts, 1)  # in the model, of average length
        if timeout_s is not None and wait > min(max(MAX_WAIT_S, work), timeout_s / 2):
            self.counters.refused += 1
            raise QueueFull(wait)

    async def embed(self, sequences: Sequence[Sized], timeout_s: float | None = None) -> np.ndarray:
        """Embed sequences, at least one; returns (len(sequences), d) vectors in order.

        A cancelled call leaves the queue, and so does one after `timeout_s` (None: no limit).

        Raises:
            QueueFull: the request would wait too long.
            DeadlineExceeded: no answer within `timeout_s`.
            Exception: what the model raised for one of these sequences.
        """
        if not sequences:
            raise ValueError("no sequences to embed")
        if timeout_s is not None and timeout_s <= 0:
            self.counters.expired += 1
            raise DeadlineExceeded(timeout_s)
        self.require_capacity(len(sequences), timeout_s)
        loop = asyncio.get_running_loop()
        request = _Request(len(sequences))
        for row, tokens in enumerate(sequences):
            turn, arrival = self._turn + row, next(self._arrivals)
            self._waiting.append(_Waiting(turn, arrival, self._cost(tokens), tokens, request, row))
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
            loop, sequences = asyncio.get_running_loop(), [waiting.tokens for waiting in batch]
            vectors = await loop.run_in_executor(self._thread, self._embed, sequences)
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
            tokens, seconds = sum(w.cost for w in batch), time.perf_counter() - start
            self.counters.batches += 1
            self.counters.texts += len(batch)
            self.counters.tokens += tokens
            self.counters.seconds += seconds
            self._done = _RATE_DECAY * self._done + tokens
            self._done_s = _RATE_DECAY * self._done_s + seconds

    def _next_batch(self) -> list[_Waiting]:
        """Take the sequences whose turn comes next from the queue, as many as a batch holds."""
        self._waiting.sort()
        first = self._waiting[0]
        batch: list[_Waiting] = []
        tokens = longest = 0
        for waiting in self._waiting:
            if self._padded and abs(waiting.cost - first.cost) > max(PADDING, first.cost // 2):
                continue
            longest = max(longest, waiting.cost)
            tokens = (len(batch) + 1) * longest if self._padded else tokens + waiting.cost
            if batch and tokens > self._batch_tokens:
                break
            batch.append(waiting)
        self._turn = first.turn
        self._take(batch)
        return batch

    def _wait_s(self, sequences: int) -> float:
        """Predict the wait of a new request with this many sequences; 0 if less than a batch is ahead of it."""
        last = self._turn + sequences
        tokens = sum(w.cost for w in self._waiting if w.turn < last)
        if tokens <= self._batch_tokens or not self._done:
            return 0.0
        return (self._in_model + tokens) * self._done_s / self._done
