"""HTTP wire format of OpenAI-compatible endpoints: addresses and keys, responses, and what each error means."""

from __future__ import annotations

import email.utils
import json
import os
import re
import socket
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from infembed_ray.config.llm import Endpoint
from infembed_ray.llm.chat import (
    PROBE,
    UNREADABLE,
    Completion,
    Request,
    RowFailure,
    RunFailure,
    replace_surrogates,
)
from infembed_ray.llm.transport import Target
from infembed_ray.redaction import masked

MOST_TOKENS = 10**8
"""Token counts above this are taken for errors: no model reads or writes that many."""
OPENAI = "https://api.openai.com/"
PATH = "chat/completions"
"""Path of chat completions after an endpoint's base URL."""

_RETRYABLE = {408, 409, 425}  # besides 429 and every 5xx
_MAYBE_PAID = {408, 502, 504, 520, 524}  # time-outs and gateway errors: the model behind may have answered
_NO_QUOTA = re.compile(r"insufficient_(quota|balance|funds|credit)|exceeded_current_quota|billing|payment_required")
"""Codes and types of errors that only a payment or a new month mends; their texts also name limits that last a minute."""
_NUMBER = re.compile(r"\d+(\.\d*)?")
_INTERRUPTED = {"error", "abort", "aborted", "insufficient_system_resource"}


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


class ServerError(Unanswered):
    """The endpoint answered HTTP 5xx."""


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
        self._targets: dict[str, Target] = {}

    def target(self, model: str) -> Target:
        """Return where requests to a model go; RunFailure if the environment variable with the key is not set."""
        if model not in self._targets:
            url = _url(self.endpoint, model)
            headers = {"Content-Type": "application/json", **authorization(self.endpoint)}
            self._targets[model] = Target(url, headers, _proxy(url), self.endpoint.timeout_s)
        return self._targets[model]

    def failure(self, request: Request, status: int, headers: Mapping[str, str], body: bytes) -> Exception:
        """Return what an HTTP error means: Unanswered (retry), RowFailure or RunFailure."""
        url = self.endpoint.base_url
        message, codes = error_message(body)
        for secret in authorization(self.endpoint).values():  # some gateways echo the key that they refuse
            message = message.replace(secret.removeprefix("Bearer "), "***")
        said = f"HTTP {status}: {message}"
        if status == 401 or (status == 403 and request.step == PROBE):  # otherwise a firewall may refuse one text
            setting = f"endpoint.api_key_env={self.endpoint.api_key_env}"
            return RunFailure(
                f"{setting}: {url} refuses its key ({said}); set a valid one on every node, or raise the key's limit"
            )
        if status == 404:
            return RunFailure(f"model {request.model}: not at endpoint.base_url={url} ({said}); correct one of the two")
        if status == 402 or _NO_QUOTA.search(codes):
            return RunFailure(f"endpoint.base_url={url}: the quota is used up ({said}); raise it")
        if status == 429:
            return RateLimited(said, paid=False, retry_after_s=retry_after_s(headers))
        if status in _RETRYABLE or status >= 500:
            kind = ServerError if status >= 500 else Unanswered
            return kind(said, paid=status in _MAYBE_PAID, retry_after_s=retry_after_s(headers))
        return RowFailure(said)


def retry_after_s(headers: Mapping[str, str]) -> float:
    """Return the seconds that a refusal asks to wait (`retry-after-ms`; `Retry-After` in seconds or as a date); else 0."""
    milliseconds, value = headers.get("retry-after-ms", ""), headers.get("Retry-After", "")
    if _NUMBER.fullmatch(milliseconds):
        return float(milliseconds) / 1000
    if _NUMBER.fullmatch(value):
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, OverflowError):
        return 0.0


