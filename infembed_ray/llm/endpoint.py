"""HTTP of OpenAI-compatible endpoints: addresses and keys, requests, responses, and what each error means.

`Transport` posts over aiohttp's connections, with the head of a request written once: a session costs 0.15 ms of CPU more.
aiohttp opens, encrypts, pools and checks the connections and parses the responses. Calls through a proxy use the session.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import ipaddress
import json
import math
import os
import re
import socket
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timezone
from functools import cached_property
from typing import Any, NamedTuple

import aiohttp
from aiohttp.helpers import ceil_timeout
from aiohttp.http_exceptions import HttpProcessingError
from yarl import URL

from infembed_ray.config.llm import Endpoint
from infembed_ray.llm.chat import PROBE, UNREADABLE, Completion, Request, RowFailure, RunFailure, replace_surrogates
from infembed_ray.redaction import masked

MOST_BYTES = 32 << 20
"""Longest response body: a small compressed one may expand to gigabytes."""
MOST_TOKENS = 10**8
"""Token counts above this are taken for errors: no model reads or writes that many."""
OPENAI = "https://api.openai.com/"
PATH = "chat/completions"
"""Path of chat completions after an endpoint's base URL."""

_RETRYABLE = {408, 409, 425}  # besides 429 and every 5xx
_MAYBE_PAID = {408, 502, 504, 520, 524}  # time-outs and gateway errors: the model behind may have answered
_NO_QUOTA = re.compile(
    r"(?i)insufficient_?(quota|balance|funds|credit)|exceeded_?current_?quota|billing|payment_?required|budget_?exceed|arrear"
)
"""Codes and types of errors that only a payment or a new month mends; their texts also name limits that last a minute."""
_INTERRUPTED = {"error", "abort", "aborted", "insufficient_system_resource"}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d*)?) *(ns|us|µs|ms|s|m|h|d)[a-z]* *")
_EPOCH = 1e9
"""Numbers from here on are times since 1970, in seconds or in a thousandth, millionth or billionth of them."""
_EXCERPT = 20_000  # bytes or characters of a body that a message is made of
_MARKUP = re.compile(r"<(script|style)\b.*?</\1>|<[^>]*>", re.DOTALL | re.IGNORECASE)
_NO_COMPLETION = "the response is no chat completion (a page, a stream, or cut short)"
LONGEST_WAIT_S = 366 * 86400.0
"""Longest wait that a response can ask for."""


