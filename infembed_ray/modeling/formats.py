"""Text formats with placeholders, `{query}`, `{instruction}` and `{passage}`: the inputs of baselines and rerankers."""

from __future__ import annotations

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


def split(text_format: str, placeholder: str, **values: str) -> tuple[str, str]:
    """Return the filled-in text before a format's placeholder and the text after it."""
    before, after = text_format.split(f"{{{placeholder}}}", 1)
    return fill(before, **values), fill(after, **values)


def query_format(settings: Any, query: Asked) -> str:
    """Return the format for a query with or without an instruction; `{query}` if the settings have none."""
    return (settings.instructed_query if query.instruction else settings.plain_query) or "{query}"


def query_text(settings: Any, query: Asked) -> str:
    """Format a query and its instruction, if it has one."""
    return fill(query_format(settings, query), query=query.query, instruction=query.instruction or "")


def passage_text(passage_format: str | None, text: str) -> str:
    """Format a passage; without a format it stays as it is."""
    return fill(passage_format or "{passage}", passage=text)
