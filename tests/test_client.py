import asyncio
import inspect
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import httpx2
import numpy as np
import pytest

from infembed_ray import client as client_module
from infembed_ray.client import ApiError, AsyncClient, Client, ClientError, Document, Unreachable
from infembed_ray.errors import InputError
from tests.serving.debug import CARD, DebugService, debug_embed, listening
from tests.serving.http.clients import make_app

URL = "http://search.test"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with listening(make_app(keys=("key",))) as url:
        yield url


class Blocking:
    """An `AsyncClient` with the blocking interface of `Client`, so one test covers both."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._args, self._options = args, options

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def call(*args: Any, **options: Any) -> Any:
            async with AsyncClient(*self._args, **self._options) as client:
                return await getattr(client, name)(*args, **options)

        return lambda *args, **options: asyncio.run(call(*args, **options))


@pytest.fixture(params=[Client, Blocking])
def client(request: pytest.FixtureRequest, url: str) -> Iterator[Any]:
    client = request.param(url, "key")
    yield client
    client.close()


@pytest.mark.parametrize("cls", [Client, AsyncClient])
def test_the_examples_run(
    cls: type, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(client_module.KEY_VARIABLE, "key")
    found = re.search(r"```python\n(.*?)```", inspect.getdoc(cls) or "", re.DOTALL)
    assert found
    code = textwrap.indent(found[1].replace("http://127.0.0.1:8000", url), "    ")
    names: dict[str, Any] = {"Client": Client, "AsyncClient": AsyncClient}
    exec(f"async def example():\n{code}", names)
    asyncio.run(names["example"]())
    assert len(capsys.readouterr().out.splitlines()) == (3 if cls is Client else 1)


def vector(text: str) -> np.ndarray:
    return debug_embed([list(text.encode())])[0]


def test_embeddings(client: Any) -> None:
    embeddings = client.embed(["ab", "c"])
    np.testing.assert_array_equal(embeddings.vectors, [vector("ab"), vector("c")])
    assert (embeddings.vectors.dtype, embeddings.model, embeddings.tokens) == (np.float32, "debug", 3)
    asked = client.embed(["ab"], instruction="I", dimensions=4, model="debug")
    short = vector("query: I ab")[:4]
    np.testing.assert_allclose(asked.vectors, [short / np.linalg.norm(short)], rtol=1e-6)
    np.testing.assert_array_equal(client.embed(["x"], input_type="query").vectors, [vector("query: None x")])


def test_searches(client: Any) -> None:
    answer = client.search("q", "I", top_k=2, filter={"language": "en"})
    assert [hit.metadata["language"] for hit in answer.hits] == ["en", "en"]
    assert answer.hits[0].score >= answer.hits[1].score
    np.testing.assert_allclose(answer.hits[0].score, vector("query: I q") @ vector(answer.hits[0].text), rtol=1e-5)
    assert (answer.model, answer.index_version, answer.timings.encode_ms, answer.timings.search_ms) == (
        "debug",
        "v1",
        1.0,
        2.0,
    )
    assert answer.explanation is None


@pytest.mark.parametrize("id", ["a/../ü b?", ".."])
def test_documents(client: Any, id: str) -> None:
    document = Document(id, "text", {"year": 2021, "draft": None})
    put = client.put([document])
    assert client.document(document.id) == document
    assert client.search("q", min_sequence=put).sequence >= put
    assert client.delete([document.id, "nothing"]) == put + 1
    assert client.document(document.id) is None


def test_a_rejected_request_raises_the_servers_message_at_once(client: Any) -> None:
    with pytest.raises(ApiError, match="did you mean year") as refusal:
        client.search("q", filter={"yeer": 1})
    assert (refusal.value.status, refusal.value.param) == (400, "filter")
    assert f"(request {refusal.value.request_id})" in str(refusal.value)
    with pytest.raises(TypeError, match="must be a list of texts"):
        client.embed("one text")
    with pytest.raises(TypeError, match="must be a list of ids"):
        client.delete("12")


def test_the_key_may_come_from_the_environment(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INFEMBED_API_KEY", raising=False)
    with Client(url) as client, pytest.raises(ApiError) as refusal:
        client.models()
    assert refusal.value.code == "invalid_api_key"
    monkeypatch.setenv("INFEMBED_API_KEY", "key")
    with Client(url) as client:
        assert client.models()


# ------------------------------------------------------------------------------------------------------- retries


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The client's pauses, on a clock that only sleeping advances; the jitter is always the maximum."""
    slept: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)
    monkeypatch.setattr(client_module, "time", clock)  # only for the client; the server uses the real clock
    monkeypatch.setattr(client_module.random, "uniform", lambda low, high: high)
    return slept


def answering(*answers: httpx2.Response | Exception) -> tuple[Client, list[httpx2.Request]]:
    """A client whose server gives these answers in turn, and then repeats the last one."""
    asked: list[httpx2.Request] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        asked.append(request)
        given = answers[min(len(asked), len(answers)) - 1]
        if isinstance(given, Exception):
            raise given
        return given

    return Client(URL, "key", timeout_s=10, transport=httpx2.MockTransport(answer)), asked


def models() -> httpx2.Response:
    return httpx2.Response(200, json={"data": [CARD.model_dump()]})


def full(status: int = 429, **headers: str) -> httpx2.Response:
    error = {
        "message": "too many requests are waiting",
        "type": "rate_limit_error",
        "param": None,
        "code": "queue_full",
    }
    return httpx2.Response(status, json={"error": error}, headers=headers)


