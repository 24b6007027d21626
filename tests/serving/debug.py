"""A service without weights and without Ray: the real batching engine over vectors computed from the token ids."""

import asyncio
import hashlib
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
import uvicorn
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, generate_latest

from infembed_ray.modeling.formats import Question
from infembed_ray.retrieval import filters
from infembed_ray.serving import explaining, schema
from infembed_ray.serving.encoder.batching import BatchingEngine, Embedded
from infembed_ray.serving.service import Document, NotApplied

DIMENSION = 16
CARD = schema.Model(
    id="debug",
    created=1,
    dimension=DIMENSION,
    encoder="e",
    index_version="v1",
    passages=5,
    metadata={"year": "integer", "language": "string", "rating": "number", "draft": "boolean", "day": "date"},
    writable=True,
)
PASSAGES = [
    Document(f"p{i}", f"passage {i}", {"year": 2020 + i, "language": "en" if i % 2 else "de"}) for i in range(5)
]

_ARROW = {
    "string": pa.string(),
    "integer": pa.int64(),
    "number": pa.float64(),
    "boolean": pa.bool_(),
    "date": pa.string(),
}


def debug_embed(sequences: Sequence[Sequence[int]]) -> np.ndarray:
    """Return (n, DIMENSION) float32 unit vectors that depend on the tokens of their own sequence only."""
    seeds = [int.from_bytes(hashlib.sha256(repr(list(s)).encode()).digest()[:8], "big") for s in sequences]
    vectors = np.stack([np.random.default_rng(seed).standard_normal(DIMENSION) for seed in seeds])
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


class DebugService:
    """A `Release` with bytes as tokens; an instruction precedes its query, as in the encoder.

    Attributes:
        card, is_ready, stuck: its answers.
        documents: by id.
        sequence: of the last change.
        registry: what `GET /metrics` shows.
    """

    def __init__(self, engine: BatchingEngine | None = None, card: schema.Model = CARD) -> None:
        self.engine = engine or BatchingEngine(debug_embed)
        self.card = card
        self.is_ready = True
        self.stuck: str | None = None
        self.documents = {document.id: document for document in PASSAGES}
        self.sequence = 0
        self.registry = CollectorRegistry()

    async def embed(self, texts: list[str], instructions: list[str | None] | None) -> Embedded:
        if instructions is not None:
            texts = [f"query: {i} {text}" for i, text in zip(instructions, texts, strict=True)]
        tokens = [list(text.encode()) for text in texts]
        return Embedded(await self.engine.embed(tokens), sum(map(len, tokens)))

    async def search(self, search: schema.SearchRequest) -> schema.SearchResponse:
        condition = filters.parse(search.filter, self.card.metadata)
        if search.min_sequence > self.sequence:
            raise NotApplied(search.min_sequence, "shard-1", self.sequence)
        kept = list(self.documents.values())
        if condition is not None:
            fields = self.card.metadata
            columns = {f: pa.array([d.metadata.get(f) for d in kept], _ARROW[fields[f]]) for f in fields}
            columns |= {f: columns[f].cast(pa.date32()) for f in fields if fields[f] == "date"}
            kept = [d for d, true in zip(kept, condition.mask(pa.table(columns)), strict=True) if true]
        vectors = debug_embed([d.text.encode() for d in kept]) if kept else np.zeros((0, DIMENSION), np.float32)
        (asked,) = await self.engine.embed([list(f"query: {search.instruction or None} {search.query}".encode())])
        scored = sorted(zip((vectors @ asked).tolist(), kept, strict=True), key=lambda hit: (-hit[0], hit[1].id))
        hits = [
            schema.SearchHit(id=d.id, score=score, text=d.text, metadata=dict(d.metadata))
            for score, d in scored[: search.top_k]
        ]
        return schema.SearchResponse(
            hits=hits,
            model=self.card.id,
            index_version=self.card.index_version,
            sequence=self.sequence,
            timings=schema.Timings(encode_ms=1.0, search_ms=2.0),
            explanation=await self._explain(search, hits) if search.explain else None,
        )

    async def _explain(self, search: schema.SearchRequest, hits: Sequence[schema.SearchHit]) -> explaining.Explanation:
        phrases = explaining.phrases_of(search.instruction or "")
        instructions = explaining.variants(search.instruction or "", phrases)
        asked = await self.engine.embed([list(f"query: {i} {search.query}".encode()) for i in instructions])
        plain = search.model_copy(update={"instruction": None, "top_k": 100, "explain": False})
        ids, plain_ids = [h.id for h in hits], [h.id for h in (await self.search(plain)).hits]
        wanted = explaining.explained_ids(ids, plain_ids, search.top_k)
        scores = {id: asked @ debug_embed([self.documents[id].text.encode()])[0] for id in wanted}
        return explaining.explanation(phrases, ids, plain_ids, search.top_k, scores)

    async def rerank(self, query: Question, texts: Sequence[str]) -> np.ndarray:
        asked = await self.engine.embed([list(f"query: {query.instruction} {query.query}".encode())])
        return debug_embed([list(text.encode()) for text in texts]) @ asked[0]

    async def put(self, documents: Sequence[Document]) -> int:
        self.documents |= {document.id: document for document in documents}
        self.sequence += 1
        return self.sequence

    async def delete(self, ids: Sequence[str]) -> int:
        for id in ids:
            self.documents.pop(id, None)
        self.sequence += 1
        return self.sequence

    async def document(self, id: str) -> Document | None:
        return self.documents.get(id)

    async def ready(self) -> bool:
        return self.is_ready

    async def fault(self) -> str | None:
        return self.stuck

    async def metrics(self) -> bytes:
        return generate_latest(self.registry)


@contextmanager
def listening(app: FastAPI) -> Iterator[str]:
    """Serve an application over HTTP on this machine while the block runs; gives its base URL."""
    # asyncio sets TCP_NODELAY only on sockets created for TCP; without it answers would wait for delayed ACKs.
    listener = socket.socket(proto=socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen()  # connections wait until the server has started
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=10)