class Unanswered(Exception):
    """An attempt failed and may be repeated after `retry_after_s` seconds.

    `paid`: the attempt may have been paid for, because nothing proves that the model did not answer.
    """

    def __init__(self, reason: str, paid: bool = True, retry_after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.paid = paid
        self.retry_after_s = retry_after_s


class RateLimited(Unanswered):
    """The endpoint asks for fewer requests (HTTP 429)."""


class ErrorBody(Unanswered):
    """The endpoint answered HTTP 200 with an error, as gateways pass one on; `status` is its code, 502 if it has none."""

    def __init__(self, error: Any) -> None:
        self.body = json.dumps({"error": error}).encode()
        said, codes = error_message(self.body)
        super().__init__(said)
        self.status = next((int(code) for code in codes.split() if re.fullmatch(r"[45]\d\d", code)), 502)


class Route:
    """Address and key of one endpoint, from this machine's environment."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint

    @cached_property
    def target(self) -> Target:
        """Where requests go; RunFailure if the environment variable with the key is not set."""
        url = f"{self.endpoint.base_url.rstrip('/')}/{PATH}"
        headers = {"Content-Type": "application/json", **authorization(self.endpoint)}
        return Target(url, headers, proxy_of(url), self.endpoint.timeout_s)

    def failure(self, request: Request, status: int, headers: Mapping[str, str], body: bytes) -> Exception:
        """Return what an HTTP error means: Unanswered (retry), RowFailure or RunFailure."""
        url, said, codes = self.endpoint.base_url, self.said(request, status, body), error_message(body)[1]
        if 300 <= status < 400:
            said = f"{said} redirects to {one_line(headers.get('Location', 'no address'))}"
            if request.step == PROBE:
                return RunFailure(f"endpoint.base_url={url}: {said}; set endpoint.base_url to the address that answers")
        if status == 401 or (status == 403 and request.step == PROBE):  # otherwise a firewall may refuse one text
            key, remedy = self.endpoint.api_key_env, "set a valid one on every node, or raise the key's limit"
            return RunFailure(f"endpoint.api_key_env={key}: {url} refuses its key ({said}); {remedy}")
        if status == 404:
            remedy = "correct one of the two" if "/v1" in url else "correct one of the two; most base URLs end with /v1"
            return RunFailure(f"model {request.model}: not at endpoint.base_url={url} ({said}); {remedy}")
        if status == 402 or _NO_QUOTA.search(codes):
            return RunFailure(f"endpoint.base_url={url}: the quota is used up ({said}); raise it")
        wait_s = retry_after_s({**_passed_on(body), **headers})
        if status == 429:
            return RateLimited(said, paid=False, retry_after_s=wait_s)
        if status in _RETRYABLE or status >= 500:
            return Unanswered(said, paid=status in _MAYBE_PAID, retry_after_s=wait_s)
        return RowFailure(said)

    def said(self, request: Request, status: int, body: bytes) -> str:
        """Return what a response says, with its status and address, without the key that some gateways echo."""
        for secret in authorization(self.endpoint).values():
            body = body.replace(secret.removeprefix("Bearer ").encode(), b"***")
        return f"HTTP {status}: {error_message(body)[0]} [{with_proxy(str(self.target.url))}]"


def retry_after_s(headers: Mapping[str, str]) -> float:
    """Return the seconds that a refusal asks to wait, at most LONGEST_WAIT_S; 0 if it does not say so.

    `retry-after-ms` comes before `Retry-After`, and both before the reset of a limit of which nothing remains.
    """
    given = {name.lower(): value for name, value in headers.items()}
    for name, unit_s in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        if (wait_s := _wait_s(given.get(name, ""), unit_s)) is not None:
            return wait_s
    resets = (name for name in given if "ratelimit" in name and "reset" in name)
    exhausted = (name for name in resets if given.get(name.replace("reset", "remaining"), "0") == "0")
    return max((_wait_s(given[name]) or 0.0 for name in exhausted), default=0.0)


def _wait_s(value: str, unit_s: float = 1.0) -> float | None:
    """Return the seconds until a time in any form: a number of `unit_s`, a duration (`1m30s`), an epoch or a date."""
    text = value.strip().strip('"').lower()
    if (parts := _DURATION.findall(text)) and not _DURATION.sub("", text):
        return min(LONGEST_WAIT_S, sum(float(number) * _SECONDS[unit] for number, unit in parts))
    try:
        number = float(text)
        seconds = number * unit_s
        if number >= _EPOCH and math.isfinite(number):
            seconds = number / 1000.0 ** (int(math.log10(number)) // 3 - 3) - time.time()
    except ValueError:
        seconds = math.nan
        for parse in (datetime.fromisoformat, email.utils.parsedate_to_datetime):
            with contextlib.suppress(ValueError, TypeError, OverflowError):
                at = parse(value.strip().replace("Z", "+00:00"))
                seconds = (at if at.tzinfo else at.replace(tzinfo=timezone.utc)).timestamp() - time.time()
                break
    return min(LONGEST_WAIT_S, max(0.0, seconds)) if math.isfinite(seconds) else None


def with_proxy(url: str) -> str:
    """Return a URL and its proxy for messages, without credentials."""
    return masked(f"{url}, proxy {proxy}" if (proxy := proxy_of(url)) else url)


def proxy_of(url: str) -> str | None:
    """Return the proxy for a URL by this machine's environment (`no_proxy` may have networks); RunFailure if it is not of HTTP."""
    parts, proxies = urllib.parse.urlsplit(url), urllib.request.getproxies()
    host, excluded = parts.hostname or "", proxies.get("no", "").replace("*.", ".")
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host)
        for each in map(str.strip, excluded.split(",")):
            with contextlib.suppress(ValueError):
                if address in ipaddress.ip_network(each, strict=False):
                    return None
    bypassed = urllib.request.proxy_bypass_environment  # type: ignore[attr-defined]
    if any(bypassed(place, {"no": excluded}) for place in (host, parts.netloc)):
        return None
    proxy = proxies.get(parts.scheme)
    proxy = f"http://{proxy}" if proxy and "://" not in proxy else proxy  # as curl reads it
    if proxy and not proxy.startswith(("http://", "https://")):
        raise RunFailure(f"{parts.scheme}_proxy={proxy}: is no proxy of HTTP; set one of HTTP, or no_proxy={host}")
    return proxy


def api_key(endpoint: Endpoint) -> str | None:
    """Return the endpoint's key from this machine's environment; None if it needs none.

    Raises:
        RunFailure: the environment variable is not set, or holds no key.
    """
    name = endpoint.api_key_env
    if name is None:
        return None
    key = os.environ.get(name, "").strip()
    if not key:
        remedy = f"set it on every node before Ray starts{missing_key_hint(endpoint)}"
        raise RunFailure(f"endpoint.api_key_env={name}: not set on {socket.gethostname()}; {remedy}")
    if not (key.isascii() and key.isprintable()):
        raise RunFailure(f"endpoint.api_key_env={name}: holds a line break or a character that no key has; correct it")
    return key


