"""The code of docs/guides/clients.md, run as it stands but for the address, against a real HTTP server."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from tests.serving.debug import CARD, PASSAGES, DebugService, debug_embed, listening
from tests.serving.http.clients import make_app

pytestmark = pytest.mark.integration

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "clients.md"
INSTRUCTION = "Only guidelines written for clinicians."
TEXTS = ["Metformin is the first choice.", "Insulin, since 1922."]
QUERY = f"query: {INSTRUCTION} diabetes treatment"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    card = CARD.model_copy(update={"id": "my-model"})
    with listening(make_app(DebugService(card=card), ("KEY",))) as url:
        yield url


def run(section: str, url: str) -> dict[str, Any]:
    """Run the code of a section; return its variables."""
    text = re.search(rf"^## {section}\n(.*?)(?=^## |\Z)", PAGE.read_text(encoding="utf-8"), re.S | re.M)
    assert text
    code = "".join(re.findall(r"```python\n(.*?)```", text[1], re.S))
    assert "http://127.0.0.1:8000" in code
    names: dict[str, Any] = {"__name__": "recipe"}
    exec(compile(code.replace("http://127.0.0.1:8000", url), section, "exec", dont_inherit=True), names)
    return names


def vector(text: str) -> np.ndarray:
    return debug_embed([list(text.encode())])[0]


def best(texts: list[str]) -> str:
    return max(texts, key=lambda text: float(vector(QUERY) @ vector(text)))


def ranked_ids() -> list[str]:
    return [p.id for p in sorted(PASSAGES, key=lambda p: -float(vector(QUERY) @ vector(p.text)))]


def test_the_openai_package(url: str) -> None:
    names = run("The openai package", url)
    np.testing.assert_allclose(names["passages"], [vector(text) for text in TEXTS], rtol=1e-6)
    short = vector(QUERY)[:8] / np.linalg.norm(vector(QUERY)[:8])
    np.testing.assert_allclose(names["query"].data[0].embedding, short, rtol=1e-6)


@pytest.fixture(scope="module")
def openai_client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="KEY", max_retries=0)


def test_openais_client_understands_our_errors(openai_client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as not_found:
        openai_client.embeddings.create(input="ab", model="other")
    assert not_found.value.code == "model_not_found"
    assert re.fullmatch("[0-9a-f]{32}", not_found.value.request_id or "")
    with pytest.raises(openai.BadRequestError) as bad:
        openai_client.embeddings.create(input="ab", model="my-model", dimensions=99)
    assert bad.value.param == "dimensions"
    with pytest.raises(openai.AuthenticationError):
        openai_client.with_options(api_key="wrong").embeddings.create(input="ab", model="my-model")
    assert [model.id for model in openai_client.models.list()] == ["my-model"]
    assert openai_client.models.retrieve("my-model").id == "my-model"


def test_our_client(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    names = run("The infembed client", url)
    assert [hit.id for hit in names["found"].hits] == ranked_ids()[:3]
    printed = capsys.readouterr().out.splitlines()
    explained = [(passage.id, passage.rank) for passage in names["explanation"].passages]
    assert len(printed) == 3 + 2 * len(explained)
    assert printed[3].startswith(f"{explained[0][0]}: rank ")
    assert printed[4].endswith("by 'no history.'")
    assert "who/2024-17" in [hit.id for hit in names["recent"].hits]
    assert names["recent"].sequence >= names["sequence"]
    np.testing.assert_array_equal(names["vectors"], [vector("query: Only guidelines. diabetes treatment")])


def test_langchain(url: str) -> None:
    pytest.importorskip("langchain_openai")
    names = run("LangChain", url)
    assert [document.page_content for document in names["documents"]] == [best(TEXTS)]
    np.testing.assert_allclose(names["embeddings"].embed_query("diabetes treatment"), vector(QUERY), rtol=1e-6)
    np.testing.assert_allclose(names["embeddings"].embed_documents(TEXTS), [vector(t) for t in TEXTS], rtol=1e-6)


def test_a_langchain_retriever(url: str) -> None:
    pytest.importorskip("langchain_core")
    documents = run("A LangChain retriever", url)["documents"]
    assert [document.id for document in documents] == ranked_ids()[:3]
    assert documents[0].metadata["year"]


def test_llamaindex(url: str) -> None:
    pytest.importorskip("llama_index.embeddings.openai_like")
    names = run("LlamaIndex", url)
    assert [node.text for node in names["nodes"]] == [best(TEXTS)]
    np.testing.assert_allclose(names["embedding"].get_query_embedding("diabetes treatment"), vector(QUERY), rtol=1e-6)
    np.testing.assert_allclose(names["embedding"].get_text_embedding(TEXTS[0]), vector(TEXTS[0]), rtol=1e-6)


def test_a_llamaindex_retriever(url: str) -> None:
    pytest.importorskip("llama_index.core")
    nodes = run("A LlamaIndex retriever", url)["nodes"]
    assert [node.node.id_ for node in nodes] == ranked_ids()[:3]
    assert [node.score for node in nodes] == sorted((node.score for node in nodes), reverse=True)
