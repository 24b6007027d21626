"""The HTTP API over a `Service`; what stands behind that, Ray or a test, it does not know."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import anyio
from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry
from pydantic import BaseModel, ValidationError
from starlette.convertors import PathConvertor, register_url_convertor

from infembed_ray import __version__
from infembed_ray.retrieval import filters
from infembed_ray.serving import pages, schema
from infembed_ray.serving.auth import ApiKeys
from infembed_ray.serving.engine import DeadlineExceeded
from infembed_ray.serving.gate import OPEN_PATHS, Gate
from infembed_ray.serving.metrics import HttpMetrics
from infembed_ray.serving.reference import reference
from infembed_ray.serving.refusals import HANDLERS, STATUSES, ApiError, invalid, json_response, too_large
from infembed_ray.serving.service import Document, Found, Query, ReadOnly, Service, Stuck

TURN_BYTES = 2**17
"""Of an answer, made at a stretch: about a millisecond's work."""

DESCRIPTION = f"""
Retrieval that obeys instructions. `POST /v1/embeddings` is OpenAI's, so its clients work with
`base_url` set to this server; `instruction` and `input_type` may come besides. `POST /v1/search` finds passages for a
query under an instruction. `/v1/documents` changes what is found, within a second.

Limits: {schema.MAX_INPUTS} inputs or {schema.MAX_QUERIES} queries a request, {schema.MAX_CHARACTERS} characters a text,
{schema.MAX_TOP_K} hits a query and {schema.MAX_HITS} a request, {schema.MAX_DOCUMENTS} documents a change. A text longer
than the model reads is cut. Where the answer is 429, 503 or 504, `Retry-After` says after how many seconds to try again.
Errors have OpenAI's shape. Answers carry `X-Request-Id`: the request's own, or a new one.
"""


@dataclass(frozen=True)
class Limits:
    """What is asked of a request."""

    max_body_mib: float = 8.0
    """Of its body; a larger one is not read."""
    request_timeout_s: float = 30.0
    """From its headers to its answer."""


