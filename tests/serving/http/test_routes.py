import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from starlette.testclient import TestClient

from infembed_ray.serving import schema
from infembed_ray.serving.http.auth import ApiKeys, new_key
from tests.serving.debug import CARD, PASSAGES, DebugService, listening
from tests.serving.http.clients import JSON, client_of, make_app, refused, vector


@pytest.fixture(scope="module")
def client() -> TestClient:
    """A client for tests that change nothing."""
    return client_of(make_app())


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({}, "ab"),
        ({"input_type": "passage"}, "ab"),
        ({"input_type": "query"}, "query: None ab"),
        ({"instruction": "I"}, "query: I ab"),
        ({"instruction": "I", "input_type": "query"}, "query: I ab"),
    ],
)
def test_an_instruction_makes_a_query_and_the_default_is_passage(
    client: TestClient, extra: dict[str, str], text: str
) -> None:
    data = client.post("/v1/embeddings", json={"input": "ab", "model": "debug", **extra}).json()["data"]
    np.testing.assert_allclose(data[0]["embedding"], vector(text), rtol=1e-6)


def ranking(query: str, instruction: str | None) -> list[str]:
    """Return the ids of all passages, best first, from the vectors."""
    scores = [vector(f"query: {instruction} {query}") @ vector(passage.text) for passage in PASSAGES]
    return [PASSAGES[i].id for i in np.argsort(scores)[::-1]]


def test_search_ranks_the_passages_under_the_instruction(client: TestClient) -> None:
    answer = client.post("/v1/search", json={"query": "q", "instruction": "I", "top_k": 2})
    assert answer.status_code == 200
    body = answer.json()
    assert [hit["id"] for hit in body["hits"]] == ranking("q", "I")[:2]
    assert set(body["hits"][0]) == {"id", "score", "text", "metadata", "chunk", "rerank_score"}
    del body["hits"]
    assert body == {
        "object": "search_results",
        "index_version": "v1",
        "sequence": 0,
        "model": "debug",
        "timings": {"encode_ms": 1.0, "search_ms": 2.0, "rerank_ms": None},
        "notes": [],
        "explanation": None,
    }
    plain = client.post("/v1/search", json={"query": "q", "instruction": ""}).json()["hits"]
    assert [hit["id"] for hit in plain] == ranking("q", None)


def reranking() -> TestClient:
    card = CARD.model_copy(update={"reranker": "cross"})
    return client_of(make_app(DebugService(card=card), news=DebugService(card=card)))


COHERE = {"model": "cross", "query": "q", "documents": [p.text for p in PASSAGES], "top_n": 3}
LANGCHAIN = {**COHERE, "max_tokens_per_doc": None, "documents": [{"text": p.text, "source": "a"} for p in PASSAGES]}


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/v1/collections/news/rerank"])
@pytest.mark.parametrize(
    ("changed", "instruction"),
    [
        ({}, None),
        (LANGCHAIN, None),
        ({"model": "debug", "top_n": None, "instruction": ""}, None),
        ({"instruction": "I", "return_documents": True, "model": None}, "I"),
        ({"instruction": "I", "top_n": 99, "return_documents": False}, "I"),
    ],
)
def test_passages_of_a_request_are_ranked_in_the_form_of_other_apis(
    path: str, changed: dict[str, Any], instruction: str | None
) -> None:
    body = COHERE | changed
    answer = reranking().post(path, json=body)
    assert answer.status_code == 200, answer.text
    results = answer.json()["results"]
    expected = [next(i for i, p in enumerate(PASSAGES) if p.id == id) for id in ranking("q", instruction)]
    assert [result["index"] for result in results] == expected[: body["top_n"]]
    for result in results:
        text = PASSAGES[result["index"]].text
        score = vector(f"query: {instruction} q") @ vector(text)
        assert result["relevance_score"] == pytest.approx(float(score), abs=1e-6)
        assert result["document"] == ({"text": text} if changed.get("return_documents") else None)
    assert answer.json()["model"] == "cross"


@pytest.mark.parametrize(
    ("changed", "status", "param"),
    [
        ({"documents": []}, 400, "documents"),
        ({"documents": ["a", " "]}, 400, "documents"),
        ({"documents": [{"title": "a"}]}, 400, "documents"),
        ({"documents": [3]}, 400, "documents"),
        ({"documents": ["a"] * 1001}, 400, "documents"),
        ({"top_n": 0}, 400, "top_n"),
        ({"instructions": "I"}, 400, "instructions"),
        ({"model": "rerank-v3.5"}, 404, "model"),
    ],
)
def test_a_rerank_request_that_cannot_be_answered_names_its_field(
    changed: dict[str, Any], status: int, param: str
) -> None:
    assert refused(reranking().post("/v1/rerank", json=COHERE | changed), status)["param"].startswith(param)


