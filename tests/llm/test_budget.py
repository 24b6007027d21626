from pathlib import Path

from infembed_ray.config.llm import Limits
from infembed_ray.llm import budget
from infembed_ray.llm.prices import PriceTable
from infembed_ray.llm.rate_limits import LeaseReport


def test_a_grant_of_a_budget_is_noted_on_disk_before_it_can_be_spent(tmp_path: Path) -> None:
    limits = budget.DurableLedger(Limits(budget_usd=10), 4, 1.0, tmp_path / "journal")
    none, wanted = {"slots": 0.0, "usd": 0.0}, {"slots": 2.0, "usd": 3.0}
    limits.exchange(LeaseReport("a", held=none, wanted=wanted, first=wanted, ahead=none))
    assert 4.0 <= budget.spent_usd(tmp_path / "journal", PriceTable("2026-01-01", {})) <= 4.1
