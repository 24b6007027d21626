"""Route that turns an instruction into a metadata filter. Searches do not call it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fastapi import APIRouter, Response

from infembed_ray.serving.filter_schema import FilterRequest, FilterResponse
from infembed_ray.serving.http.errors import ApiError, json_response
from infembed_ray.serving.http.openapi import error_responses
from infembed_ray.serving.service import Service

if TYPE_CHECKING:
    from infembed_ray.serving.filter_suggestions import FilterSuggester


def add_filter_routes(api: APIRouter, current: Callable[[], Service], suggester: FilterSuggester | None) -> None:
    """Add `POST /v1/filters`; without a suggester it answers 404 with the remedy."""

    @api.post("/v1/filters", response_model=FilterResponse, responses=error_responses(404, 502))
    async def suggest_filter(request: FilterRequest) -> Response:
        """Suggest a metadata filter for an instruction, by the server's LLM. Nothing is searched, and no search uses it."""
        if suggester is None:
            message = "this server has no LLM for filters; start `infembed serve` with filter_model.model"
            raise ApiError(404, message, code="no_filter_model")
        found = await suggester.suggest(request.query, request.instruction, current().card.metadata)
        return json_response(FilterResponse(**found._asdict()))
