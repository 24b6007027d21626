"""Routes of the HTTP API that name a collection in their path. They answer as those of the default collection."""

from __future__ import annotations

from fastapi import APIRouter, Response

from infembed_ray.serving import schema
from infembed_ray.serving.http import routes
from infembed_ray.serving.http.collections import Collections
from infembed_ray.serving.http.errors import json_response
from infembed_ray.serving.http.openapi import error_responses

PREFIX = "/v1/collections"


def add_collection_routes(api: APIRouter, collections: Collections) -> None:
    """Add the list of collections, and the search and the documents of each."""

    @api.get(PREFIX, response_model=schema.CollectionsResponse, responses=error_responses())
    async def list_collections() -> Response:
        """Return the collections that the key may use, the default one first: their models and indexes."""
        cards = {name: service.card for name, service in collections.visible().items()}
        data = [schema.Collection(name=name, model=card) for name, card in cards.items()]
        return json_response(schema.CollectionsResponse(data=data))

    one = f"{PREFIX}/{{collection}}"

    @api.post(f"{one}/search", response_model=routes.SearchAnswer, responses=error_responses(404))
    async def search_collection(request: schema.SearchRequest, collection: str) -> Response:
        """Search a collection, as POST /v1/search."""
        return await routes.answer_search(collections[collection], request)

    @api.put(f"{one}/documents", response_model=schema.ChangeResponse, responses=error_responses(404, 507))
    async def put_into_collection(request: schema.PutRequest, collection: str) -> Response:
        """Put documents into a collection, as PUT /v1/documents."""
        return await routes.answer_put(collections[collection], request)

    @api.delete(f"{one}/documents", response_model=schema.ChangeResponse, responses=error_responses(404))
    async def delete_from_collection(request: schema.DeleteRequest, collection: str) -> Response:
        """Delete documents of a collection, as DELETE /v1/documents."""
        return await routes.answer_delete(collections[collection], request.ids)

    @api.delete(
        f"{one}/documents/{{id:any}}", response_model=schema.ChangeResponse, responses=error_responses(400, 404)
    )
    async def delete_one_of_collection(id: str, collection: str) -> Response:
        """Delete one document of a collection, as DELETE /v1/documents/{id}."""
        return await routes.answer_delete(collections[collection], [routes.checked_id(id)])

    @api.get(f"{one}/documents/{{id:any}}", response_model=schema.DocumentResponse, responses=error_responses(400, 404))
    async def document_of_collection(id: str, collection: str) -> Response:
        """Return the current state of one document of a collection, as GET /v1/documents/{id}."""
        return await routes.answer_document(collections[collection], routes.checked_id(id))
