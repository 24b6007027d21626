"""The HTTP API over two calls, `embed` and `search`; what stands behind them, Ray or a test, it does not know."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from fastapi import APIRouter, FastAPI, Request, Response, Security
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPBearer
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from infembed_ray import __version__
from infembed_ray.serving import schema
from infembed_ray.serving.auth import ApiKeys
from infembed_ray.serving.engine import EmptySequence, QueueFull
from infembed_ray.serving.schema import InputType, SearchHit, Timings

log = logging.getLogger(__name__)

DESCRIPTION = """
Retrieval that obeys instructions. `POST /v1/embeddings` is OpenAI's, so its clients work with
`base_url` set to this server; `instruction` and `input_type` may come besides. `POST /v1/search` finds passages for a
query under an instruction.

Limits: 2,048 inputs a request, 100,000 characters a text, 1,000 hits. A text longer than the model reads is cut. When
the queue is full the answer is 429 with `Retry-After`, in seconds. Errors have OpenAI's shape.
"""


OPEN_PATHS = frozenset({"/healthz", "/readyz", "/docs", "/openapi.json"})
"""What needs no key; everything else does, unless there are none."""


class Embedded(NamedTuple):
    """Answer of `Service.embed`."""

    vectors: np.ndarray
    """(inputs, d) float32 unit vectors."""
    tokens: int
    """Tokens the model read for all of them."""


class Found(NamedTuple):
    """Answer of `Service.search`."""

    hits: Sequence[SearchHit]
    timings: Timings


class Service(Protocol):
    """What answers the requests. Calls are cancelled when the client goes.

    Besides their answers they may give `QueueFull`, `EmptySequence` or an `ApiError`.
    """

    async def embed(
        self, inputs: list[str] | list[list[int]], input_type: InputType, instruction: str | None
    ) -> Embedded:
        """Vectors of texts or token arrays."""

    async def search(self, query: str, instruction: str | None, top_k: int) -> Found:
        """Hits of a query under an instruction, best first."""

    async def ready(self) -> bool:
        """Would a request be answered now?"""


class ApiError(Exception):
    """A request that cannot be answered, as OpenAI would say it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.error = schema.Error(message=_printable(message), type=type, param=param, code=code)
        self.headers = headers

    def response(self) -> Response:
        """As an answer."""
        return _json(schema.ErrorResponse(error=self.error), self.status, self.headers)


def create_app(service: Service, model: schema.Model, deployment: str, keys: ApiKeys) -> FastAPI:
    """The ASGI application.

    Args:
        service: answers the requests.
        model: what `GET /v1/models` says.
        deployment: fingerprint of what is served, for `GET /healthz`.
        keys: one of them is asked for; without any, all callers are welcome.
    """
    app = FastAPI(title="infembed_ray", version=__version__, description=DESCRIPTION, redoc_url=None)
    app.add_middleware(Authentication, keys=keys)
    _answer_errors(app)
    # Authentication is the middleware's; this one tells it to /docs.
    v1 = APIRouter(prefix="/v1", dependencies=[Security(HTTPBearer(auto_error=False))] if keys else [])
    refusals: dict[int | str, dict[str, Any]] = {
        status: {"model": schema.ErrorResponse} for status in (400, 401, 404, 429)
    }

    def check_model(name: str) -> None:
        if name != model.id:
            message = f"the model {name!r} is not served here, {model.id!r} is"
            raise ApiError(404, message, param="model", code="model_not_found")

    @v1.post("/embeddings", response_model=schema.EmbeddingsResponse, responses=refusals)
    async def embeddings(request: schema.EmbeddingsRequest) -> Response:
        """Unit vectors of texts or token arrays, in their order."""
        check_model(request.model)
        if request.dimensions is not None and request.dimensions > model.dimension:
            message = f"dimensions={request.dimensions}: the model has {model.dimension}; ask for as many or fewer"
            raise ApiError(400, message, param="dimensions")
        inputs = request.inputs()
        largest = max((max(tokens) for tokens in inputs if isinstance(tokens, list)), default=0)
        if largest >= model.vocabulary:
            message = (
                f"token id {largest}: the vocabulary of {model.id} ends at {model.vocabulary - 1}; "
                "send its own tokenizer's ids, or text"
            )
            raise ApiError(400, message, param="input")
        embedded = await service.embed(inputs, request.kind(), request.instruction)
        return _json(schema.EmbeddingsResponse.of(embedded.vectors, embedded.tokens, model.id, request))

    @v1.post("/search", response_model=schema.SearchResponse, responses=refusals)
    async def search(request: schema.SearchRequest) -> Response:
        """The passages nearest to a query under an instruction, best first."""
        if request.model is not None:
            check_model(request.model)
        found = await service.search(request.query, request.instruction, request.top_k)
        return _json(
            schema.SearchResponse(
                hits=list(found.hits), index_version=model.index_version, model=model.id, timings=found.timings
            )
        )

    @v1.get("/models", response_model=schema.ModelsResponse)
    async def models() -> Response:
        """The served model and index."""
        return _json(schema.ModelsResponse(data=[model]))

    @app.get("/healthz", response_model=schema.HealthResponse)
    async def healthz() -> Response:
        """The API process is alive."""
        return _json(schema.HealthResponse(deployment=deployment))

    @app.get("/readyz", response_model=schema.HealthResponse, responses={503: {"model": schema.ErrorResponse}})
    async def readyz() -> Response:
        """Encoder and all shards answer."""
        if not await service.ready():
            raise ApiError(503, "encoder or shards do not answer yet", type="server_error", code="not_ready")
        return _json(schema.HealthResponse(deployment=deployment))

    app.include_router(v1)
    return app


