"""Routes of the HTTP API: embeddings, search, documents, models and status.

Each request reads the current `Service` of its collection once, so it is answered by one release even if another one takes over meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.convertors import PathConvertor, register_url_convertor

from infembed_ray.config.serving import DEFAULT_COLLECTION
from infembed_ray.retrieval import filters
from infembed_ray.serving import embeddings_schema, schema
from infembed_ray.serving.http.collections import Collections
from infembed_ray.serving.http.errors import ApiError, json_response
from infembed_ray.serving.http.openapi import error_responses
from infembed_ray.serving.service import Document, Found, Query, ReadOnly, Search, Service, Stuck

SearchAnswer = schema.SearchResponse | schema.SearchManyResponse
TURN_BYTES = 2**17
"""Bytes of an answer that are serialised before other requests get a turn: about a millisecond's work."""


class AnyId(PathConvertor):
    """Path converter for the rest of a path, line breaks included; Starlette's own `path` stops at a line break."""

    regex = "(?s:.*)"


register_url_convertor("any", AnyId())


def add_query_routes(api: APIRouter, collections: Collections) -> None:
    """Add the routes that encode: embeddings and search."""

    @api.post("/v1/embeddings", response_model=embeddings_schema.EmbeddingsResponse, responses=error_responses(404))
    async def embeddings(request: embeddings_schema.EmbeddingsRequest) -> Response:
        """Embed texts or token arrays: one unit vector per input, in order."""
        service = collections.encoding(request.model)
        card = require_model(service, request.model)
        inputs = request.inputs()
        _require_possible(request, inputs, card)
        embedded = await service.embed(inputs, request.kind(), request.instruction)
        pieces = embeddings_schema.EmbeddingsResponse.json_of(embedded.vectors, embedded.tokens, card.id, request)
        return Response(await _join(pieces), media_type="application/json")

    @api.post("/v1/search", response_model=SearchAnswer, responses=error_responses(404))
    async def search(request: schema.SearchRequest) -> Response:
        """Search the nearest passages to one query or several queries, each under an instruction, best first."""
        return await answer_search(collections[DEFAULT_COLLECTION], request)


def add_document_routes(api: APIRouter, collections: Collections) -> None:
    """Add the routes that read and change documents of the default collection."""

    @api.put("/v1/documents", response_model=schema.ChangeResponse, responses=error_responses(507))
    async def put_documents(request: schema.PutRequest) -> Response:
        """Add documents, or replace those with the same ids. Durable when answered, searchable within a second."""
        return await answer_put(collections[DEFAULT_COLLECTION], request)

    @api.delete("/v1/documents", response_model=schema.ChangeResponse, responses=error_responses())
    async def delete_documents(request: schema.DeleteRequest) -> Response:
        """Delete documents. Durable when answered, gone from search results within a second."""
        return await answer_delete(collections[DEFAULT_COLLECTION], request.ids)

    @api.delete("/v1/documents/{id:any}", response_model=schema.ChangeResponse, responses=error_responses(400))
    async def delete_document(id: str) -> Response:
        """Delete one document; its id may contain slashes."""
        return await answer_delete(collections[DEFAULT_COLLECTION], [checked_id(id)])

    @api.get(
        "/v1/documents/{id:any}",
        response_model=schema.DocumentResponse,
        responses=error_responses(400, 404),
    )
    async def document(id: str) -> Response:
        """Return the current state of one document; its id may contain slashes."""
        return await answer_document(collections[DEFAULT_COLLECTION], checked_id(id))


def add_status_routes(api: APIRouter, collections: Collections, deployment: Callable[[], str]) -> None:
    """Add the routes that describe the server: models, health and metrics."""

    def health() -> Response:
        return json_response(schema.HealthResponse(deployment=deployment()))

    @api.get("/v1/models", response_model=schema.ModelsResponse, responses=error_responses())
    async def models() -> Response:
        """Return the served model and index; of several models each, with the first collection that it serves."""
        return json_response(schema.ModelsResponse(data=collections.models()))

    @api.get("/v1/models/{model:path}", response_model=schema.Model, responses=error_responses(404))
    async def model(model: str) -> Response:
        """Return the served model and index, by the model's name."""
        cards = collections.models()
        return json_response(next((card for card in cards if card.id == model), None) or _other_model(model, cards))

    @api.get("/healthz", response_model=schema.HealthResponse, responses=error_responses())
    async def healthz() -> Response:
        """Liveness: the API process answers."""
        return health()

    @api.get("/readyz", response_model=schema.HealthResponse, responses=error_responses())
    async def readyz() -> Response:
        """Readiness: the encoder and all shards of all collections answer, and the shards apply changes."""
        services = collections.all()
        if not all(await asyncio.gather(*(service.ready() for service in services.values()))):
            raise ApiError.later(503, "encoder or shards do not answer yet", code="not_ready")
        faults = await asyncio.gather(*(service.fault() for service in services.values()))
        for (name, service), fault in zip(services.items(), faults, strict=True):
            if fault:
                # The path needs no key, so the answer names the index version and not the collection.
                version = "" if name == DEFAULT_COLLECTION else f"index {service.card.index_version}: "
                raise Stuck(version + fault)
        return health()

    @api.get(
        "/metrics",
        response_class=Response,
        responses={
            200: {"description": "Prometheus text format", "content": {"text/plain": {}}},
            **error_responses(),
        },
    )
    async def metrics() -> Response:
        """Return the metrics of all replicas for Prometheus. It needs an API key if the API does."""
        return Response(await collections.all()[DEFAULT_COLLECTION].metrics(), media_type=CONTENT_TYPE_LATEST)


