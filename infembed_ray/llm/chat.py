"""Chat requests, completions, and the ways in which a request fails, as plain values."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

UNREADABLE = "unreadable"
"""Finish reason of a complete response whose JSON exceeds Python's limits. It was paid for, so it is journaled."""

_CANONICAL = json.JSONEncoder(sort_keys=True, ensure_ascii=False, check_circular=False)


class RowFailure(Exception):
    """This row cannot be completed: it becomes a dead letter and the run goes on."""


class Malformed(RowFailure):
    """An answer is not in the requested format; asking again may help.

    Args:
        wanted: what the answer lacks.
        text: the answer.
    """

    def __init__(self, wanted: str, text: str) -> None:
        self.fault = f"no `{wanted}` in {_shortened(text)!r}"
        super().__init__(f"malformed answer: {self.fault}")


class RunFailure(Exception):
    """No row can be completed (a refused key, an unknown model): the run ends. The message is one line."""


class Unjournaled(RunFailure):
    """A request is in no journal, and nothing may be sent."""

    def __init__(self, request: Request) -> None:
        super().__init__(f"row {request.row}, step {request.step}: a request to {request.model} is in no journal")
        self.request = request


@dataclass(frozen=True)
class Request:
    """A chat-completions request. `prompt`, `step`, `row` and `route` are not sent."""

    model: str
    messages: tuple[Mapping[str, str], ...]
    prompt: str
    """Name and version of the prompt file, for example `judge=1`."""
    step: str
    row: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """The other members of the body."""
    route: str = ""
    """Hash that routes the row to its partition (module `partitions`); empty if every partition may need the answer."""

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body of the HTTP request."""
        return {"model": self.model, "messages": list(self.messages), **self.parameters}

    @cached_property
    def sent(self) -> bytes:
        """The body as it is sent, with sorted keys."""
        return _CANONICAL.encode(self.body).encode()

    @cached_property
    def key(self) -> str:
        """The journal key: SHA-256 (64 hex digits) of everything that decides the answer, body and prompt version."""
        decides = b'{"body": %b, "prompt": %b}' % (self.sent, _CANONICAL.encode(self.prompt).encode())
        return hashlib.sha256(decides).hexdigest()


@dataclass(frozen=True)
class Completion:
    """A model's answer as it arrived, usable or not, because it was paid for."""

    text: str
    finish_reason: str
    model: str
    """The model's name at the endpoint, usually a dated snapshot."""
    prompt_tokens: int
    completion_tokens: int
    refusal: str | None = None
    replayed: bool = False
    """It came from a journal and cost nothing in this run."""
    batched: bool = False
    """It came from the Batch API, at a lower price."""
    cached_tokens: int = 0
    """Prompt tokens that the endpoint had in its cache, at a lower price."""


Dialect = Mapping[str, str | None]
"""Parameter of ours -> what is sent instead: another name, or None if it is left out. For `response_format`, another type."""


def adapted(body: Mapping[str, Any], dialect: Dialect) -> dict[str, Any]:
    """Return a request's body with the parameters of a dialect."""
    sent = dict(body)
    for name, instead in dialect.items():
        if name in sent:
            value = sent.pop(name)
            if instead is not None:
                sent |= {name: {"type": instead}} if name == "response_format" else {instead: value}
    return sent


Complete = Callable[[Request], Awaitable[Completion]]
"""Asks a model; raises RowFailure or RunFailure."""


def usable_text(completion: Completion) -> str:
    """Return the text of a completion that ended normally.

    Raises:
        RowFailure: the answer is a refusal, filtered, cut off at the token limit, unreadable or empty.
    """
    if completion.refusal:
        raise RowFailure(f"refused: {_shortened(completion.refusal)}")
    if completion.finish_reason == "content_filter":
        raise RowFailure("refused: the endpoint's content filter stopped the answer")
    if completion.finish_reason == "length":
        raise RowFailure(f"cut off at the token limit ({completion.completion_tokens} tokens); raise max_tokens")
    if completion.finish_reason == UNREADABLE:
        raise RowFailure("unreadable answer: its JSON is nested too deeply or holds a number with too many digits")
    if not completion.text.strip():
        raise RowFailure("empty answer")
    return completion.text


def replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which JSON can hold but UTF-8 cannot, with question marks."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _shortened(text: str, length: int = 120) -> str:
    line = " ".join(text.split())
    return line if len(line) <= length else f"{line[: length - 3]}..."
