"""A stand-in for an OpenAI-compatible endpoint: a real HTTP server that answers the pipeline's prompts by rule.

    python -m tests.support.stand_in_llm --port 0 --latency-s 0.1 --rate-limited 0.05 --log requests.jsonl

prints its URL and serves until it is interrupted. `stand_in` serves in a thread of a test, `stand_in_process` in a process.
Equal requests get equal answers. Faults are drawn per attempt; refusals and useless answers are drawn per request. The log
has one line per request that says how it ended:

    probed       a short request with a model's parameters was answered, before the run's own requests
    answered     the client received all of the answer
    undelivered  the answer was sent, but the client died or disconnected before it received all of it
    abandoned    the client disconnected before there was an answer; the server then stops working on it
    ...          name of the fault

TCP tells `answered` from `undelivered`: a process that ends closes a connection with FIN if it had read everything that
arrived there, and with RST otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import email.utils
import hashlib
import json
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, fields
from itertools import count
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.support.stand_in_answers import (
    ATTEMPT_FAULTS,
    BREAKS,
    CHAOS,
    PROBE,
    READABLE,
    REQUEST_FAULTS,
    UNMENDABLE,
    UNUSABLE,
    Behaviour,
    draw,
    encoded,
)
from tests.support.stand_in_batches import Batches, error_response

REPOSITORY = Path(__file__).parents[2]


# ------------------------------------------------------------------------------------------------- the server


class _Server(Batches):
    def __init__(self, behaviour: Behaviour, log: Path) -> None:
        super().__init__(behaviour, log)
        self._in_flight = 0
        self._requests = count()
        self._used = (0.0, time.monotonic())
        """Requests of the limited model that have not refilled, and when that was so."""
        self._sent: dict[asyncio.BaseTransport, int] = {}
        """Connection -> number of the last request answered on it, until the client has certainly received the answer."""

    async def start(self, port: int) -> int:
        """Serve on loopback; return the port."""
        # As in a real server, a request ends at once when its client disconnects.
        self._runner = runner = web.AppRunner(
            self.application(), access_log=None, shutdown_timeout=0, handler_cancellation=True
        )
        await runner.setup()
        assert runner.server is not None
        of_aiohttp = runner.server.connection_lost

        def connection_lost(handler: web.RequestHandler[Any], error: BaseException | None = None) -> None:
            self._ended(handler.transport, error)
            of_aiohttp(handler, error)

        runner.server.connection_lost = connection_lost  # type: ignore[method-assign]
        await web.TCPSite(runner, "127.0.0.1", port, backlog=1024).start()
        opened: int = runner.addresses[0][1]
        return opened

    async def stop(self) -> None:
        """Close all connections."""
        await self._runner.cleanup()
        self._log.close()

    def _ended(self, transport: asyncio.BaseTransport | None, error: BaseException | None) -> None:
        """Log the last answer of a closed connection if the client did not receive it."""
        number = None if transport is None else self._sent.pop(transport, None)
        if number is None or transport is None:
            return
        reset = transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error is not None or reset:
            self._log.write(json.dumps({"undelivered": number, "time": time.time()}) + "\n")

    def application(self) -> web.Application:
        application = web.Application(client_max_size=2**28)
        application.add_routes(
            [
                web.post("/v1/chat/completions", self._handle),
                *self.batch_routes(),
                web.post("/hold", self._hold),
                web.post("/release", self._release),
            ]
        )
        return application

    async def _hold(self, _: web.Request) -> web.Response:
        self._open.clear()
        return web.Response()

    async def _release(self, _: web.Request) -> web.Response:
        await asyncio.sleep(0.1)  # clients that disconnected before this call are noticed first
        self._open.set()
        return web.Response()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        arrived, number = time.time(), next(self._requests)
        assert request.transport is not None
        self._sent.pop(request.transport, None)  # received: the connection is used again
        body = await request.json()
        digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        self._attempts[digest] += 1
        self._in_flight += 1
        entry = {"request": digest, "attempt": self._attempts[digest], "model": body["model"], "arrived": arrived}
        entry |= {"number": number, "in_flight": self._in_flight}
        entry |= {"authorization": request.headers.get("Authorization")}
        ended = "abandoned"
        try:
            how, response = await self._answer(request, body, digest)
            response.headers.update(request.get("headers", {}))
            if how == "answered":
                transport = request.transport
                await response.prepare(request)
                await response.write_eof()
                assert transport is not None
                self._sent[transport] = number
            ended = how
            return response
        except ConnectionError:
            return web.Response()
        finally:
            self._in_flight -= 1
            ended = request.get("fault", ended) if ended == "abandoned" else ended
            entry |= request.get("usage", {})
            self._log.write(json.dumps({**entry, "ended": ended, "time": time.time()}) + "\n")

    def _take(self, request: web.Request) -> bool:
        """Take one request from the rate limit of the limited model, and put what is left into the response's headers."""
        limit, now = self._behaviour.model_limit, time.monotonic()
        rate = limit / self._behaviour.model_window_s
        used = max(0.0, self._used[0] - rate * (now - self._used[1]))
        taken = used + 1 <= limit
        used += taken
        self._used = used, now
        request["headers"] = {
            "x-ratelimit-limit-requests": str(limit),
            "x-ratelimit-remaining-requests": str(int(limit - used)),
            "x-ratelimit-reset-requests": f"{1000 * used / rate:.0f}ms",
            **({} if taken else {"retry-after-ms": f"{1000 * (used + 1 - limit) / rate:.0f}"}),
        }
        return taken

    async def _answer(self, request: web.Request, body: dict[str, Any], digest: str) -> tuple[str, web.StreamResponse]:
        how = self._behaviour
        if how.breaks_after and self._answered >= how.breaks_after:
            status, error, headers = BREAKS[how.breaks]
            if not status:
                await asyncio.Event().wait()
            if isinstance(error, str):
                return "broken", web.Response(text=error, status=status, headers=headers, content_type="text/html")
            return "broken", web.json_response({"error": error}, status=status, headers=headers)
        if how.key and request.headers.get("Authorization") != f"Bearer {how.key}":
            return "refused_key", error_response(401, "Incorrect API key provided.", "invalid_api_key")
        if how.models and body["model"] not in how.models.split(","):
            return "unknown_model", error_response(
                404, f"The model `{body['model']}` does not exist.", "model_not_found"
            )
        if refused := self._refused(body):
            said = f"Unsupported parameter: '{refused}' is not supported with this model."
            return "refused_parameter", error_response(400, said, "unsupported_parameter", param=refused)
        if body["messages"][0]["content"].startswith(PROBE) and body["model"] != how.refused_model:
            response = how.completion(body, None)
            request["usage"] = response["usage"]
            return "probed", web.json_response(response)
        if body["model"] == how.limited_model and not self._take(request):
            return "rate_limited", error_response(429, "Rate limit reached.", "rate_limit_exceeded")
        rng = random.Random(f"{how.seed}/{digest}/{self._attempts[digest]}")
        fault = rng.choice(CHAOS) if how.chaos and rng.random() < how.chaos else draw(how, ATTEMPT_FAULTS, rng)
        if fault in ("rate_limited_until", "rate_limited_bare", "rate_limited_in_body"):
            return fault, _rate_limited(fault)
        if fault == "rate_limited":
            return fault, error_response(429, "Rate limit reached.", "rate_limit_exceeded", how.retry_after_s)
        await asyncio.sleep(how.latency_s + rng.uniform(0, how.jitter_s))
        if fault == "hang":
            request["fault"] = fault
            await asyncio.Event().wait()
        await self._open.wait()
        if fault == "server_error":
            return fault, error_response(500, "The server had an error.", "server_error")
        if fault == "dropped":
            assert request.transport is not None
            request.transport.close()
            return fault, web.Response()
        if fault == "reset":
            return fault, await self._reset(request)
        always = draw(how, REQUEST_FAULTS, random.Random(f"{how.seed}/{digest}"))
        always = fault if fault in (*UNUSABLE, *UNMENDABLE, *READABLE) else always
        if always == "bad_request" or body["model"] == how.refused_model:
            return "bad_request", error_response(400, "This request is not acceptable.", "invalid_request_error")
        response = how.completion(body, always)
        request["usage"] = {**response["usage"], "fault": always or fault}
        text = encoded(response, always == "unreadable")
        if fault == "truncated":
            return fault, web.Response(text=text[: len(text) // 2], content_type="application/json")
        if fault == "wrong_charset":
            return fault, web.Response(body=text[:-1].encode() + b', "x": "\xe9"}', content_type="application/json")
        if fault == "wrong_length":
            return fault, await self._reset(request, text.encode())
        self._answered += 1
        if fault == "drip":
            return "answered", await _drip(request, text.encode())
        return "answered", web.Response(text=text, content_type="application/json")

    async def _reset(self, request: web.Request, body: bytes = b"") -> web.StreamResponse:
        """Close the connection amid a response: its header promises more than `body`."""
        transport = request.transport
        assert isinstance(transport, asyncio.Transport)
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body) + 9}\r\n\r\n"
        transport.write(head.encode() + body)
        await asyncio.sleep(0.01)
        if body:
            transport.close()
        else:
            transport.abort()
        return web.Response()


