from pathlib import Path

from infembed_ray.config import Limits
from infembed_ray.synthesis import budget
from infembed_ray.synthesis.limits import Report
from infembed_ray.synthesis.prices import PriceTable


def test_what_a_run_may_spend_is_noted_before_it_does_so_that_a_killed_one_is_not_forgotten(tmp_path: Path) -> None:
    limits = budget.NotedLedger(Limits(budget_usd=10), 4, 1.0, tmp_path / "journal")
    none, wanted = {"slots": 0.0, "usd": 0.0}, {"slots": 2.0, "usd": 3.0}
    limits.exchange(Report("a", held=none, wanted=wanted, first=wanted, ahead=none))
    assert 4.0 <= budget.spent_usd(tmp_path / "journal", PriceTable("2026-01-01", {})) <= 4.1
