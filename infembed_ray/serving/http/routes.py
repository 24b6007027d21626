"""Routes of the HTTP API: embeddings, search, documents, collections, models and status.

Each request reads the current service of its collection once, so it is answered by one release even if another one takes over meanwhile.
"""

import asyncio
from base64 import b64encode
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import numpy as np
from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic_core import to_json
from starlette.convertors import PathConvertor, register_url_convertor

from infembed_ray.config.serving import DEFAULT_COLLECTION
from infembed_ray.modeling.formats import Question
from infembed_ray.retrieval import filters
from infembed_ray.retrieval.updates.write_ahead_log import typed_metadata
from infembed_ray.serving import schema
from infembed_ray.serving.encoder.batching import Embedded
from infembed_ray.serving.http.auth import ALLOWED
from infembed_ray.serving.http.errors import RETRIED, STATUSES, HttpError, json_response
from infembed_ray.serving.routing.blue_green import Release
from infembed_ray.serving.service import Document, Stuck

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])

EMBEDDINGS_PER_TURN = 16
"""Vectors that are serialised before other requests get a turn: about a millisecond's work."""


class AnyId(PathConvertor):
    """Path converter for the rest of a path, line breaks included; Starlette's own `path` stops at a line break."""

    regex = "(?s:.*)"


register_url_convertor("any", AnyId())


class Collections:
    """Name -> the service of a collection, for the request that runs now.

    Args:
        all: returns the services of a new request, the default collection first. They are of one release.
    """

    def __init__(self, all: Callable[[], Mapping[str, Release]]) -> None:
        self.all = all

    def __getitem__(self, name: str) -> Release:
        """Return the service of a collection; HttpError if there is none, or the key may not use it."""
        allowed = ALLOWED.get()
        if allowed is not None and name not in allowed:  # the same answer whether there is such a collection or not
            message = f"this API key may not use the collection {name!r}; it may use {', '.join(sorted(allowed))}"
            message = f"{message} (/v1/collections/NAME)"
            raise HttpError("collection_not_allowed", message, param="collection")
        visible = self.visible()
        if name not in visible:
            message = f"there is no collection {name!r}; there are {', '.join(visible)}"
            raise HttpError("collection_not_found", message, param="collection")
        return visible[name]

    def of(self, request: Request) -> Release:
        """Return the service of the collection in a request's path; without one, of the default collection."""
        return self[request.path_params.get("collection", DEFAULT_COLLECTION)]

    def visible(self) -> dict[str, Release]:
        """Return the collections that the key may use."""
        allowed = ALLOWED.get()
        return {name: service for name, service in self.all().items() if allowed is None or name in allowed}

    def models(self) -> list[schema.Model]:
        """Return the card of each model: that of its first collection which the key may use."""
        cards = [service.card for service in self.visible().values()]
        return list({card.id: card for card in reversed(cards)}.values())[::-1]

    def encoding(self, model: str | None) -> Release:
        """Return the service that embeds texts: of the default collection, unless another model is named.

        Every key may use every encoder: vectors of the client's own texts tell nothing about a collection.
        """
        services = self.all()
        return next((one for one in services.values() if one.card.id == model), services[DEFAULT_COLLECTION])


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


# Long: a function for each route, which need `both`.
def add_collection_routes(api: APIRouter, collections: Collections) -> None:
    """Add the routes of a collection: search and documents, each for the default collection and for a named one."""

    def both(method: str, path: str, model: Any, *statuses: int) -> Callable[[Endpoint], Endpoint]:
        def register(endpoint: Endpoint) -> Endpoint:
            for prefix, more in (("/v1", ()), ("/v1/collections/{collection}", (404,))):
                responses = error_responses(*statuses, *more)
                api.add_api_route(prefix + path, endpoint, methods=[method], response_model=model, responses=responses)
            return endpoint

        return register

    @both("POST", "/search", schema.SearchResponse, 404)
    async def search(body: schema.SearchRequest, request: Request) -> Response:
        """Search the nearest passages to a query under an instruction, best first."""
        service = collections.of(request)
        card = _require_model(service, body.model)
        filters.parse(body.filter, card.metadata)  # raises before anything is encoded
        if body.hybrid and not card.lexical:
            raise HttpError(400, f"hybrid={body.hybrid:g}: {schema.NO_WORDS}", param="hybrid")
        if body.rerank and card.reranker is None:
            raise HttpError(400, f"rerank=true: {schema.NO_RERANKER}, or leave it out", param="rerank")
        return json_response(await service.search(body))

    @api.post("/v2/rerank", include_in_schema=False)  # where Cohere's newer clients ask
    @both("POST", "/rerank", schema.RerankResponse, 404)
    async def rerank(body: schema.RerankRequest, request: Request) -> Response:
        """Score given passages for a query under an instruction by the server's reranker, the most relevant first."""
        service = collections.of(request)
        if (name := service.card.reranker) is None:
            raise HttpError("model_not_found", schema.NO_RERANKER, param="model")
        if body.model != name:
            _require_model(service, body.model)
        scores = await service.rerank(Question(body.query, body.instruction or None), body.texts())
        return json_response(schema.RerankResponse(model=name, results=body.ranked(scores.tolist())))

    @both("PUT", "/documents", schema.ChangeResponse, 507)
    async def put_documents(body: schema.PutRequest, request: Request) -> Response:
        """Add documents, or replace those with the same ids. Durable when answered, searchable within a second."""
        service = _writable(collections.of(request))
        for new in body.documents:
            typed_metadata(new.id, new.metadata, service.card.metadata)  # raises before anything is encoded
        documents = [Document(new.id, new.text, new.metadata) for new in body.documents]
        sequence = await service.put(documents)
        return json_response(schema.ChangeResponse(object="documents.put", count=len(documents), sequence=sequence))

    @both("DELETE", "/documents", schema.ChangeResponse)
    async def delete_documents(body: schema.DeleteRequest, request: Request) -> Response:
        """Delete documents. Durable when answered, gone from search results within a second."""
        return await _delete(collections.of(request), body.ids)

    @both("DELETE", "/documents/{id:any}", schema.ChangeResponse)
    async def delete_document(id: str, request: Request) -> Response:
        """Delete one document; its id may contain slashes."""
        return await _delete(collections.of(request), [id])

    @both("GET", "/documents/{id:any}", schema.DocumentResponse, 404)
    async def document(id: str, request: Request) -> Response:
        """Return the current state of one document; its id may contain slashes."""
        passage = await collections.of(request).document(id)
        if passage is None:
            raise HttpError("document_not_found", f"there is no document {id!r}", param="id")
        return json_response(schema.DocumentResponse(id=passage.id, text=passage.text, metadata=dict(passage.metadata)))


