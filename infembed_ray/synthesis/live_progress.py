"""The progress line of a run: share kept, cost and its forecast, and the load of the endpoints."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from infembed_ray.llm.ledger import LedgerStats
from infembed_ray.progress import Advance, say
from infembed_ray.telemetry import report


@contextlib.contextmanager
def live_progress(
    stats: Callable[[], LedgerStats | None], forecast: Callable[[], str], budget_usd: float | None, advance: Advance
) -> Iterator[None]:
    """Update the progress note each second, also while no row ends; print the actors' warnings.

    Args:
        stats: state of the run; None ends the updates.
        forecast: first part of the note; "" before a row ends.
    """
    ended = threading.Event()

    def watch() -> None:
        printed: set[str] = set()
        answered, then, over = 0, time.monotonic(), False
        while not over:
            over = ended.wait(1.0)
            if (state := stats()) is None:
                return
            now, traffic, rows = time.monotonic(), state.traffic, forecast()
            rate, answered, then = (traffic.answered - answered) / (now - then), traffic.answered, now
            spent = "" if budget_usd is None else f", {state.spent_usd:.2f} of the budget's {budget_usd:g} USD"
            load = f"{rate:.0f}/s, {state.in_flight} in flight, {traffic.rate_limited} x 429{spent}"
            begun = rows or state.in_flight or traffic.answered or traffic.rate_limited or traffic.failed
            advance(0, note=f"{rows or 'no row has ended'}; {load}" if begun else "starting the actors on Ray")
            left = None if budget_usd is None else budget_usd - state.spent_usd
            calls = {"answered": answered, "rate_limited": traffic.rate_limited, "failed": traffic.failed}
            report(synthesis_in_flight=state.in_flight, synthesis_calls_total=calls)
            report(synthesis_budget_usd=budget_usd, synthesis_budget_left_usd=left)
            for warning in state.warnings:
                if warning not in printed:
                    printed.add(warning)
                    say(f"synthesize: {warning}")

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        advance(0, note=forecast())
