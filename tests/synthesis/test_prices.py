import datetime

import pytest

from infembed_ray.synthesis import prices
from tests.synthesis.exchanges import completion

TABLE = prices.PriceTable("2026-01-01", {"small": (0.5, 2.0)})


def test_tokens_cost_their_list_price_per_million() -> None:
    assert TABLE.usd("small", completion("x", tokens=(3_000_000, 250_000))) == pytest.approx(1.5 + 0.5)


def test_a_dated_snapshot_costs_what_its_model_does() -> None:
    answer = completion("x", tokens=(100, 10))
    assert TABLE.usd("small-2026-03-31", answer) == TABLE.usd("small", answer)


def test_an_unknown_model_has_no_price() -> None:
    assert TABLE.usd("smaller", completion("x")) is None


def test_the_bundled_table_is_dated_and_plausible() -> None:
    table = prices.load()
    datetime.date.fromisoformat(table.as_of)
    assert all(0 < prompt < answer for prompt, answer in table.models.values())