def test_an_explanation_has_the_phrases_and_the_passages_of_both_rankings(client: TestClient) -> None:
    asked = {"query": "q", "instruction": "For A, not B.", "top_k": 2}
    body = client.post("/v1/search", json=asked | {"explain": True}).json()
    assert body["hits"] == client.post("/v1/search", json=asked).json()["hits"]
    explanation = body["explanation"]
    assert explanation["phrases"] == [
        {"text": "For A,", "start": 0, "end": 6},
        {"text": "not B.", "start": 7, "end": 13},
    ]
    ranked, plain = ranking("q", "For A, not B.")[:2], ranking("q", None)[:2]
    assert [passage["id"] for passage in explanation["passages"]] == list(dict.fromkeys(ranked + plain))
    for passage in explanation["passages"]:
        assert passage.keys() == {"id", "rank", "rank_without", "score", "score_without", "effects"}
        assert len(passage["effects"]) == 2


def test_a_filter_selects_hits_by_their_metadata(client: TestClient) -> None:
    condition = {"$or": [{"year": {"gte": 2021, "lt": 2024}, "language": "en"}, {"draft": {"ne": None}}]}
    hits = client.post("/v1/search", json={"query": "q", "filter": condition}).json()["hits"]
    assert {hit["id"]: hit["metadata"] for hit in hits} == {
        "p1": {"year": 2021, "language": "en"},
        "p3": {"year": 2023, "language": "en"},
    }


def test_reranking_needs_a_reranker_and_its_notes_are_answered(client: TestClient) -> None:
    refusals = {
        "rerank": refused(client.post("/v1/search", json={"query": "q", "rerank": True}), 400),
        "model": refused(client.post("/v1/rerank", json=COHERE), 404),
    }
    for param, error in refusals.items():
        assert error["param"] == param
        assert "rerank.kind" in error["message"]
    for rerank in (False, None):
        answer = client.post("/v1/search", json={"query": "q", "rerank": rerank}).json()
        assert (answer["notes"], answer["timings"]["rerank_ms"]) == ([], None)
    asked = []

    class Reranking(DebugService):
        async def search(self, search: schema.SearchRequest) -> schema.SearchResponse:
            asked.append(search.rerank)
            answer = await super().search(search)
            return answer.model_copy(update={"notes": ["Not re-ranked: too slow."]})

    reranking = client_of(make_app(Reranking(card=CARD.model_copy(update={"reranker": "r"}))))
    for rerank in (True, False, None):
        assert reranking.post("/v1/search", json={"query": "q", "rerank": rerank}).json()["notes"]
    assert asked == [True, False, None]
    assert reranking.get("/v1/models").json()["data"][0]["reranker"] == "r"


@pytest.fixture(scope="module")
def over_http() -> Iterator[httpx2.Client]:
    with listening(make_app()) as url, httpx2.Client(base_url=url) as client:
        yield client


@pytest.mark.parametrize("id", ["new", "a/b", "/a//b/", "ü ?#%2F", "a\nb\0", "..", "."])
def test_a_document_is_put_read_replaced_and_deleted_under_any_id(over_http: httpx2.Client, id: str) -> None:
    client = over_http
    sequence = client.post("/v1/search", json={"query": "q"}).json()["sequence"]
    path = "/v1/documents/" + "".join(f"%{byte:02X}" for byte in id.encode())
    metadata = {"year": 2021, "rating": 4, "draft": False, "day": "2021-05-31", "language": None}
    answer = client.put("/v1/documents", json={"documents": [{"id": id, "text": "t", "metadata": metadata}]})
    assert answer.json() == {"object": "documents.put", "count": 1, "sequence": sequence + 1}
    assert client.get(path).json() == {"object": "document", "id": id, "text": "t", "metadata": metadata}
    client.put("/v1/documents", json={"documents": [{"id": id, "text": "u"}, {"id": "other", "text": "o"}]})
    assert client.get(path).json() == {"object": "document", "id": id, "text": "u", "metadata": {}}
    answer = client.post("/v1/search", json={"query": "q"}).json()
    assert answer["sequence"] == sequence + 2
    assert {"id": id, "text": "u", "metadata": {}}.items() <= next(h for h in answer["hits"] if h["id"] == id).items()
    assert client.delete(path).json() == {"object": "documents.deleted", "count": 1, "sequence": sequence + 3}
    assert refused(client.get(path), 404)["code"] == "document_not_found"


def test_a_bulk_delete_ignores_unknown_ids() -> None:
    client = client_of(make_app())
    answer = client.request("DELETE", "/v1/documents", json={"ids": ["p0", "p1", "p0", "nothing"]})
    assert answer.json() == {"object": "documents.deleted", "count": 3, "sequence": 1}
    answer = client.post("/v1/search", json={"query": "q"}).json()
    assert {hit["id"] for hit in answer["hits"]} == {"p2", "p3", "p4"}


