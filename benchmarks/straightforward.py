"""Search on Ray Serve, written as Serve's documentation suggests: the baseline of `serving_http.py`.

    python benchmarks/straightforward.py MODEL CORPUS.npz PORT [CPUS]

A FastAPI ingress awaits an encoder that batches with `@serve.batch`, then two FAISS shards at once, and merges. The
encoder is SentenceTransformer.encode in a thread, so the next batch can form in the meantime. The limits of requests in
flight are far above Serve's default of five, and access logs are off.
"""

import asyncio
import heapq
import os
import sys
import time
from typing import Any

import faiss
import numpy as np
import ray
from fastapi import FastAPI
from pydantic import BaseModel
from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig

SHARDS = 2
MANY = 1000
api = FastAPI()


class Search(BaseModel):
    query: str
    instruction: str | None = None
    top_k: int = 10


@serve.deployment(max_ongoing_requests=MANY)
class Encoder:
    def __init__(self, model: str, threads: int) -> None:
        os.environ["HF_HUB_OFFLINE"] = "1"
        import torch
        from sentence_transformers import SentenceTransformer

        torch.set_num_threads(threads)
        self.model = SentenceTransformer(model, device="cpu")
        self.model.encode(["warm up"])

    @serve.batch(max_batch_size=32, batch_wait_timeout_s=0.005)
    async def __call__(self, texts: list[str]) -> list[np.ndarray]:
        return list(await asyncio.to_thread(self.model.encode, texts, batch_size=32, show_progress_bar=False))


@serve.deployment(max_ongoing_requests=MANY, ray_actor_options={"num_cpus": 0.1})
class Shard:
    def __init__(self, corpus: str, number: int) -> None:
        arrays = np.load(corpus)
        self.ids, self.texts = (arrays[name][number::SHARDS].tolist() for name in ("ids", "texts"))
        vectors = arrays["vectors"][number::SHARDS]
        self.index = faiss.IndexFlatIP(vectors.shape[1])
        self.index.add(np.ascontiguousarray(vectors))

    def search(self, vector: np.ndarray, k: int) -> list[tuple[float, str, str]]:
        scores, rows = self.index.search(vector[None], k)
        return [(float(s), self.ids[r], self.texts[r]) for s, r in zip(scores[0], rows[0], strict=True) if r >= 0]


@serve.deployment(max_ongoing_requests=MANY, ray_actor_options={"num_cpus": 0.1})
@serve.ingress(api)
class Ingress:
    def __init__(self, encoder: DeploymentHandle, shards: list[DeploymentHandle]) -> None:
        self.encoder, self.shards = encoder, shards

    @api.get("/readyz")
    async def readyz(self) -> dict[str, str]:
        return {"status": "ok"}

    @api.post("/v1/search")
    async def search(self, request: Search) -> dict[str, Any]:
        text = f"{request.instruction} {request.query}" if request.instruction else request.query
        vector = await self.encoder.remote(text)
        found = await asyncio.gather(*(shard.search.remote(vector, request.top_k) for shard in self.shards))
        best = heapq.nlargest(request.top_k, (hit for hits in found for hit in hits))
        return {"hits": [{"id": id, "score": score, "text": text} for score, id, text in best]}


def main() -> None:
    model, corpus, port, cpus = sys.argv[1], sys.argv[2], int(sys.argv[3]), int((*sys.argv, 1)[4])
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    quiet = LoggingConfig(log_level="WARNING", enable_access_log=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config=quiet)
    shards = [Shard.options(name=f"shard-{number}").bind(corpus, number) for number in range(SHARDS)]
    encoder = Encoder.options(ray_actor_options={"num_cpus": cpus}).bind(model, cpus)
    serve.run(Ingress.bind(encoder, shards), logging_config=quiet)
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    main()
