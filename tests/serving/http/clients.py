from typing import Any

import numpy as np
from fastapi import FastAPI
from starlette.testclient import TestClient

from infembed_ray.serving.http.app import create_app
from infembed_ray.serving.http.auth import ApiKeys
from tests.serving.debug import DebugService, debug_embed

JSON = {"Content-Type": "application/json"}


def make_app(
    service: Any = None,
    keys: tuple[str, ...] | ApiKeys = (),
    request_timeout_s: float = 30.0,
    **collections: Any,
) -> FastAPI:
    """Return the API over a service as the default collection, and over further collections."""
    default = service or DebugService()
    return create_app(
        lambda: {"index": default, **collections},
        lambda: "fingerprint",
        keys if isinstance(keys, ApiKeys) else ApiKeys(keys),
        request_timeout_s,
        metrics=default.metrics,
        registry=default.registry,
    )


def client_of(app: FastAPI, **options: Any) -> TestClient:
    return TestClient(app, base_url="http://localhost", **options)


def vector(text: str) -> np.ndarray:
    return debug_embed([list(text.encode())])[0]


def refused(answer: Any, status: int) -> dict[str, Any]:
    assert answer.status_code == status
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert "\n" not in body["error"]["message"]
    error: dict[str, Any] = body["error"]
    return error
