"""Canary release: the checks that a new release must pass before the API is switched to it. No Ray.

First both releases answer the probe set. Then the new release answers a share of the searches for some time, while the driver
compares its failures and its latency with those of the current release. If a check fails, the caller rolls back.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from infembed_ray.config.serving import CanarySettings
from infembed_ray.progress import say
from infembed_ray.serving.probes import ProbeFigures
from infembed_ray.serving.routing.outcomes import Window

POLL_S = 2.0
"""Seconds between two comparisons."""
LEAST_FAILURES = 3
"""Failed searches of the new release below which it is not judged by failures."""
LEAST_ANSWERS = 50
"""Answers of each release below which latencies are not compared."""


class Rejected(Exception):
    """The new release failed a check; the text is the reason."""


def require_good_traffic(current: Window, new: Window, settings: CanarySettings) -> None:
    """Raise Rejected if the new release fails more often or answers more slowly than the settings allow."""
    if new.failed >= LEAST_FAILURES and new.failures > current.failures + settings.max_failures:
        raise Rejected(
            f"it failed {new.failed} of {new.answered + new.failed} searches ({new.failures:.1%}, the current release "
            f"{current.failures:.1%}); canary.max_failures={settings.max_failures:g} more are allowed"
        )
    enough = min(current.answered, new.answered) >= LEAST_ANSWERS
    if enough and new.latency_s > settings.max_slowdown * current.latency_s:
        raise Rejected(
            f"its p95 latency is {1e3 * new.latency_s:.0f} ms, the current release's {1e3 * current.latency_s:.0f} ms; "
            f"canary.max_slowdown={settings.max_slowdown:g} times that is allowed"
        )


def require_good_probes(current: ProbeFigures, new: ProbeFigures, settings: CanarySettings) -> None:
    """Raise Rejected if the new release ranks the probe set worse than the settings allow, or if the set shows nothing."""
    if current.ndcg == new.ndcg == 0:
        raise Rejected(
            "neither release finds a relevant passage of canary.probes among its first ten; give the ids of indexed passages"
        )
    drops = [("nDCG@10", current.ndcg, new.ndcg, settings.max_ndcg_drop, "max_ndcg_drop")]
    if current.p_mrr is not None and new.p_mrr is not None:
        drops.append(("p-MRR", current.p_mrr, new.p_mrr, settings.max_p_mrr_drop, "max_p_mrr_drop"))
    for measure, before, after, allowed, setting in drops:
        if after < before - allowed:
            raise Rejected(
                f"its {measure} on the probes is {after:.1f}, the current release's {before:.1f}; "
                f"canary.{setting}={allowed:g} less is allowed"
            )


def watch(read_page: Callable[[], str], current: str, new: str, settings: CanarySettings) -> None:
    """Compare two releases for `settings.seconds` while both answer searches.

    Args:
        read_page: returns the metrics of all replicas.
        current, new: fingerprints of the releases.

    Raises:
        Rejected: the new release failed a check.
    """
    page = read_page()
    before = {release: Window.of_page(page, release) for release in (current, new)}
    end = time.monotonic() + settings.seconds
    while True:
        page = read_page()
        now = {release: Window.of_page(page, release).since(before[release]) for release in (current, new)}
        require_good_traffic(now[current], now[new], settings)
        if time.monotonic() >= end:
            break
        time.sleep(min(POLL_S, max(0.0, end - time.monotonic())))
    seen = now[new]
    say(f"serve: canary: {seen.answered} searches answered, {seen.failed} failed")
    if seen.answered < LEAST_ANSWERS:
        say(f"serve: canary: fewer than {LEAST_ANSWERS} answers, so its latency was not compared")
