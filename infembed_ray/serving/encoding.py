"""The encoder of a serving replica: texts of concurrent callers -> unit vectors. No HTTP, no Ray.

Tokenising has a thread, the model has one, and the engine between them makes the batches.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, NamedTuple

import torch

from infembed_ray.config import ServeSettings
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.modeling.layout import Side, Tokens
from infembed_ray.serving import runtime, startup
from infembed_ray.serving.engine import BatchingEngine, Counters, DeadlineExceeded, Embedded, measured_overhead
from infembed_ray.serving.runtime import Runtime

AMORTISED = 16
"""Times its fixed cost that a batch has in tokens: more would save little, and whoever comes next would wait longer."""
LEAST_BATCH_TOKENS = 512
"""No batch is kept smaller than that."""
SLICE = 128
"""Inputs of a request that are tokenised at a time, so that those of others come between."""


class Facts(NamedTuple):
    """The state of an encoding engine, for metrics and for GET /v1/models."""

    runtime: str
    """`torch` or `onnx`."""
    waiting: int
    """Texts in the queue."""
    counters: Counters
    """Batches, texts, tokens, seconds and failures so far."""
    prefix_hits: int
    """Queries whose instruction was cached."""
    prefix_misses: int
    """Queries whose instruction was computed; both are 0 without a cache."""
    prefix_bytes: int
    """Memory of the cached instructions."""


class _Untokenized(NamedTuple):
    inputs: Sequence[str] | Sequence[list[int]]
    instructions: Sequence[str | None] | None
    """Of queries; None: they are passages."""
    tokens: asyncio.Future[list[Tokens]]


class EncodingEngine:
    """Embeds texts and token arrays. All calls come from one event loop; build it with `load`.

    Args:
        encoder: tokenises; its weights are the runtime's affair.
        model: embeds.
        engine: makes the batches.
    """

    def __init__(self, encoder: InstructionEncoder, model: Runtime, engine: BatchingEngine) -> None:
        self._encoder = encoder
        self._model = model
        self._engine = engine
        # One thread: truncation is state of a fast tokenizer, so two calls at a time would fail. Beside the event
        # loop, which a long text would hold up.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenize")
        self._untokenized: list[_Untokenized] = []
        self._tokenizing: asyncio.Task[None] | None = None  # runs while there are any
        self._unready = 0  # requests that are not all tokenised

    @classmethod
    def load(cls, model: str, settings: ServeSettings, dimensions: int | None = None) -> EncodingEngine:
        """Load a model, choose what runs it and warm that up. Blocks for seconds.

        Args:
            model: directory or hub name.
            settings: runtime, dtype, threads, batches and queue.
            dimensions: as `InstructionEncoder.from_pretrained` takes it.

        Raises:
            InputError: the model cannot run as the settings ask.
        """
        torch.set_num_threads(runtime.threads(settings))
        encoder = startup.in_background(
            lambda: InstructionEncoder.from_pretrained(
                model,
                dimensions=dimensions,
                device="cuda" if settings.gpus_per_encoder else "cpu",
                dtype=getattr(torch, settings.dtype),
            )
        ).eval()
        chosen = runtime.choose(encoder, settings, model)
        for text in runtime.probes(encoder):
            chosen.embed([text])
        overhead = measured_overhead(chosen.embed, lambda n: Tokens([0] * n), settings.batch_tokens)
        engine = BatchingEngine(
            chosen.embed,
            batch_tokens=min(settings.batch_tokens, max(LEAST_BATCH_TOKENS, int(AMORTISED * overhead))),
            max_queue=settings.max_queue,
            overhead_tokens=overhead,
            padded=chosen.padded,
            cost=chosen.cost,
        )
        return cls(encoder, chosen, engine)

    @property
    def tokenizer(self) -> Any:
        """Of the model."""
        return self._encoder.tokenizer

    @property
    def facts(self) -> Facts:
        """What runs the model, and what it has done so far."""
        prefixes = self._model.prefixes
        return Facts(
            runtime=self._model.name,
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
        """Embed texts, or token arrays: those are decoded first, so template, prefix and special tokens apply.

        Args:
            inputs: at least one.
            input_type: what they are.
            instruction: of queries; None: none.
            timeout_s: how long the answer is of use; None: however long it takes.

        Raises:
            QueueFull: try again later.
            EmptySequence: one of the inputs has no tokens.
            DeadlineExceeded: there was no answer within `timeout_s`.
        """

        instructions = None if input_type == "passage" else [instruction] * len(inputs)
        return await self._embed(inputs, instructions, timeout_s)

    async def embed_queries(
        self, queries: Sequence[str], instructions: Sequence[str | None], timeout_s: float | None = None
    ) -> Embedded:
        """As `embed`, of queries each under its own instruction; as many of these as of those."""
        return await self._embed(queries, instructions, timeout_s)

    async def _embed(
        self,
        inputs: Sequence[str] | Sequence[list[int]],
        instructions: Sequence[str | None] | None,
        timeout_s: float | None,
    ) -> Embedded:
        self._engine.require_room(len(inputs), timeout_s, ahead=self._unready)  # before there is work with it
        began = asyncio.get_running_loop().time()
        tokens: list[Tokens] = []
        self._unready += 1
        try:
            for start in range(0, len(inputs), SLICE):
                part = slice(start, start + SLICE)
                tokens += await self._tokenized(inputs[part], None if instructions is None else instructions[part])
        finally:
            self._unready -= 1
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
        """What comes while the tokenizer works waits for its next call, and shares it: its calls are dear."""
        while self._untokenized:
            batch = [one for one in self._untokenized if not one.tokens.done()]
            self._untokenized = []
            answers = await asyncio.get_running_loop().run_in_executor(self._thread, self._tokenize, batch)
            for one, answer in zip(batch, answers, strict=True):
                if one.tokens.done():  # its caller went away
                    continue
                if isinstance(answer, Exception):
                    one.tokens.set_exception(answer)
                else:
                    one.tokens.set_result(answer)

    def _tokenize(self, batch: list[_Untokenized]) -> list[list[Tokens] | Exception]:
        """For each its own tokens, or what is wrong with it."""
        queries = [one for one in batch if one.instructions is not None]
        passages = [one for one in batch if one.instructions is None]
        try:
            instructions = [i for one in queries for i in one.instructions or ()]
            of_queries = iter(self._encoder.tokenize_queries(self._texts(queries), instructions))
            of_passages = iter(self._encoder.tokenize_passages(self._texts(passages)))
        except BaseException as error:  # a panic of the tokenizer is no Exception
            if len(batch) == 1:
                return [error if isinstance(error, Exception) else RuntimeError(repr(error))]
            return [answer for one in batch for answer in self._tokenize([one])]
        return [list(islice(of_passages if one.instructions is None else of_queries, len(one.inputs))) for one in batch]

    def _texts(self, several: list[_Untokenized]) -> list[str]:
        return [
            x if isinstance(x, str) else self._encoder.tokenizer.decode(x, skip_special_tokens=True)
            for one in several
            for x in one.inputs
        ]
