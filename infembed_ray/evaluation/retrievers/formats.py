"""How a retriever writes what it reads: formats with places for query, instruction and passage."""

from __future__ import annotations

import re

from infembed_ray.config import RetrieverSettings
from infembed_ray.evaluation.tasks.task import Query

_PLACE = re.compile(r"\{(\w+)\}")


def places(text_format: str) -> list[str]:
    """The names of the places of a format, in order."""
    return _PLACE.findall(text_format)


def fill(text_format: str, **values: str) -> str:
    """The text of a format; braces within the values mean nothing."""
    return _PLACE.sub(lambda place: values[place[1]], text_format)


def split(text_format: str, place: str, **values: str) -> tuple[str, str]:
    """The text before a format's place, and the text after it."""
    before, after = text_format.split(f"{{{place}}}", 1)
    return fill(before, **values), fill(after, **values)


def query_format(settings: RetrieverSettings, query: Query) -> str:
    """The format that is for this query; `{query}` for settings without formats."""
    return (settings.instructed_query if query.instruction else settings.plain_query) or "{query}"


def query_text(settings: RetrieverSettings, query: Query) -> str:
    """A query, and its instruction if it has one, as the retriever reads them."""
    return fill(query_format(settings, query), query=query.query, instruction=query.instruction or "")


def passage_text(settings: RetrieverSettings, passage: str) -> str:
    """A passage as the retriever reads it."""
    return fill(settings.passage or "{passage}", passage=passage)
