"""What a key sees of an API with several collections: over the real routes and the real middleware."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from infembed_ray.serving.http.app import create_app
from infembed_ray.serving.http.auth import ApiKeys, new_key
from infembed_ray.serving.service import Service
from tests.serving.debug import CARD, DebugService
from tests.serving.http.clients import client_of, refused

NAMES = ("index", "news", "law")


class Api:
    """Three collections over one model; `law` has another one."""

    def __init__(self, keys: ApiKeys) -> None:
        cards = {name: CARD.model_copy(update={"index_version": f"of-{name}"}) for name in NAMES}
        cards["law"] = cards["law"].model_copy(update={"id": "legal"})
        self.services = {name: DebugService(card=card) for name, card in cards.items()}
        for service in self.services.values():
            service.documents = {}
        served: dict[str, Service] = dict(self.services)
        self.client = client_of(create_app(self.services["index"], "f", keys, collections=lambda: served))


@pytest.fixture
def api() -> Api:
    return Api(ApiKeys())


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, dict[str, str]]:
    """Headers with a key of all collections, one of `news`, and one of `news` and one that is not served."""
    file = tmp_path / "keys"
    made = {
        "all": new_key("all", file, "read,write,admin"),
        "news": new_key("news", file, "read,write", collections="news"),
        "gone": new_key("gone", file, "read", collections="news,gone"),
        "writer": new_key("writer", file, "write", collections="index,law"),
    }
    return {name: {"Authorization": f"Bearer {key}"} for name, key in made.items()}


@pytest.fixture
def locked(tmp_path: Path, keys: dict[str, dict[str, str]]) -> TestClient:
    return Api(ApiKeys(file=tmp_path / "keys")).client


def base(name: str) -> str:
    return f"/v1/collections/{name}"


def test_the_default_collection_answers_with_and_without_its_name(api: Api) -> None:
    assert api.client.put("/v1/documents", json={"documents": [{"id": "a", "text": "t"}]}).status_code == 200
    body = {"query": "t", "top_k": 3}
    plain, named = (api.client.post(path, json=body).json() for path in ("/v1/search", f"{base('index')}/search"))
    assert plain == named
    assert [hit["id"] for hit in plain["hits"]] == ["a"]
    assert api.client.get("/v1/documents/a").json() == api.client.get(f"{base('index')}/documents/a").json()


def test_the_list_has_the_card_of_each_collection(api: Api) -> None:
    data = api.client.get("/v1/collections").json()["data"]
    assert [(one["object"], one["name"], one["model"]["index_version"], one["model"]["id"]) for one in data] == [
        ("collection", "index", "of-index", "debug"),
        ("collection", "news", "of-news", "debug"),
        ("collection", "law", "of-law", "legal"),
    ]
    models = api.client.get("/v1/models").json()["data"]
    assert [(card["id"], card["index_version"]) for card in models] == [("debug", "of-index"), ("legal", "of-law")]
    assert api.client.get("/v1/models/legal").json()["index_version"] == "of-law"
    error = refused(api.client.get("/v1/models/gpt-4"), 404)
    assert error["message"].endswith("the served model is 'debug', 'legal'")


def test_an_unknown_collection_is_404_and_names_the_known_ones(api: Api) -> None:
    for answer in (
        api.client.post(f"{base('sport')}/search", json={"query": "q"}),
        api.client.put(f"{base('sport')}/documents", json={"documents": [{"id": "a", "text": "t"}]}),
        api.client.request("DELETE", f"{base('sport')}/documents", json={"ids": ["a"]}),
        api.client.delete(f"{base('sport')}/documents/a"),
        api.client.get(f"{base('sport')}/documents/a"),
    ):
        error = refused(answer, 404)
        assert (error["code"], error["param"]) == ("collection_not_found", "collection")
        assert error["message"] == "there is no collection 'sport'; there are index, news, law"
    for path in ("/v1/collections//search", "/v1/collections/a/b/search"):
        assert api.client.post(path, json={"query": "q"}).status_code in (404, 405)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(NAMES), st.sampled_from(["put", "delete"]), st.sampled_from(["a", "b", "c/d", "e?"])),
        max_size=25,
    )
)
def test_changes_of_one_collection_are_seen_in_it_alone(changes: list[tuple[str, str, str]]) -> None:
    api = Api(ApiKeys())
    expected: dict[str, dict[str, str]] = {name: {} for name in NAMES}
    for number, (name, change, id) in enumerate(changes):
        if change == "put":
            document = {"id": id, "text": f"{name} {number}"}
            answer = api.client.put(f"{base(name)}/documents", json={"documents": [document]})
            expected[name][id] = document["text"]
        else:
            answer = api.client.request("DELETE", f"{base(name)}/documents", json={"ids": [id]})
            expected[name].pop(id, None)
        assert answer.status_code == 200
        # Sequence numbers count the changes of one collection.
        assert answer.json()["sequence"] == sum(other == name for other, _, _ in changes[: number + 1])
    for name in NAMES:
        hits = api.client.post(f"{base(name)}/search", json={"query": "q", "top_k": 100}).json()["hits"]
        assert {hit["id"]: hit["text"] for hit in hits} == expected[name]


def test_min_sequence_and_read_only_are_of_the_collection(api: Api) -> None:
    api.services["news"].sequence = 7
    assert api.client.post(f"{base('news')}/search", json={"query": "q", "min_sequence": 7}).status_code == 200
    error = refused(api.client.post("/v1/search", json={"query": "q", "min_sequence": 7}), 503)
    assert error["code"] == "changes_not_applied"
    api.services["law"].card = api.services["law"].card.model_copy(update={"writable": False})
    body = {"documents": [{"id": "a", "text": "t"}]}
    assert refused(api.client.put(f"{base('law')}/documents", json=body), 403)["code"] == "read_only"
    assert api.client.put(f"{base('news')}/documents", json=body).status_code == 200


def test_a_search_names_the_model_of_its_collection_and_embeddings_are_made_by_the_named_model(api: Api) -> None:
    assert api.client.post(f"{base('law')}/search", json={"query": "q", "model": "legal"}).status_code == 200
    assert refused(api.client.post("/v1/search", json={"query": "q", "model": "legal"}), 404)["code"] == (
        "model_not_found"
    )
    counters = {name: service.engine.counters for name, service in api.services.items()}
    before = counters["law"].texts
    assert api.client.post("/v1/embeddings", json={"input": "q", "model": "legal"}).json()["model"] == "legal"
    assert counters["law"].texts == before + 1
    assert api.client.post("/v1/embeddings", json={"input": "q"}).json()["model"] == "debug"
    assert (counters["index"].texts, counters["news"].texts) == (1, 0)


def test_ready_means_that_all_collections_are(api: Api) -> None:
    assert api.client.get("/readyz").status_code == 200
    api.services["law"].is_ready = False
    assert refused(api.client.get("/readyz"), 503)["code"] == "not_ready"
    api.services["law"].is_ready, api.services["news"].stuck = True, "shard-0: a segment is corrupted"
    error = refused(api.client.get("/readyz"), 503)
    assert error["code"] == "changes_stuck"
    assert "index of-news: shard-0: a segment is corrupted" in error["message"]
    assert "collection" not in error["message"]  # the path needs no key


# ------------------------------------------------------------------------------------------------------------ keys


def requests(client: TestClient, name: str, headers: dict[str, str]) -> dict[str, Any]:
    """Each request to a collection, by its path with the name, and for the default collection without it too."""
    answers = {}
    for prefix in ("/v1", base(name)) if name == "index" else (base(name),):
        body = {"documents": [{"id": "a", "text": "t"}]}
        answers |= {
            f"POST {prefix}/search": client.post(f"{prefix}/search", json={"query": "q"}, headers=headers),
            f"PUT {prefix}/documents": client.put(f"{prefix}/documents", json=body, headers=headers),
            f"GET {prefix}/documents/a": client.get(f"{prefix}/documents/a", headers=headers),
            f"DELETE {prefix}/documents": client.request(
                "DELETE", f"{prefix}/documents", json={"ids": ["b"]}, headers=headers
            ),
            f"DELETE {prefix}/documents/b": client.delete(f"{prefix}/documents/b", headers=headers),
        }
    return answers


def test_a_key_of_all_collections_uses_all(locked: TestClient, keys: dict[str, dict[str, str]]) -> None:
    for name in NAMES:
        assert {answer.status_code for answer in requests(locked, name, keys["all"]).values()} == {200}
    assert locked.get("/metrics", headers=keys["all"]).status_code == 200


def test_a_key_of_one_collection_uses_that_one_alone(locked: TestClient, keys: dict[str, dict[str, str]]) -> None:
    assert {answer.status_code for answer in requests(locked, "news", keys["news"]).values()} == {200}
    for name in ("index", "law", "sport", "NEWS", "news%2F"):
        for request, answer in requests(locked, name, keys["news"]).items():
            assert answer.status_code in (403, 404), request
            if answer.status_code == 403:
                error = refused(answer, 403)
                assert error["code"] == "collection_not_allowed"
                assert error["message"].endswith("it may use news (/v1/collections/NAME)")
            assert not any(other in answer.text for other in ("of-law", "of-index"))
    # No difference between a collection that there is and one that there is not.
    served, unknown = (requests(locked, name, keys["news"]) for name in ("law", "foo"))
    assert [answer.text.replace("law", "foo") for answer in served.values()] == [a.text for a in unknown.values()]


def test_a_key_of_one_collection_sees_no_other_in_lists_and_errors(
    locked: TestClient, keys: dict[str, dict[str, str]]
) -> None:
    assert [one["name"] for one in locked.get("/v1/collections", headers=keys["news"]).json()["data"]] == ["news"]
    (card,) = locked.get("/v1/models", headers=keys["news"]).json()["data"]
    assert card["index_version"] == "of-news"
    assert refused(locked.get("/v1/models/legal", headers=keys["news"]), 404)["message"].endswith("model is 'debug'")
    assert refused(locked.get("/metrics", headers=keys["news"]), 403)["code"] == "missing_scope"
    error = refused(locked.post(f"{base('gone')}/search", json={"query": "q"}, headers=keys["gone"]), 404)
    assert error["message"] == "there is no collection 'gone'; there are news"
    assert locked.post("/v1/embeddings", json={"input": "q"}, headers=keys["news"]).status_code == 200


def test_scopes_hold_beside_collections(locked: TestClient, keys: dict[str, dict[str, str]]) -> None:
    error = refused(locked.post(f"{base('law')}/search", json={"query": "q"}, headers=keys["writer"]), 403)
    assert error["code"] == "missing_scope"
    body = {"documents": [{"id": "a", "text": "t"}]}
    assert locked.put(f"{base('law')}/documents", json=body, headers=keys["writer"]).status_code == 200
    assert locked.put("/v1/documents", json=body, headers=keys["writer"]).status_code == 200
    assert refused(locked.put(f"{base('news')}/documents", json=body, headers=keys["writer"]), 403)["code"] == (
        "collection_not_allowed"
    )


def test_a_request_does_not_inherit_the_collections_of_the_one_before(
    locked: TestClient, keys: dict[str, dict[str, str]]
) -> None:
    with locked:  # one event loop for all requests
        for name, seen in (("news", 1), ("all", 3), ("news", 1), ("all", 3)):
            assert len(locked.get("/v1/collections", headers=keys[name]).json()["data"]) == seen