def _rate_limited(how: str) -> web.Response:
    """A 429 whose Retry-After is a date, one without anything, or an error in a response with status 200."""
    if how == "rate_limited_until":
        date = email.utils.formatdate(time.time(), usegmt=True)
        return web.Response(status=429, headers={"Retry-After": date}, text="slow down")
    if how == "rate_limited_bare":
        return web.Response(status=429, text="<html>Too Many Requests</html>", content_type="text/html")
    return web.json_response({"error": {"message": "Provider returned error", "code": 429}})


async def _drip(request: web.Request, body: bytes) -> web.StreamResponse:
    """Send a response in small pieces, the last one apart."""
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    for start in range(0, len(body), 100):
        await response.write(body[start : start + 100])
        await asyncio.sleep(0.005)
    return response


# --------------------------------------------------------------------------------------------- from outside


class StandIn:
    """A running stand-in endpoint, as a test sees it."""

    def __init__(self, address: str, log: Path) -> None:
        self._address = address
        self._log = log
        self.url = f"{address}/v1"
        self.kill: Callable[[], None] | None = None
        """Kills the server, if it is in a process of its own."""

    def log(self, ended: str | None = None) -> list[dict[str, Any]]:
        """Return the requests so far, in the order in which they ended; with `ended`, only those that ended so."""
        lines = self._log.read_text(encoding="utf-8").split("\n")[:-1]  # the server may be writing the last one
        entries = [json.loads(line) for line in lines]
        undelivered = {entry["undelivered"]: entry["time"] for entry in entries if "undelivered" in entry}
        entries = [entry for entry in entries if "undelivered" not in entry]
        for entry in entries:
            if entry.get("number") in undelivered:
                entry |= {"ended": "undelivered", "lost": undelivered[entry["number"]]}
        return [entry for entry in entries if ended is None or entry["ended"] == ended]

    def usable(self) -> list[dict[str, Any]]:
        """Return the requests with a usable answer. A useless one may be asked for again with an equal body."""
        return [each for each in self.log("answered") if each.get("fault") not in UNUSABLE]

    def usable_answers(self) -> Counter[str]:
        """Return request -> number of its usable answers."""
        return Counter(each["request"] for each in self.usable())

    def answers(self) -> int:
        """Count the answers so far, also those that the client did not receive; cheaper than `log`."""
        return self._log.read_text(encoding="utf-8").count('"ended": "answered"')

    def hold(self) -> None:
        """Keep all answers back until `release`."""
        self._post("hold")

    def release(self) -> None:
        """Send the answers again."""
        self._post("release")

    def _post(self, path: str) -> None:
        urllib.request.urlopen(urllib.request.Request(f"{self._address}/{path}", method="POST"), timeout=10).close()


