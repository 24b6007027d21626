"""Rows against an endpoint of which every fourth response has one of 29 faults."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from infembed_ray.config.llm import Endpoint, Limits
from infembed_ray.config.synthesis import SynthesizeSettings
from infembed_ray.llm import client
from infembed_ray.llm.client import ChatClient
from infembed_ray.llm.journal import Journal
from infembed_ray.llm.ledger import Grant, LeaseReport, Ledger, RateLimiter
from infembed_ray.llm.prices import PriceTable
from infembed_ray.records.tables import Seed
from infembed_ray.synthesis.pipeline import Outcome, synthesize
from tests.support.stand_in_answers import CHAOS
from tests.support.stand_in_llm import StandIn, stand_in
from tests.synthesis.runs import ROWS, answered_most

pytestmark = pytest.mark.integration

SEEDS = [Seed(**row) for row in ROWS]
POOL = [seed.passage for seed in SEEDS]
MODEL = {"model": "m"}
UNMENDED = ("HTTP 400", "unreadable answer")
"""Errors of rows that no further request may mend."""
UNLUCKY = ("refused", "empty answer", "cut off", "malformed answer")
"""Errors of rows whose second answer was of no use, either."""


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "BACKOFF_S", 0.01)


def outcomes(server: StandIn, journal: Path, options: dict[str, Any]) -> list[Outcome]:
    """Make the records of all seeds at once."""
    model = {**MODEL, **options}
    settings = SynthesizeSettings.from_mapping({"seeds": "", "output": "", "generator": model, "judge": model})

    async def run() -> list[Outcome]:
        ledger = Ledger(Limits())

        async def exchange(report: LeaseReport) -> Grant:
            return ledger.exchange(report)

        limiter = RateLimiter(Limits(), 32, exchange, interval_s=0.02)
        endpoint = Endpoint(base_url=server.url, api_key_env=None, timeout_s=1, max_retries=9)
        chat = ChatClient(endpoint, Journal(journal), limiter, PriceTable("2026-01-01", {}))
        try:
            return await asyncio.gather(*(synthesize(seed, POOL, settings, chat.complete) for seed in SEEDS))
        finally:
            await chat.close()

    return asyncio.run(run())


@pytest.mark.parametrize("options", [{}, {"max_tokens": 500, "structured": True}], ids=["text", "json"])
def test_every_row_that_a_further_request_can_mend_ends_as_without_faults(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    with stand_in() as flawless:
        wanted = outcomes(flawless, tmp_path / "flawless", options)
    with stand_in(chaos=0.25, seed=2) as server:
        got = outcomes(server, tmp_path / "journal", options)
        log = server.log()
        assert {*CHAOS} <= {entry["ended"] for entry in log} | {entry.get("fault") for entry in log}
        assert answered_most(server) == 1
    assert len(got) == len(SEEDS)
    errors = [row.row["error"] for row in got if row.kind == "dead_letter"]
    unmended = [error for error in errors if error.startswith(UNMENDED)]
    unlucky = [error for error in errors if error.startswith(UNLUCKY)]
    assert len(unmended) + len(unlucky) == len(errors)
    assert len(unlucky) <= len(SEEDS) // 16
    for mine, flawless_row in zip(got, wanted, strict=True):
        if mine.kind != "dead_letter":
            assert mine.kind == flawless_row.kind
            assert {**mine.row, "provenance": None} == {**flawless_row.row, "provenance": None}
    kept = [sum(row.kind == "kept" for row in rows) for rows in (got, wanted)]
    assert kept[0] >= kept[1] - len(errors)

    with stand_in() as later:  # the journal has every answer, also those of no use
        again = outcomes(later, tmp_path / "journal", options)
        unanswered = sum(error.startswith("HTTP 400") for error in errors)
        assert [row.kind for row in again if row.paid.calls] == ["kept"] * unanswered
    assert [row.row for row in again if not row.paid.calls] == [row.row for row in got if not _unanswered(row)]


def _unanswered(row: Outcome) -> bool:
    return row.kind == "dead_letter" and row.row["error"].startswith("HTTP 400")