@pytest.mark.parametrize(
    "first", [full(), full(503), full(504), httpx2.Response(502, text="bad gateway"), httpx2.ConnectError("refused")]
)
def test_a_transient_error_is_retried(pauses: list[float], first: Any) -> None:
    client, asked = answering(first, first, models())
    assert client.models()[0].id == "debug"
    assert len(asked) == 3
    assert pauses == [0.1, 0.2]


def test_a_pause_is_at_least_retry_after(pauses: list[float]) -> None:
    client, _ = answering(full(**{"Retry-After": "3"}), models())
    client.models()
    assert pauses == [3.1]


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 500])
def test_a_permanent_error_is_not_retried(pauses: list[float], status: int) -> None:
    client, asked = answering(full(status))
    with pytest.raises(ApiError, match="too many requests are waiting"):
        client.models()
    assert (len(asked), pauses) == (1, [])


def test_retries_of_a_full_server_end_within_the_timeout_with_its_message(pauses: list[float]) -> None:
    client, _ = answering(full(**{"Retry-After": "4"}))
    with pytest.raises(ApiError, match="429 queue_full: too many requests are waiting"):
        client.models()
    assert sum(pauses) < 10


def test_retries_of_an_unreachable_server_end_within_the_timeout_with_the_reason(pauses: list[float]) -> None:
    client, asked = answering(httpx2.ConnectError("connection refused"))
    with pytest.raises(Unreachable, match=r"no answer within 10 s \(attempts: \d+\): connection refused") as failure:
        client.models()
    assert isinstance(failure.value.__cause__, httpx2.ConnectError)
    assert len(asked) > 3
    assert sum(pauses) < 10


@pytest.mark.parametrize("answer", [httpx2.Response(200, text="<html>"), httpx2.Response(200, json={"data": [{}]})])
def test_the_answer_of_another_server_is_an_error(pauses: list[float], answer: httpx2.Response) -> None:
    client, _ = answering(answer)
    with pytest.raises(ClientError, match=r"http://search\.test/v1/models does not answer as this API"):
        client.models()


# --------------------------------------------------------------------------------------------------- imports and signatures


@pytest.mark.integration
@pytest.mark.parametrize("given", ["127.0.0.1:8000", "localhost", "", "ftp://host", "http://", "/v1", "host:80/v1"])
@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_an_address_without_scheme_or_host_is_refused_at_once(kind: Any, given: str) -> None:
    with pytest.raises(InputError, match=r"^base_url=.*: is no address of a server; give one such as http://"):
        kind(given)


@pytest.mark.parametrize("given", ["http://h", "http://h/", "http://h/v1", "http://h/v1/", "http://h/prefix/v1"])
@pytest.mark.parametrize("embedding", [[0.6, 0.8], "mpkZP83MTD8="])
def test_an_address_may_end_in_v1_and_vectors_may_be_lists(given: str, embedding: Any) -> None:
    asked = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        asked.append(request.url.path)
        return httpx2.Response(
            200, json={"data": [{"embedding": embedding}], "model": "m", "usage": {"total_tokens": 1}}
        )

    with Client(given, transport=httpx2.MockTransport(answer)) as client:
        vectors = client.embed(["a"]).vectors
    assert asked == [f"{'/prefix' if 'prefix' in given else ''}/v1/embeddings"]
    np.testing.assert_array_equal(vectors, np.array([[0.6, 0.8]], dtype=np.float32))


def test_importing_it_loads_neither_torch_nor_ray_nor_the_server() -> None:
    code = (
        "import sys, json, infembed_ray.client; print(json.dumps(sorted({m.partition('.')[0] for m in sys.modules})))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not {"torch", "ray", "fastapi", "pyarrow", "transformers"} & set(json.loads(output))


def test_both_clients_have_the_same_methods_and_arguments() -> None:
    def methods(cls: type) -> dict[str, Any]:
        public = {n: m for n, m in inspect.getmembers(cls, inspect.isfunction) if not n.startswith("_")}
        return {name: list(inspect.signature(method).parameters.values()) for name, method in public.items()}

    assert methods(Client) == methods(AsyncClient)


@pytest.mark.parametrize("kind", [Client, Blocking])
def test_collections(kind: Any) -> None:
    services = {name: DebugService(card=CARD.model_copy(update={"index_version": name})) for name in ("index", "news")}
    with listening(make_app(services["index"], news=services["news"])) as url:
        client = kind(url)
        assert [(one.name, one.model.index_version) for one in client.collections()] == [
            ("index", "index"),
            ("news", "news"),
        ]
        sequence = client.put([Document("new/1", "text")], collection="news")
        assert client.document("new/1", collection="news") == Document("new/1", "text", {})
        assert client.document("new/1") is None
        answer = client.search("q", top_k=100, min_sequence=sequence, collection="news")
        assert (answer.index_version, "new/1" in {hit.id for hit in answer.hits}) == ("news", True)
        default = client.search("q", top_k=100)
        assert (default.index_version, "new/1" in {hit.id for hit in default.hits}) == ("index", False)
        client.delete(["new/1"], collection="news")
        assert client.document("new/1", collection="news") is None
        for name in ("law", "../models", "a/b"):
            with pytest.raises(ApiError) as refusal:
                client.search("q", collection=name)
            assert refusal.value.status == 404
        client.close()