def create_app(
    service: Service,
    deployment: str | Callable[[], str],
    keys: ApiKeys,
    limits: Limits = Limits(),
    *,
    registry: CollectorRegistry | None = None,
    request_ids: bool = True,
) -> FastAPI:
    """The ASGI application.

    Args:
        service: answers the requests.
        deployment: fingerprint of what is served, for `GET /healthz`.
        keys: one of them is asked for; without any, all callers of this machine are welcome.
        limits: of a request.
        registry: where the API counts its requests; `GET /metrics` is the service's own affair.
        request_ids: echo or make X-Request-Id; False behind a proxy that does, such as Ray Serve's.
    """
    app = FastAPI(
        title="infembed_ray",
        version=__version__,
        description=DESCRIPTION,
        redirect_slashes=False,
        docs_url=None,  # FastAPI's pages load scripts of a CDN
        redoc_url=None,
    )
    app.state.limits = limits
    app.add_middleware(Gate, keys=keys, metrics=HttpMetrics(registry or CollectorRegistry()), request_ids=request_ids)
    for error, refusal in HANDLERS.items():
        app.add_exception_handler(error, _handler(refusal))
    api = app.router
    api.route_class = Route

    def check_model(name: str | None) -> schema.Model:
        """The card of what answers this request."""
        card = service.card
        if name is not None and name != card.id:
            message = f"the model {name!r} is not served here, {card.id!r} is"
            raise ApiError(404, message, param="model", code="model_not_found")
        return card

    @api.post("/v1/embeddings", response_model=schema.EmbeddingsResponse, responses=_refusals(404, 429, 503, 504))
    async def embeddings(request: schema.EmbeddingsRequest) -> Response:
        """Unit vectors of texts or token arrays, in their order."""
        card = check_model(request.model)
        if request.dimensions is not None and request.dimensions > card.dimension:
            message = f"dimensions={request.dimensions}: the model has {card.dimension}; ask for as many or fewer"
            raise ApiError(400, message, param="dimensions")
        inputs = request.inputs()
        largest = max((max(tokens) for tokens in inputs if isinstance(tokens, list)), default=0)
        if largest >= card.vocabulary:
            message = (
                f"input: token id {largest}: the vocabulary of {card.id} ends at {card.vocabulary - 1}; "
                "send its own tokenizer's ids, or text"
            )
            raise ApiError(400, message, param="input")
        embedded = await service.embed(inputs, request.kind(), request.instruction)
        pieces = schema.EmbeddingsResponse.json_of(embedded.vectors, embedded.tokens, card.id, request)
        return Response(await _in_turns(pieces), media_type="application/json")

    @api.post(
        "/v1/search",
        response_model=schema.SearchResponse | schema.SearchManyResponse,
        responses=_refusals(404, 429, 503, 504),
    )
    async def search(request: schema.SearchRequest) -> Response:
        """The passages nearest to a query under an instruction, best first; or those of each of several queries."""
        card = check_model(request.model)
        filters.parse(request.filter, card.metadata)  # refused here, before anything is encoded
        queries = [Query(*both) for both in zip(request.queries(), request.instructions(), strict=True)]
        found = await service.search(queries, request.top_k, request.filter, request.allow_partial)
        return json_response(_search_answer(found, isinstance(request.query, list)))

    @api.put("/v1/documents", response_model=schema.ChangeResponse, responses=_refusals(429, 503, 504))
    async def put_documents(request: schema.PutRequest) -> Response:
        """Add documents, or replace those of the same ids. Durable when answered, found within a second."""
        card = check_writable()
        documents = [
            Document(document.id, document.text, _typed(document.metadata, card, f"documents.{i}.metadata"))
            for i, document in enumerate(request.documents)
        ]
        sequence = await service.put(documents)
        return json_response(schema.ChangeResponse(object="documents.put", count=len(documents), sequence=sequence))

    @api.delete("/v1/documents", response_model=schema.ChangeResponse, responses=_refusals(429, 503, 504))
    async def delete_documents(request: schema.DeleteRequest) -> Response:
        """Delete documents. Durable when answered, no longer found within a second."""
        return await delete(request.ids)

    @api.delete("/v1/documents/{id:any}", response_model=schema.ChangeResponse, responses=_refusals(400, 429, 503, 504))
    async def delete_document(id: str) -> Response:
        """Delete one document; its id may hold slashes."""
        return await delete([_id(id)])

    @api.get(
        "/v1/documents/{id:any}", response_model=schema.DocumentResponse, responses=_refusals(400, 404, 429, 503, 504)
    )
    async def document(id: str) -> Response:
        """One document as it is now; its id may hold slashes."""
        found = await service.document(_id(id))
        if found is None:
            raise ApiError(404, f"there is no document {id!r}", param="id", code="document_not_found")
        return json_response(schema.DocumentResponse(id=found.id, text=found.text, metadata=dict(found.metadata)))

    async def delete(ids: list[str]) -> Response:
        check_writable()
        ids = list(dict.fromkeys(ids))
        sequence = await service.delete(ids)
        return json_response(schema.ChangeResponse(object="documents.deleted", count=len(ids), sequence=sequence))

    def check_writable() -> schema.Model:
        card = service.card
        if not card.writable:
            raise ReadOnly
        return card

    @api.get("/v1/models", response_model=schema.ModelsResponse, responses=_refusals())
    async def models() -> Response:
        """The served model and index."""
        return json_response(schema.ModelsResponse(data=[service.card]))

    @api.get("/v1/models/{model:path}", response_model=schema.Model, responses=_refusals(404))
    async def model(model: str) -> Response:
        """The served model and index, by the model's name."""
        return json_response(check_model(model))

    def health() -> Response:
        return json_response(
            schema.HealthResponse(deployment=deployment if isinstance(deployment, str) else deployment())
        )

    @api.get("/healthz", response_model=schema.HealthResponse, responses=_refusals())
    async def healthz() -> Response:
        """The API process is alive."""
        return health()

    @api.get("/readyz", response_model=schema.HealthResponse, responses=_refusals(503))
    async def readyz() -> Response:
        """Encoder and all shards answer, and the shards apply changes."""
        if not await service.ready():
            raise ApiError.later(503, "encoder or shards do not answer yet", code="not_ready")
        if fault := await service.fault():
            raise Stuck(fault)
        return health()

    @api.get(
        "/metrics",
        response_class=Response,
        responses={200: {"description": "Prometheus' text format", "content": {"text/plain": {}}}, **_refusals(503)},
    )
    async def metrics() -> Response:
        """Counts, latencies and states of all that serves, for Prometheus; asks for a key where the API does."""
        return Response(await service.metrics(), media_type=CONTENT_TYPE_LATEST)

    app.include_router(pages.router())

    @api.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return docs_page()

    app.openapi = functools.cache(functools.partial(_openapi, app, bool(keys)))  # type: ignore[method-assign]
    docs_page = functools.cache(lambda: reference(app.openapi()))
    return app


class AnyId(PathConvertor):
    """The rest of a path, as it is; Starlette's own ends at a line break."""

    regex = "(?s:.*)"


register_url_convertor("any", AnyId())


