"""A service without weights or Ray: the real batching engine over vectors computed from the token ids themselves."""

from __future__ import annotations

import hashlib

import numpy as np

from infembed_ray.serving import schema
from infembed_ray.serving.app import Embedded, Found
from infembed_ray.serving.engine import BatchingEngine

DIMENSION = 16
VOCABULARY = 256


def debug_embed(sequences: list[list[int]]) -> np.ndarray:
    """(n, DIMENSION) float32 unit vectors that depend on every token of their own sequence and on nothing else."""
    seeds = [int.from_bytes(hashlib.sha256(repr(s).encode()).digest()[:8], "big") for s in sequences]
    vectors = np.stack([np.random.default_rng(seed).standard_normal(DIMENSION) for seed in seeds])
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


class DebugService:
    """`app.Service` with bytes as tokens: an instruction is put before a query, as the encoder does."""

    def __init__(self, engine: BatchingEngine | None = None) -> None:
        self.engine = engine or BatchingEngine(debug_embed)
        self.is_ready = True

    async def embed(
        self, inputs: list[str] | list[list[int]], input_type: schema.InputType, instruction: str | None
    ) -> Embedded:
        texts = [x if isinstance(x, str) else bytes(x).decode() for x in inputs]
        if input_type == "query":
            texts = [f"query: {instruction} {text}" for text in texts]
        tokens = [list(text.encode()) for text in texts]
        return Embedded(await self.engine.embed(tokens), sum(map(len, tokens)))

    async def search(self, query: str, instruction: str | None, top_k: int) -> Found:
        await self.embed([query], "query", instruction)
        hits = [schema.SearchHit(id=f"p{i}", score=1 - i / 10, text=f"{instruction} {query}") for i in range(5)]
        return Found(hits[:top_k], schema.Timings(encode_ms=1.0, search_ms=2.0))

    async def ready(self) -> bool:
        return self.is_ready
