"""OpenAPI document of the HTTP API."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from infembed_ray.serving import schema
from infembed_ray.serving.http.errors import RETRIED, STATUSES
from infembed_ray.serving.http.middleware import OPEN_PATHS


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI `responses` of a route: these error statuses and those of every route."""
    retry_after = {"Retry-After": {"description": "seconds", "schema": {"type": "integer", "minimum": 1}}}
    return {
        status: {
            "model": schema.ErrorResponse,
            "description": STATUSES[status],
            **({"headers": retry_after} if status in RETRIED else {}),
        }
        for status in sorted({*statuses, 403, 429, 500, 503, 504})
    }


def openapi_document(app: FastAPI, needs_key: bool) -> dict[str, Any]:
    """Return FastAPI's OpenAPI document with the errors of the middleware and of `Route`, and without its own 422."""
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    for path, operations in document["paths"].items():
        for operation in operations.values():
            responses = operation["responses"]
            responses.pop("422", None)
            added = [
                *((400, 408, 413, 415) if "requestBody" in operation else ()),
                *((401,) if path not in OPEN_PATHS else ()),
            ]
            for status in added:
                responses[str(status)] = {
                    "description": STATUSES[status],
                    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorResponse"}}},
                }
            operation["responses"] = dict(sorted(responses.items()))
            if "{collection}" in path:  # the routes read it from the path themselves
                name = {"name": "collection", "in": "path", "required": True, "schema": {"type": "string"}}
                operation["parameters"] = [name, *operation.get("parameters", [])]
            if needs_key and path not in OPEN_PATHS:
                operation["security"] = [{"bearer": []}]
    for unused in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(unused, None)
    if needs_key:
        document["components"]["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    return document
