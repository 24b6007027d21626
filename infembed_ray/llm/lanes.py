"""One model, as one process learns it: its concurrency limit, its parameters, and whether it answers.

Providers limit every model on its own, so a judge that answers 429 must not slow the generator. The user's own limits are
the ledger's (module `ledger`).
"""

import asyncio
import json
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from infembed_ray.config.llm import Endpoint
from infembed_ray.llm.chat import CAP, Completion, Request, RunFailure
from infembed_ray.llm.endpoint import OPENAI, Unanswered

TOLERATED = 0.1
"""Share of 429s that does not reduce the requests in flight: a 429 costs a retry and nothing else."""
DECREASE = 0.7
"""Factor of the requests in flight when the share of 429s is above TOLERATED."""
INCREASE = 0.02
"""Growth of the requests in flight otherwise, as a share of the configured limit."""
ADAPT_S = 1.0
"""Least seconds between two adaptations."""
ADAPT_REQUESTS = 100
"""Least requests between two adaptations: among fewer, a few 429s by chance would often exceed TOLERATED."""

MAX_TOKENS = "max_tokens"
"""Older name of CAP, the only one that some servers know."""
_ADAPTABLE: dict[str, tuple[str, ...]] = {
    name: (name,) for name in (CAP, MAX_TOKENS, "temperature", "reasoning_effort")
}
_ADAPTABLE["response_format"] = ("response_format", "json_schema", "json_object")


class Dialect:
    """The parameters that a model takes, learned from the errors that name one (HTTP 400 and 422).

    The cap of an answer is sent under both of its names, since servers ignore a name that they do not know; OpenAI takes only
    the new one. `temperature` and `reasoning_effort` are left out if they are refused; a JSON schema becomes a JSON object,
    then nothing. Only the sent body is adapted: the journal's key is of the request as the settings say it.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._caps = [CAP] if endpoint.base_url.startswith(OPENAI) else [CAP, MAX_TOKENS]
        self._refused: set[str] = set()

    def body(self, request: Request) -> dict[str, Any]:
        """Return the body to send."""
        sent = {name: value for name, value in request.body.items() if name not in self._refused}
        if CAP in request.parameters:
            sent.pop(CAP, None)
            sent |= dict.fromkeys(self._caps, request.parameters[CAP])
        if "json_schema" in self._refused and "response_format" in sent:
            sent["response_format"] = {"type": "json_object"}
        return sent

    def encoded(self, request: Request) -> bytes:
        """Return the body to send as JSON."""
        body = self.body(request)
        return request.sent if body == request.body else json.dumps(body, ensure_ascii=False).encode()

    def learn(self, request: Request, sent: bytes, error: bytes) -> str | None:
        """Learn from an error that names a sent parameter; return what changed, for the user.

        "" if another request has learned it meanwhile; None if the error names no parameter, or there is no other form of it.
        """
        if sent != self.encoded(request):
            return ""
        body = json.loads(sent)
        name = _named(error, body)
        if name is None:
            return None
        if name in (CAP, MAX_TOKENS):
            others = [cap for cap in self._caps if cap != name] or [MAX_TOKENS] * (name == CAP)
            if not others or others[0] in self._refused:
                return None
            self._refused.add(name)
            self._caps = others
            return f"takes {others[0]} and not {name}"
        if name == "response_format" and body[name]["type"] == "json_schema":
            self._refused.add("json_schema")
            return "takes no JSON schema; a JSON object is asked for"
        self._refused.add(name)
        return f"takes no {name}; it is left out"


def _named(error: bytes, parameters: Mapping[str, Any]) -> str | None:
    """Return which sent parameter an error's body names: in `error.param`, or else first in its text."""
    text = error.decode(errors="replace")
    try:
        param = str(json.loads(error)["error"]["param"])
    except (ValueError, LookupError, TypeError, RecursionError):
        param = ""
    for where in (param, text):
        places = [
            (where.find(spelling), name)
            for name, spellings in _ADAPTABLE.items()
            if name in parameters
            for spelling in spellings
            if spelling in where
        ]
        if places:
            return min(places)[1]
    return None


class Lane:
    """One model at an endpoint. Use it within one event loop.

    Args:
        slots: most requests in flight.
        careful: begin with one, and add one for each answer (slow start), because nothing is known of the answers yet.
    """

    def __init__(
        self, endpoint: Endpoint, slots: int, clock: Callable[[], float] = time.monotonic, careful: bool = False
    ) -> None:
        self.dialect = Dialect(endpoint)
        self.limit = 1 if careful else slots
        """Current limit of the requests in flight (additive increase, multiplicative decrease by the share of 429s)."""
        self.added = self.longest = 0
        """Tokens that the endpoint adds to prompts, and that an answer has whatever its cap, as far as answers showed it."""
        self.in_flight = 0
        self.answered_steps: set[str] = set()
        """Steps whose parameters the model has taken."""
        self.asking = asyncio.Lock()
        """Held while a short question is asked."""
        self.fault: Unanswered | RunFailure | None = None
        """Why the last request was not answered."""
        self.noted = -math.inf
        """Time of `note`."""
        self._slots, self._clock, self._starting = slots, clock, careful
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._settled = self._limited = 0
        self._adapted = (clock(), 0, 0)  # time of the last adaptation; 429s and requests sent until then

    def note(self, fault: Unanswered | RunFailure | None) -> None:
        """Note why a request was not answered now; None: it was answered."""
        self.noted, self.fault = self._clock(), fault
        self._starting = self._starting and self.limit < self._slots
        self.limit += self._starting and fault is None

    def exceeded(self, request: Request, completion: Completion) -> bool:
        """Learn from an answer; return whether it exceeds its cap."""
        self.added = max(self.added, completion.prompt_tokens - request.most_prompt_tokens)
        exceeds = completion.completion_tokens > request.parameters.get(CAP, math.inf)
        if exceeds:
            self.longest = max(self.longest, 2 * completion.completion_tokens)
        return exceeds

    async def enter(self) -> None:
        """Wait until a request is counted as in flight. The caller must `leave` afterwards."""
        if self.in_flight < self.limit and not self._waiting:
            self.in_flight += 1
            return
        begun = asyncio.get_running_loop().create_future()
        self._waiting.append(begun)
        await begun

    def leave(self, limited: bool) -> None:
        """Count a request as ended, with a 429 if it was `limited`."""
        self.in_flight -= 1
        self._settled += 1
        self._limited += limited
        self._adapt()
        while self._waiting and self.in_flight < self.limit:
            self.in_flight += 1
            self._waiting.popleft().set_result(None)

    def _adapt(self) -> None:
        # Requests in flight count as sent: 429s arrive at once, so after a burst they arrive before any answer.
        sent = self._settled + self.in_flight
        then, limited_then, sent_then = self._adapted
        if sent - sent_then < ADAPT_REQUESTS or (now := self._clock()) - then < ADAPT_S:
            return
        self._adapted = (now, self._limited, sent)
        if self._limited - limited_then > TOLERATED * (sent - sent_then):
            self._starting = False
            self.limit = max(1, math.floor(DECREASE * self.limit))
        elif not self._starting:
            self.limit = min(self._slots, self.limit + math.ceil(INCREASE * self._slots))
