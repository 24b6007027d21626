"""Rate limits in response headers: how long to wait after a 429, and what is left of the limits of a model.

OpenAI, Azure OpenAI and most gateways send `x-ratelimit-{limit,remaining,reset}-{requests,tokens}`; Anthropic sends
`anthropic-ratelimit-{requests,tokens}-{limit,remaining,reset}`.
"""

from __future__ import annotations

import email.utils
import re
import time
from collections.abc import Mapping
from datetime import datetime
from typing import NamedTuple

from infembed_ray.llm.rate_limits import REQUESTS, TOKENS

LONGEST_RESET_S = 60.0
"""Longest wait for the reset of a quota without any request, because only an answer shows that it is available again."""
_STYLES = ("x-ratelimit-{part}-{name}", "anthropic-ratelimit-{name}-{part}")
_HEADERS = {
    name: [[style.format(part=part, name=name) for part in ("limit", "remaining", "reset")] for style in _STYLES]
    for name in (REQUESTS, TOKENS)
}
_NUMBER = re.compile(r"\d+(\.\d*)?")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|[smhd])")
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class Quota(NamedTuple):
    """What a model's rate limit has left."""

    limit: float
    """In a window; the window's length is not in the headers."""
    remaining: float
    reset_s: float
    """Seconds until all of it is available again."""


def quotas(headers: Mapping[str, str]) -> dict[str, Quota]:
    """Return the quotas of requests and tokens that response headers state plausibly."""
    found = {}
    for name, styles in _HEADERS.items():
        for limit, remaining, reset in styles:
            numbers = headers.get(limit, ""), headers.get(remaining, "")
            if all(map(_NUMBER.fullmatch, numbers)):
                quota = Quota(float(numbers[0]), float(numbers[1]), seconds(headers.get(reset, "")))
                if 0 <= quota.remaining <= quota.limit > 0:
                    found[name] = quota
    return found


def retry_after_s(headers: Mapping[str, str]) -> float:
    """Return the seconds that a refusal asks to wait; 0 if it does not say.

    `retry-after-ms` and `Retry-After` (seconds or a date) come first, then the reset of each quota that is used up, but at
    most LONGEST_RESET_S: it is the time until all of the quota is available, not until a part of it is.
    """
    milliseconds = headers.get("retry-after-ms", "")
    if _NUMBER.fullmatch(milliseconds):
        return float(milliseconds) / 1000
    if value := headers.get("Retry-After", ""):
        return seconds(value)
    resets = (quota.reset_s for quota in quotas(headers).values() if quota.remaining < 1)
    return min(LONGEST_RESET_S, max(resets, default=0.0))


def seconds(value: str) -> float:
    """Convert a waiting time to seconds: `12`, `120ms`, `6m0s`, or a date; 0 if it is none of these or in the past."""
    if _NUMBER.fullmatch(value):
        return float(value)
    parts = _DURATION.findall(value)
    if parts and "".join(map("".join, parts)) == value:
        return sum(float(number) * _SECONDS[unit] for number, unit in parts)
    for parse in (datetime.fromisoformat, email.utils.parsedate_to_datetime):
        try:
            return max(0.0, parse(value.replace("Z", "+00:00")).timestamp() - time.time())
        except (ValueError, OverflowError):
            continue
    return 0.0
