import datetime
from dataclasses import replace
from pathlib import Path

import pytest

from infembed_ray.errors import InputError
from infembed_ray.llm import prices
from tests.support.chat import completion

TABLE = prices.PriceTable("2026-01-01", {"small": (0.5, 2.0)})


def test_tokens_cost_their_list_price_per_million_or_what_was_charged() -> None:
    answer = completion("x", tokens=(3_000_000, 250_000))
    assert TABLE.usd("small", answer) == TABLE.usd("small-2026-03-31", answer) == pytest.approx(1.5 + 0.5)
    assert TABLE.usd("smaller", answer) is TABLE.usd("small", completion("x", tokens=(0, 0))) is None
    assert TABLE.usd("smaller", replace(answer, usd=0.25)) == TABLE.usd("small", replace(answer, usd=0.25)) == 0.25


def test_the_bundled_table_is_dated_and_plausible() -> None:
    table = prices.load()
    datetime.date.fromisoformat(table.as_of)
    for prompt, answer, *cached in table.models.values():
        assert 0 < prompt < answer or answer == 0  # 0: an embedder
        assert all(0 < each <= prompt / 2 for each in cached)


def test_cached_tokens_have_their_own_price_but_not_in_a_batch() -> None:
    answer = replace(completion("x", tokens=(2_000_000, 0)), cached_tokens=1_500_000)
    table = prices.PriceTable("2026-01-01", {"small": (0.5, 2.0, 0.1), "old": (0.5, 2.0)})
    assert table.usd("small", answer) == pytest.approx(0.5 * 0.5 + 1.5 * 0.1)
    assert table.usd("small", replace(answer, batched=True)) == pytest.approx(prices.BATCH_PRICE * 1.0)
    assert table.usd("old", answer) == pytest.approx(1.0)


def test_a_price_file_overrides_the_bundled_prices(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("as_of: 2026-10-01\nmodels:\n  my-model: [1.0, 2.0, 0.5]\n  gpt-4o-mini: [0.1, 0.2]\n")
    table = prices.load(str(own))
    assert table.as_of == "2026-10-01"
    assert table.price("my-model") == (1.0, 2.0, 0.5)
    assert table.price("gpt-4o-mini-2024-07-18") == (0.1, 0.2)
    assert table.price("gpt-4o") == prices.load().price("gpt-4o")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "models: {}",
        "as_of: 1\nmodels: {a: 1}",
        "as_of: 1\nmodels: {a: [1, x]}",
        "as_of: 1\nmodels: {a: [1, -2]}",
        "as_of: 1\nmodels: {a: [1]}",
        "as_of: 1\nmodels: {a: [1, 2, 1, 1]}",
        "][",
    ],
)
def test_a_malformed_price_table_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(text)
    with pytest.raises(InputError, match="no price table; write") as refused:
        prices.load(str(own))
    assert "\n" not in str(refused.value)
