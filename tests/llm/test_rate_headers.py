import email.utils
import time
from datetime import datetime, timedelta, timezone

import pytest
from multidict import CIMultiDict

from infembed_ray.llm.rate_headers import Quota, quotas, retry_after_s, seconds
from infembed_ray.llm.rate_limits import REQUESTS, TOKENS


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ({}, 0),
        ({"Retry-After": "1.5"}, 1.5),
        ({"Retry-After": "-3"}, 0),
        ({"Retry-After": "inf"}, 0),
        ({"Retry-After": "soon"}, 0),
        ({"retry-after-ms": "250", "Retry-After": "1"}, 0.25),
        ({"retry-after-ms": "x", "Retry-After": "1"}, 1),
        ({"x-ratelimit-limit-requests": "60", "x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "6m0s"}, 60),
        ({"x-ratelimit-limit-tokens": "60", "x-ratelimit-remaining-tokens": "9", "x-ratelimit-reset-tokens": "6m0s"}, 0),
    ],
)  # fmt: skip
def test_a_refusal_says_how_long_to_wait(header: dict[str, str], expected: float) -> None:
    assert retry_after_s(CIMultiDict(header)) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [("1s", 1), ("6m0s", 360), ("120ms", 0.12), ("1h2m3.5s", 3723.5), ("7.66s", 7.66), ("2", 2), ("1s?", 0), ("", 0)],
)
def test_a_reset_is_a_duration(value: str, expected: float) -> None:
    assert seconds(value) == pytest.approx(expected)


@pytest.mark.parametrize(("ahead_s", "expected"), [(3600, 3600), (-3600, 0)])
def test_a_wait_may_end_at_a_date(ahead_s: float, expected: float) -> None:
    header = {"Retry-After": email.utils.formatdate(time.time() + ahead_s, usegmt=True)}
    assert retry_after_s(header) == pytest.approx(expected, abs=30)
    iso = (datetime.now(timezone.utc) + timedelta(seconds=ahead_s)).isoformat().replace("+00:00", "Z")
    assert seconds(iso) == pytest.approx(expected, abs=30)


def test_quotas_are_read_from_the_headers_of_openai_and_anthropic() -> None:
    openai = {
        f"x-ratelimit-{part}-requests": value for part, value in [("limit", "60"), ("remaining", "59"), ("reset", "1s")]
    }
    assert quotas(openai) == {REQUESTS: Quota(60, 59, 1)}
    anthropic = {"anthropic-ratelimit-tokens-limit": "8000", "anthropic-ratelimit-tokens-remaining": "0"}
    assert quotas(anthropic) == {TOKENS: Quota(8000, 0, 0)}


@pytest.mark.parametrize(("limit", "remaining"), [("0", "0"), ("10", "11"), ("10", "-1"), ("many", "1"), ("10", "")])
def test_implausible_quotas_are_ignored(limit: str, remaining: str) -> None:
    assert not quotas({"x-ratelimit-limit-requests": limit, "x-ratelimit-remaining-requests": remaining})