def _url(endpoint: Endpoint, model: str) -> str:
    base = endpoint.base_url.rstrip("/")
    if endpoint.api_version is None:
        return f"{base}/{PATH}"
    deployment = urllib.parse.quote(model, safe="")  # a deployment is named like its model
    version = urllib.parse.quote(endpoint.api_version, safe="")
    return f"{base}/openai/deployments/{deployment}/{PATH}?api-version={version}"


def _proxy(url: str) -> str | None:
    parts = urllib.parse.urlsplit(url)
    if urllib.request.proxy_bypass(parts.hostname or ""):
        return None
    proxy = urllib.request.getproxies().get(parts.scheme)
    return f"http://{proxy}" if proxy and "://" not in proxy else proxy  # as curl reads it


def api_key(endpoint: Endpoint) -> str | None:
    """Return the endpoint's key from this machine's environment; None if it needs none.

    Raises:
        RunFailure: the environment variable is not set.
    """
    name = endpoint.api_key_env
    if name is None:
        return None
    key = os.environ.get(name, "").strip()
    if not key:
        raise RunFailure(
            f"endpoint.api_key_env={name}: not set on {socket.gethostname()}; set it on every node before Ray starts"
            f"{missing_key_hint(endpoint)}"
        )
    return key


def authorization(endpoint: Endpoint) -> dict[str, str]:
    """Return the header that carries the endpoint's key; raises as `api_key` does."""
    key = api_key(endpoint)
    if key is None:
        return {}
    return {"Authorization": f"Bearer {key}"} if endpoint.api_version is None else {"api-key": key}


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
        raise Unanswered("the response is no chat completion (cut short?)") from error
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
        finish_reason = _text(choice.get("finish_reason")) or "stop"
        if finish_reason.lower() in _INTERRUPTED:
            raise ServerError(f"the endpoint interrupted the answer (finish_reason={finish_reason})")
        usage = answer.get("usage")
        names = "prompt_tokens", "completion_tokens", "total_tokens"
        prompt_tokens, completion_tokens, total = token_counts(usage, *names)
        return Completion(
            text=replace_surrogates(content),
            refusal=_text(message.get("refusal")) or refusal or None,
            finish_reason=finish_reason,
            model=_text(answer.get("model")),
            prompt_tokens=prompt_tokens,
            # xAI and Gemini: reasoning is in the total only.
            completion_tokens=max(completion_tokens, total - prompt_tokens),
            cached_tokens=_cached_tokens(usage, prompt_tokens),
        )
    except (LookupError, TypeError, AttributeError) as error:
        raise Unanswered("the response is no chat completion (cut short?)") from error


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


def token_counts(usage: Any, *names: str) -> list[int]:
    """Return token counts of a response; all 0 if one is implausible, so the request counts at its worst case."""
    try:
        counts = [int(usage.get(name) or 0) for name in names]
    except (AttributeError, TypeError, ValueError, OverflowError):
        counts = []
    return counts if counts and all(0 <= count <= MOST_TOKENS for count in counts) else [0] * len(names)


def _cached_tokens(usage: Any, prompt_tokens: int) -> int:
    """Return how many of the prompt's tokens the endpoint had in its cache; 0 if it does not say so plausibly."""
    details = usage.get("prompt_tokens_details") if prompt_tokens else None
    return min(token_counts(details, "cached_tokens")[0], prompt_tokens) if details else 0


def _text(value: Any) -> str:
    return replace_surrogates(value) if isinstance(value, str) else ""


def error_message(body: bytes) -> tuple[str, str]:
    """Return the message of an error body, which may be anything, and its code, status and type."""
    codes = ""
    try:
        error = json.loads(body)["error"]
        codes = " ".join(str(error.get(name) or "") for name in ("code", "status", "type"))
        return one_line(error["message"]), codes
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return one_line(body.decode(errors="replace")) or "no message", codes


def one_line(value: object) -> str:
    """Return an endpoint's text for use in a message: one line of valid UTF-8, at most 300 characters, without credentials."""
    return replace_surrogates(" ".join(masked(str(value)).split())[:300])
