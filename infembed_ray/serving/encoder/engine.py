"""Encoding engine of a serving replica: texts of concurrent callers -> unit vectors. It depends on neither HTTP nor Ray.

One thread tokenises, another runs the model, and the batching engine between them forms the batches.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from infembed_ray.config.serving import ServeSettings
from infembed_ray.errors import InputError
from infembed_ray.modeling import exclusions
from infembed_ray.modeling.formats import Question
from infembed_ray.modeling.linear import cpu_has_bf16
from infembed_ray.modeling.tokenizer import TextTokenizer, Tokens
from infembed_ray.progress import say
from infembed_ray.retrieval.chunks import Bounds, Cutter, as_chunks
from infembed_ray.retrieval.updates.write_ahead_log import ChangeError
from infembed_ray.serving import schema, startup
from infembed_ray.serving.encoder.batching import BatchingEngine, DeadlineExceeded, Embedded

if TYPE_CHECKING:
    from infembed_ray.modeling.encoder import InstructionEncoder
    from infembed_ray.modeling.prefix_cache import PrefixCache

CPU_BATCH_TOKENS, GPU_BATCH_TOKENS = 1024, 4096
"""Largest number of tokens in a batch. On a CPU larger ones save little and delay the next request."""
PREFIX_CACHE_BYTES = 256 * 2**20
"""Size of the prefix cache for instructions, with causal backbones."""
WARM_UP_LENGTHS = (4, 8, 16, 32, 64, 128, 256, 512)
SLICE = 128
"""Inputs of a request that are tokenised in one call, so that other requests get a turn in between."""


class EncodingEngine:
    """Embeds texts as `InstructionEncoder` does. All calls come from one event loop; build it with `load`."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        batching: BatchingEngine,
        dtype: str = "float32",
        prefixes: PrefixCache | None = None,
        exclusion_weight: float = 0.0,
    ) -> None:
        self.batching = batching
        self.dtype = dtype
        self.prefixes = prefixes
        self.exclusion_weight = exclusion_weight
        self._tokenizer = tokenizer
        # One thread, because truncation is mutable state of a fast tokenizer; not the event loop, which a long text
        # would block.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenize")

    @classmethod
    def load(
        cls, model: str, settings: ServeSettings, dimensions: int | None = None, fingerprint: str | None = None
    ) -> EncodingEngine:
        """Load a model and warm it up. Blocks for seconds.

        Args:
            model: directory or hub name.
            dimensions: as `InstructionEncoder.from_pretrained` takes it.
            fingerprint: that the model must have; None: any.

        Raises:
            InputError: there is no such model, or it has another fingerprint.
        """
        encoder = startup.in_background(lambda: _load(model, settings, dimensions))
        if fingerprint not in (None, own := encoder.fingerprint()):
            fault = f"its fingerprint is {own} on this node and {fingerprint} where `serve` was started"
            raise InputError.of("model", model, fault, "put the same checkpoint on all nodes")
        tokens = GPU_BATCH_TOKENS if settings.gpus_per_encoder else CPU_BATCH_TOKENS
        prefixes = _prefix_cache(encoder)
        embed = _warmed_up(encoder, (prefixes or encoder).embed)
        padded, cost = not (prefixes or encoder.packs), prefixes.remaining if prefixes else len
        batching = BatchingEngine(lambda some: embed(some, tokens), batch_tokens=tokens, padded=padded, cost=cost)
        dtype = str(encoder.dtype).removeprefix("torch.")
        say(f"serve: the encoder runs in {dtype}")
        return cls(encoder.texts, batching, dtype, prefixes, encoder.exclusion_weight)

    async def embed(
        self,
        texts: Sequence[str],
        instructions: Sequence[str | None] | None,
        timeout_s: float | None = None,
        chunks: tuple[int, int] | None = None,
    ) -> Embedded:
        """Embed texts, at least one, within a time (None: no limit).

        Args:
            instructions: one per query, None for a query without one; None: the texts are passages.
            chunks: maximum and shared tokens of the chunks into which passages are cut; None: they are not.

        Raises:
            QueueFull, DeadlineExceeded: as `BatchingEngine.embed`.
            ChangeError: the passages have more than `MAX_DOCUMENTS` chunks.
        """
        self.batching.require_capacity(len(texts), timeout_s)  # before any work is done
        loop = asyncio.get_running_loop()
        ends = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        cut: list[Bounds] | None = None
        if chunks is not None:
            try:
                cut = await self._cut(texts, Cutter(self._tokenizer, *chunks, ends))
            except TimeoutError:
                self.batching.counters.expired += 1
                raise DeadlineExceeded(timeout_s or 0.0) from None
            texts = [chunk.text for of in map(as_chunks, texts, cut) for chunk in of]
        asked: list[Question] = []
        if instructions is not None:
            asked = list(map(Question, texts, instructions))
            texts, instructions = zip(*exclusions.with_excluded(asked, self.exclusion_weight), strict=True)
        tokens: list[Tokens] = []
        for start in range(0, len(texts), SLICE):
            part = slice(start, start + SLICE)
            of_part = None if instructions is None else instructions[part]
            tokens += await loop.run_in_executor(self._thread, self._tokenize, texts[part], of_part)
        vectors = await self.batching.embed(tokens, None if timeout_s is None else ends - time.monotonic())
        if asked:
            vectors = exclusions.moved(asked, vectors, self.exclusion_weight)
        return Embedded(vectors, sum(map(len, tokens)), cut)

    async def _cut(self, texts: Sequence[str], cutter: Cutter) -> list[Bounds]:
        cut, loop = list[Bounds](), asyncio.get_running_loop()
        for place, text in enumerate(texts):
            cut.append(await loop.run_in_executor(self._thread, cutter.cut, text))
            if (total := sum(map(len, cut)) // 2) > schema.MAX_DOCUMENTS:
                fault = f"{total:,} chunks up to here, and a request stores at most {schema.MAX_DOCUMENTS:,}"
                raise ChangeError(f"documents.{place}.text: {fault}; send fewer documents, or divide the text")
        return cut

    def _tokenize(self, texts: Sequence[str], instructions: Sequence[str | None] | None) -> list[Tokens]:
        try:
            if instructions is None:
                return self._tokenizer.tokenize_passages(texts)
            return self._tokenizer.tokenize_queries(texts, instructions)
        except BaseException as error:  # a panic of the tokenizer is not an Exception
            raise error if isinstance(error, Exception) else RuntimeError(repr(error)) from error


def _load(model: str, settings: ServeSettings, dimensions: int | None) -> InstructionEncoder:
    import torch

    from infembed_ray.modeling.encoder import InstructionEncoder

    torch.set_num_threads(max(1, int(settings.cpus_per_encoder)))
    gpu = settings.gpus_per_encoder > 0
    low = settings.dtype == "bfloat16" or (settings.dtype == "auto" and (gpu or cpu_has_bf16()))
    device, dtype = "cuda" if gpu else "cpu", torch.bfloat16 if low else torch.float32
    return InstructionEncoder.from_pretrained(model, dimensions=dimensions, device=device, dtype=dtype).eval()


def _warmed_up(encoder: InstructionEncoder, embed: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Return a function that embeds texts, after its first passes; on a GPU, small batches by CUDA graphs."""
    for length in WARM_UP_LENGTHS:
        embed([Tokens([0] * min(length, encoder.text.passage_length))])
    if encoder.device.type == "cpu" or not encoder.packs or encoder.interaction or len(encoder.backbones) > 1:
        return embed
    from infembed_ray.modeling.graphs import GraphedEncoder

    return GraphedEncoder(encoder, embed).embed


def _prefix_cache(encoder: InstructionEncoder) -> PrefixCache | None:
    from infembed_ray.modeling import prefix_cache

    if not encoder.causal:
        return None
    if obstacle := prefix_cache.obstacle(encoder):
        say(f"serve: the prefix cache is off, every query encodes its instruction: {obstacle}")
        return None
    return prefix_cache.PrefixCache(encoder, PREFIX_CACHE_BYTES)
