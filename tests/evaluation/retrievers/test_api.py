"""Remote embedders against a server on loopback that counts what it embeds."""

import math
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from infembed_ray.errors import InputError
from infembed_ray.evaluation.retrievers import api, baselines
from infembed_ray.evaluation.retrievers.baselines import TextEncoder
from infembed_ray.evaluation.tasks.task import Query
from tests.evaluation.retrievers import stand_in_embedder
from tests.evaluation.retrievers.stand_in_embedder import embedding

pytestmark = pytest.mark.integration

PASSAGES = [f"passage {number} about bread" for number in range(40)]
QUERIES = [Query("1", "how is aspirin dosed", "for nurses"), Query("2", "what is bread")]


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("STAND_IN_KEY", "secret")
    monkeypatch.setattr(api, "TEXTS", 8)
    with stand_in_embedder.serving() as running:
        yield running


def encoder(server, **changed) -> TextEncoder:
    endpoint = {"base_url": f"{server.url}/v1", "api_key_env": "STAND_IN_KEY", "timeout_s": 5, "max_retries": 8}
    settings = baselines.resolve("x", {"baseline": "openai-v3-large", "endpoint": endpoint} | changed)
    baselines.inputs(settings, "models.x")
    made = baselines.load(settings)
    assert isinstance(made, TextEncoder)
    return made


def units(texts):
    vectors = np.array([embedding(text) for text in texts])
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def test_queries_with_their_instruction_and_passages_are_embedded_in_their_order(server):
    remote = encoder(server)
    np.testing.assert_allclose(remote.encode_passages(PASSAGES), units(PASSAGES), atol=1e-6)
    queries = ["how is aspirin dosed for nurses", "what is bread"]
    np.testing.assert_allclose(remote.encode_queries(QUERIES), units(queries), atol=1e-6)
    assert {len(body["input"]) for body in server.bodies} == {8, 2}
    assert server.bodies[0].keys() == {"model", "input", "encoding_format"}
    encoder(server, dimensions=4).encode_queries(QUERIES)
    assert server.bodies[-1]["dimensions"] == 4


def test_faults_are_retried_and_no_text_is_embedded_twice(server):
    server.faults = ["429", "500", "429", "dropped", "500"]
    np.testing.assert_allclose(encoder(server).encode_passages(PASSAGES), units(PASSAGES), atol=1e-6)
    assert set(server.paid.values()) == {1}
    assert len(server.bodies) == 5 + 5


def test_blank_and_long_texts_have_an_embedding_too(server, monkeypatch):
    monkeypatch.setattr(api, "LONGEST", 100)
    server.longest = 100
    made = encoder(server).encode_passages(["", " \n", "bread", "endless " * 20])
    np.testing.assert_allclose(made, units([".", ".", "bread", ("endless " * 20)[:100]]), atol=1e-6)
    assert encoder(server).encode_passages([]).shape[0] == 0


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"server": {"longest": 3}}, "too long or empty"),
        ({"server": {"faults": ["nan"]}}, "is not finite"),
        ({"server": {"faults": ["301"] * 9}}, "/v1/embeddings redirects to /v2/embeddings; set"),
        ({"server": {"faults": ["wrong count"]}}, "3 embeddings for 4 texts"),
        ({"model": "unknown"}, "no such model"),
        ({"key": "wrong"}, "Incorrect API key"),
        ({"key": None}, "STAND_IN_KEY"),
    ],
)
def test_what_cannot_be_embedded_is_an_error_that_names_the_model(server, monkeypatch, fault, said):
    for name, value in fault.get("server", {}).items():
        setattr(server, name, value)
    if "key" in fault:
        monkeypatch.delenv("STAND_IN_KEY")
        if fault["key"]:
            monkeypatch.setenv("STAND_IN_KEY", fault["key"])
    model = fault.get("model", "text-embedding-3-large")
    with pytest.raises(InputError, match=said) as refused:
        encoder(server, model=model).encode_passages(PASSAGES[:4])
    (failure,) = refused.value.faults
    assert (failure.setting, failure.value) == ("model", model)


ORDERED = [([0, 1, 2], "abc"), ([2, 0, 1], "bca"), ([None] * 3, "abc"), ([None, 1, 2], "abc"), ([1, 2, None], "cab")]
UNORDERED = [[0, 0, 1], [0, 0, 0], [0, 1, 3], [1, 2, 3], [-1, 0, 1], [None, 0, 0], ["0", "1", "2"]]


@pytest.mark.parametrize(("indexes", "order"), [*ORDERED, *((indexes, "") for indexes in UNORDERED)])
def test_embeddings_are_ordered_by_their_indexes_or_refused(indexes, order):
    """Gemini leaves out an index of 0."""
    entries = [SimpleNamespace(embedding=[ord("abc"[at])], index=index) for at, index in enumerate(indexes)]
    with nullcontext() if order else pytest.raises(ValueError, match="the indexes of 3 embeddings are"):
        assert api.in_order(entries, 3) == [[ord(each)] for each in order]


@pytest.mark.parametrize("embedding", [[], [None], ["a"], [[1.0]], "AAAA"])
def test_an_embedding_that_is_no_list_of_numbers_is_refused(embedding):
    with pytest.raises(ValueError, match="no list of numbers"):
        api.in_order([SimpleNamespace(embedding=embedding)], 1)


@pytest.mark.parametrize("vector", [[0.0, 0.0], [math.inf, 1.0], [math.nan, 0.0], [1e39, 1.0]])
def test_zero_and_non_finite_embeddings_are_refused(server, monkeypatch, vector):
    monkeypatch.setattr(stand_in_embedder, "embedding", lambda text: vector)
    with pytest.raises(InputError, match="is not finite, or zero"):
        encoder(server).encode_passages(["bread"])
