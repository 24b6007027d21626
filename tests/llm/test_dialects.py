import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from infembed_ray.config.llm import ChatModel, Endpoint
from infembed_ray.llm.chat import CAP, IGNORED, UNCAPPED, Request, RunFailure, adapted
from infembed_ray.llm.dialects import Learned, learn, most_usd
from infembed_ray.llm.prices import PriceTable
from infembed_ray.llm.rate_limits import REQUESTS, TOKENS, USD
from infembed_ray.synthesis.templates import probe
from tests.llm.test_client import endpoint, using
from tests.support.chat import passage_request
from tests.support.stand_in_llm import StandIn, stand_in

pytestmark = pytest.mark.integration

TABLE = PriceTable("2026-01-01", {"small": (1.0, 2.0)})
MODEL = ChatModel(model="small", temperature=0.5, max_tokens=64, reasoning_effort="low", structured=True)


def learned(*servers: StandIn, model: ChatModel = MODEL, **settings: Any) -> Learned:
    endpoints = {f"endpoint.{number}": endpoint(server, **settings) for number, server in enumerate(servers)}
    return asyncio.run(learn(endpoints, {"generator": probe(model)}, TABLE))


def test_a_model_that_takes_everything_is_asked_twice_and_nothing_is_adapted() -> None:
    with stand_in() as server:
        found = learned(server)
        assert [entry["ended"] for entry in server.log()] == ["probed"] * 2  # once with a tiny cap
    assert found.dialects == ({"small": {}},)
    assert found.report == [
        f"endpoint.0 {server.url}: small takes temperature, max_completion_tokens, reasoning_effort, response_format"
    ]
    assert found.used[REQUESTS] == 2
    assert found.used[USD] == pytest.approx(found.used[TOKENS] * 1e-6, rel=0.5)


@pytest.mark.parametrize(
    ("refused", "dialect"),
    [
        ("temperature", {"temperature": None}),
        ("reasoning_effort", {"reasoning_effort": None}),
        ("max_completion_tokens", {"max_completion_tokens": "max_tokens"}),
        ("json_schema", {"response_format": "json_object"}),
        ("response_format", {"response_format": None}),
    ],
)
def test_a_refused_parameter_is_renamed_or_left_out(refused: str, dialect: dict[str, str | None]) -> None:
    with stand_in(refused_parameters=f"other:max_tokens,small:{refused}") as server:
        found = learned(server)
        assert len(server.log("refused_parameter")) <= 2
    assert found.dialects == ({"small": dialect},)
    change = f"is sent as {instead}" if (instead := next(iter(dialect.values()))) else "is left out"
    assert found.report[0].endswith(f"; {next(iter(dialect))} {change}")


def test_several_refusals_are_adapted_together() -> None:
    with stand_in(refused_parameters="small:temperature,small:max_completion_tokens,small:json_schema") as server:
        found = learned(server)
    assert found.dialects == (
        {"small": {"temperature": None, "max_completion_tokens": "max_tokens", "response_format": "json_object"}},
    )


def test_a_parameter_refused_in_every_form_is_named_with_its_setting() -> None:
    refused = "small:max_completion_tokens,small:max_tokens"
    with stand_in(refused_parameters=refused) as server, pytest.raises(RunFailure) as failure:
        learned(server)
    message = str(failure.value)
    assert message.startswith("generator.max_tokens: small at http://127.0.0.1")
    assert "refuses max_completion_tokens=64 in every form (HTTP 400" in message
    assert "set endpoint.0.probe=false" in message
    assert "\n" not in message


def test_a_refusal_without_a_reason_of_ours_names_the_model() -> None:
    with stand_in(refused_model="small") as server, pytest.raises(RunFailure) as failure:
        learned(server)
    assert str(failure.value).startswith("generator.model=small: http://127.0.0.1")
    assert "This request is not acceptable" in str(failure.value)


def test_an_endpoint_that_refuses_the_key_is_reported_while_another_stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_KEY", "wrong")
    with stand_in(key="right") as locked, stand_in(refused_parameters="small:temperature") as free:
        found = learned(locked, free, api_key_env="STAND_IN_KEY")
        assert found.dialects == ({}, {"small": {"temperature": None}})
        assert any("refuses its key" in line for line in found.report)
        with pytest.raises(RunFailure, match="refuses its key"):
            learned(locked, api_key_env="STAND_IN_KEY")


@pytest.mark.parametrize(
    ("ignored", "refused", "dialect"),
    [
        ("max_completion_tokens", "", {CAP: "max_tokens"}),
        ("max_tokens", "", {}),
        ("max_completion_tokens,max_tokens", "", {UNCAPPED: IGNORED}),
        ("max_completion_tokens", "small:max_tokens", {UNCAPPED: IGNORED}),
        ("max_tokens", "small:max_completion_tokens", {CAP: "max_tokens", UNCAPPED: IGNORED}),
    ],
)
def test_the_cap_is_sent_under_the_name_that_the_model_keeps_to(
    ignored: str, refused: str, dialect: dict[str, str | None]
) -> None:
    with stand_in(ignored_caps=ignored, refused_parameters=refused) as server:
        found = learned(server)
    assert found.dialects == ({"small": dialect},)
    assert ("it ignores the cap of an answer" in found.report[0]) == (UNCAPPED in dialect)


