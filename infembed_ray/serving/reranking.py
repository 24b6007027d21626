"""The reranker: checks before a start, and the engine of its replica, which scores pairs of concurrent searches in batches. No Ray."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from infembed_ray.config.evaluation import RetrieverSettings
from infembed_ray.config.serving import RerankSettings, ServeSettings
from infembed_ray.errors import InputError
from infembed_ray.modeling import checkpoint
from infembed_ray.modeling.formats import Question
from infembed_ray.serving.encoder.batching import BatchingEngine
from infembed_ray.serving.release import RerankerArguments

if TYPE_CHECKING:
    from infembed_ray.modeling.rerankers import PairScorer

BATCH_TOKENS = 4096
"""Largest number of tokens in a batch, with padding."""
CACHE_BYTES = 256 * 2**20
"""Memory per replica for token vectors of recent passages (late interaction)."""
PLAIN_CLASSIFIER = {"kind": "classifier", "instructed_query": "{instruction} {query}", "plain_query": "{query}"}
"""Settings of a cross-encoder that is given by its directory or hub name."""
WARM_UP = (Question("warm up", "Only what warms up."), "A passage, which is as long as a sentence.")


def resolve(settings: ServeSettings, served: str) -> RerankerArguments | None:
    """Check the settings of the re-ranking stage; None: there is none. No weights are loaded.

    Args:
        settings: of the API.
        served: directory, URI or hub name of the served encoder.

    Raises:
        InputError: there is no such model, or it is not of the kind that the settings name.
    """
    rerank = settings.rerank
    if rerank is None:
        return None
    if rerank.kind == "late_interaction":
        return _late_interaction(settings, rerank, served)
    return _cross_encoder(settings, rerank)


def _late_interaction(settings: ServeSettings, rerank: RerankSettings, served: str) -> RerankerArguments:
    from infembed_ray.modeling.encoder import InstructionEncoder

    if isinstance(rerank.model, dict):
        fault = "settings of a cross-encoder with rerank.kind=late_interaction"
        raise InputError.of("rerank.model", None, fault, "give an encoder's directory, or null")
    path = checkpoint.locate(rerank.model or served, "rerank.model", kind="encoder").path
    encoder = InstructionEncoder.from_pretrained(checkpoint.local(path), device="meta")
    if encoder.interaction is not None:
        fault = f"late_interaction cannot read {path}: it encodes instruction and query separately"
        raise InputError.of("rerank.kind", rerank.kind, fault, "give another checkpoint as rerank.model")
    fingerprint = encoder.fingerprint()
    return RerankerArguments(model=path, fingerprint=fingerprint, replicas=rerank.replicas, settings=settings)


def _cross_encoder(settings: ServeSettings, rerank: RerankSettings) -> RerankerArguments:
    from infembed_ray.modeling.rerankers import KINDS

    if rerank.model is None:
        remedy = "give a directory, a hub name, or settings with `kind` and `model`"
        raise InputError.of("rerank.model", None, "rerank.kind=cross_encoder needs a model", remedy)
    own = rerank.model if isinstance(rerank.model, dict) else {**PLAIN_CLASSIFIER, "model": rerank.model}
    reranker = RetrieverSettings.from_mapping(own, "rerank.model.")
    if reranker.kind not in KINDS:
        remedy = f"give one of {', '.join(KINDS)}, or set rerank.kind=late_interaction for an encoder"
        raise InputError.of("rerank.model.kind", reranker.kind, "does not read query and passage together", remedy)
    path = checkpoint.locate(reranker.model, "rerank.model", reranker.revision, reranker.kind).path
    if Path(path).is_absolute():
        located = reranker.model_copy(update={"model": path})
        KINDS[reranker.kind](located, "meta", BATCH_TOKENS)  # raises if model and kind do not fit
    fingerprint = checkpoint.fingerprint(path, json.dumps(reranker.identity(), sort_keys=True))
    formats = {name: value for name, value in own.items() if name != "model"}
    return RerankerArguments(
        model=path, fingerprint=fingerprint, reranker=formats, replicas=rerank.replicas, settings=settings
    )


def load(arguments: RerankerArguments) -> PairScorer:
    """Load the model and warm it up. Blocks for seconds.

    Raises:
        InputError: the model cannot be loaded, or is not of the kind that the settings name.
    """
    import torch

    from infembed_ray.modeling import rerankers

    settings = arguments.settings
    torch.set_num_threads(max(1, int(settings.cpus_per_encoder)))
    device = "cuda" if settings.gpus_per_encoder else "cpu"
    scorer: PairScorer
    if arguments.reranker is None:
        from infembed_ray.modeling.encoder import InstructionEncoder
        from infembed_ray.modeling.late_interaction import LateInteraction

        dtype = torch.bfloat16 if settings.gpus_per_encoder else torch.float32
        encoder = InstructionEncoder.from_pretrained(checkpoint.local(arguments.model), device=device, dtype=dtype)
        scorer = LateInteraction(encoder, CACHE_BYTES)
    else:
        own = {**arguments.reranker, "model": checkpoint.local(arguments.model)}
        reranker = RetrieverSettings.from_mapping(own, "rerank.model.")
        scorer = rerankers.KINDS[reranker.kind](reranker, device, BATCH_TOKENS)
    scorer.score([WARM_UP])
    return scorer


class RerankEngine:
    """Scores passages of concurrent searches. All calls come from one event loop."""

    def __init__(self, scorer: PairScorer, batch_tokens: int = BATCH_TOKENS) -> None:
        self._scorer = scorer
        self.batching = BatchingEngine(self._relevance, batch_tokens=batch_tokens, cost=scorer.cost)
        # One thread, because truncation is mutable state of a fast tokenizer; not the event loop, which it would block.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenize")

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
        self.batching.require_capacity(len(texts), timeout_s)  # before any work is done
        question = Question(query, instruction)
        pairs = [(question, text) for text in texts]
        tokenized = await loop.run_in_executor(self._thread, self._scorer.tokenized, pairs)
        return (await self.batching.embed(tokenized, ends - loop.time()))[:, 0]

    def _relevance(self, pairs: list[Any]) -> np.ndarray:
        """Score pairs as the batching engine wants it: (n, 1)."""
        scores = self._scorer.relevance(pairs)
        if not np.isfinite(scores).all():
            raise ValueError("a score of the reranker is not finite: its weights are damaged, or its dtype overflows")
        return scores[:, None]
