from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx2
import numpy as np
import pytest
from starlette.testclient import TestClient

from infembed_ray.serving import schema
from infembed_ray.serving.service import Found, Search
from tests.serving.debug import CARD, PASSAGES, DebugService, listening
from tests.serving.http.clients import JSON, client_of, make_app, refused, vector


@pytest.fixture(scope="module")
def client() -> TestClient:
    """A client for tests that change nothing."""
    return client_of(make_app())


@pytest.mark.parametrize(
    ("inputs", "texts"),
    [
        ("ab", ["ab"]),
        (["ab", "c", "ab"], ["ab", "c", "ab"]),
        ([97, 98], ["ab"]),
        ([[97, 98], [99]], ["ab", "c"]),
    ],
)
def test_all_four_forms_of_input(client: TestClient, inputs: Any, texts: list[str]) -> None:
    answer = client.post("/v1/embeddings", json={"input": inputs, "model": "debug"})
    assert answer.status_code == 200
    body = answer.json()
    assert (body["object"], body["model"]) == ("list", "debug")
    assert [(item["object"], item["index"]) for item in body["data"]] == [("embedding", i) for i in range(len(texts))]
    np.testing.assert_allclose([item["embedding"] for item in body["data"]], [vector(t) for t in texts], rtol=1e-6)
    length = sum(len(t) for t in texts)
    assert body["usage"] == {"prompt_tokens": length, "total_tokens": length}


def test_base64_holds_the_same_numbers(client: TestClient) -> None:
    body = {"input": ["ab", "c"], "model": "debug", "encoding_format": "base64"}
    data = client.post("/v1/embeddings", json=body).json()["data"]
    decoded = [np.frombuffer(base64.b64decode(item["embedding"]), dtype="<f4") for item in data]
    np.testing.assert_array_equal(decoded, [vector("ab"), vector("c")])


def test_vectors_of_fewer_dimensions_are_normalised_again(client: TestClient) -> None:
    data = client.post("/v1/embeddings", json={"input": "ab", "model": "debug", "dimensions": 4}).json()["data"]
    short = np.array(data[0]["embedding"])
    np.testing.assert_allclose(short, vector("ab")[:4] / np.linalg.norm(vector("ab")[:4]), rtol=1e-6)


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
    assert set(body["hits"][0]) == {"id", "score", "text", "metadata", "rerank_score"}
    del body["hits"]
    assert body == {
        "object": "search_results",
        "index_version": "v1",
        "sequence": 0,
        "model": "debug",
        "timings": {"encode_ms": 1.0, "search_ms": 2.0, "rerank_ms": None},
        "partial": False,
        "missing_shards": [],
        "notes": [],
        "explanation": None,
    }
    plain = client.post("/v1/search", json={"query": "q", "instruction": ""}).json()["hits"]
    assert [hit["id"] for hit in plain] == ranking("q", None)


def test_an_explanation_has_ranks_scores_and_the_effects_of_phrases(client: TestClient) -> None:
    asked = {"query": "q", "instruction": "For A, not B.", "top_k": 2}
    body = client.post("/v1/search", json=asked | {"explain": True}).json()
    assert body["hits"] == client.post("/v1/search", json=asked).json()["hits"]
    explanation = body["explanation"]
    assert explanation["phrases"] == [
        {"text": "For A,", "start": 0, "end": 6},
        {"text": "not B.", "start": 7, "end": 13},
    ]
    ranked, plain = ranking("q", "For A, not B.")[:2], ranking("q", None)
    passages = {passage["id"]: passage for passage in explanation["passages"]}
    assert list(passages) == list(dict.fromkeys(ranked + plain[:2]))
    for id, passage in passages.items():
        text = vector(f"passage {id[1:]}")
        whole, none, *without = (
            float(vector(f"query: {i} q") @ text) for i in ("For A, not B.", None, "not B.", "For A,")
        )
        assert passage["effects"] == pytest.approx([whole - one for one in without], abs=1e-6)
        assert (passage["score"], passage["score_without"]) == pytest.approx((whole, none), abs=1e-6)
        assert passage["rank"] == (ranked.index(id) + 1 if id in ranked else None)
        assert passage["rank_without"] == plain.index(id) + 1
    several = client.post("/v1/search", json=asked | {"explain": True, "query": ["q"]}).json()
    assert several["explanation"] == explanation


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"query": ["a", "b"], "instruction": "I"}, "explain: 2 queries; send one at a time"),
        ({"query": "a"}, "explain: there is no instruction"),
        ({"query": "a", "instruction": "I", "top_k": 21}, "explain: top_k=21; ask for up to 20 hits"),
    ],
)
def test_what_cannot_be_explained_is_refused(client: TestClient, body: Any, message: str) -> None:
    error = refused(client.post("/v1/search", json=body | {"explain": True}), 400)
    assert error["message"].startswith(message)
    assert error["param"] == "explain"


