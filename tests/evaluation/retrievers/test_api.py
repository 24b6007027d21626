"""Remote embedders against a server on loopback that counts what it embeds."""

import subprocess
import sys
import time

import numpy as np
import pytest

from infembed_ray.errors import InputError
from infembed_ray.evaluation.retrievers import api, baselines
from infembed_ray.evaluation.retrievers.retriever import TextEncoder
from infembed_ray.evaluation.tasks.task import Query
from infembed_ray.llm.journal import Journal
from tests.evaluation.retrievers import stand_in_embedder
from tests.evaluation.retrievers.stand_in_embedder import embedding

pytestmark = pytest.mark.integration

PASSAGES = [f"passage {number} about bread" for number in range(40)]
QUERIES = [Query("1", "how is aspirin dosed", "for nurses"), Query("2", "what is bread")]


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("STAND_IN_KEY", "secret")
    with stand_in_embedder.serving() as running:
        yield running


@pytest.fixture
def encoder(server, tmp_path, monkeypatch):
    """Make encoders, each like a new run with the same journal."""

    def make(baseline="openai-v3-large", limits=None, texts=8, **changed) -> TextEncoder:
        monkeypatch.setattr(api, "TEXTS", texts)
        path = "v2" if baseline.startswith("cohere") else "v1"
        endpoint = {"base_url": f"{server.url}/{path}", "api_key_env": "STAND_IN_KEY", "timeout_s": 5, "max_retries": 2}
        asked = {"endpoint": endpoint, "journal": str(tmp_path / "journal")}
        asked |= {"limits": limits or {}} | changed.pop("api", {})
        settings = baselines.resolve("x", {"baseline": baseline, "api": asked} | changed)
        baselines.inputs(settings, "models.x")
        made = baselines.load(settings)
        assert isinstance(made, TextEncoder)
        return made

    return make


def units(texts, kind=""):
    vectors = np.array([embedding(text, kind) for text in texts])
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def test_openai_embeds_queries_with_their_instruction_and_passages_in_their_order(server, encoder):
    remote = encoder()
    np.testing.assert_allclose(remote.encode_passages(PASSAGES), units(PASSAGES), atol=1e-6)
    np.testing.assert_allclose(
        remote.encode_queries(QUERIES), units(["how is aspirin dosed for nurses", "what is bread"]), atol=1e-6
    )
    assert {len(body["input"]) for body in server.bodies} == {8, 2}
    assert server.bodies[0].keys() == {"model", "input", "encoding_format"}


def test_cohere_gets_the_side_of_each_text(server, encoder):
    remote = encoder("cohere-embed-english-v3.0", dimensions=8)
    np.testing.assert_allclose(remote.encode_passages(PASSAGES[:3]), units(PASSAGES[:3], "search_document"), atol=1e-6)
    both = [Query("1", PASSAGES[0])]  # on the other side, a text has another embedding
    np.testing.assert_allclose(remote.encode_queries(both), units(PASSAGES[:1], "search_query"), atol=1e-6)
    assert server.bodies[0]["output_dimension"] == 8
    assert server.bodies[0]["truncate"] == "END"


def test_you_never_pay_for_the_same_text_twice(server, encoder):
    first = encoder().encode_passages([*PASSAGES[:20], PASSAGES[3]])
    again = encoder().encode_passages(PASSAGES[10:] + PASSAGES[:10])
    np.testing.assert_array_equal(first[10:20], again[:10])
    assert set(server.paid) == set(PASSAGES)
    assert set(server.paid.values()) == {1}


def test_a_finished_journal_needs_no_key_and_no_server(server, encoder, monkeypatch):
    embeddings = encoder().encode_passages(PASSAGES)
    monkeypatch.delenv("STAND_IN_KEY")
    requests = len(server.bodies)
    np.testing.assert_array_equal(encoder().encode_passages(PASSAGES), embeddings)
    assert len(server.bodies) == requests
    with pytest.raises(InputError, match="api_key_env=STAND_IN_KEY: not set on"):
        encoder().encode_passages(["another"])


def test_faults_are_retried_and_429s_waited_for(server, encoder):
    server.latency_s = 0.02
    server.faults = ["429", "500", "429", "dropped", "truncated", "429", "500"]
    np.testing.assert_allclose(encoder().encode_passages(PASSAGES), units(PASSAGES), atol=1e-6)
    assert set(server.paid.values()) == {1}
    assert len(server.bodies) == 5 + 7


def test_requests_are_in_flight_together_and_never_more_than_allowed(server, encoder):
    server.latency_s = 0.05
    encoder(limits={"in_flight": 3}, texts=1).encode_passages(PASSAGES)
    assert server.most_in_flight == 3


def test_a_server_that_keeps_failing_ends_the_run_and_the_next_resumes(server, encoder):
    server.latency_s = 0.01
    one_by_one = {"in_flight": 1}
    server.faults = ["", ""] + ["500"] * 100
    with pytest.raises(InputError, match=r"HTTP 500: oops; tried 3 times; the same command resumes"):
        encoder(limits=one_by_one).encode_passages(PASSAGES)
    assert sum(server.paid.values()) == 16
    server.faults = []
    encoder(limits=one_by_one).encode_passages(PASSAGES)
    assert set(server.paid) == set(PASSAGES)
    assert set(server.paid.values()) == {1}