def test_an_endpoint_without_a_probe_is_not_asked() -> None:
    with stand_in(refused_parameters="small:temperature") as server:
        assert learned(server, probe=False) == Learned(({},), [], {REQUESTS: 0, TOKENS: 0, USD: 0.0})
        assert not server.log()


def serve_and_learn(answer: Callable[[web.Request], Awaitable[web.Response]]) -> Learned:
    async def run() -> Learned:
        application = web.Application()
        application.router.add_post("/v1/chat/completions", answer)
        async with TestServer(application) as server:
            where = Endpoint(base_url=str(server.make_url("/v1")), api_key_env=None)
            return await learn({"endpoint": where}, {"generator": probe(MODEL)}, TABLE)

    return asyncio.run(run())


def test_a_validation_error_that_names_a_parameter_in_its_text_is_understood() -> None:
    async def answer(request: web.Request) -> web.Response:
        if "max_completion_tokens" in await request.json():
            fault = {"loc": ["body", "max_completion_tokens"], "msg": "Extra inputs are not permitted"}
            return web.json_response({"detail": [fault]}, status=422)
        return web.json_response({"choices": [{"message": {"content": "yes"}}]})

    found = serve_and_learn(answer)
    assert found.dialects == ({"small": {"max_completion_tokens": "max_tokens", UNCAPPED: None}},)  # too short to tell
    assert found.used[TOKENS] > 64  # it did not count its tokens, so they count at their worst case


def test_a_refusal_in_a_response_with_status_200_is_understood() -> None:
    async def answer(request: web.Request) -> web.Response:
        if "temperature" in await request.json():
            return web.json_response({"error": {"code": 400, "message": "temperature is not supported"}})
        return web.json_response({"choices": [{"message": {"content": "yes"}}]}, status=201)

    assert serve_and_learn(answer).dialects == ({"small": {"temperature": None, UNCAPPED: None}},)


def test_a_busy_endpoint_is_asked_again_and_then_left_unknown() -> None:
    asked = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request)
        return web.json_response({"error": {"message": "overloaded"}}, status=503)

    found = serve_and_learn(answer)
    assert len(asked) == 3
    assert found.dialects == ({},)
    assert "unknown parameters (HTTP 503: overloaded)" in found.report[0]


def test_what_a_request_may_have_cost_counts() -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "bad gateway"}}, status=502)

    found, requests = serve_and_learn(answer), {"generator": probe(MODEL)}
    most = most_usd({"endpoint": Endpoint(), "more_endpoints.0": Endpoint(probe=False)}, requests, TABLE)
    assert 0 < found.used[USD] <= most


def test_only_the_sent_body_is_adapted_so_another_dialect_asks_nothing_again(tmp_path: Path) -> None:
    asked = replace(passage_request("tea"), parameters={"max_completion_tokens": 150, "temperature": 0.5})
    dialect = {"max_completion_tokens": "max_tokens", "temperature": None}

    async def know() -> list[dict[str, dict[str, str | None]]]:
        return [{"small": dialect}]

    with stand_in(refused_parameters="small:temperature,small:max_completion_tokens") as server:
        first = using(endpoint(server), tmp_path, lambda chat: chat.complete(asked), learn=know)
        again = using(endpoint(server), tmp_path, lambda chat: chat.complete(asked))
        assert len(server.log()) == 1
    assert again == replace(first, replayed=True)


def test_what_is_learned_is_asked_for_once_and_only_before_something_is_sent(tmp_path: Path) -> None:
    calls = []

    async def know() -> list[dict[str, dict[str, str | None]]]:
        calls.append(1)
        await asyncio.sleep(0.05)
        return [{}]

    requests = [passage_request(f"query {number}") for number in range(8)]
    with stand_in() as server:
        for _ in range(2):
            using(endpoint(server), tmp_path, lambda chat: asyncio.gather(*map(chat.complete, requests)), learn=know)
    assert len(calls) == 1


def test_a_body_is_adapted_only_where_it_has_the_parameter() -> None:
    request = Request("m", (), "p", "s", "r", {"response_format": {"type": "json_schema"}, "max_completion_tokens": 3})
    dialect = {"response_format": "json_object", "temperature": None, "max_completion_tokens": "max_tokens"}
    sent = adapted(request.body, dialect)
    assert sent == {"model": "m", "messages": [], "response_format": {"type": "json_object"}, "max_tokens": 3}
    assert json.loads(request.sent)["max_completion_tokens"] == 3