@pytest.mark.parametrize(
    ("instruction", "each"),
    [("I", ["I", "I"]), (["I", None], ["I", None]), (["", "J"], [None, "J"]), (None, [None, None])],
)
def test_several_queries_are_answered_in_order(client: TestClient, instruction: Any, each: list[Any]) -> None:
    body = client.post("/v1/search", json={"query": ["a", "b"], "instruction": instruction}).json()
    assert "hits" not in body
    found = [[hit["id"] for hit in result["hits"]] for result in body["results"]]
    assert found == [ranking(query, i) for query, i in zip(["a", "b"], each, strict=True)]
    one = client.post("/v1/search", json={"query": ["a"]}).json()
    assert len(one["results"]) == 1


def test_a_filter_selects_hits_by_their_metadata(client: TestClient) -> None:
    condition = {"year": {"gte": 2021, "lt": 2024}, "language": "en"}
    hits = client.post("/v1/search", json={"query": "q", "filter": condition}).json()["hits"]
    assert {hit["id"]: hit["metadata"] for hit in hits} == {
        "p1": {"year": 2021, "language": "en"},
        "p3": {"year": 2023, "language": "en"},
    }


def test_reranking_needs_a_reranker_and_its_notes_are_answered(client: TestClient) -> None:
    error = refused(client.post("/v1/search", json={"query": "q", "rerank": True}), 400)
    assert error["param"] == "rerank"
    assert "rerank.kind" in error["message"]
    for rerank in (False, None):
        answer = client.post("/v1/search", json={"query": "q", "rerank": rerank}).json()
        assert (answer["notes"], answer["timings"]["rerank_ms"]) == ([], None)
    asked = []

    class Reranking(DebugService):
        async def search(self, search: Search) -> Found:
            asked.append(search.rerank)
            return (await super().search(search))._replace(notes=["Not re-ranked: too slow."])

    reranking = client_of(make_app(Reranking(card=CARD.model_copy(update={"reranker": "r"}))))
    for rerank in (True, False, None):
        assert reranking.post("/v1/search", json={"query": "q", "rerank": rerank}).json()["notes"]
    assert asked == [True, False, None]
    assert reranking.get("/v1/models").json()["data"][0]["reranker"] == "r"


def test_a_partial_answer_needs_allow_partial_and_is_marked() -> None:
    service = DebugService()
    service.missing_shards = ["shard-1"]
    client = client_of(make_app(service))
    refusal = client.post("/v1/search", json={"query": "q"})
    assert refused(refusal, 503)["code"] == "replica_lost"
    assert refusal.headers["retry-after"] == "1"
    answer = client.post("/v1/search", json={"query": "q", "allow_partial": True}).json()
    assert (answer["partial"], answer["missing_shards"]) == (True, ["shard-1"])


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
    found = client.post("/v1/search", json={"query": "q"}).json()
    assert found["sequence"] == sequence + 2
    assert {"id": id, "text": "u", "metadata": {}}.items() <= next(h for h in found["hits"] if h["id"] == id).items()
    assert client.delete(path).json() == {"object": "documents.deleted", "count": 1, "sequence": sequence + 3}
    assert refused(client.get(path), 404)["code"] == "document_not_found"


