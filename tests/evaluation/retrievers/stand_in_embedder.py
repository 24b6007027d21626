"""A stand-in for an embeddings API: an HTTP server on loopback with faults."""

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

DIMENSION = 8
KEY = "secret"


def embedding(text: str) -> list[float]:
    """Return the server's embedding of a text, not normalized."""
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    return (3 * np.random.default_rng(seed).standard_normal(DIMENSION)).tolist()


@dataclass
class Server:
    """Behaviour, which tests change, and the requests that it saw."""

    url: str = ""
    faults: list[str] = field(default_factory=list)
    """Faults of the next requests: `429`, `500`, `301`, `dropped`, `wrong count`, `nan`."""
    longest: int = 10**9
    """Maximum characters of a text."""
    paid: Counter[str] = field(default_factory=Counter)
    """Text -> number of times it was embedded and answered."""
    bodies: list[dict[str, Any]] = field(default_factory=list)

    def answer(self, body: dict[str, Any], key: str | None) -> tuple[int, dict[str, Any]] | None:
        """Return status and body of the answer to POST /v1/embeddings; None drops the connection."""
        self.bodies.append(body)
        if key != f"Bearer {KEY}":
            return 401, {"error": {"message": "Incorrect API key provided."}}
        if body["model"] == "unknown":
            return 404, {"error": {"message": "no such model"}}
        fault = self.faults.pop(0) if self.faults else ""
        if fault in ("429", "500"):
            return int(fault), {"error": {"message": "slow down"}}
        if fault == "301":
            return 301, {}
        if fault == "dropped":
            return None
        if any(len(text) > self.longest or not text for text in body["input"]):
            return 400, {"error": {"message": "a text is too long or empty"}}
        vectors = [embedding(text) for text in body["input"]][fault == "wrong count" :]
        if fault == "nan":
            vectors[0][0] = float("nan")
        self.paid.update(body["input"])
        data = [{"index": i, "object": "embedding", "embedding": v} for i, v in enumerate(vectors)]
        return 200, {"data": data[::-1], "model": body["model"], "usage": {"prompt_tokens": 1, "total_tokens": 1}}


class _Handler(BaseHTTPRequestHandler):
    server_state: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answered = self.server_state.answer(body, self.headers["Authorization"])
        if answered is None:
            return
        content = json.dumps(answered[1]).encode()
        self.send_response(answered[0])
        for name, value in (
            ("Content-Type", "application/json"),
            ("Retry-After", "0.05"),
            *([("Location", "/v2/embeddings")] if answered[0] == 301 else []),
            ("Content-Length", len(content)),
        ):
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


@contextmanager
def serving() -> Iterator[Server]:
    """Run the server in a thread."""
    state = Server()
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"server_state": state})) as server:
        state.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield state
        finally:
            server.shutdown()
            thread.join()
