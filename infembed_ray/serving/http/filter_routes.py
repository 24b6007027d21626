"""Routes that turn an instruction into a metadata filter. Searches do not call them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter, Response

from infembed_ray.config.serving import DEFAULT_COLLECTION
from infembed_ray.serving.filter_schema import FilterRequest, FilterResponse
from infembed_ray.serving.http.collections import Collections
from infembed_ray.serving.http.errors import ApiError, json_response
from infembed_ray.serving.http.openapi import error_responses

if TYPE_CHECKING:
    from infembed_ray.serving.filter_suggestions import FilterSuggester


def add_filter_routes(api: APIRouter, collections: Collections, suggester: FilterSuggester | None) -> None:
    """Add `POST /v1/filters`, also under a collection; without a suggester it answers 404 with the remedy."""

    async def suggest(request: FilterRequest, collection: str) -> Response:
        card = collections[collection].card
        if suggester is None:
            message = "this server has no LLM for filters; start `infembed serve` with filter_model.model"
            raise ApiError(404, message, code="no_filter_model")
        found = await suggester.suggest(request.query, request.instruction, card.metadata)
        return json_response(FilterResponse(**found._asdict()))

    @api.post("/v1/filters", response_model=FilterResponse, responses=error_responses(404, 502))
    async def suggest_filter(request: FilterRequest) -> Response:
        """Suggest a metadata filter for an instruction, by the server's LLM. Nothing is searched, and no search uses it."""
        return await suggest(request, DEFAULT_COLLECTION)

    @api.post(
        "/v1/collections/{collection}/filters", response_model=FilterResponse, responses=error_responses(404, 502)
    )
    async def suggest_filter_of_collection(request: FilterRequest, collection: str) -> Response:
        """Suggest a filter on the fields of a collection, as POST /v1/filters."""
        return await suggest(request, collection)
