"""The estimate of calls, tokens and price."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from infembed_ray.quickstart import sample
from infembed_ray.synthesis import preflight
from infembed_ray.synthesis.preflight import Estimate
from tests.synthesis.runs import ROWS, settings

BOUNDED = {"generator": {"model": "gpt-4o-mini", "max_tokens": 1000}, "judge": {"model": "o4-mini", "max_tokens": 4000}}
BUNDLED = {"generator": {"model": "bundled-sample"}, "judge": {"model": "bundled-sample"}}


def estimated(seeds: Path, root: Path, **values: Any) -> Estimate:
    given = settings(seeds, root / "out", **values)
    opened, table, _ = preflight.prepare(given)
    return preflight.estimate(preflight.resolve(given, opened, table))


@pytest.mark.parametrize(("complement", "calls"), [(False, 8), (True, 10)])
def test_a_seed_takes_every_step_once(seeds: Path, tmp_path: Path, complement: bool, calls: int) -> None:
    assert estimated(seeds, tmp_path, complement=complement).calls == calls * len(ROWS)


def test_a_cheap_judge_is_always_in_doubt(seeds: Path, tmp_path: Path) -> None:
    made = estimated(seeds, tmp_path, complement=True, cheap_judge={"model": "m"})
    assert made.calls == len(ROWS) * (5 + 3 * (2 + 1) + 2)


def test_the_price_is_that_of_the_list(seeds: Path, tmp_path: Path) -> None:
    prices = tmp_path / "prices.yaml"
    prices.write_text("as_of: 2026-01-01\nmodels: {gpt-4o-mini: [0, 2], o4-mini: [0, 3]}\n")
    made = estimated(seeds, tmp_path, prices=str(prices), **BOUNDED)
    assert made.answer_tokens == len(ROWS) * (5 * 1000 + 3 * 4000)
    assert made.usd == pytest.approx(len(ROWS) * (5 * 1000 * 2 + 3 * 4000 * 3) / 1e6)
    prices = tmp_path / "other.yaml"
    prices.write_text("as_of: 2026-01-02\nmodels: {gpt-4o-mini: [5, 0], o4-mini: [5, 0]}\n")
    other = estimated(seeds, tmp_path, prices=str(prices), **BOUNDED)
    assert other.usd == pytest.approx(other.prompt_tokens * 5 / 1e6)


def test_batches_cost_half(seeds: Path, tmp_path: Path) -> None:
    local = {**BOUNDED, "endpoint": {"api_key_env": None}}
    online = estimated(seeds, tmp_path, **local).usd
    assert estimated(seeds, tmp_path, **local, batches={}).usd == pytest.approx(online / 2)


def test_without_a_bound_or_a_price_there_is_no_figure(seeds: Path, tmp_path: Path) -> None:
    unbounded = estimated(seeds, tmp_path, generator={"model": "gpt-4o-mini"}, judge=BOUNDED["judge"])
    assert not math.isfinite(unbounded.answer_tokens)
    assert not math.isfinite(unbounded.usd)
    unpriced = estimated(seeds, tmp_path, generator={"model": "own", "max_tokens": 9}, judge=BOUNDED["judge"])
    assert unpriced.answer_tokens == len(ROWS) * (5 * 9 + 3 * 4000)
    assert math.isnan(unpriced.usd)


def test_calls_that_a_journal_answers_are_left_out(tmp_path: Path) -> None:
    lines = sample.JOURNAL.read_bytes().splitlines(keepends=True)
    assert estimated(sample.SEEDS, tmp_path, replay=[str(sample.JOURNAL)], **BUNDLED).calls == 0
    partly = tmp_path / "partly.jsonl"
    mine = [line for line in lines if json.loads(line)["row"] == "sleep-01"]
    kept = [line for line in mine if not json.loads(line)["step"].startswith("judge_")]
    assert (len(mine), len(kept)) == (8, 5)
    partly.write_bytes(b"".join([line for line in lines if line not in mine] + kept))
    assert estimated(sample.SEEDS, tmp_path, replay=[str(partly)], **BUNDLED).calls == 3


def test_many_seeds_are_sampled_evenly(seeds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = estimated(seeds, tmp_path, **BOUNDED)
    monkeypatch.setattr(preflight, "SAMPLE", 16)
    part = estimated(seeds, tmp_path, **BOUNDED)
    assert (whole.rehearsed, part.rehearsed) == (64, 16)
    assert part.calls == whole.calls
    assert part.prompt_tokens == pytest.approx(whole.prompt_tokens, rel=0.05)
