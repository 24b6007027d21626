from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI

from infembed_ray.config.serving import FilterModelSettings
from infembed_ray.serving.filter_suggestions import FilterSuggester
from infembed_ray.serving.http.app import create_app
from infembed_ray.serving.http.auth import ApiKeys, new_key
from tests.serving.debug import DebugService
from tests.serving.http.clients import client_of, make_app, refused
from tests.support.stand_in_llm import stand_in

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def llm() -> Iterator[str]:
    with stand_in() as running:
        yield running.url


def app(url: str, keys: ApiKeys | None = None) -> FastAPI:
    suggester = FilterSuggester(FilterModelSettings(model="small", base_url=url, api_key_env=None))
    return create_app(DebugService(), "fingerprint", keys or ApiKeys(), suggester=suggester)


def test_a_filter_is_suggested_and_a_search_takes_it(llm: str) -> None:
    client = client_of(app(llm))
    answer = client.post("/v1/filters", json={"query": "passage", "instruction": "Only those since 2022. No drafts."})
    assert answer.status_code == 200
    body = answer.json()
    assert body["object"] == "filter"
    assert body["filter"] == {"year": {"gte": 2022}, "draft": {"ne": True}}
    assert body["notes"] == []
    searched = client.post("/v1/search", json={"query": "passage", "filter": body["filter"]})
    assert {hit["metadata"]["year"] for hit in searched.json()["hits"]} == {2022, 2023, 2024}


def test_without_an_llm_the_answer_names_the_setting() -> None:
    error = refused(client_of(make_app()).post("/v1/filters", json={"instruction": "Since 2020."}), 404)
    assert "filter_model.model" in error["message"]
    assert error["code"] == "no_filter_model"


def test_an_unreachable_llm_is_a_502_without_its_address() -> None:
    error = refused(
        client_of(app("http://127.0.0.1:1/v1")).post("/v1/filters", json={"instruction": "Since 2020."}), 502
    )
    assert error["code"] == "no_suggestion"
    assert "127.0.0.1" not in error["message"]


def test_bad_requests_are_rejected(llm: str) -> None:
    client = client_of(app(llm))
    assert refused(client.post("/v1/filters", json={"instruction": " "}), 400)["param"] == "instruction"
    assert refused(client.post("/v1/filters", json={"query": "x"}), 400)["param"] == "instruction"
    assert refused(client.post("/v1/filters", json={"instruction": "x" * 4001}), 400)["param"] == "instruction"


def test_a_key_needs_the_scope_read(llm: str, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    reader, writer = (new_key(scope, file, scope) for scope in ("read", "write"))
    client = client_of(app(llm, ApiKeys(file=file)))
    body = {"instruction": "Since 2020."}
    assert client.post("/v1/filters", json=body, headers={"Authorization": f"Bearer {reader}"}).status_code == 200
    refused(client.post("/v1/filters", json=body, headers={"Authorization": f"Bearer {writer}"}), 403)
    refused(client.post("/v1/filters", json=body), 401)
