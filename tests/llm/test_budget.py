from pathlib import Path

import pytest

from infembed_ray.config.llm import Limits
from infembed_ray.llm import budget
from infembed_ray.llm.prices import PriceTable
from infembed_ray.llm.rate_limits import LEASE_S, LeaseReport


def test_a_grant_of_a_budget_is_noted_on_disk_before_it_can_be_spent(tmp_path: Path) -> None:
    limits = budget.DurableLedger(Limits(budget_usd=10), 4, 1.0, tmp_path / "journal")
    none, wanted = {"slots": 0.0, "usd": 0.0}, {"slots": 2.0, "usd": 3.0}
    limits.exchange(LeaseReport("a", held=none, wanted=wanted, first=wanted, ahead=none))
    assert 4.0 <= budget.spent_usd(tmp_path / "journal", PriceTable("2026-01-01", {})) <= 4.1


def test_the_time_that_a_note_takes_expires_no_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = budget.DurableLedger(Limits(budget_usd=10), 4, 1.0, tmp_path / "journal")
    now = 0.0
    monkeypatch.setattr(limits, "_clock", lambda: now)
    none, held = {"slots": 0.0, "usd": 0.0}, {"slots": 1.0, "usd": 3.0}
    limits.exchange(LeaseReport("a", held=held, wanted=none, first=none, ahead=none))

    def slowly(*_: object) -> None:
        nonlocal now
        now += 2 * LEASE_S

    monkeypatch.setattr(budget, "_write_note", slowly)
    limits.exchange(LeaseReport("b", held=held, wanted=none, first=none, ahead=none))
    now += LEASE_S / 2
    used = ((0.0, {"usd": 1.0}),)
    for holder in "ab":
        limits.exchange(LeaseReport(holder, held=none, wanted=none, first=none, ahead=none, used=used))
    assert limits.committed_usd == 1.0 + 2 * 1.0


def test_a_failed_note_is_written_by_the_next_exchange(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    limits = budget.DurableLedger(Limits(budget_usd=10), 4, 1.0, journal)
    none, held = {"slots": 0.0, "usd": 0.0}, {"slots": 1.0, "usd": 3.0}
    report = LeaseReport("a", held=held, wanted=none, first=none, ahead=none)
    journal.write_text("no directory")
    with pytest.raises(FileExistsError):
        limits.exchange(report)
    journal.unlink()
    limits.exchange(report)
    assert budget.spent_usd(journal, PriceTable("2026-01-01", {})) >= 4.0