def test_a_killed_process_keeps_its_journaled_embeddings(server, encoder, tmp_path):
    server.latency_s = 0.05
    remote = encoder(limits={"in_flight": 2})
    asked = remote._settings.model_dump_json()
    script = (
        "import sys; from infembed_ray.config.evaluation import RetrieverSettings as S; from infembed_ray.evaluation.retrievers import api;"
        "api.TEXTS = 8; api.ApiEncoder(S.model_validate_json(sys.argv[1]), '').encode_passages([f'passage {i}' for i in range(400)])"
    )
    process = subprocess.Popen([sys.executable, "-c", script, asked])
    try:
        while server.paid.total() < 80:
            assert process.poll() is None
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
    while server.in_flight:  # the server finishes requests in progress
        time.sleep(0.01)
    passages = [f"passage {i}" for i in range(400)]
    answered, journaled = set(server.paid), len(Journal(tmp_path / "journal"))
    assert 40 <= journaled <= len(answered)
    np.testing.assert_allclose(encoder().encode_passages(passages), units(passages), atol=1e-6)
    twice = [text for text, times in server.paid.items() if times > 1]
    assert len(twice) <= len(answered) - journaled
    assert set(server.paid) == set(passages)


def test_a_refused_key_and_an_unknown_model_are_named(server, encoder, monkeypatch):
    with pytest.raises(InputError, match=r"model unknown: not at endpoint\.base_url"):
        encoder(model="unknown").encode_passages(PASSAGES)
    monkeypatch.setenv("STAND_IN_KEY", "wrong")
    with pytest.raises(InputError, match=r"refuses its key") as refused:
        encoder().encode_passages(PASSAGES)
    assert "wrong" not in str(refused.value)


def test_a_text_that_the_endpoint_refuses_is_named_and_the_others_are_kept(server, encoder):
    server.longest = 100
    long = "endless " * 20
    with pytest.raises(InputError, match=r"refuses the text 'endless endless.*lower api\.max_characters"):
        encoder().encode_passages([*PASSAGES[:5], long])
    assert sum(server.paid.values()) >= 3
    cut = encoder(api={"max_characters": 100}).encode_passages([*PASSAGES[:5], long])
    np.testing.assert_allclose(cut[-1:], units([long[:100]]), atol=1e-6)
    assert set(server.paid.values()) == {1}


def test_blank_texts_have_an_embedding_too(encoder):
    assert np.isfinite(encoder().encode_passages(["", " \n", "bread"])).all()


def test_the_budget_is_reserved_before_and_never_exceeded_whatever_the_runs(server, encoder):
    worst_of_all = sum(len(text) + 2 for text in PASSAGES) * 0.13e-6
    budget = {"budget_usd": worst_of_all / 3}
    with pytest.raises(InputError, match=r"limits\.budget_usd=.*used up"):
        encoder(limits=budget).encode_passages(PASSAGES)
    assert 0 < server.tokens * 0.13e-6 <= budget["budget_usd"]
    with pytest.raises(InputError, match=r"used up"):  # the budget covers all runs
        for run in range(20):
            encoder(limits=budget).encode_passages([f"{text}, {run}" for text in PASSAGES])
    assert server.tokens * 0.13e-6 <= budget["budget_usd"]
    encoder(limits={"budget_usd": 2 * worst_of_all}).encode_passages(PASSAGES)
    assert server.paid[PASSAGES[0]] == server.paid[PASSAGES[-1]] == 1


def test_tokens_of_a_request_are_divided_among_its_texts():
    for total, sizes in ((100, [1, 2, 3]), (7, [5, 5, 5, 5]), (0, [3]), (5, [0, 0])):
        shares = api._divided(total, sizes)
        assert sum(shares) == (total if sum(sizes) else 0)
        assert min(shares) >= 0


def test_malformed_embeddings_are_rejected(server, encoder):
    server.faults = ["nan"]
    with pytest.raises(InputError, match=r"the embedding of 'passage 0 about bread' is not finite"):
        encoder().encode_passages(PASSAGES[:3])
    encoder().encode_passages(PASSAGES[:3])
    assert [server.paid[text] for text in PASSAGES[:3]] == [2, 1, 1]  # the other embeddings of the request are kept
    server.faults = ["wrong count"]
    with pytest.raises(InputError, match=r"3 embeddings for 4 texts"):
        encoder().encode_passages(PASSAGES[3:7])


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"journal": None}, r"models\.x\.api\.journal is missing"),
        ({"endpoint": {"base_url": "localhost"}}, "not a URL"),
        ({"limits": {"budget_usd": 1}, "prices": None}, "the price of model=odd is unknown"),
    ],
)
def test_invalid_api_settings_are_rejected_before_any_request(tmp_path, wrong, said):
    settings = {"baseline": "openai-v3-large", "model": "odd", "api": {"journal": str(tmp_path)} | wrong}
    with pytest.raises(InputError, match=said):
        baselines.inputs(baselines.resolve("x", settings), "models.x")