# ------------------------------------------------------------------------------------- answers of one collection


async def answer_search(service: Service, request: schema.SearchRequest) -> Response:
    """Answer a search."""
    card = require_model(service, request.model)
    filters.parse(request.filter, card.metadata)  # raises before anything is encoded
    queries = [Query(*both) for both in zip(request.queries(), request.instructions(), strict=True)]
    if request.hybrid and not card.lexical:
        raise ApiError(400, f"hybrid={request.hybrid:g}: {schema.NO_WORDS}", param="hybrid")
    if request.rerank and card.reranker is None:
        message = "rerank=true: this server has no reranker; leave it out, or start `infembed serve` with rerank.kind"
        raise ApiError(400, message, param="rerank")
    asked = Search(
        queries,
        request.top_k,
        request.filter,
        request.allow_partial,
        request.min_sequence,
        request.exclude,
        request.hybrid,
        request.explain,
        rerank=request.rerank,
    )
    found = await service.search(asked)
    return json_response(_search_answer(found, isinstance(request.query, list)))


async def answer_put(service: Service, request: schema.PutRequest) -> Response:
    """Put documents."""
    _require_writable(service)
    documents = [
        Document(
            document.id,
            document.text,
            _checked_metadata(document.metadata, service.card, f"documents.{i}.metadata"),
        )
        for i, document in enumerate(request.documents)
    ]
    sequence = await service.put(documents)
    return json_response(schema.ChangeResponse(object="documents.put", count=len(documents), sequence=sequence))


async def answer_delete(service: Service, ids: list[str]) -> Response:
    """Delete documents."""
    _require_writable(service)
    ids = list(dict.fromkeys(ids))
    sequence = await service.delete(ids)
    return json_response(schema.ChangeResponse(object="documents.deleted", count=len(ids), sequence=sequence))


async def answer_document(service: Service, id: str) -> Response:
    """Return a document."""
    found = await service.document(id)
    if found is None:
        raise ApiError(404, f"there is no document {id!r}", param="id", code="document_not_found")
    return json_response(schema.DocumentResponse(id=found.id, text=found.text, metadata=dict(found.metadata)))


def checked_id(id: str) -> str:
    """Return the id of a document in a path; ApiError if it is none."""
    if not 1 <= len(id) <= schema.MAX_ID_CHARACTERS:
        raise ApiError(400, f"id: must have 1 to {schema.MAX_ID_CHARACTERS} characters", param="id")
    return id


def _require_writable(service: Service) -> None:
    if not service.card.writable:
        raise ReadOnly


def require_model(service: Service, name: str | None) -> schema.Model:
    """Return the card of the served model; ApiError if a request names another model."""
    card = service.card
    return card if name in (None, card.id) else _other_model(str(name), [card])


def _other_model(name: str, cards: Sequence[schema.Model]) -> NoReturn:
    known = ", ".join(repr(card.id) for card in cards)
    message = f"the model {name!r} is not served here; the served model is {known}"
    raise ApiError(404, message, param="model", code="model_not_found")


def _require_possible(
    request: embeddings_schema.EmbeddingsRequest, inputs: list[str] | list[list[int]], card: schema.Model
) -> None:
    """ApiError if the model has fewer dimensions than the request asks for, or does not know a token id."""
    if request.dimensions is not None and request.dimensions > card.dimension:
        message = f"dimensions={request.dimensions}: the model has {card.dimension}; ask for at most that many"
        raise ApiError(400, message, param="dimensions")
    largest = max((max(tokens) for tokens in inputs if isinstance(tokens, list)), default=0)
    if largest >= card.vocabulary:
        message = (
            f"input: token id {largest}: the vocabulary of {card.id} ends at {card.vocabulary - 1}; "
            "send ids of the model's own tokenizer, or text"
        )
        raise ApiError(400, message, param="input")


async def _join(pieces: Iterable[bytes]) -> bytes:
    """Join the pieces of an answer; other requests get a turn every `TURN_BYTES`."""
    joined, size = [], 0
    for piece in pieces:
        joined.append(piece)
        size += len(piece)
        if size > TURN_BYTES:
            await asyncio.sleep(0)
            size = 0
    return b"".join(joined)


def _search_answer(found: Found, many: bool) -> schema.SearchResponse | schema.SearchManyResponse:
    common: dict[str, Any] = {
        "index_version": found.index_version,
        "sequence": found.sequence,
        "model": found.model,
        "timings": found.timings,
        "partial": bool(found.missing_shards),
        "missing_shards": list(found.missing_shards),
        "notes": list(found.notes),
        "explanation": found.explanation,
    }
    if many:
        results = [schema.SearchResult(hits=list(hits)) for hits in found.results]
        return schema.SearchManyResponse(results=results, **common)
    return schema.SearchResponse(hits=list(found.results[0]), **common)


def _checked_metadata(metadata: dict[str, Any], card: schema.Model, where: str) -> dict[str, schema.Metadata]:
    """Return a document's metadata; ApiError if a field or a type is not the index's."""
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
