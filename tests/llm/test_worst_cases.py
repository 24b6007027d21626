"""The budget where an endpoint ignores the cap of an answer, by the server's own count."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import pytest

from infembed_ray.config.llm import ChatModel, Limits
from infembed_ray.llm.chat import IGNORED, UNCAPPED, Completion, Dialect, RunFailure
from infembed_ray.llm.client import ChatClient
from infembed_ray.llm.dialects import learn
from infembed_ray.synthesis.templates import probe
from tests.llm.test_client import TABLE, endpoint, using
from tests.support.chat import passage_request
from tests.support.stand_in_llm import StandIn, stand_in

pytestmark = pytest.mark.integration

CAP = 20
"""The stand-in's passages have 58 to 75 tokens."""
STEPS = ("a", "b", "c", "d", "e")
REQUESTS = [
    replace(
        passage_request(f"query {number} {'word ' * random.Random(number).randrange(12)}"),
        parameters={"max_completion_tokens": CAP},
        step=STEPS[number % len(STEPS)],
    )
    for number in range(3000)
]


def spent_usd(server: StandIn) -> float:
    return sum(e.get("prompt_tokens", 0) * 1e-6 + e.get("completion_tokens", 0) * 2e-6 for e in server.log())


def spend(server: StandIn, journal: Path, budget_usd: float, slots: int, dialect: Dialect | None) -> list[str]:
    """Ask until the budget is used up; return the warnings."""
    warnings: list[str] = []

    async def until_it_ends(chat: ChatClient) -> None:
        ended = await asyncio.gather(*map(chat.complete, REQUESTS), return_exceptions=True)
        failures = {str(each) for each in ended if not isinstance(each, Completion)}
        assert failures
        assert all("used up" in each for each in failures)

    async def know() -> list[dict[str, Dialect]]:
        return [{} if dialect is None else {"small": dialect}]

    def note(warning: str) -> None:
        warnings.append(warning)

    bounds = Limits(budget_usd=budget_usd)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("infembed_ray.llm.lease.Lease.warn", lambda _, warning: note(warning))
        using(endpoint(server), journal, until_it_ends, bounds=bounds, in_flight=slots, learn=know)
    return warnings


@pytest.mark.parametrize(("budget_usd", "slots"), [(0.03, 32), (0.1, 400)])
@pytest.mark.parametrize("dialect", [{UNCAPPED: IGNORED}, None], ids=["ignored", "not asked"])
def test_the_budget_holds_where_the_cap_is_ignored(
    tmp_path: Path, budget_usd: float, slots: int, dialect: Dialect | None
) -> None:
    with stand_in(latency_s=0.05, jitter_s=0.05, ignored_caps="max_completion_tokens,max_tokens") as server:
        warnings = spend(server, tmp_path, budget_usd, slots, dialect)
        spent, answered = spent_usd(server), len(server.log("answered"))
        together = max(entry["in_flight"] for entry in server.log())
    print(f"budget {budget_usd}, {slots} slots: {spent:.4f} USD, {answered} answers, {together} in flight")
    assert 0.7 * budget_usd < spent <= budget_usd
    assert len(set(warnings)) == 1
    assert "model small: an answer has more tokens than its max_tokens" in warnings[0]
    assert together >= 16  # more answers let more requests go


def test_an_endpoint_that_stops_to_obey_exceeds_the_budget_only_by_what_was_in_flight(tmp_path: Path) -> None:
    slots, budget_usd = 64, 0.03
    with stand_in(latency_s=0.05, ignored_caps="max_completion_tokens,max_tokens") as server:
        spend(server, tmp_path, budget_usd, slots, {})
        spent = spent_usd(server)
        excess = max(e.get("completion_tokens", 0) - CAP for e in server.log()) * 2e-6
    assert spent <= budget_usd + slots * excess


def test_without_a_budget_nothing_waits_for_the_first_answers(tmp_path: Path) -> None:
    async def ask(chat: ChatClient) -> None:
        await asyncio.gather(*map(chat.complete, REQUESTS[:32]))

    with stand_in(latency_s=0.3, ignored_caps="max_completion_tokens,max_tokens") as server:
        using(endpoint(server), tmp_path, ask)
        assert max(entry["in_flight"] for entry in server.log()) == 32


def test_the_name_that_the_pre_flight_finds_caps_the_answers(tmp_path: Path) -> None:
    async def know() -> list[dict[str, Dialect]]:
        model = ChatModel(model="small", max_tokens=CAP)
        return list((await learn({"endpoint": endpoint(server)}, {"generator": probe(model)}, TABLE)).dialects)

    async def ask(chat: ChatClient) -> list[Completion | BaseException]:
        return await asyncio.gather(*map(chat.complete, REQUESTS[:600]), return_exceptions=True)

    with stand_in(latency_s=0.05, ignored_caps="max_completion_tokens") as server:
        ended = using(endpoint(server), tmp_path, ask, bounds=Limits(budget_usd=0.02), in_flight=400, learn=know)
        spent = spent_usd(server)
    assert any(isinstance(each, RunFailure) for each in ended)
    assert {each.completion_tokens for each in ended if isinstance(each, Completion)} == {CAP}
    assert 0.5 * 0.02 < spent <= 0.02 + 0.001  # the pre-flight's questions are counted by its caller
