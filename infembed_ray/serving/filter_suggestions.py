"""Metadata filters suggested by an LLM from an instruction. A search never applies them by itself. No Ray.

What the LLM writes is checked as a client's filter is. Conditions that the index cannot use are dropped, each with a note.
Log lines hold neither the request nor the answer, nor the endpoint's own words, which may quote them.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections.abc import Mapping
from datetime import date
from importlib import resources
from typing import Any, NamedTuple

import openai
import yaml

from infembed_ray.config.llm import Endpoint
from infembed_ray.config.retrieval import FieldType
from infembed_ray.config.serving import FilterModelSettings
from infembed_ray.errors import InputError
from infembed_ray.llm.chat import CAP, Malformed, RunFailure, Unusable, usable_text
from infembed_ray.llm.endpoint import Unanswered, completion_of, one_line
from infembed_ray.llm.openai_client import openai_client
from infembed_ray.llm.structured_output import AnswerFormat, labelled
from infembed_ray.retrieval import filters
from infembed_ray.serving.encoder.batching import QueueFull
from infembed_ray.serving.service import NoSuggestion

MAX_IN_FLIGHT = 8
"""Requests to the LLM in flight per ingress replica; more are rejected with 429."""
RETRIES = 2
"""Retries of the `openai` client after 429, 5xx and lost connections."""
_FRONT_MATTER = re.compile(r"---\n(?P<header>.*?)\n---\n(?P<text>.*)", re.DOTALL)
_TYPES: Mapping[FieldType, str] = {
    "string": "string",
    "integer": "whole number",
    "number": "number",
    "boolean": "true or false",
    "date": "date, as in 2024-05-31",
}

log = logging.getLogger(__name__)


class Suggestion(NamedTuple):
    """A filter that `retrieval.filters.parse` takes."""

    filter: dict[str, Any]
    """Field -> condition; empty: the metadata decides nothing of the instruction."""
    explanation: str
    """By the LLM: which part of the instruction each condition stands for."""
    notes: list[str]
    """Conditions that were dropped, and why, a sentence each."""


class FilterSuggester:
    """Asks an LLM for filters. All calls come from one event loop.

    Raises:
        InputError: the environment variable with the endpoint's key is not set.
    """

    def __init__(self, settings: FilterModelSettings) -> None:
        self._settings = settings
        endpoint = Endpoint(base_url=settings.base_url, api_key_env=settings.api_key_env, timeout_s=settings.timeout_s)
        try:
            self._client = openai_client(endpoint).with_options(max_retries=RETRIES)
        except RunFailure as failure:
            raise InputError(str(failure).replace("endpoint.", "filter_model.")) from failure
        parts = _FRONT_MATTER.fullmatch(
            (resources.files("infembed_ray.serving") / "suggest_filter.md").read_text(encoding="utf-8")
        )
        assert parts is not None
        self._prompt = parts["text"].strip()
        self._answer = AnswerFormat.parse(yaml.safe_load(parts["header"])["answer"])
        self._in_flight = 0

    async def suggest(self, query: str | None, instruction: str, schema: Mapping[str, FieldType]) -> Suggestion:
        """Suggest a filter for an instruction.

        Args:
            query: what the passages should be about, for context; None: unknown.
            instruction: what relevant passages must satisfy.
            schema: metadata field of the index -> its type.

        Raises:
            NoSuggestion: the LLM cannot be reached, refuses, or does not answer with a filter.
            QueueFull: `MAX_IN_FLIGHT` requests are in flight.
        """
        if not schema:
            return Suggestion({}, "", ["The index has no metadata fields, so a filter can decide nothing."])
        if self._in_flight >= MAX_IN_FLIGHT:
            raise QueueFull(1.0)
        self._in_flight += 1
        try:
            text = await self._ask(self._rendered(query, instruction, schema))
            answer = json.JSONDecoder(strict=False).raw_decode(text[text.index("{") :])[0]
            written, explanation = answer["filter"], str(answer.get("explanation", ""))
            if not isinstance(written, dict):
                raise TypeError(f"filter is a {type(written).__name__}")
        except (Malformed, LookupError, TypeError, ValueError, RecursionError) as error:
            log.warning("filter_model: no filter in the answer (%s)", type(error).__name__)
            raise NoSuggestion("the LLM did not answer with a filter") from error
        finally:
            self._in_flight -= 1
        kept, notes = checked(written, schema)
        return Suggestion(kept, explanation, notes)

    def _rendered(self, query: str | None, instruction: str, schema: Mapping[str, FieldType]) -> str:
        """Return the prompt. A user's text cannot close its tag, whose name ends in a random mark."""
        return self._prompt.format(
            fields="\n".join(f"- {json.dumps(name)}: {_TYPES[kind]}" for name, kind in schema.items()),
            today=date.today().isoformat(),
            mark=secrets.token_hex(8),
            query=query or "(none)",
            instruction=instruction,
            answer=self._answer.shown(self._settings.structured),
        )

    async def _ask(self, prompt: str) -> str:
        """Return what follows the answer's label; Malformed if there is none."""
        settings = self._settings
        parameters: dict[str, Any] = {
            "temperature": settings.temperature,
            CAP: settings.max_tokens,
            "response_format": self._answer.response_format() if settings.structured else None,
        }
        sent = {name: value for name, value in parameters.items() if value is not None}
        try:
            answer = await self._client.chat.completions.create(
                model=settings.model, messages=[{"role": "user", "content": prompt}], **sent
            )
            text = usable_text(completion_of(answer.model_dump()))
        except openai.APIStatusError as error:
            log.warning("filter_model: HTTP %d (%s)", error.status_code, error.code or error.type)
            raise NoSuggestion(f"the LLM's endpoint answered HTTP {error.status_code}") from error
        except openai.APIError as error:
            log.warning("filter_model: %s", one_line(error.__cause__ or error))
            raise NoSuggestion("the LLM's endpoint cannot be reached, or gave no answer in time") from error
        except (Unusable, Unanswered) as error:
            log.warning("filter_model: refused, cut off, empty or unreadable (%s)", type(error).__name__)
            raise NoSuggestion("the LLM gave no usable answer") from error
        return labelled(self._answer.label, self._answer.as_text(text) if settings.structured else text)


def checked(written: Mapping[str, Any], schema: Mapping[str, FieldType]) -> tuple[dict[str, Any], list[str]]:
    """Return the conditions that an index can use, and a note for each that was dropped."""
    kept: dict[str, Any] = {}
    notes: list[str] = []
    for field, condition in written.items():
        try:
            filters.parse({field: condition}, schema)
        except filters.FilterError as error:
            notes.append(f"A condition was dropped: {one_line(error)}.")
        else:
            kept[field] = condition
    return kept, notes
