"""Parameter dialects: which of our parameters a model takes at an endpoint, and under which names.

Servers call the cap of an answer `max_completion_tokens` or `max_tokens`, reasoning models refuse a temperature, and not all
take a JSON schema. One short request to each model, with the parameters of the run, shows it before anything is paid for:
on HTTP 400 or 422, the parameter that the error names is renamed or left out, and the request is sent again. Some servers take
`max_completion_tokens` and ignore it: a question with a long answer and a tiny cap shows which name they keep to. Only the
sent body is adapted. The journal's key is of the request as the settings say it, so a dialect never asks anything again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from infembed_ray.config.llm import Endpoint
from infembed_ray.llm.chat import CAP, IGNORED, UNCAPPED, Dialect, Request, RowFailure, RunFailure, adapted
from infembed_ray.llm.endpoint import CHAT, ErrorBody, Route, Unanswered, one_line
from infembed_ray.llm.prices import PriceTable
from infembed_ray.llm.rate_limits import REQUESTS, TOKENS, USD, Amounts, used_by, worst_case
from infembed_ray.llm.transport import Transport

_INSTEAD: dict[str, tuple[str | None, ...]] = {
    "max_completion_tokens": ("max_tokens",),
    "temperature": (None,),
    "reasoning_effort": (None,),
    "response_format": ("json_object", None),
}
_SETTINGS = {"max_completion_tokens": "max_tokens", "response_format": "structured"}
_ALIASES = {"max_tokens": "max_completion_tokens", "json_schema": "response_format", "json_object": "response_format"}
Dialects = Sequence[Mapping[str, Dialect]]
"""By endpoint: model -> dialect; without a model, its parameters are sent as they are."""
_ATTEMPTS = 3
"""Attempts at an endpoint that is busy, before its dialect stays unknown."""
_TINY_CAP = 16
_LONG_ANSWER = "This is a test. Count from 1 to 100 in words; if JSON is asked for, as its only value."
"""A question whose answer has hundreds of tokens."""


@dataclass
class Learned:
    """What the models of a run take."""

    dialects: tuple[dict[str, Dialect], ...]
    """`Dialects`."""
    report: list[str]
    """One line for each model at each endpoint."""
    used: Amounts
    """Used by the requests that were answered, or may have been."""


async def learn(endpoints: Mapping[str, Endpoint], requests: Mapping[str, Request], table: PriceTable) -> Learned:
    """Ask every endpoint a short question with the parameters of every model; an endpoint without `probe` is not asked.

    Args:
        endpoints: name of the setting -> endpoint.
        requests: name of the setting of a model -> a request with its parameters. Requests that share a model are asked
            one after another, and the dialect holds for all of them.

    Raises:
        RunFailure: every endpoint refuses a model's parameters in every form, the model, or the key.
    """
    learned = Learned(tuple({} for _ in endpoints), [], {REQUESTS: 0, TOKENS: 0, USD: 0.0})
    failures: list[RunFailure] = []
    transport = Transport()

    async def ask(name: str, endpoint: Endpoint, dialects: dict[str, Dialect]) -> None:
        route = Route(endpoint, CHAT.path)
        try:
            for setting, request in requests.items():
                probe = _Probe(name, route, transport, setting, request, table, learned)
                dialect = await probe.dialect(dialects.get(request.model, {}))
                if dialect is not None:
                    dialects[request.model] = dialect
        except RunFailure as failure:
            failures.append(failure)
            learned.report.append(str(failure))

    asked = [
        (name, endpoint, dialects)
        for (name, endpoint), dialects in zip(endpoints.items(), learned.dialects, strict=True)
        if endpoint.probe
    ]
    try:
        await asyncio.gather(*(ask(*each) for each in asked))
    finally:
        await transport.close()
    if failures and len(failures) == len(endpoints):
        raise failures[0]
    return learned


def most_usd(endpoints: Mapping[str, Endpoint], requests: Mapping[str, Request], table: PriceTable) -> float:
    """Return the most that `learn` can cost in USD."""
    asked = sum(endpoint.probe for endpoint in endpoints.values())
    return asked * (_ATTEMPTS + 2) * sum(worst_case(request, table)[USD] for request in requests.values())


@dataclass
class _Probe:
    """The request that finds out the dialect of one model at one endpoint."""

    name: str
    route: Route
    transport: Transport
    setting: str
    request: Request
    table: PriceTable
    learned: Learned

    async def dialect(self, dialect: Dialect) -> Dialect | None:
        """Send the request until its parameters are taken, and report what they are; begin with a known dialect.

        Return None if the endpoint is busy or cannot be reached.
        """
        address = self.route.address(self.request.model)
        busy = 0
        while True:
            body = adapted(self.request.body, dialect)
            try:
                status, headers, answer = await self.transport.post(address, json.dumps(body).encode(), {})
                if 200 <= status < 300:
                    self._count(answer)
                    dialect = await self._with_cap(dialect)
                    self._report(dialect)
                    return dialect
                failure = self.route.failure(self.request, status, headers, answer)
            except ErrorBody as error:
                answer = error.body
                failure = self.route.failure(self.request, error.status, headers, answer)
            except (asyncio.TimeoutError, aiohttp.ClientError, OSError) as error:
                failure = Unanswered(one_line(error) or "time-out")
            if isinstance(failure, RunFailure):
                raise failure
            if isinstance(failure, RowFailure):
                dialect = self._next(dialect, body, answer, failure)
                continue
            if isinstance(failure, Unanswered) and failure.paid:
                self._add(worst_case(self.request, self.table))
            busy += 1
            if busy == _ATTEMPTS:
                self.learned.report.append(f"{self._model}: unknown parameters ({failure}); they are sent as set")
                return None
            await asyncio.sleep(min(5.0, getattr(failure, "retry_after_s", 0.0)) + 0.5 * busy)

    async def _with_cap(self, dialect: Dialect) -> Dialect:
        """Return the dialect with the name of the cap that the model keeps to; marked if no name is known to work."""
        cap = self.request.parameters.get(CAP)
        if cap is None:
            return dialect
        asked = replace(
            self.request,
            messages=({"role": "user", "content": _LONG_ANSWER},),
            parameters={**self.request.parameters, CAP: min(cap, _TINY_CAP)},
        )
        found = None
        for name in dict.fromkeys((dialect.get(CAP, CAP), "max_tokens")):
            tried = dialect if name == CAP else {**dialect, CAP: name}
            body = json.dumps(adapted(asked.body, tried)).encode()
            try:
                status, _, answer = await self.transport.post(self.route.address(asked.model), body, {})
                said = CHAT.parse(answer) if 200 <= status < 300 else None
            except (Unanswered, asyncio.TimeoutError, aiohttp.ClientError, OSError):
                said = None
            if said is None:
                break
            self._count(answer)
            if said.completion_tokens <= min(cap, _TINY_CAP):
                if said.cut_off:
                    return tried
                break
            found = IGNORED
        return {**dialect, UNCAPPED: found}

    @property
    def _model(self) -> str:
        return f"{self.name} {self.route.endpoint.base_url}: {self.request.model}"

    def _next(self, dialect: Dialect, body: Mapping[str, Any], answer: bytes, failure: RowFailure) -> Dialect:
        """Return the dialect to try after a refusal, which names a parameter."""
        off = f"or set {self.name}.probe=false to send it nevertheless"
        refused = _named(answer, self.request.parameters)
        if refused is None:
            raise RunFailure(
                f"{self.setting}.model={self.request.model}: {self.route.endpoint.base_url} refuses a short request with "
                f"the parameters of {self.setting} ({failure}); correct them, {off}"
            )
        known = _INSTEAD[refused]
        tried = known.index(dialect[refused]) + 1 if refused in dialect else 0
        if tried == len(known):
            value = json.dumps(self.request.parameters[refused])[:40]
            raise RunFailure(
                f"{self.setting}.{_SETTINGS.get(refused, refused)}: {self.request.model} at {self.route.endpoint.base_url} "
                f"refuses {refused}={value} in every form ({failure}); change it, {off}"
            )
        return {**dialect, refused: known[tried]}

    def _count(self, answer: bytes) -> None:
        """Count what the answered request used, at its worst case if the endpoint does not say; raise ErrorBody."""
        used = None
        try:
            used = used_by(self.request, CHAT.parse(answer), self.table)
        except ErrorBody:
            raise
        except Unanswered:
            pass
        self._add(used or worst_case(self.request, self.table))

    def _add(self, used: Amounts) -> None:
        for name in self.learned.used:
            self.learned.used[name] += used[name]

    def _report(self, dialect: Dialect) -> None:
        names = [name for name in self.request.parameters if name not in dialect]
        changes = [
            f"{name} is left out" if instead is None else f"{name} is sent as {instead}"
            for name, instead in dialect.items()
            if name in self.request.parameters
        ]
        if dialect.get(UNCAPPED) == IGNORED:
            changes.append(
                "it ignores the cap of an answer, so the worst case of a request follows from the longest answer"
            )
        line = f"{self._model} takes {', '.join(names) or 'none of the parameters as they are'}"
        self.learned.report.append("; ".join([line, *changes]))


def _named(answer: bytes, parameters: Sequence[str] | Mapping[str, Any]) -> str | None:
    """Return which of the parameters an error's body names: in `error.param`, or else first in its text."""
    text = answer.decode(errors="replace")
    try:
        param = str(json.loads(answer)["error"]["param"])
    except (ValueError, LookupError, TypeError, RecursionError):
        param = ""
    adaptable = {name: name for name in _INSTEAD} | _ALIASES
    for where in (param, text):
        found = sorted(
            (where.find(said), name) for said, name in adaptable.items() if said in where and name in parameters
        )
        if found:
            return found[0][1]
    return None
