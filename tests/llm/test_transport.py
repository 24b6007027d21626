import asyncio
import gzip
import ssl
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import aiohttp
import pytest

from infembed_ray.llm.endpoint import Response, Target, Transport

pytestmark = pytest.mark.integration

T = TypeVar("T")

BOMB = gzip.compress(bytes(40 << 20))
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\nX-Kind: Plain\r\n\r\nanswer"


class Server:
    """Gives scripted bytes to each request; None closes the connection."""

    def __init__(self, *responses: bytes | None, pause_s: float = 0.0, close: bool = False) -> None:
        self.responses = list(responses)
        self.pause_s = pause_s
        self.close = close
        self.heads: list[str] = []
        self.bodies: list[bytes] = []
        self.connections = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while self.responses:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                lines = dict(line.split(": ", 1) for line in head.split("\r\n")[1:-2])
                self.heads.append(head)
                self.bodies.append(await reader.readexactly(int(lines["Content-Length"])))
                response = self.responses.pop(0)
                if response is None:
                    return
                for part in response.partition(b"|")[::2]:
                    writer.write(part)
                    await asyncio.sleep(self.pause_s)
                if self.close:
                    return
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()


def using(server: Server, use: Callable[[Transport, str], Awaitable[T]], tls: ssl.SSLContext | None = None) -> T:
    async def run() -> T:
        listening = await asyncio.start_server(server.handle, "127.0.0.1", 0, ssl=tls)
        transport = Transport()
        try:
            port = listening.sockets[0].getsockname()[1]
            return await use(transport, f"http{'s' if tls else ''}://localhost:{port}/v1/chat?version=1")
        finally:
            await transport.close()
            listening.close()

    return asyncio.run(run())


def posting(server: Server, timeout_s: float = 5.0, times: int = 1, tls: ssl.SSLContext | None = None) -> Response:
    async def use(transport: Transport, url: str) -> Response:
        address = Target(url, {"Content-Type": "application/json", "Authorization": "Bearer key"}, None, timeout_s)
        for _ in range(times):
            response = await transport.post(address, '{"é": 1}'.encode())
        return response

    return using(server, use, tls)


def test_a_request_has_its_address_headers_and_body_and_reuses_the_connection() -> None:
    server = Server(OK, OK, OK)
    response = posting(server, times=3)
    assert (response.status, response.body, response.headers["x-kind"]) == (200, b"answer", "Plain")
    assert server.connections == 1
    lines = server.heads[2].split("\r\n")
    assert lines[0] == "POST /v1/chat?version=1 HTTP/1.1"
    assert {"Authorization: Bearer key", "Content-Type: application/json"} <= set(lines)
    assert sum(line.startswith("Host: localhost:") for line in lines) == 1
    assert server.bodies == ['{"é": 1}'.encode()] * 3


@pytest.mark.parametrize(
    ("connections", "response"),
    [
        (1, b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nans\r\n|3\r\nwer\r\n0\r\n\r\n"),
        (
            1,
            b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 26\r\n\r\n"
            + gzip.compress(b"answer", mtime=0),
        ),
        (1, b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n|" + OK),
        (1, b"HTTP/1.1 200 OK\r\nContent-Le|ngth: 6\r\n\r\nanswer"),
        (1, b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 6\r\n\r\nanswer"),
        (2, b"HTTP/1.1 200 OK\r\n\r\nans|wer"),
        (2, b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 6\r\n\r\nanswer"),
    ],
)
def test_every_form_of_response_is_read_and_only_one_that_ends_its_connection_is_followed_by_a_new_one(
    connections: int, response: bytes
) -> None:
    server = Server(response, response, pause_s=0.01, close=connections == 2)
    assert posting(server, times=2).body == b"answer"
    assert server.connections == connections


@pytest.mark.parametrize(
    "response",
    [
        None,
        b"HTTP/1.1 200 OK\r\nContent-Length: 60\r\n\r\nanswer",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n6\r\nans",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 6\r\n\r\nanswer",
        b"no HTTP at all\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n%b" % (len(BOMB), BOMB),
    ],
)
def test_a_broken_response_is_a_client_error_and_the_next_request_gets_a_new_connection(response: bytes | None) -> None:
    server = Server(response, OK, close=True)

    async def use(transport: Transport, url: str) -> Response:
        address = Target(url, {}, None, 5.0)
        with pytest.raises(aiohttp.ClientError):
            await transport.post(address, b"{}")
        return await transport.post(address, b"{}")

    assert using(server, use).body == b"answer"
    assert server.connections == 2


def test_a_response_that_nothing_asked_for_answers_no_request() -> None:
    server = Server(OK + b"|" + OK.replace(b"answer", b"stray!"), OK, pause_s=0.01)

    async def use(transport: Transport, url: str) -> Response:
        address = Target(url, {}, None, 5.0)
        await transport.post(address, b"{}")
        await asyncio.sleep(0.1)
        with pytest.raises(aiohttp.ClientError):
            await transport.post(address, b"{}")
        return await transport.post(address, b"{}")

    assert using(server, use).body == b"answer"
    assert server.connections == 2


@pytest.mark.parametrize("response", [b"|" + OK, OK[:-3] + b"|wer", b"HTTP/1.1 200 OK\r\n\r\nans|wer"])
def test_the_timeout_holds_for_the_head_and_for_the_body(response: bytes) -> None:
    with pytest.raises(asyncio.TimeoutError):
        posting(Server(response, pause_s=2.0), timeout_s=0.2)


def test_a_proxy_gets_the_whole_address() -> None:
    proxy = Server(OK)

    async def use(transport: Transport, url: str) -> Response:
        return await transport.post(Target("http://far.example/v1", {"X-One": "1"}, url, 5.0), b"{}")

    assert using(proxy, use).body == b"answer"
    assert proxy.heads[0].startswith("POST http://far.example/v1 HTTP/1.1")
    assert "X-One: 1" in proxy.heads[0].split("\r\n")


def test_tls_is_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj",
         "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    served = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    served.load_cert_chain(certificate, key)
    with pytest.raises(aiohttp.ClientConnectorCertificateError):
        posting(Server(OK), tls=served)
    trusting = ssl.create_default_context(cafile=str(certificate))
    monkeypatch.setattr("aiohttp.connector._SSL_CONTEXT_VERIFIED", trusting)
    server = Server(OK, OK)
    assert posting(server, times=2, tls=served).body == b"answer"
    assert server.connections == 1


def test_a_header_with_a_line_break_is_refused() -> None:
    async def use(transport: Transport, url: str) -> None:
        await transport.post(Target(url, {"Authorization": "Bearer a\r\nX-Other: b"}, None, 5.0), b"{}")

    with pytest.raises(ValueError, match="line break"):
        using(Server(OK), use)