def add_model_routes(api: APIRouter, collections: Collections) -> None:
    """Add embeddings, and the lists of collections and models."""

    @api.post("/v1/embeddings", response_model=schema.EmbeddingsResponse, responses=error_responses(404))
    async def embeddings(body: schema.EmbeddingsRequest, request: Request) -> Response:
        """Embed texts: one unit vector per input, in order."""
        service = collections.encoding(body.model)
        card = _require_model(service, body.model)
        if body.dimensions is not None and body.dimensions > card.dimension:
            message = f"dimensions={body.dimensions}: the model has {card.dimension}; ask for at most that many"
            raise HttpError(400, message, param="dimensions")
        embedded = await service.embed(*body.texts())
        return Response(await _embeddings_json(embedded, card.id, body), media_type="application/json")

    @api.get("/v1/collections", response_model=schema.CollectionsResponse, responses=error_responses())
    async def list_collections() -> Response:
        """Return the collections that the key may use, the default one first: their models and indexes."""
        data = [schema.Collection(name=name, model=one.card) for name, one in collections.visible().items()]
        return json_response(schema.CollectionsResponse(data=data))

    @api.get("/v1/models", response_model=schema.ModelsResponse, responses=error_responses())
    async def models() -> Response:
        """Return the served model and index; of several models each, with the first collection that it serves."""
        return json_response(schema.ModelsResponse(data=collections.models()))

    @api.get("/v1/models/{model:any}", response_model=schema.Model, responses=error_responses(404))
    async def model(model: str) -> Response:
        """Return the served model and index, by the model's name."""
        cards = {card.id: card for card in collections.models()}
        if model not in cards:
            message = f"the model {model!r} is not served here; there are {', '.join(cards)}"
            raise HttpError("model_not_found", message, param="model")
        return json_response(cards[model])


def add_status_routes(
    api: APIRouter, collections: Collections, deployment: Callable[[], str], page: Callable[[], Awaitable[bytes]]
) -> None:
    """Add health and metrics."""

    @api.get("/healthz", response_model=schema.HealthResponse, responses=error_responses())
    async def healthz() -> Response:
        """Liveness: the API process answers."""
        return json_response(schema.HealthResponse(deployment=deployment()))

    @api.get("/readyz", response_model=schema.HealthResponse, responses=error_responses())
    async def readyz() -> Response:
        """Readiness: the encoder and all shards of all collections answer, and the shards apply changes."""
        services = collections.all()
        if not all(await asyncio.gather(*(service.ready() for service in services.values()))):
            raise HttpError("not_ready", "encoder or shards do not answer yet")
        faults = await asyncio.gather(*(service.fault() for service in services.values()))
        for (name, service), fault in zip(services.items(), faults, strict=True):
            if fault:
                # The path needs no key, so the answer names the index version and not the collection.
                version = "" if name == DEFAULT_COLLECTION else f"index {service.card.index_version}: "
                raise Stuck(version + fault)
        return await healthz()

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
        return Response(await page(), media_type=CONTENT_TYPE_LATEST)


async def _delete(service: Release, ids: list[str]) -> Response:
    ids = list(dict.fromkeys(ids))
    sequence = await _writable(service).delete(ids)
    return json_response(schema.ChangeResponse(object="documents.deleted", count=len(ids), sequence=sequence))


def _writable(service: Release) -> Release:
    if not service.card.writable:
        raise HttpError("read_only", "this index is read-only: documents cannot be put or deleted")
    return service


def _require_model(service: Release, name: str | None) -> schema.Model:
    """Return the card of the served model; HttpError if a request names another model."""
    card = service.card
    if name not in (None, card.id):
        message = f"the model {name!r} is not served here; the served model is {card.id!r}"
        raise HttpError("model_not_found", message, param="model")
    return card


async def _embeddings_json(embedded: Embedded, model: str, request: schema.EmbeddingsRequest) -> bytes:
    """Serialise an `EmbeddingsResponse`, which can hold millions of numbers; other requests get a turn in between."""
    vectors = embedded.vectors
    if request.dimensions is not None:
        vectors = vectors[:, : request.dimensions]
        vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    data = []
    for i, vector in enumerate(vectors.astype("<f4")):
        base64 = request.encoding_format == "base64"
        embedding = b'"%s"' % b64encode(vector) if base64 else to_json(vector.tolist())
        data.append(b'{"object":"embedding","index":%d,"embedding":%s}' % (i, embedding))
        if i % EMBEDDINGS_PER_TURN == 0:
            await asyncio.sleep(0)
    end = b'"model":%s,"usage":{"prompt_tokens":%d,"total_tokens":%d}'
    return b'{"object":"list","data":[%s],' % b",".join(data) + end % (to_json(model), *[embedded.tokens] * 2) + b"}"
