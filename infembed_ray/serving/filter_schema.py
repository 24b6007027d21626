"""Schemas of `POST /v1/filters`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from infembed_ray.serving.schema import Filter, Request, Text

MAX_FILTER_CHARACTERS = 4000
"""Characters of a query or an instruction to turn into a filter."""


class FilterRequest(Request):
    """An instruction to turn into a metadata filter."""

    instruction: Annotated[Text, Field(max_length=MAX_FILTER_CHARACTERS)] = Field(
        description="what a relevant passage must satisfy"
    )
    query: Annotated[Text, Field(max_length=MAX_FILTER_CHARACTERS)] | None = Field(
        None, description="what the passages should be about, for context"
    )


class FilterResponse(BaseModel):
    """A suggested filter, to be read and changed before a search uses it."""

    object: Literal["filter"] = "filter"
    filter: Filter = Field(description="as `POST /v1/search` takes it; empty: the metadata decides nothing")
    explanation: str = Field(description="by the LLM: what each condition stands for, and what no field can decide")
    notes: list[str] = Field([], description="conditions that were dropped, and why, a sentence each")
