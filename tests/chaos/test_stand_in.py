"""The stand-in's log distinguishes answers that a client received from lost ones."""

from __future__ import annotations

import json
import socket
import time
from urllib.parse import urlsplit

from tests.support.chat import passage_request
from tests.support.stand_in_llm import StandIn, stand_in


def send(server: StandIn, *headers: str, on: socket.socket | None = None) -> socket.socket:
    """Send a request; return its connection."""
    body = json.dumps(passage_request("tea").body)
    head = ["POST /v1/chat/completions HTTP/1.1", "Host: here", f"Content-Length: {len(body)}", *headers]
    connection = on or socket.create_connection(("127.0.0.1", urlsplit(server.url).port or 0))
    connection.sendall("\r\n".join([*head, "", body]).encode())
    return connection


def ends(server: StandIn, requests: int) -> list[str]:
    """Return how the requests ended, once all have and their connections are closed."""
    deadline = time.monotonic() + 20
    while len(server.log()) < requests and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)
    return [entry["ended"] for entry in server.log()]


def test_an_answer_that_was_read_is_answered() -> None:
    with stand_in() as server, send(server) as connection:
        assert connection.recv(1 << 16)
        connection.close()
        assert ends(server, 1) == ["answered"]


def test_an_answer_unread_when_the_client_died_is_undelivered() -> None:
    with stand_in() as server:
        with send(server) as connection:
            assert connection.recv(1 << 16)
            send(server, on=connection)
            assert ends(server, 2) == ["answered", "answered"]
        assert ends(server, 2) == ["answered", "undelivered"]


def test_a_request_whose_client_disconnected_is_abandoned() -> None:
    with stand_in(latency_s=0.5) as server:
        send(server).close()
        assert ends(server, 1) == ["abandoned"]


def test_a_known_idempotency_key_is_answered_from_memory() -> None:
    with stand_in() as server:
        answers = []
        for _ in range(2):
            with send(server, "Idempotency-Key: one") as connection:
                answers.append(connection.recv(1 << 16).split(b"\r\n\r\n")[1])
        assert ends(server, 2) == ["answered", "remembered"]
    assert answers[0] == answers[1]
