import pytest

from infembed_ray.analysis.cost import cost
from infembed_ray.analysis.inputs import read
from infembed_ray.storage.steps import resolve
from tests.analysis.samples import ROWS, Rows, kept, publish


def analyse(tmp_path, rows=ROWS):
    return cost(read(resolve(publish(tmp_path / "out", rows)), "records"))


def test_the_cost_per_kept_record_includes_lost_rows(tmp_path):
    found = analyse(tmp_path)
    assert (found.total.rows, found.total.prompt_tokens, found.total.completion_tokens) == (7, 7000, 600)
    assert (found.kept.usd, found.rejected.usd, found.dead_letter.usd) == (
        pytest.approx(0.03),
        pytest.approx(0.03),
        pytest.approx(0.01),
    )
    assert found.usd_per_1000_kept == pytest.approx(1000 * 0.07 / 3)
    assert (found.calls, found.replayed) == (40, 2)
    assert found.latency_s == {"p50": 0.5, "p90": 1.5, "p99": 4.25}


def test_one_unknown_price_makes_the_sum_unknown(tmp_path):
    found = analyse(tmp_path, Rows([kept("a"), kept("b", usd=None)], ROWS.rejected, []))
    assert (found.kept.usd, found.total.usd, found.usd_per_1000_kept) == (None, None, None)
    assert found.rejected.usd == pytest.approx(0.03)
    assert found.total.prompt_tokens == 5000


def test_no_kept_record_has_no_price(tmp_path):
    found = analyse(tmp_path, Rows([], ROWS.rejected, []))
    assert found.usd_per_1000_kept is None
    assert found.total.usd == pytest.approx(0.03)


def test_records_without_provenance_have_no_cost(tmp_path):
    plain = [{**row, "provenance": None} for row in ROWS.kept]
    assert analyse(tmp_path, Rows(plain, [], [])) is None