def authorization(endpoint: Endpoint) -> dict[str, str]:
    """Return the header that carries the endpoint's key; raises as `api_key` does."""
    key = api_key(endpoint)
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def missing_key_hint(endpoint: Endpoint) -> str:
    """Return the end of an error message about a missing key: how to use an endpoint without one."""
    if endpoint.base_url.startswith(OPENAI):
        return "; for a local server, set endpoint.base_url to its URL and endpoint.api_key_env=null"
    return f"; if {endpoint.base_url} needs no key, set endpoint.api_key_env=null"


def parse_completion(body: bytes) -> Completion:
    """Parse the body of a chat completion; its text is valid UTF-8 and its token counts are plausible.

    Raises:
        Unanswered: the body is no chat completion.
    """
    try:
        answer = json.loads(body)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise Unanswered(_NO_COMPLETION) from error
    except (ValueError, RecursionError):  # complete, but beyond Python's limits: another attempt would cost as much
        return Completion("", UNREADABLE, "", 0, 0)
    return completion_of(answer)


def completion_of(answer: Any) -> Completion:
    """Convert a parsed response body; raises as `parse_completion` does, and ErrorBody if it holds an error."""
    try:
        if not answer.get("choices") and (answer.get("error") or answer.get("object") == "error"):
            raise ErrorBody(answer.get("error") or answer)
        choice = answer["choices"][0]
        if error := choice.get("error"):
            raise ErrorBody(error)
        message = choice["message"]
        content, refusal = _joined(message.get("content"))
        finish_reason = _text(choice.get("finish_reason"))
        if finish_reason.lower() in _INTERRUPTED:
            raise Unanswered(f"the endpoint interrupted the answer (finish_reason={finish_reason})")
        prompt_tokens, completion_tokens, cached_tokens, usd = _usage(answer.get("usage"), bool(content))
        return Completion(
            text=replace_surrogates(content),
            refusal=_text(message.get("refusal")) or refusal or None,
            finish_reason=finish_reason,
            model=_text(answer.get("model")),
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            cached_tokens=cached_tokens,
            usd=usd,
        )
    except (LookupError, TypeError, AttributeError) as error:
        raise Unanswered(_NO_COMPLETION) from error


def _joined(content: Any) -> tuple[str, str]:
    """Return text and refusal of a message's content, which may be a list of parts; parts with reasoning are left out."""
    if content is None or isinstance(content, str):
        return content or "", ""
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    texts = [part["text"] for part in parts if part.get("type", "text") in ("text", "output_text")]
    return "".join(texts), "".join(_text(part.get("refusal")) for part in parts)


def short_question(request: Request) -> Request:
    """Return a short request with the same parameters, which shows whether the endpoint answers at all."""
    text = "This is a test. Answer with the word yes; if JSON is asked for, as its only value."
    return replace(request, messages=({"role": "user", "content": text},), prompt="probe=1", step=PROBE, row="")


def _usage(usage: Any, answered: bool) -> tuple[int, int, int, float | None]:
    """Return tokens of the prompt, of the answer and of the cache, and the USD that the endpoint charged, if it says so.

    All are 0 if a count is missing or implausible: the budget then counts the worst case, and the price is unknown.
    """
    if not isinstance(usage, dict):
        return 0, 0, 0, None
    counts = prompt, completion, total = [
        _count(usage.get(name)) for name in ("prompt_tokens", "completion_tokens", "total_tokens")
    ]
    completion = max(completion, total - prompt)  # xAI and Gemini: reasoning is in the total only
    if not prompt or min(counts) < 0 or (answered and not completion):
        return 0, 0, 0, None
    details, usd = usage.get("prompt_tokens_details"), usage.get("cost")
    cached = (details.get("cached_tokens") if isinstance(details, dict) else 0) or usage.get("prompt_cache_hit_tokens")
    charged = isinstance(usd, (int, float)) and math.isfinite(usd) and 0 < usd < MOST_TOKENS
    return prompt, completion, max(0, min(_count(cached), prompt)), float(usd or 0) if charged else None


def _count(value: Any) -> int:
    """Return a number of tokens: 0 if there is none, -1 if it is implausible."""
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if 0 <= int(value or 0) <= MOST_TOKENS:
            return int(value or 0)
    return -1


def _text(value: Any) -> str:
    return replace_surrogates(value) if isinstance(value, str) else ""


def error_message(body: bytes) -> tuple[str, str]:
    """Return the message of an error body, which may be anything, and its code, status and type."""
    error = _error_in(body)
    codes = " ".join(str(error.get(name) or "") for name in ("code", "status", "type"))
    if not isinstance(message := error.get("message"), str) or not message.strip():
        text = body[:_EXCERPT].decode(errors="replace")
        return one_line(_MARKUP.sub(" ", text) if text.lstrip().startswith("<") else text) or "no message", codes
    behind = error.get("metadata")  # OpenRouter: the provider and its own words
    more = [behind.get(name) for name in ("provider_name", "raw")] if isinstance(behind, dict) else []
    return one_line(": ".join(str(each) for each in (message, *more) if each)), codes


