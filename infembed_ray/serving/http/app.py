"""The HTTP API as an ASGI application over the service of each collection. It does not depend on Ray."""

import functools
import hashlib
import json
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any, cast

import anyio
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse
from fastapi.routing import APIRoute
from markupsafe import Markup, escape
from prometheus_client import CollectorRegistry
from pydantic import BaseModel, ValidationError

from infembed_ray import __version__
from infembed_ray.reporting.page import render
from infembed_ray.serving import schema
from infembed_ray.serving.encoder.batching import DeadlineExceeded
from infembed_ray.serving.http.auth import ApiKeys
from infembed_ray.serving.http.errors import EXCEPTION_HANDLERS, STATUSES, HttpError, invalid
from infembed_ray.serving.http.middleware import OPEN_PATHS, ApiMiddleware
from infembed_ray.serving.http.routes import Collections, add_collection_routes, add_model_routes, add_status_routes
from infembed_ray.serving.routing.blue_green import Release

FILES = resources.files("infembed_ray.serving.http") / "playground"
MEDIA_TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}
ASSETS = sorted(file.name for file in FILES.iterdir() if Path(file.name).suffix in MEDIA_TYPES)
"""Files below `/playground/`. They hold no data and need no API key; the page's requests to the API do."""
PLAYGROUND_HEADERS = {
    # No other origins, no inline code, no HTML from strings (Trusted Types): a passage cannot become a script.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "Cache-Control": "no-cache",
}
DESCRIPTION = f"""
Instruction-following retrieval. `POST /v1/embeddings` is OpenAI's endpoint, so OpenAI's clients work with `base_url` set to
this server; it also takes `instruction` and `input_type`. `POST /v1/search` finds passages for a query under an instruction.
`/v1/documents` adds, replaces and deletes passages; searches show a change within a second. Both mean the default collection;
`/v1/collections` lists all, and `/v1/collections/NAME/...` names one.

Limits: {schema.MAX_INPUTS} inputs per embeddings request, {schema.MAX_CHARACTERS} characters per text, {schema.MAX_TOP_K} hits per
search, {schema.MAX_DOCUMENTS} documents or chunks of them per change. A text longer
than the model's maximum length is truncated. With 429, 503 and 504, `Retry-After` gives the seconds to wait before a retry.
Errors have OpenAI's shape. Answers carry `X-Request-Id`: the request's own, or a new one.
"""


def create_app(
    collections: Callable[[], Mapping[str, Release]],
    deployment: Callable[[], str],
    keys: ApiKeys,
    request_timeout_s: float = 30.0,
    *,
    metrics: Callable[[], Awaitable[bytes]],
    registry: CollectorRegistry | None = None,
    request_ids: bool = True,
) -> FastAPI:
    """Create the ASGI application.

    Args:
        collections: returns the services of all collections for a new request, the default one first.
        deployment: returns the fingerprint of what is served, for `GET /healthz`.
        keys: without any, the API serves its own machine only.
        request_timeout_s: maximum time from the end of the headers to the answer.
        metrics: returns the metrics of all replicas in Prometheus text format, for `GET /metrics`.
        registry: where the application counts its requests.
        request_ids: echo or create X-Request-Id; False behind a proxy that does, such as Ray Serve's.
    """
    # Without FastAPI's pages, which load scripts from a CDN.
    app = FastAPI(
        title="infembed_ray",
        version=__version__,
        description=DESCRIPTION,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
    )
    app.state.request_timeout_s = request_timeout_s
    app.add_middleware(ApiMiddleware, keys=keys, registry=registry or CollectorRegistry(), request_ids=request_ids)
    for error, as_api_error in EXCEPTION_HANDLERS.items():
        app.add_exception_handler(error, _handler(as_api_error))
    served = Collections(collections)
    app.router.route_class = ApiRoute
    # Not by `include_router`: its routes are missing in `app.routes`, from which a 405 lists the allowed methods.
    add_collection_routes(app.router, served)
    add_model_routes(app.router, served)
    add_status_routes(app.router, served, deployment, metrics)
    app.include_router(playground())
    app.openapi = functools.cache(functools.partial(openapi_document, app, bool(keys)))  # type: ignore[method-assign]
    package = "infembed_ray.serving.http"
    docs = functools.cache(lambda: render(package, "api_docs.html", document=app.openapi(), type_of=type_of))
    app.add_api_route("/docs", lambda: docs(), response_class=HTMLResponse, include_in_schema=False)
    return app


class ApiRoute(APIRoute):
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
                return await self.endpoint(parsed, request)

        async def answer_in_time(request: Request) -> Response:
            timeout_s: float = request.app.state.request_timeout_s
            # Replace a part's own DeadlineExceeded, which names the time that was left for that part.
            with anyio.move_on_after(timeout_s), suppress(DeadlineExceeded):
                return await answer(request)
            raise DeadlineExceeded(timeout_s)

        return answer_in_time


async def _read_body(request: Request) -> bytes:
    """Return the body, whose size the proxy has limited; HttpError if it is not JSON."""
    content_type = request.headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        # A web page may send a body of any other type to any server without asking it first (CORS).
        message = f"Content-Type {content_type!r}: send the body as application/json"
        raise HttpError("unsupported_media_type", message)
    return await request.body()


def _handler(as_api_error: Callable[[Request, Any], HttpError]) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def handle(request: Request, error: Exception) -> Response:
        return as_api_error(request, error).response()

    return handle


def openapi_document(app: FastAPI, needs_key: bool) -> dict[str, Any]:
    """Return FastAPI's OpenAPI document with the errors of the middleware and of `Route`, and without its own 422."""
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    for path, operations in document["paths"].items():
        for operation in operations.values():
            responses = operation["responses"]
            responses.pop("422", None)
            added = [400, 408, 413, 415] if "requestBody" in operation else []
            added += [401] if path not in OPEN_PATHS else []
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


def playground() -> APIRouter:
    """Return the routes of the page and its files: with security headers and an ETag."""
    routes = APIRouter(include_in_schema=False)
    page = render("infembed_ray.serving.http", "playground/index.html").encode()
    contents = {"/": (page, "text/html; charset=utf-8")}
    contents |= {f"/playground/{n}": ((FILES / n).read_bytes(), MEDIA_TYPES[Path(n).suffix]) for n in ASSETS}

    for path, (content, media_type) in contents.items():

        async def answer(request: Request, content: bytes = content, media_type: str = media_type) -> Response:
            headers = {**PLAYGROUND_HEADERS, "ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}
            if headers["ETag"] in request.headers.get("if-none-match", ""):
                return Response(status_code=304, headers=headers)
            return Response(content, media_type=media_type, headers=headers)

        routes.add_api_route(path, answer, methods=["GET", "HEAD"])
    return routes


def type_of(schema: Mapping[str, Any]) -> Markup:
    """Describe the type of a JSON schema in a few words of HTML; a named schema becomes a link."""
    if "$ref" in schema:
        return Markup('<a href="#{0}">{0}</a>').format(schema["$ref"].rpartition("/")[2])
    kinds = schema.get("type", "anything")
    if choices := schema.get("anyOf", schema.get("oneOf")):
        words = [type_of(choice) for choice in choices]
    elif values := schema.get("enum", [schema["const"]] if "const" in schema else None):
        words = [Markup("<code>{}</code>").format(json.dumps(value)) for value in values]
    elif kinds == "array":
        words = [Markup("list of ") + type_of(schema["items"])]
    else:
        words = [escape(kind) for kind in ([kinds] if isinstance(kinds, str) else kinds)]
    return Markup(" or ").join(words)
