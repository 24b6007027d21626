"""A proxy before the stand-in object store: drops replies, answers errors, is slow, truncates objects."""

import http.client
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple


class Request(NamedTuple):
    """One request of a client.

    Attributes:
        method: HTTP method.
        path: with bucket and query: `/bucket/key?uploads`.
        headers: of the request.
    """

    method: str
    path: str
    headers: Mapping[str, str]


@dataclass(frozen=True)
class Fault:
    """What happens to a request.

    Attributes:
        error: status and S3 error code of the reply; the store does not see the request.
        delay_s: time before the store sees the request.
        drop_reply: close the connection instead of replying; the store has executed the request.
        truncate: close the connection in the middle of the reply's body.
    """

    error: tuple[int, str] | None = None
    delay_s: float = 0
    drop_reply: bool = False
    truncate: bool = False


FORWARD = Fault()
LOST_REPLY = Fault(drop_reply=True)
TRUNCATED = Fault(truncate=True)
UNAVAILABLE = Fault(error=(503, "SlowDown"))
EXPIRED = Fault(error=(403, "ExpiredToken"))


def first_replies_lost() -> Callable[[Request], Fault]:
    """Return a decision that loses the first reply to each write of an object."""
    lost: set[str] = set()

    def decide(request: Request) -> Fault:
        if request.method != "PUT" or request.path in lost:
            return FORWARD
        lost.add(request.path)
        return LOST_REPLY

    return decide


def writes_refused(request: Request) -> Fault:
    """Decide that the store is unavailable for writes."""
    return UNAVAILABLE if request.method in ("PUT", "POST") else FORWARD


@dataclass
class Proxy:
    """A running proxy.

    Attributes:
        endpoint: its URL.
        decide: request -> fault; tests set it.
        requests: all requests so far.
    """

    endpoint: str = ""
    decide: Callable[[Request], Fault] = lambda request: FORWARD
    requests: list[Request] = field(default_factory=list)


@contextmanager
def proxy() -> Iterator[Proxy]:
    """Serve before the store of AWS_ENDPOINT_URL, and direct that variable to the proxy, while the block runs.

    Writes are forwarded one at a time: moto checks the condition of a write and executes it without a lock between.
    """
    store = os.environ["AWS_ENDPOINT_URL"]
    state, writing = Proxy(), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one_request(self) -> None:
            self.raw_requestline = self.rfile.readline(65537)
            if self.raw_requestline and self.parse_request():
                self.forward()
            else:
                self.close_connection = True

        def forward(self) -> None:
            body = self.body()
            request = Request(self.command, self.path, dict(self.headers))
            state.requests.append(request)
            fault = state.decide(request)
            time.sleep(fault.delay_s)
            if fault.error is not None:
                status, code = fault.error
                text = (
                    f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>a test says so</Message></Error>'.encode()
                )
                self.reply(status, {"Content-Type": "application/xml", "Content-Length": str(len(text))}, text)
                return
            connection = http.client.HTTPConnection(store.removeprefix("http://"))
            with writing if self.command in ("PUT", "POST", "DELETE") else nullcontext():
                headers = {name: value for name, value in self.headers.items() if name.lower() != "transfer-encoding"}
                connection.request(self.command, self.path, body, headers)
                answer = connection.getresponse()
                text = answer.read()
            connection.close()
            headers = {name: value for name, value in answer.getheaders() if name != "Transfer-Encoding"}
            if self.command != "HEAD":
                headers["Content-Length"] = str(len(text))
            if fault.drop_reply or fault.truncate:
                self.close_connection = True
            if not fault.drop_reply:
                self.reply(answer.status, headers, text[: len(text) // 2] if fault.truncate else text)

        def body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            chunks = []
            while size := int(self.rfile.readline(), 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
            while self.rfile.readline().strip():  # trailers
                pass
            return b"".join(chunks)

        def reply(self, status: int, headers: dict[str, str], text: bytes) -> None:
            self.send_response_only(status)
            for name, value in headers.items():
                self.send_header(name, value)
            with suppress(ConnectionError):  # the client may have given up
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(text)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        state.endpoint = os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{server.server_port}"
        try:
            yield state
        finally:
            os.environ["AWS_ENDPOINT_URL"] = store
            server.shutdown()
