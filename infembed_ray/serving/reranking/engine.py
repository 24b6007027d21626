"""Engine of a reranker's replica: pairs of concurrent searches -> scores, in batches by tokens. No Ray.

One thread tokenises, another runs the model, and the batching engine of the encoder between them forms the batches, bounds the
queue and drops what is too late.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from infembed_ray.modeling.pair_scorer import PairScorer
from infembed_ray.serving.encoder.batching import BatchingEngine, Counters, DeadlineExceeded
from infembed_ray.serving.release import RerankerArguments
from infembed_ray.serving.reranking.arguments import BATCH_TOKENS

CACHE_BYTES = 256 * 2**20
"""Memory per replica for token vectors of recent passages (late interaction)."""
WARM_UP = ("warm up", "Only what warms up.", ["A passage.", "Another passage, which is longer than the first one."])


class RerankEngine:
    """Scores passages of concurrent searches. All calls come from one event loop.

    Args:
        scorer: scores pairs.
        batch_tokens: largest number of tokens in a batch, with padding.
    """

    def __init__(self, scorer: PairScorer, batch_tokens: int = BATCH_TOKENS) -> None:
        self._scorer = scorer
        self._engine = BatchingEngine(self._relevance, batch_tokens=batch_tokens, cost=scorer.cost)
        # One thread, because truncation is mutable state of a fast tokenizer; not the event loop, which it would block.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenize")

    @property
    def waiting(self) -> int:
        """Number of passages in the queue."""
        return self._engine.waiting

    @property
    def counters(self) -> Counters:
        """Totals since the start; a text is a pair."""
        return self._engine.counters

    async def score(self, query: str, instruction: str | None, texts: Sequence[str], timeout_s: float) -> np.ndarray:
        """Score passages for a query under its instruction: (len(texts)) float32.

        Raises:
            QueueFull: too many passages wait.
            DeadlineExceeded: no scores within `timeout_s`.
            Exception: what the model raised.
        """
        if not texts:
            return np.zeros(0, dtype=np.float32)
        loop = asyncio.get_running_loop()
        ends = loop.time() + timeout_s
        self._engine.require_capacity(len(texts), timeout_s)  # before any work is done
        pairs = await loop.run_in_executor(self._thread, self._scorer.tokenize, query, instruction, texts)
        try:
            return (await self._engine.embed(pairs, ends - loop.time()))[:, 0]
        except DeadlineExceeded:
            raise DeadlineExceeded(timeout_s) from None

    def _relevance(self, pairs: list[Any]) -> np.ndarray:
        """Score pairs as the batching engine wants it: (n, 1)."""
        scores = self._scorer.relevance(pairs)
        if not np.isfinite(scores).all():
            raise ValueError("a score of the reranker is not finite: its weights are damaged, or its dtype overflows")
        return scores[:, None]


def load(arguments: RerankerArguments) -> PairScorer:
    """Load the model and warm it up. Blocks for seconds.

    Raises:
        InputError: the model cannot be loaded, or is not of the kind that the settings name.
    """
    import torch

    from infembed_ray.config.evaluation import RetrieverSettings
    from infembed_ray.modeling import checkpoint, pair_scorer, rerankers

    settings = arguments.rerank
    torch.set_num_threads(max(1, int(settings.cpus)))
    device = "cuda" if settings.gpus else "cpu"
    scorer: PairScorer
    if arguments.reranker is None:
        from infembed_ray.modeling.encoder import InstructionEncoder
        from infembed_ray.modeling.late_interaction import LateInteraction

        dtype = torch.bfloat16 if settings.gpus else torch.float32
        encoder = InstructionEncoder.from_pretrained(checkpoint.local(arguments.model), device=device, dtype=dtype)
        scorer = LateInteraction(encoder, CACHE_BYTES)
    else:
        own = RetrieverSettings.from_mapping(
            {**arguments.reranker, "model": checkpoint.local(arguments.model)}, "rerank.model."
        )
        reranker = rerankers.KINDS[own.kind](own, device, BATCH_TOKENS, arguments.fingerprint)
        scorer = pair_scorer.CrossEncoder(reranker)
    scorer.score(*WARM_UP)
    return scorer
