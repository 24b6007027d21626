"""The HTTP API as an ASGI application over a `Service`. It does not depend on Ray."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import anyio
from fastapi import FastAPI, Request, Response
from fastapi.routing import APIRoute
from prometheus_client import CollectorRegistry
from pydantic import BaseModel, ValidationError

from infembed_ray import __version__
from infembed_ray.config.serving import DEFAULT_COLLECTION
from infembed_ray.serving import embeddings_schema, schema
from infembed_ray.serving.encoder.batching import DeadlineExceeded
from infembed_ray.serving.http import playground_routes
from infembed_ray.serving.http.api_docs import api_docs_page
from infembed_ray.serving.http.auth import ApiKeys
from infembed_ray.serving.http.collection_routes import add_collection_routes
from infembed_ray.serving.http.collections import Collections
from infembed_ray.serving.http.errors import EXCEPTION_HANDLERS, ApiError, invalid, too_large
from infembed_ray.serving.http.middleware import ApiMiddleware, HttpMetrics
from infembed_ray.serving.http.openapi import openapi_document
from infembed_ray.serving.http.routes import add_document_routes, add_query_routes, add_status_routes
from infembed_ray.serving.service import Service

DESCRIPTION = f"""
Instruction-following retrieval. `POST /v1/embeddings` is OpenAI's endpoint, so OpenAI's clients work with `base_url` set to
this server; it also takes `instruction` and `input_type`. `POST /v1/search` finds passages for a query under an instruction.
`/v1/documents` adds, replaces and deletes passages; searches show a change within a second. Both mean the default collection;
`/v1/collections` lists all, and `/v1/collections/NAME/...` names one.

Limits: {embeddings_schema.MAX_INPUTS} inputs or {schema.MAX_QUERIES} queries per request, {schema.MAX_CHARACTERS} characters per text,
{schema.MAX_TOP_K} hits per query and {schema.MAX_HITS} per request, {schema.MAX_DOCUMENTS} documents per change. A text longer
than the model's maximum length is truncated. With 429, 503 and 504, `Retry-After` gives the seconds to wait before a retry.
Errors have OpenAI's shape. Answers carry `X-Request-Id`: the request's own, or a new one.
"""


@dataclass(frozen=True)
class Limits:
    """Limits of a request."""

    max_body_mib: float = 8.0
    """Largest body; a larger one is not read."""
    request_timeout_s: float = 30.0
    """Longest time from the end of the headers to the answer."""


def create_app(
    service: Service | Callable[[], Service],
    deployment: str | Callable[[], str],
    keys: ApiKeys,
    limits: Limits = Limits(),
    *,
    registry: CollectorRegistry | None = None,
    request_ids: bool = True,
    collections: Callable[[], Mapping[str, Service]] | None = None,
) -> FastAPI:
    """Create the ASGI application.

    Args:
        service: answers the requests to the default collection; a function returns the service of a new request.
        deployment: fingerprint of what is served, for `GET /healthz`.
        keys: the accepted API keys; without any, the API serves its own machine only.
        limits: limits of a request.
        registry: where the application counts its requests. `GET /metrics` returns the service's metrics instead.
        request_ids: echo or create X-Request-Id; False behind a proxy that does, such as Ray Serve's.
        collections: returns the services of all collections for a new request, the default one first; None: `service`
            alone.
    """
    app = FastAPI(
        title="infembed_ray",
        version=__version__,
        description=DESCRIPTION,
        redirect_slashes=False,
        docs_url=None,  # FastAPI's pages load scripts from a CDN
        redoc_url=None,
    )
    app.state.limits = limits
    metrics = HttpMetrics(registry or CollectorRegistry())
    app.add_middleware(ApiMiddleware, keys=keys, metrics=metrics, request_ids=request_ids)
    for error, as_api_error in EXCEPTION_HANDLERS.items():
        app.add_exception_handler(error, _handler(as_api_error))
    current = service if callable(service) else lambda: service
    served = Collections(collections or (lambda: {DEFAULT_COLLECTION: current()}))
    fingerprint = deployment if callable(deployment) else lambda: deployment
    app.router.route_class = Route
    # Not by `include_router`: its routes are missing in `app.routes`, from which a 405 lists the allowed methods.
    add_query_routes(app.router, served)
    add_document_routes(app.router, served)
    add_collection_routes(app.router, served)
    add_status_routes(app.router, served, fingerprint)
    app.include_router(playground_routes.router())
    app.openapi = functools.cache(functools.partial(openapi_document, app, bool(keys)))  # type: ignore[method-assign]
    docs_page = functools.cache(lambda: api_docs_page(app.openapi()))

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return docs_page()

    return app


class Route(APIRoute):
    """A route under the API's limits, whose body is parsed and validated in one step by pydantic's own JSON parser."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler; FastAPI's own first parses the body and then validates it."""
        answer: Callable[[Request], Awaitable[Response]]
        if self.body_field is None:
            answer = super().get_route_handler()
        else:
            model = cast(type[BaseModel], self.body_field.field_info.annotation)

            async def answer(request: Request) -> Response:
                body = await _read_body(request)
                try:
                    parsed = model.model_validate_json(body)
                except ValidationError as error:
                    raise invalid(error) from None  # the error's text contains the body's
                response: Response = await self.endpoint(parsed, **request.path_params)
                return response

        async def answer_in_time(request: Request) -> Response:
            limits: Limits = request.app.state.limits
            # Replace a part's own DeadlineExceeded, which names the time that was left for that part.
            with anyio.move_on_after(limits.request_timeout_s), suppress(DeadlineExceeded):
                return await answer(request)
            raise DeadlineExceeded(limits.request_timeout_s)

        return answer_in_time


async def _read_body(request: Request) -> bytes:
    """Return the body; ApiError if it is not JSON or larger than the limit."""
    content_type = request.headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        # A web page may send a body of any other type to any server without asking it first (CORS).
        message = f"Content-Type {content_type!r}: send the body as application/json"
        raise ApiError(415, message, code="unsupported_media_type")
    max_mib = request.app.state.limits.max_body_mib
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and float(announced) > max_mib * 2**20:
        raise too_large(max_mib)
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_mib * 2**20:
            raise too_large(max_mib)
        chunks.append(chunk)
    return b"".join(chunks)


def _handler(as_api_error: Callable[[Request, Any], ApiError]) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def handle(request: Request, error: Exception) -> Response:
        return as_api_error(request, error).response()

    return handle