@contextmanager
def stand_in(**behaviour: Any) -> Iterator[StandIn]:
    """Serve in a thread of this process; the arguments are those of `Behaviour`."""
    started: Future[tuple[int, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve_until_stopped(log: Path) -> None:
        server, stop = _Server(Behaviour(**behaviour), log), asyncio.Event()
        started.set_result((await server.start(0), asyncio.get_running_loop(), stop))
        await stop.wait()
        await server.stop()

    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "requests.jsonl"
        thread = threading.Thread(target=lambda: asyncio.run(serve_until_stopped(log)), daemon=True)
        thread.start()
        port, loop, stop = started.result(timeout=30)
        try:
            yield StandIn(f"http://127.0.0.1:{port}", log)
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join()


@contextmanager
def stand_in_process(port: int = 0, **behaviour: Any) -> Iterator[StandIn]:
    """Serve in a process of its own, for tests of throughput, memory and kills; `StandIn.kill` ends it."""
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "requests.jsonl"
        log.touch()
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in asdict(Behaviour(**behaviour)).items()]
        command = [sys.executable, "-m", "tests.support.stand_in_llm", f"--port={port}", f"--log={log}", *flags]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as server:
            try:
                assert server.stdout is not None
                running = StandIn(server.stdout.readline().strip().removesuffix("/v1"), log)
                running.kill = server.kill
                yield running
            finally:
                server.kill()


async def serve(behaviour: Behaviour, port: int, log: Path) -> None:
    """Serve on loopback until cancelled; print the URL when the port is open."""
    port = await _Server(behaviour, log).start(port)
    print(f"http://127.0.0.1:{port}/v1", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description="A stand-in for an OpenAI-compatible endpoint.")
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument("--log", type=Path, default=Path("/dev/null"), help="JSONL file, one line a request")
    for field in fields(Behaviour):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    options = vars(parser.parse_args())
    port, log = options.pop("port"), options.pop("log")
    asyncio.run(serve(Behaviour(**options), port, log))


if __name__ == "__main__":
    main()