@pytest.mark.parametrize(
    ("document", "fault"),
    [
        ({"id": ""}, "documents.1.id: "),
        ({"id": "x" * 1001}, "documents.1.id: "),
        ({"text": " "}, "documents.1.text: must not be empty"),
        ({"text": "x" * (schema.MAX_CHARACTERS + 1)}, "documents.1.text: "),
        ({"title": "x"}, "documents.1.title: no such field"),
        ({"metadata": []}, "documents.1.metadata: "),
        ({"metadata": {"yeer": 1}}, "document 'a': metadata 'yeer' is no column of the index; did you mean year?"),
        ({"metadata": {"year": True}}, "metadata 'year'=True must be a whole number"),
        ({"metadata": {"year": 2**63}}, "metadata 'year'=9223372036854775808 must be a whole number"),
        ({"metadata": {"rating": float("nan")}}, "metadata 'rating'=nan must be a finite number"),
        ({"metadata": {"draft": 0}}, "metadata 'draft'=0 must be true or false"),
        ({"metadata": {"day": "31.5.2021"}}, "metadata 'day'='31.5.2021' must be a date"),
    ],
)
def test_an_invalid_document_is_rejected_and_changes_nothing(document: Any, fault: str) -> None:
    service = DebugService()
    body = json.dumps({"documents": [{"id": "fine", "text": "t"}, {"id": "a", "text": "t", **document}]})
    error = refused(client_of(make_app(service)).put("/v1/documents", content=body, headers=JSON), 400)
    assert fault in error["message"]
    assert error["param"] == "documents"
    assert service.sequence == 0


@pytest.mark.parametrize(
    ("method", "body", "message"),
    [
        ("PUT", {"documents": []}, "at least 1 item"),
        ("PUT", {"documents": [{"id": "a", "text": "t"}] * 2}, "the id 'a' appears twice"),
        ("PUT", {"documents": [{"id": str(i), "text": "t"} for i in range(1001)]}, "at most 1000 items"),
        ("DELETE", {"ids": []}, "at least 1 item"),
        ("DELETE", {"ids": ["a"] * 1001}, "at most 1000 items"),
        ("DELETE", {}, "Field required"),
    ],
)
def test_changes_have_limits(client: TestClient, method: str, body: Any, message: str) -> None:
    assert message in refused(client.request(method, "/v1/documents", json=body), 400)["message"]


def test_a_read_only_service_rejects_changes_and_still_reads() -> None:
    service = DebugService(card=CARD.model_copy(update={"writable": False}))
    client = client_of(make_app(service))
    for answer in (
        client.put("/v1/documents", json={"documents": [{"id": "a", "text": "t"}]}),
        client.request("DELETE", "/v1/documents", json={"ids": ["p0"]}),
    ):
        assert refused(answer, 403)["code"] == "read_only"
    assert client.get("/v1/documents/p0").json()["text"] == "passage 0"


# -------------------------------------------------------------------------------- several collections, as a key sees them

NAMES = ("index", "news", "law")


class Api:
    """Three collections over one model; `law` has another one."""

    def __init__(self, keys: ApiKeys) -> None:
        cards = {name: CARD.model_copy(update={"index_version": f"of-{name}"}) for name in NAMES}
        cards["law"] = cards["law"].model_copy(update={"id": "legal"})
        self.services = {name: DebugService(card=card) for name, card in cards.items()}
        for service in self.services.values():
            service.documents = {}
        default, *_ = self.services.values()
        others = {name: service for name, service in self.services.items() if service is not default}
        self.client = client_of(make_app(default, keys, **others))


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


def test_an_unknown_collection_is_404_and_names_the_known_ones(api: Api) -> None:
    for answer in (
        api.client.post(f"{base('sport')}/search", json={"query": "q"}),
        api.client.put(f"{base('sport')}/documents", json={"documents": [{"id": "a", "text": "t"}]}),
        api.client.request("DELETE", f"{base('sport')}/documents", json={"ids": ["a"]}),
        api.client.get(f"{base('sport')}/documents/a"),
    ):
        error = refused(answer, 404)
        assert (error["code"], error["param"]) == ("collection_not_found", "collection")
        assert error["message"] == "there is no collection 'sport'; there are index, news, law"
    for path in ("/v1/collections//search", "/v1/collections/a/b/search"):
        assert api.client.post(path, json={"query": "q"}).status_code in (404, 405)


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
        }
    return answers


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
    assert locked.get("/v1/models/debug", headers=keys["news"]).json() == card
    assert refused(locked.get("/v1/models/legal", headers=keys["news"]), 404)["code"] == "model_not_found"
    assert refused(locked.get("/metrics", headers=keys["news"]), 403)["code"] == "missing_scope"
    error = refused(locked.post(f"{base('gone')}/search", json={"query": "q"}, headers=keys["gone"]), 404)
    assert error["message"] == "there is no collection 'gone'; there are news"
    assert locked.post("/v1/embeddings", json={"input": "q"}, headers=keys["news"]).status_code == 200


def test_a_request_does_not_inherit_the_collections_of_the_one_before(
    locked: TestClient, keys: dict[str, dict[str, str]]
) -> None:
    with locked:  # one event loop for all requests
        for name, seen in (("news", 1), ("all", 3), ("news", 1), ("all", 3)):
            assert len(locked.get("/v1/collections", headers=keys[name]).json()["data"]) == seen
