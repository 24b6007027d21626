"""A fast stand-in for a chat-completions endpoint, for measurements of clients; about 0.05 ms of CPU per request.

    python benchmarks/llm_server.py --latency-s 0.1 --rate-limited 0.05 --stragglers 0.015625

prints its URL and serves until its standard input is closed. Its last line is a JSON object: the number of requests that it
answered, their rate between the first and the last fifth, which leaves out the start and end of a client, when that part
began and ended (`time.monotonic`), and the server's own CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time

ANSWER = (
    "Instruction: Keep to what matters in case {number}, for readers who have an hour and no more.\\n"
    "Query: what matters in case {number}\\n"
    "Passage: In case {number} the cost comes first, then the time it takes, then what people say who have done it "
    "before. Most of them would do it again, though not in winter, and not without asking a neighbour.\\n"
    "Answer: 1"
)
"""A valid answer to every prompt of the pipeline; each one differs."""

BODY = (
    '{{"id":"chatcmpl-{number}","object":"chat.completion","created":1767225600,"model":"{model}",'
    '"choices":[{{"index":0,"message":{{"role":"assistant","content":"' + ANSWER + '","refusal":null}},'
    '"finish_reason":"stop","logprobs":null}}],'
    '"usage":{{"prompt_tokens":400,"completion_tokens":80,"total_tokens":480}}}}'
)
LIMITED = b'{"error":{"message":"Rate limit reached.","type":"error","code":"rate_limit_exceeded"}}'


class Server:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.random = random.Random(options.seed)
        self.answered: list[float] = []
        self.limited = 0
        self.in_flight = 0
        self.most_in_flight = 0

    def respond(self) -> tuple[float, bytes]:
        """Return the latency in seconds and the response."""
        draw = self.random.random()
        if draw < self.options.rate_limited:
            self.limited += 1
            extra = f"Retry-After: {self.options.retry_after_s:g}\r\n"
            return 0.0, _response("429 Too Many Requests", LIMITED, extra)
        slow = self.random.random() < self.options.stragglers
        body = BODY.format(number=self.random.getrandbits(40), model="gpt-4o-mini-2024-07-18").encode()
        return self.options.straggler_s if slow else self.options.latency_s, _response("200 OK", body)

    def summary(self) -> dict[str, float]:
        times = self.answered
        fifth = len(times) // 5
        began, ended = (times[fifth], times[-fifth - 1]) if fifth else (0.0, 0.0)
        rate = (len(times) - 2 * fifth) / (ended - began) if fifth else 0.0
        return {
            "answered": len(times),
            "limited": self.limited,
            "most_in_flight": self.most_in_flight,
            "per_second": round(rate, 1),
            "steady_from": began,
            "steady_to": ended,
            "server_cpu_ms_per_request": round(1e3 * time.process_time() / max(1, len(times) + self.limited), 3),
        }


def _response(status: str, body: bytes, extra: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n{extra}\r\n"
    return head.encode() + body


class Connection(asyncio.Protocol):
    """HTTP/1.1 for keep-alive POSTs with a Content-Length."""

    def __init__(self, server: Server, loop: asyncio.AbstractEventLoop) -> None:
        self.server, self.loop = server, loop
        self.received = b""
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.received += data
        while (end := self.received.find(b"\r\n\r\n")) >= 0:
            head = self.received[:end].lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self.received) < end + 4 + length:
                return
            self.received = self.received[end + 4 + length :]
            server = self.server
            seconds, response = server.respond()
            server.in_flight += 1
            server.most_in_flight = max(server.most_in_flight, server.in_flight)
            self.loop.call_later(seconds, self.answer, response)

    def answer(self, response: bytes) -> None:
        self.server.in_flight -= 1
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(response)
            if response.startswith(b"HTTP/1.1 200"):
                self.server.answered.append(time.monotonic())


async def serve(options: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    server = Server(options)
    listening = await loop.create_server(lambda: Connection(server, loop), "127.0.0.1", 0, backlog=1024)
    print(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1", flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    print(json.dumps(server.summary()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latency-s", type=float, default=0.1)
    parser.add_argument("--rate-limited", type=float, default=0.0, help="share of 429s")
    parser.add_argument("--retry-after-s", type=float, default=1.0)
    parser.add_argument("--stragglers", type=float, default=0.0, help="share of answers that take straggler-s")
    parser.add_argument("--straggler-s", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=0)
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
