"""Text formats with placeholders, `{query}`, `{instruction}` and `{passage}`: the inputs of baselines and rerankers."""

import re
from typing import Any, NamedTuple, Protocol


class Asked(Protocol):
    """A query with at most one instruction; hashable."""

    @property
    def query(self) -> str: ...

    @property
    def instruction(self) -> str | None: ...


class Question(NamedTuple):
    """An `Asked` of two texts."""

    query: str
    instruction: str | None = None


def fill(text_format: str, **values: str) -> str:
    """Fill in a format's placeholders. Braces inside the values are plain text."""
    return re.sub(r"\{(\w+)\}", lambda placeholder: values[placeholder[1]], text_format)


def query_text(settings: Any, query: Asked) -> str:
    """Format a query with or without an instruction; `{query}` if the settings have no format."""
    text_format = (settings.instructed_query if query.instruction else settings.plain_query) or "{query}"
    return fill(text_format, query=query.query, instruction=query.instruction or "")


def passage_text(passage_format: str | None, text: str) -> str:
    """Format a passage; without a format it stays as it is."""
    return fill(passage_format or "{passage}", passage=text)
