"""Encoding engine of a serving replica: texts of concurrent callers -> unit vectors. It depends on neither HTTP nor Ray.

One thread tokenises, another runs the model, and the batching engine between them forms the batches.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from infembed_ray.config.serving import ServeSettings
from infembed_ray.modeling.tokenizer import Side, TextTokenizer, Tokens
from infembed_ray.serving import startup
from infembed_ray.serving.encoder import calibration
from infembed_ray.serving.encoder.batching import (
    BatchingEngine,
    Counters,
    DeadlineExceeded,
    Embedded,
    measured_overhead,
)
from infembed_ray.serving.encoder.calibration import Candidate, Choice, Measurement
from infembed_ray.serving.encoder.known import KnownEncoder, describe
from infembed_ray.serving.encoder.runtime import threads

if TYPE_CHECKING:
    from infembed_ray.modeling.encoder import InstructionEncoder

BATCH_TO_OVERHEAD = 16
"""Largest batch, as a multiple of the fixed cost of a batch. Larger ones save little and delay the next request."""
MIN_BATCH_TOKENS = 512
"""Lower bound of the largest batch."""
SLICE = 128
"""Inputs of a request that are tokenised in one call, so that other requests get a turn in between."""


class Facts(NamedTuple):
    """State of an encoding engine, for the metrics."""

    candidate: Candidate
    """Runtime and precision that were chosen."""
    measured: Mapping[Candidate, Measurement]
    """What the calibration measured of each candidate; empty without a choice."""
    waiting: int
    """Texts in the queue."""
    counters: Counters
    """Totals since the start."""
    prefix_hits: int
    """Queries whose instruction was in the prefix cache."""
    prefix_misses: int
    """Queries whose instruction was computed; 0 without a cache."""
    prefix_bytes: int
    """Memory of the cached instructions."""


class _Untokenized(NamedTuple):
    inputs: Sequence[str] | Sequence[list[int]]
    instructions: Sequence[str | None] | None
    """One per query; None: the inputs are passages."""
    tokens: asyncio.Future[list[Tokens]]


class EncodingEngine:
    """Embeds texts and token arrays. All calls come from one event loop; build it with `load`.

    Args:
        tokenizer: tokenises.
        choice: the runtime that embeds.
        engine: forms the batches.
    """

    def __init__(self, tokenizer: TextTokenizer, choice: Choice, engine: BatchingEngine) -> None:
        self._tokenizer = tokenizer
        self._choice = choice
        self._engine = engine
        # One thread, because truncation is mutable state of a fast tokenizer; not the event loop, which a long text
        # would block.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenize")
        self._untokenized: list[_Untokenized] = []
        self._tokenizing: asyncio.Task[None] | None = None  # runs while there are untokenised requests

    @classmethod
    def load(
        cls, model: str, settings: ServeSettings, dimensions: int | None = None, known: KnownEncoder | None = None
    ) -> EncodingEngine:
        """Load a model, choose its runtime and warm it up. Blocks for seconds.

        torch is imported unless an earlier start has left a graph that may run.

        Args:
            model: directory or hub name.
            settings: runtime, dtype, threads, batches and queue.
            dimensions: as `InstructionEncoder.from_pretrained` takes it.
            known: the model's description; None: it is made here.

        Raises:
            InputError: the model cannot run as the settings ask.
        """
        known = known or startup.in_background(lambda: describe(model, dimensions))
        choice = calibration.resume(known, settings)
        if choice is None:
            encoder = startup.in_background(lambda: _load(model, settings, dimensions))
            choice = calibration.choose(encoder, settings, model)
        chosen = choice.runtime
        for text in calibration.probes(known.texts):
            chosen.embed([text])
        overhead = measured_overhead(chosen.embed, lambda n: Tokens([0] * n), settings.batch_tokens)
        engine = BatchingEngine(
            chosen.embed,
            batch_tokens=min(settings.batch_tokens, max(MIN_BATCH_TOKENS, int(BATCH_TO_OVERHEAD * overhead))),
            overhead_tokens=overhead,
            padded=chosen.padded,
            cost=chosen.cost,
        )
        return cls(known.texts, choice, engine)

    @property
    def facts(self) -> Facts:
        """The current state."""
        prefixes = self._choice.runtime.prefixes
        return Facts(
            candidate=self._choice.candidate,
            measured=self._choice.measured,
            waiting=self._engine.waiting,
            counters=self._engine.counters,
            prefix_hits=prefixes.hits if prefixes else 0,
            prefix_misses=prefixes.misses if prefixes else 0,
            prefix_bytes=prefixes.bytes if prefixes else 0,
        )

    async def embed(
        self,
        inputs: list[str] | list[list[int]],
        input_type: Side,
        instruction: str | None = None,
        timeout_s: float | None = None,
    ) -> Embedded:
        """Embed texts or token arrays. Token arrays are decoded first, so template, prefix and special tokens apply.

        Args:
            inputs: at least one.
            input_type: query or passage.
            instruction: shared by all queries; None if they have none.
            timeout_s: time-out of the request; None: no limit.

        Raises:
            QueueFull: try again later.
            EmptySequence: one of the inputs has no tokens.
            DeadlineExceeded: no answer within `timeout_s`.
        """
        instructions = None if input_type == "passage" else [instruction] * len(inputs)
        return await self._embed(inputs, instructions, timeout_s)

    async def embed_queries(
        self, queries: Sequence[str], instructions: Sequence[str | None], timeout_s: float | None = None
    ) -> Embedded:
        """Embed queries, each under its own instruction, as `embed`."""
        return await self._embed(queries, instructions, timeout_s)

    async def _embed(
        self,
        inputs: Sequence[str] | Sequence[list[int]],
        instructions: Sequence[str | None] | None,
        timeout_s: float | None,
    ) -> Embedded:
        self._engine.require_capacity(len(inputs), timeout_s)  # before any work is done
        began = asyncio.get_running_loop().time()
        tokens: list[Tokens] = []
        for start in range(0, len(inputs), SLICE):
            part = slice(start, start + SLICE)
            tokens += await self._tokenized(inputs[part], None if instructions is None else instructions[part])
        left = None if timeout_s is None else timeout_s - (asyncio.get_running_loop().time() - began)
        try:
            vectors = await self._engine.embed(tokens, left)
        except DeadlineExceeded:
            raise DeadlineExceeded(timeout_s or 0.0) from None
        return Embedded(vectors, sum(map(len, tokens)))

    async def _tokenized(
        self, inputs: Sequence[str] | Sequence[list[int]], instructions: Sequence[str | None] | None
    ) -> list[Tokens]:
        loop = asyncio.get_running_loop()
        untokenized = _Untokenized(inputs, instructions, loop.create_future())
        self._untokenized.append(untokenized)
        if self._tokenizing is None or self._tokenizing.done():
            self._tokenizing = loop.create_task(self._tokenize_all())
        return await untokenized.tokens

    async def _tokenize_all(self) -> None:
        """Tokenise until nothing waits. Requests that arrive during a call share the next one, because calls are expensive."""
        while self._untokenized:
            batch = [one for one in self._untokenized if not one.tokens.done()]
            self._untokenized = []
            answers = await asyncio.get_running_loop().run_in_executor(self._thread, self._tokenize, batch)
            for one, answer in zip(batch, answers, strict=True):
                if one.tokens.done():  # its caller was cancelled
                    continue
                if isinstance(answer, Exception):
                    one.tokens.set_exception(answer)
                else:
                    one.tokens.set_result(answer)

    def _tokenize(self, batch: list[_Untokenized]) -> list[list[Tokens] | Exception]:
        """Return the tokens of each request, or its exception."""
        queries = [one for one in batch if one.instructions is not None]
        passages = [one for one in batch if one.instructions is None]
        try:
            instructions = [i for one in queries for i in one.instructions or ()]
            of_queries = iter(self._tokenizer.tokenize_queries(self._texts(queries), instructions))
            of_passages = iter(self._tokenizer.tokenize_passages(self._texts(passages)))
        except BaseException as error:  # a panic of the tokenizer is not an Exception
            if len(batch) == 1:
                return [error if isinstance(error, Exception) else RuntimeError(repr(error))]
            return [answer for one in batch for answer in self._tokenize([one])]
        return [list(islice(of_passages if one.instructions is None else of_queries, len(one.inputs))) for one in batch]

    def _texts(self, several: list[_Untokenized]) -> list[str]:
        return [x if isinstance(x, str) else self._tokenizer.decode(x) for one in several for x in one.inputs]


def _load(model: str, settings: ServeSettings, dimensions: int | None) -> InstructionEncoder:
    """Load a model as the settings ask."""
    import torch

    from infembed_ray.modeling.encoder import InstructionEncoder

    torch.set_num_threads(threads(settings))
    low = settings.dtype == "auto" and settings.gpus_per_encoder > 0
    return InstructionEncoder.from_pretrained(
        model,
        dimensions=dimensions,
        device="cuda" if settings.gpus_per_encoder else "cpu",
        dtype=torch.bfloat16 if low or settings.dtype == "bfloat16" else torch.float32,
    ).eval()
