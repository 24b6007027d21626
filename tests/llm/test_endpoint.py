import json
import math
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from infembed_ray.config.llm import Endpoint
from infembed_ray.llm.chat import RunFailure
from infembed_ray.llm.endpoint import completion_of, error_message, list_models, parse_completion


@pytest.mark.parametrize("usage", [math.inf, -1, {"prompt_tokens": math.inf}, {"prompt_tokens": math.nan}, "12", [7]])
@pytest.mark.parametrize("name", ["prompt_tokens", "completion_tokens"])
def test_implausible_token_counts_count_as_none(usage: object, name: str) -> None:
    for wrong in (usage, {"prompt_tokens": 7, "completion_tokens": 3, name: usage}):
        body = {"choices": [{"message": {"content": "yes"}}], "usage": wrong}
        got = parse_completion(json.dumps(body).encode())
        if wrong not in (
            {"prompt_tokens": "12", "completion_tokens": 3},
            {"prompt_tokens": 7, "completion_tokens": "12"},
        ):
            assert (got.prompt_tokens, got.completion_tokens) == (0, 0)
        assert got.text == "yes"


def test_an_error_with_a_lone_surrogate_can_be_written() -> None:
    message, _ = error_message(b'{"error": {"message": "no \\ud83d"}}')
    assert message == "no ?"
    assert error_message(b"[" * 10_000)[0].startswith("[[")


@pytest.fixture
def listing() -> Iterator[Callable[[int, bytes], tuple[Endpoint, list[tuple[str, str]]]]]:
    """Start an endpoint that answers GET with a status and a body; returns it and what it was asked."""
    servers = []

    def start(status: int, body: bytes) -> tuple[Endpoint, list[tuple[str, str]]]:
        asked: list[tuple[str, str]] = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.append((self.path, self.headers.get("Authorization", "")))
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return Endpoint(base_url=f"http://127.0.0.1:{server.server_address[1]}/v1/", api_key_env="LISTING_KEY"), asked

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "body", "names"),
    [
        (200, b'{"data": [{"id": "a"}, {"id": "b"}]}', {"a", "b"}),
        (404, b"", None),
        (200, b"<html>", None),
        (200, b'{"data": 3}', None),
        (500, b"", None),
    ],
)
def test_an_endpoint_lists_its_models(
    listing: Callable[..., tuple[Endpoint, list[tuple[str, str]]]],
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    body: bytes,
    names: set[str] | None,
) -> None:
    monkeypatch.setenv("LISTING_KEY", "secret")
    endpoint, asked = listing(status, body)
    assert list_models(endpoint) == names
    assert asked == [("/v1/models", "Bearer secret")]


def test_a_refused_key_is_named_and_not_shown(
    listing: Callable[..., tuple[Endpoint, list[tuple[str, str]]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LISTING_KEY", "secret")
    with pytest.raises(
        RunFailure, match=r"^endpoint.api_key_env=LISTING_KEY: http.* refuses its key \(HTTP 401\)"
    ) as error:
        list_models(listing(401, b'{"error": "secret"}')[0])
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("details", "cached"),
    [
        ({"cached_tokens": 64}, 64),
        ({"cached_tokens": 1000}, 100),
        ({"cached_tokens": -1}, 0),
        ({}, 0),
        (None, 0),
        (3, 0),
    ],
)
def test_cached_tokens_are_at_most_the_prompts(details: object, cached: int) -> None:
    message = {"message": {"content": "x"}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 100, "completion_tokens": 1, "prompt_tokens_details": details}
    assert completion_of({"choices": [message], "usage": usage}).cached_tokens == cached
