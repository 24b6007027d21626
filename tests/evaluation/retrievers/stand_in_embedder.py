"""A stand-in for an embeddings API: an HTTP server on loopback with latency, faults and token counts."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from aiohttp import web

DIMENSION = 8


def embedding(text: str) -> list[float]:
    """Return the server's embedding of a text, not normalized."""
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    return (3 * np.random.default_rng(seed).standard_normal(DIMENSION)).tolist()


@dataclass
class Server:
    """Behaviour, which tests change, and the requests that it saw."""

    url: str = ""
    key: str = "secret"
    latency_s: float = 0.0
    faults: list[str] = field(default_factory=list)
    """Faults of the next requests: `429`, `500`, `dropped`, `truncated`, `wrong count`, `nan`."""
    longest: int = 10**9
    """Maximum characters of a text."""
    paid: Counter[str] = field(default_factory=Counter)
    """Text -> number of times it was embedded and answered."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/embeddings."""
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            return await self._answer(request)
        finally:
            self.in_flight -= 1

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": {"message": "Incorrect API key provided."}}, status=401)
        if body["model"] == "unknown":
            return web.json_response({"error": {"message": "no such model"}}, status=404)
        fault = self.faults.pop(0) if self.faults else ""
        if fault == "429":
            headers = {"Retry-After": "0.05"}
            return web.json_response({"error": {"message": "slow down"}}, status=429, headers=headers)
        await asyncio.sleep(self.latency_s)
        if fault == "500":
            return web.json_response({"error": {"message": "oops"}}, status=500)
        if fault == "dropped":
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        texts = body["input"]
        if any(len(text) > self.longest or not text for text in texts):
            return web.json_response({"error": {"message": "a text is too long or empty"}}, status=400)
        vectors = [embedding(text) for text in texts]
        if fault == "wrong count":
            vectors = vectors[1:]
        if fault == "nan":
            vectors[0][0] = float("nan")
        data = [{"index": i, "object": "embedding", "embedding": v} for i, v in enumerate(vectors)]
        answer = {"data": data[::-1], "model": body["model"], "usage": {"prompt_tokens": 1, "total_tokens": 1}}
        if fault == "truncated":
            return web.Response(text='{"data": [{"index": 0', content_type="application/json")
        self.paid.update(texts)
        return web.json_response(answer)


@contextmanager
def serving() -> Iterator[Server]:
    """Run the server in a thread."""
    server, loop, ready = Server(), asyncio.new_event_loop(), threading.Event()

    async def start() -> web.AppRunner:
        application = web.Application(client_max_size=2**26)
        application.add_routes([web.post("/v1/embeddings", server.handle)])
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()
        return runner

    def run() -> None:
        asyncio.set_event_loop(loop)
        runner = loop.run_until_complete(start())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(30)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