class Route(APIRoute):
    """A route under the API's limits, whose body is read and validated in one step by pydantic's own JSON parser."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """As FastAPI's, which parses first and validates then."""
        answer: Callable[[Request], Awaitable[Response]]
        if self.body_field is None:
            answer = super().get_route_handler()
        else:
            model = cast(type[BaseModel], self.body_field.field_info.annotation)

            async def answer(request: Request) -> Response:
                body = await _body(request)
                try:
                    asked = model.model_validate_json(body)
                except ValidationError as error:
                    raise invalid(error) from None  # whose text has the body's in it
                response: Response = await self.endpoint(asked)
                return response

        async def in_time(request: Request) -> Response:
            limits: Limits = request.app.state.limits
            # A part of the service was given what was left: its own time would tell the client nothing.
            with anyio.move_on_after(limits.request_timeout_s), suppress(DeadlineExceeded):
                return await answer(request)
            raise DeadlineExceeded(limits.request_timeout_s)

        return in_time


async def _in_turns(pieces: Iterable[bytes]) -> bytes:
    """All pieces, made while others are answered too."""
    made, since = [], 0
    for piece in pieces:
        made.append(piece)
        since += len(piece)
        if since > TURN_BYTES:
            await asyncio.sleep(0)
            since = 0
    return b"".join(made)


async def _body(request: Request) -> bytes:
    """The body, of JSON and within the limits."""
    kind = request.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "application/json":
        # A web page may send any other type to any server without asking it first.
        raise ApiError(415, f"Content-Type {kind!r}: send the body as application/json", code="unsupported_media_type")
    most = request.app.state.limits.max_body_mib
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and float(announced) > most * 2**20:
        raise too_large(most)
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > most * 2**20:
            raise too_large(most)
        chunks.append(chunk)
    return b"".join(chunks)


def _search_answer(found: Found, many: bool) -> schema.SearchResponse | schema.SearchManyResponse:
    common: dict[str, Any] = {
        "index_version": found.index_version,
        "sequence": found.sequence,
        "model": found.model,
        "timings": found.timings,
        "partial": bool(found.missing_shards),
        "missing_shards": list(found.missing_shards),
    }
    if many:
        results = [schema.SearchResult(hits=list(hits)) for hits in found.results]
        return schema.SearchManyResponse(results=results, **common)
    return schema.SearchResponse(hits=list(found.results[0]), **common)


def _id(id: str) -> str:
    if not 1 <= len(id) <= schema.MAX_ID_CHARACTERS:
        raise ApiError(400, f"id: must have 1 to {schema.MAX_ID_CHARACTERS} characters", param="id")
    return id


def _typed(metadata: dict[str, Any], card: schema.Model, where: str) -> dict[str, schema.Metadata]:
    """Metadata of a document that suits the fields of the index."""
    for field, value in metadata.items():
        if field not in card.metadata:
            known = f"the index has {', '.join(card.metadata)}" if card.metadata else "the index has none"
            raise ApiError(400, f"{where}: no field {field!r}; {known}", param="documents")
        if value is not None:
            try:
                filters.typed(value, card.metadata[field])
            except ValueError as error:
                raise ApiError(400, f"{where}.{field}: {error}", param="documents") from None
    return metadata


def _handler(refusal: Callable[[Request, Any], ApiError]) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def handle(request: Request, error: Exception) -> Response:
        return refusal(request, error).response()

    return handle


# ---------------------------------------------------------------------------------------------------- OpenAPI


def _refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route: these, and what every route refuses with."""
    later = {"Retry-After": {"description": "seconds", "schema": {"type": "integer", "minimum": 1}}}
    return {
        status: {
            "model": schema.ErrorResponse,
            "description": STATUSES[status],
            **({"headers": later} if status in (429, 503, 504) else {}),
        }
        for status in sorted({*statuses, 403, 500, 504})
    }


def _openapi(app: FastAPI, locked: bool) -> dict[str, Any]:
    """FastAPI's document, with what it cannot know: what the gate and `Route` refuse, and without its own 422."""
    document = get_openapi(title=app.title, version=app.version, description=DESCRIPTION, routes=app.routes)
    refusals = {str(status): response for status, response in STATUSES.items()}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            responses = operation["responses"]
            responses.pop("422", None)
            also = [
                *((400, 408, 413, 415) if "requestBody" in operation else ()),
                *((401,) if path not in OPEN_PATHS else ()),
            ]
            for status in also:
                responses[str(status)] = {
                    "description": refusals[str(status)],
                    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorResponse"}}},
                }
            operation["responses"] = dict(sorted(responses.items()))
            if locked and path not in OPEN_PATHS:
                operation["security"] = [{"bearer": []}]
    for unused in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(unused, None)
    if locked:
        document["components"]["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    return document
