"""Several collections behind one API on a real Ray Serve, upgraded under load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray import serve
from ray.serve.context import _get_global_client

from infembed_ray.config.serving import ServeSettings
from infembed_ray.serving import distributed
from infembed_ray.serving.distributed import run, serving
from infembed_ray.serving.http.auth import new_key
from infembed_ray.serving.plan import Plan
from infembed_ray.serving.release import APPLICATION
from tests.serving.http_client import ask, under_load
from tests.serving.indexes import AGAIN, PASSAGES, publish_index
from tests.support.ports import free_port
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.ray]

NEWS = {f"news-{id}": f"News: {text}" for id, text in PASSAGES.items()}


@pytest.fixture(scope="module")
def keys(root: Path) -> dict[str, str]:
    file = root / "keys"
    return {
        "all": new_key("all", file, "read,write,admin"),
        "news": new_key("news", file, "read,write", collections="news"),
    }


@pytest.fixture(scope="module")
def settings(root: Path, minilm: str, keys: dict[str, str]) -> ServeSettings:
    places = {
        name: publish_index(root / name, minilm, texts, shards=1) for name, texts in (("a", PASSAGES), ("b", NEWS))
    }
    return ServeSettings(
        index=str(places["a"]),
        collections={"news": str(places["b"])},
        port=free_port(),
        api_keys_env=None,
        api_keys_file=str(root / "keys"),
        request_timeout_s=8,
        cpus_per_encoder=0.5,
        dtype="float32",
        wait=False,
    )


@pytest.fixture(scope="module")
def api(settings: ServeSettings, ray_cluster: None) -> Iterator[str]:
    with serving(settings) as url:
        yield url
    distributed.stop()  # the release that replaced it


@pytest.fixture
def key(keys: dict[str, str]) -> dict[str, str]:
    return {"Authorization": f"Bearer {keys['all']}"}


def search(api: str, key: dict[str, str], path: str, query: str, **more: Any) -> list[str]:
    status, answer, _ = ask(f"{api}{path}/search", {"query": query, **more}, **key)
    assert status == 200, answer
    return [hit["id"] for hit in answer["hits"]]


def replicas() -> dict[str, set[str]]:
    """Return the ids of the running replicas of each application."""
    return {
        name: {
            replica["replica_id"]
            for deployment in application["deployments"].values()
            for replica in deployment["replicas"]
            if replica["state"] == "RUNNING"
        }
        for name, application in _get_global_client().get_serve_details()["applications"].items()
    }


def test_each_collection_answers_from_its_own_index_and_documents(api: str, key: dict[str, str]) -> None:
    assert set(search(api, key, "/v1", "diabetes", top_k=100)) == set(PASSAGES)
    assert set(search(api, key, "/v1/collections/index", "diabetes", top_k=100)) == set(PASSAGES)
    assert set(search(api, key, "/v1/collections/news", "diabetes", top_k=100)) == set(NEWS)
    text = "The Kalmar Union joined Denmark, Norway and Sweden under one crown in 1397."
    news = f"{api}/v1/collections/news/documents"
    status, answer, _ = ask(news, {"documents": [{"id": "history/kalmar", "text": text}]}, "PUT", **key)
    assert status == 200, answer
    fresh = {"top_k": 1, "min_sequence": answer["sequence"]}
    assert search(api, key, "/v1/collections/news", "Kalmar Union", **fresh) == ["history/kalmar"]
    assert "history/kalmar" not in search(api, key, "/v1", "Kalmar Union", top_k=100)
    assert ask(f"{api}/v1/documents/history/kalmar", **key)[0] == 404
    assert ask(f"{news}/history/kalmar", **key)[1]["text"] == text
    assert ask(news, {"ids": ["history/kalmar"]}, "DELETE", **key)[0] == 200
    assert ask(f"{api}/v1/collections/law/search", {"query": "x"}, **key)[1]["error"]["message"] == (
        "there is no collection 'law'; there are index, news"
    )


def test_an_upgrade_of_one_collection_fails_no_request_and_restarts_no_other_part(
    api: str, key: dict[str, str], settings: ServeSettings, root: Path, minilm: str, capsys: pytest.CaptureFixture[str]
) -> None:
    other = publish_index(root / "c", minilm, AGAIN, shards=1)
    before, release = replicas(), Plan.resolve(settings).release
    new = settings.model_copy(update={"collections": {"news": str(other)}})
    news = "/v1/collections/news/search"
    with under_load(api, 2, headers=key) as plain, under_load(api, 2, news, key) as answers:
        wait_until(lambda: min(len(plain), len(answers)) > 20)
        run(new)
        wait_until(lambda: any(answer.body["index_version"] == other.name for answer in answers[-4:]))
    for of_one in (plain, answers):
        assert Counter(answer.status for answer in of_one) == {200: len(of_one)}
    assert {answer.body["index_version"] for answer in plain} == {Path(settings.index).name}
    assert {hit["id"] for answer in plain for hit in answer.body["hits"]} <= set(PASSAGES)
    versions = {Path(settings.collections["news"]).name: set(NEWS), other.name: set(AGAIN)}
    assert {answer.body["index_version"] for answer in answers} == set(versions)
    for answer in answers:
        assert {hit["id"] for hit in answer.body["hits"]} <= versions[answer.body["index_version"]]
    after = replicas()
    for kept in (release.default.index.application, *release.encoders, APPLICATION):
        assert before[kept] == after[kept] != set()
    assert release.collections["news"].index.application not in serve.status().applications
    printed = capsys.readouterr().out
    assert f"from index {Path(settings.index).name}, news {other.name}" in printed