def test_a_bulk_delete_ignores_unknown_ids() -> None:
    client = client_of(make_app())
    answer = client.request("DELETE", "/v1/documents", json={"ids": ["p0", "p1", "p0", "nothing"]})
    assert answer.json() == {"object": "documents.deleted", "count": 3, "sequence": 1}
    found = client.post("/v1/search", json={"query": "q"}).json()
    assert {hit["id"] for hit in found["hits"]} == {"p2", "p3", "p4"}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"id": "", "text": "t"}, "documents.0.id: String should have at least 1 character"),
        ({"id": "x" * 1001, "text": "t"}, "documents.0.id: String should have at most 1000 characters"),
        ({"id": 1, "text": "t"}, "documents.0.id: Input should be a valid string"),
        ({"id": "a"}, "documents.0.text: Field required"),
        ({"id": "a", "text": " "}, "documents.0.text: must not be empty"),
        ({"id": "a", "text": "x" * (schema.MAX_CHARACTERS + 1)}, "documents.0.text: String should have at most 100000"),
        ({"id": "a", "text": "t", "title": "x"}, "documents.0.title: no such field"),
        (
            {"id": "a", "text": "t", "metadata": {"yeer": 1}},
            "documents.0.metadata: no field 'yeer'; the index has year",
        ),
        ({"id": "a", "text": "t", "metadata": {"year": "2021"}}, "documents.0.metadata.year: must be a whole number"),
        ({"id": "a", "text": "t", "metadata": {"year": True}}, "documents.0.metadata.year: must be a whole number"),
        ({"id": "a", "text": "t", "metadata": {"year": 2**63}}, "documents.0.metadata.year: must be a whole number"),
        ({"id": "a", "text": "t", "metadata": {"year": 10**400}}, "documents.0.metadata.year: must be a whole number"),
        ({"id": "a", "text": "t", "metadata": {"rating": float("nan")}}, "metadata.rating: must be a finite number"),
        ({"id": "a", "text": "t", "metadata": {"rating": float("inf")}}, "metadata.rating: must be a finite number"),
        ({"id": "a", "text": "t", "metadata": {"draft": 0}}, "documents.0.metadata.draft: must be true or false"),
        ({"id": "a", "text": "t", "metadata": {"day": "31.5.2021"}}, "documents.0.metadata.day: must be a date as in"),
        ({"id": "a", "text": "t", "metadata": {"language": ["en"]}}, "documents.0.metadata.language: must be a string"),
        ({"id": "a", "text": "t", "metadata": []}, "documents.0.metadata: Input should be an object"),
    ],
)
def test_an_invalid_document_is_rejected_and_changes_nothing(document: Any, message: str) -> None:
    service = DebugService()
    body = json.dumps({"documents": [document, {"id": "fine", "text": "t"}]})
    error = refused(client_of(make_app(service)).put("/v1/documents", content=body, headers=JSON), 400)
    assert message in error["message"]
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


@pytest.mark.parametrize("id", ["", "x" * 1001])
def test_invalid_ids_are_rejected(client: TestClient, id: str) -> None:
    assert refused(client.get(f"/v1/documents/{id}"), 400)["param"] == "id"


def test_a_read_only_service_rejects_changes_and_still_reads() -> None:
    service = DebugService(card=CARD.model_copy(update={"writable": False}))
    client = client_of(make_app(service))
    for answer in (
        client.put("/v1/documents", json={"documents": [{"id": "a", "text": "t"}]}),
        client.request("DELETE", "/v1/documents", json={"ids": ["p0"]}),
        client.delete("/v1/documents/p0"),
    ):
        assert refused(answer, 403)["code"] == "read_only"
    assert client.get("/v1/documents/p0").json()["text"] == "passage 0"
