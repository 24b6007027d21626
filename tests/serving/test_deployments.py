"""The API on a real Ray Serve, over real HTTP, with the real small encoder."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from ray import serve

from infembed_ray.config import IndexSettings, ServeSettings
from infembed_ray.errors import InputError
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.retrieval.distributed import run as build_index
from infembed_ray.retrieval.index import Index
from infembed_ray.serving.deployments import Ingress, require_free_port, run, serving

PASSAGES = {
    f"{topic}-{audience}": f"{topic.capitalize()} {text}"
    for topic in ("diabetes", "asthma", "back pain")
    for audience, text in {
        "children": "in children: what parents and schools should know, with games that teach it.",
        "doctors": "treatment guideline for clinicians: dosage tables, contraindications, evidence grades.",
        "history": "in the nineteenth century: how physicians of the time explained and treated it.",
        "costs": "and what it costs health insurers a year, by country.",
    }.items()
}
QUERY = "diabetes"
INSTRUCTIONS = ("Only guidelines written for clinicians.", "For a lesson on nineteenth century medicine.")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ask(url: str, body: dict[str, Any] | None = None, **headers: str) -> tuple[int, dict[str, Any], dict[str, str]]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer), dict(answer.headers)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error), dict(error.headers)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory, minilm: str, ray_cluster: None) -> str:
    root = tmp_path_factory.mktemp("serving")
    corpus = root / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"id": i, "text": t}) + "\n" for i, t in PASSAGES.items()))
    return str(build_index(IndexSettings(corpus=str(corpus), model=minilm, output=str(root / "index"))).path)


@pytest.fixture(scope="module")
def settings(index: str) -> ServeSettings:
    return ServeSettings(index=index, port=free_port(), model_name="minilm", wait=False)


@pytest.fixture(scope="module")
def api(settings: ServeSettings) -> Iterator[str]:
    # As a job that was stopped in a hurry leaves it: Serve without an application, holding the port.
    serve.start(http_options={"host": settings.host, "port": settings.port})
    with serving(settings) as url:
        yield url


@pytest.mark.ray
def test_the_api_takes_over_the_port_that_a_stopped_job_left_listening(api: str, settings: ServeSettings) -> None:
    assert api == f"http://127.0.0.1:{settings.port}"
    assert ask(f"{api}/readyz")[0] == 200


@pytest.mark.ray
def test_hits_over_http_are_those_of_the_index_offline(api: str, index: str, minilm: str) -> None:
    encoder = InstructionEncoder.from_pretrained(minilm)
    offline = Index.open(index, encoder.fingerprint())
    firsts = []
    for instruction in INSTRUCTIONS:
        status, answer, _ = ask(f"{api}/v1/search", {"query": QUERY, "instruction": instruction, "top_k": 5})
        assert status == 200
        expected = offline.search(encoder.encode_queries([QUERY], [instruction]), 5)[0]
        assert [(hit["id"], hit["text"]) for hit in answer["hits"]] == [(hit.id, hit.text) for hit in expected]
        np.testing.assert_allclose([hit["score"] for hit in answer["hits"]], [hit.score for hit in expected], atol=1e-5)
        assert (answer["index_version"], answer["model"]) == (offline.version, "minilm")
        assert answer["timings"]["encode_ms"] > 0
        assert answer["timings"]["search_ms"] > 0
        firsts.append(answer["hits"][0]["id"])
    assert firsts == ["diabetes-doctors", "diabetes-history"]


@pytest.mark.ray
def test_embeddings_over_http_are_those_of_the_encoder(api: str, minilm: str) -> None:
    client = openai.OpenAI(base_url=f"{api}/v1", api_key="none needed", max_retries=0)
    encoder = InstructionEncoder.from_pretrained(minilm)
    texts = list(PASSAGES.values())

    def embed(inputs: Any, **extra: Any) -> np.ndarray:
        answer = client.embeddings.create(input=inputs, model="minilm", extra_body=extra)
        return np.array([item.embedding for item in answer.data])

    np.testing.assert_allclose(embed(texts), encoder.encode_passages(texts), atol=1e-5)
    queries = encoder.encode_queries(texts[:2], [INSTRUCTIONS[0]] * 2)
    np.testing.assert_allclose(embed(texts[:2], instruction=INSTRUCTIONS[0]), queries, atol=1e-5)
    for special in (True, False):  # a token array stands for its text, with or without special tokens
        tokens = encoder.tokenizer(texts[0], add_special_tokens=special)["input_ids"]
        np.testing.assert_allclose(embed(tokens), encoder.encode_passages(texts[:1]), atol=1e-5)


@pytest.mark.ray
def test_sixty_four_clients_at_once_all_get_their_own_answer(api: str) -> None:
    texts = [f"{text} {i}" for i, text in enumerate(list(PASSAGES.values()) * 6)][:64]

    def embed(text: str) -> list[float]:
        status, answer, _ = ask(f"{api}/v1/embeddings", {"input": text, "model": "minilm"})
        assert status == 200
        vector: list[float] = answer["data"][0]["embedding"]
        return vector

    with ThreadPoolExecutor(64) as clients:
        together = np.array(list(clients.map(embed, texts)))
    np.testing.assert_allclose(together[::16], np.array([embed(text) for text in texts[::16]]), atol=1e-5)


@pytest.mark.ray
def test_refusals_and_health_cross_ray_as_http(api: str) -> None:
    status, answer, headers = ask(f"{api}/v1/embeddings", {"input": "x", "model": "gpt-4"})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    status, answer, _ = ask(f"{api}/v1/embeddings", {"input": [30522], "model": "minilm"})
    assert (status, answer["error"]["param"]) == (400, "input")
    assert ask(f"{api}/healthz")[:2] == ask(f"{api}/readyz")[:2]
    models = ask(f"{api}/v1/models")[1]["data"]
    assert [(m["id"], m["dimension"], m["passages"]) for m in models] == [("minilm", 384, len(PASSAGES))]
    _, _, headers = ask(f"{api}/healthz", **{"X-Request-ID": "mine-1"})
    assert headers["x-request-id"] == "mine-1"


@pytest.mark.ray
def test_the_same_index_and_settings_are_not_served_twice(
    api: str, settings: ServeSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    before = ask(f"{api}/v1/models")[1]
    run(settings)
    assert capsys.readouterr().out == (f"serve: nothing to do: same index and settings, already served at {api}\n")
    assert ask(f"{api}/v1/models")[1] == before


@pytest.mark.ray
def test_another_port_is_refused_while_serve_is_up(api: str, settings: ServeSettings) -> None:
    elsewhere = settings.model_copy(update={"port": free_port()})
    with (
        pytest.raises(InputError, match=r"Serve runs on this cluster already and listens at 127\.0\.0\.1"),
        serving(elsewhere),
    ):
        pass
    assert ask(f"{api}/readyz")[0] == 200  # the refusal took nothing down


@pytest.mark.ray
def test_other_settings_replace_what_is_served(api: str, settings: ServeSettings) -> None:
    run(settings.model_copy(update={"model_name": "renamed"}))
    assert ask(f"{api}/v1/models")[1]["data"][0]["id"] == "renamed"


@pytest.mark.ray
def test_bad_input_is_refused_before_anything_starts(
    index: str, minilm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(message: str, **changes: Any) -> None:
        with pytest.raises(InputError, match=message) as refusal:
            run(ServeSettings.of({"index": index, "port": free_port(), "wait": False, **changes}))
        assert "\n" not in str(refusal.value)

    refuse("index=nowhere: no such file or directory", index="nowhere")
    refuse(r"model=./nowhere: no such model directory", model="./nowhere")
    encoder = InstructionEncoder.from_pretrained(minilm)
    next(encoder.backbone.parameters()).data.mul_(1.01)
    encoder.save_pretrained(tmp_path / "other")
    refuse(rf"built by another encoder \({Index.open(index).facts.encoder}", model=str(tmp_path / "other"))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        refuse(f"port={port}: cannot be listened on .* set another port", port=port)
    monkeypatch.delenv("INFEMBED_API_KEYS", raising=False)
    refuse(r"host=0\.0\.0\.0: open to other machines without API keys", host="0.0.0.0")
    monkeypatch.setenv("INFEMBED_API_KEYS", "key1,,key2")
    refuse("holds an empty key")


def test_a_replica_without_the_keys_it_should_have_refuses_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INFEMBED_API_KEYS", raising=False)
    replica: Any = Ingress.__mro__[1]  # as written, without Serve's wrapper
    with pytest.raises(RuntimeError, match="would be open"):
        replica(None, "", "INFEMBED_API_KEYS", True, None, [])


def test_a_free_port_is_accepted_even_just_after_use() -> None:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as every server does
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            listener.accept()[0].close()  # leaves the port in TIME_WAIT
        with pytest.raises(InputError):
            require_free_port("127.0.0.1", port)
    require_free_port("127.0.0.1", port)


@pytest.mark.ray
def test_the_command_serves_until_interrupted_with_keys_from_the_environment(index: str) -> None:
    port = free_port()
    command = [sys.executable, "-m", "infembed_ray.cli", "serve", f"index={index}", f"port={port}"]
    environment = {**os.environ, "INFEMBED_API_KEYS": "key-one,key-two"}
    environment.pop("RAY_ADDRESS", None)
    server = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        lines = []
        for line in server.stdout or ():
            lines.append(line)
            if "Ctrl-C" in line:
                break
        url = f"http://127.0.0.1:{port}"
        assert any(url in line for line in lines), "".join(lines)
        body = {"query": QUERY, "top_k": 1}
        assert ask(f"{url}/v1/search", body)[0] == 401
        assert ask(f"{url}/v1/search", body, Authorization="Bearer key-two")[0] == 200
        again = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert again.returncode == 0
        assert "nothing to do: same index and settings" in again.stdout
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=60) == 0
    finally:
        server.kill()
        server.wait()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            require_free_port("127.0.0.1", port)
            break
        except InputError:
            time.sleep(0.2)
    require_free_port("127.0.0.1", port)