class Authentication:
    """ASGI middleware: without a key only `OPEN_PATHS`. Nothing of an unwelcome caller's body is read."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401."""
        if self._keys and scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            request = Request(scope)
            if not self._keys.accept(request.headers.get("authorization")):
                refusal = ApiError(
                    401,
                    "give a valid API key: Authorization: Bearer KEY",
                    type="authentication_error",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
                return await refusal.response()(scope, receive, send)
        await self._app(scope, receive, send)


def _answer_errors(app: FastAPI) -> None:
    """Give every error OpenAI's shape."""

    @app.exception_handler(ApiError)
    async def refused(_: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(QueueFull)
    async def full(_: Request, error: QueueFull) -> Response:
        seconds = max(1, math.ceil(error.retry_after_s))
        return ApiError(
            429,
            f"too many requests are waiting; try again in {seconds} s",
            type="rate_limit_error",
            code="queue_full",
            headers={"Retry-After": str(seconds)},
        ).response()

    @app.exception_handler(EmptySequence)
    async def empty(_: Request, error: EmptySequence) -> Response:
        return ApiError(400, f"{error}: give text", param="input").response()

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            return ApiError(400, f"the body is no JSON: {first['ctx']['error']} at {first['loc'][1]}").response()
        where = [str(part) for part in first["loc"] if part != "body"]
        if first["type"] == "model_attributes_type":
            message = "the body must be a JSON object, sent with Content-Type: application/json"
        elif first["type"] == "extra_forbidden":
            message = f"{'.'.join(where)}: no such field"
        else:
            message = f"{'.'.join(where) or 'body'}: {first['msg'].removeprefix('Value error, ')}"
        return ApiError(400, message, param=_printable(where[0]) if where else None).response()

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return ApiError(error.status_code, message, headers=error.headers).response()

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        # Never the request's texts: they may be confidential.
        request_id = request.headers.get("x-request-id")
        log.error("%s %s failed (request %s)", request.method, request.url.path, request_id, exc_info=error)
        return ApiError(500, "internal error; the server's log has it", type="server_error").response()


def _json(body: BaseModel, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """An answer serialised once, without FastAPI's second validation of what we built ourselves."""
    return Response(body.model_dump_json(), status, dict(headers or {}), "application/json")


def _printable(text: str) -> str:
    """Without the lone surrogates that JSON can smuggle into a string and UTF-8 cannot hold."""
    return text.encode("utf-8", "replace").decode()
