"""The progress line of a run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from infembed_ray.config.llm import Limits
from infembed_ray.llm.ledger import Ledger, LedgerStats, Traffic
from infembed_ray.synthesis.distributed import live_progress
from tests.support.waiting import wait_until


@pytest.mark.integration  # it takes seconds
@pytest.mark.parametrize("budget_usd", [None, 5.0])
def test_the_note_has_forecast_and_load_and_a_warning_is_printed_once(
    budget_usd: float | None, capsys: pytest.CaptureFixture[str]
) -> None:
    traffic, notes = Traffic(rate_limited=3), list[str]()

    def stats() -> LedgerStats:
        traffic.answered += 50
        return replace(Ledger(Limits()).stats(), in_flight=7, spent_usd=1.25, traffic=traffic, warnings=("slow",))

    def advance(n: int = 1, note: str = "") -> None:
        assert n == 0
        notes.append(note)

    with live_progress(stats, lambda: "70% kept", budget_usd, advance):
        wait_until(lambda: len(notes) >= 2, 30)
    spent = ", 1.25 of the budget's 5 USD" if budget_usd else ""
    assert all(note.endswith(f"/s, 7 in flight, 3 x 429{spent}") for note in notes[:2])
    assert all(note.startswith("70% kept; ") for note in notes[:2])
    assert notes[-1] == "70% kept"
    assert capsys.readouterr().out == "synthesize: slow\n"