def _error_in(body: bytes) -> dict[str, Any]:
    """Return the error of a body in any provider's form; {} if it is none."""
    try:
        said = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    said = said[0] if isinstance(said, list) and said else said  # Gemini
    error = (said.get("error") or said) if isinstance(said, dict) else {}
    return error if isinstance(error, dict) else {"message": error}


def _passed_on(body: bytes) -> dict[str, str]:
    """Return the headers of the provider behind a gateway (OpenRouter), and the wait in a body (Gemini)."""
    error = _error_in(body)
    with contextlib.suppress(LookupError, AttributeError, TypeError):
        return {str(name): str(value) for name, value in error["metadata"]["headers"].items()}
    with contextlib.suppress(LookupError, TypeError):
        return {"retry-after": next(str(each["retryDelay"]) for each in error["details"] if "retryDelay" in each)}
    return {}


def one_line(value: object) -> str:
    """Return an endpoint's text for use in a message: one line of valid UTF-8, at most 300 characters, without credentials."""
    return replace_surrogates(" ".join(masked(str(value)[:_EXCERPT]).split())[:300])


class Response(NamedTuple):
    """A complete HTTP response."""

    status: int
    headers: Mapping[str, str]  # names in any case
    body: bytes


class Target:
    """Where requests of one kind go; `timeout_s` is from connecting to the last byte of a response."""

    def __init__(self, url: str, headers: Mapping[str, str], proxy: str | None, timeout_s: float) -> None:
        self.url = URL(url)
        self.headers = headers
        self.proxy = proxy
        self.timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._prepared: tuple[aiohttp.ClientRequest, bytes] | None = None

    def prepare(self) -> tuple[aiohttp.ClientRequest, bytes]:
        """Return a request for aiohttp's connector, and the head of all requests but its last header."""
        if self._prepared is None:
            request = aiohttp.ClientRequest("POST", self.url, headers=self.headers, loop=asyncio.get_running_loop())
            lines = [f"{name}: {value}" for name, value in request.headers.items() if name != "Content-Length"]
            if any(mark in line for line in lines for mark in "\r\n\0"):
                raise ValueError("a header holds a line break")
            head = "\r\n".join((f"POST {self.url.raw_path_qs} HTTP/1.1", *lines, ""))
            self._prepared = request, head.encode()
        return self._prepared


class Transport:
    """Connections of one event loop, kept open between requests."""

    def __init__(self) -> None:
        self._connector = aiohttp.TCPConnector(limit=0)  # the rate limiter is the limit
        self._session = aiohttp.ClientSession(connector=self._connector, cookie_jar=aiohttp.DummyCookieJar())

    async def close(self) -> None:
        """Close all connections; requests in flight fail."""
        await self._session.close()

    async def post(self, target: Target, body: bytes) -> Response:
        """Send a request; return its complete response.

        Raises:
            asyncio.TimeoutError: `target.timeout` is over.
            aiohttp.ClientError, OSError: the connection failed, or the response is no HTTP or not complete.
        """
        if target.proxy is not None:
            return await self._post_by_session(target, body)
        try:
            async with ceil_timeout(target.timeout.total):
                return await self._post(target, body)
        except HttpProcessingError as error:
            raise aiohttp.ClientPayloadError(f"the response is no valid HTTP: {error.message}") from error

    async def _post(self, target: Target, body: bytes) -> Response:
        request, head = target.prepare()
        connection = await self._connector.connect(request, [], target.timeout)
        try:
            protocol, transport = connection.protocol, connection.transport
            if protocol is None or transport is None or protocol.should_close:  # after bytes that nothing asked for
                raise aiohttp.ServerDisconnectedError
            protocol.set_response_params(read_until_eof=True)
            transport.write(b"%bContent-Length: %d\r\n\r\n%b" % (head, len(body), body))
            while True:
                message, payload = await protocol.read()
                if message.code >= 200:  # below: informational, the response follows
                    break
            response = Response(message.code, message.headers, await _read(payload))
        except BaseException:
            connection.close()
            raise
        connection.release()
        return response

    async def _post_by_session(self, target: Target, body: bytes) -> Response:
        async with self._session.post(
            target.url,
            data=body,
            headers=target.headers,
            proxy=target.proxy,
            timeout=target.timeout,
            allow_redirects=False,
        ) as response:  # a redirected POST would become a GET
            return Response(response.status, response.headers, await _read(response.content))


async def _read(payload: aiohttp.StreamReader) -> bytes:
    body = bytearray()
    while block := await payload.readany():
        body += block
        if len(body) > MOST_BYTES:
            raise aiohttp.ClientPayloadError(f"the response is longer than {MOST_BYTES} bytes")
    return bytes(body)
