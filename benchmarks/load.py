"""Load generator for an HTTP API: closed loop (clients wait for answers) or open loop (constant rate).

    python benchmarks/load.py URL --bodies FILE --rate 50 --seconds 180 --out answers.jsonl     # an open loop
    python benchmarks/load.py URL --bodies FILE --clients 64 --seconds 20 --out answers.jsonl   # a closed loop

In an open loop, latency counts from the time at which a request was due, so a stall counts for all requests that it delays
(no coordinated omission, after Tene). A request that is rejected with `Retry-After` (429 or 503) is retried at that time,
and its latency includes the wait. A request whose connection breaks is sent again up to twice, after 0.5 and 1 s, as OpenAI's
client does by default; ours goes on for longer. SIGTERM stops sending; requests in flight are completed.

Each line of the file of bodies is a JSON body; they are sent in turn. Each line of the answers is an `Answer`. The last
line of the output is the JSON object of `summary`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import signal
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp

TOLD_TO_RETRY = (429, 503)
ATTEMPTS = 20
"""Maximum attempts of a request that is rejected with `Retry-After`."""
PATIENCE_S = 60.0
"""Time-out of one attempt."""
RESENDS_S = (0.5, 1.0)
"""Pauses before a request whose connection broke is sent again."""


@dataclass(frozen=True)
class Answer:
    """The outcome of a request.

    Attributes:
        at: wall-clock time at which it was due.
        latency: seconds from then to the answer of its last attempt.
        statuses: of all attempts, the final one last; 0 means no answer.
        told: whether every attempt without success was answered with `Retry-After`; a connection may break once for each
            pause of `RESENDS_S`.
        first: seconds to the answer of the first attempt.
        version: `index_version` of the answer.
        owners: distinct prefixes of its hits' ids before the first dash: the indexes that the hits belong to.
        fault: error of the client, the connection or the API.
    """

    at: float
    latency: float
    statuses: tuple[int, ...]
    told: bool
    first: float
    version: str | None = None
    owners: tuple[str, ...] = ()
    fault: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the request succeeded in the end."""
        return self.statuses[-1] == 200

    @property
    def failed(self) -> bool:
        """Whether the request failed without having been rejected with `Retry-After` each time."""
        return not (self.ok and self.told)


class Load:
    """Requests to one URL.

    Args:
        url: with path.
        bodies: JSON values, sent in turn.
        headers: of every request.
        obey: retry as `Retry-After` says; false makes one attempt each.
    """

    def __init__(
        self, url: str, bodies: Sequence[Any], headers: dict[str, str] | None = None, obey: bool = True
    ) -> None:
        self._url = url
        self._bodies = itertools.cycle([json.dumps(body).encode() for body in bodies])
        self._headers = {"Content-Type": "application/json"} | (headers or {})
        self._attempts = ATTEMPTS if obey else 1
        self.answers: list[Answer] = []
        self.over = False
        """Set it, and no more requests are sent."""

    async def closed(self, clients: int, seconds: float, requests: int | None = None) -> float:
        """Run clients that send a request when the previous one is answered; return the seconds that it took.

        Args:
            clients: number of concurrent clients.
            seconds: during which requests are sent; requests in flight are then completed.
            requests: maximum number; None sets no maximum.
        """
        began, left = time.monotonic(), itertools.count() if requests is None else iter(range(requests))

        async def client(session: aiohttp.ClientSession) -> None:
            while not self.over and time.monotonic() - began < seconds and next(left, None) is not None:
                self.answers.append(await self._ask(session, time.monotonic()))

        async with self._session() as session:
            await asyncio.gather(*(client(session) for _ in range(clients)))
        return time.monotonic() - began

    async def constant(self, rate: float, seconds: float) -> float:
        """Send `rate` requests per second, evenly spaced; return the seconds to the last answer."""
        began, waiting = time.monotonic(), set[asyncio.Task[None]]()

        async def send(session: aiohttp.ClientSession, due: float) -> None:
            self.answers.append(await self._ask(session, due))

        async with self._session() as session:
            for number in range(round(rate * seconds)):
                due = began + number / rate
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                if self.over:
                    break
                task = asyncio.create_task(send(session, due))
                waiting.add(task)
                task.add_done_callback(waiting.discard)
            await asyncio.gather(*waiting)
        return time.monotonic() - began

    def _session(self) -> aiohttp.ClientSession:
        timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout, headers=self._headers)

    async def _ask(self, session: aiohttp.ClientSession, due: float) -> Answer:
        """Send one request with its retries; `due` is the monotonic time at which it was due."""
        at = time.time() - time.monotonic() + due
        body, statuses, told, broken = next(self._bodies), list[int](), True, 0
        first: float | None = None
        answer: dict[str, Any] | None = None
        fault: str | None = None
        while True:
            status, retry_after = 0, None
            try:
                async with session.post(self._url, data=body) as response:
                    text = await response.read()
                    if response.status == 200:
                        answer = json.loads(text)
                    else:
                        fault = text[:200].decode(errors="replace")
                    status, retry_after = response.status, response.headers.get("Retry-After")
            except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError) as error:
                fault = f"{type(error).__name__}: {error}"
                resent = isinstance(error, aiohttp.ClientConnectionError)  # a time-out is not
                broken += 1 if resent else ATTEMPTS
            statuses.append(status)
            first = time.monotonic() - due if first is None else first
            if status == 200:
                break
            allowed = broken <= len(RESENDS_S) if status == 0 else status in TOLD_TO_RETRY and retry_after is not None
            told = told and allowed
            if not told or len(statuses) >= self._attempts:
                break
            await asyncio.sleep(RESENDS_S[broken - 1] if status == 0 else float(retry_after or 0))
        results = [answer, *answer.get("results", [])] if answer else []
        hits = [hit for result in results for hit in result.get("hits") or []]
        return Answer(
            at=at,
            latency=time.monotonic() - due,
            statuses=tuple(statuses),
            told=told,
            first=first,
            version=answer.get("index_version") if answer else None,
            owners=tuple(sorted({hit["id"].partition("-")[0] for hit in hits if "-" in hit["id"]})),
            fault=None if answer else fault,
        )


def mixed(answers: Iterable[Answer]) -> int:
    """Return the answers whose hits belong to several indexes, or to another index than the answer names."""
    answers = [answer for answer in answers if answer.owners]
    pairs = Counter((answer.version, answer.owners[0]) for answer in answers if len(answer.owners) == 1)
    of = {version: owner for (version, owner), _ in reversed(pairs.most_common())}  # keep the most common fault
    return sum(len(a.owners) > 1 or of[a.version] != a.owners[0] for a in answers)


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return a percentile by nearest rank; None without values."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else None


def milliseconds(value: float | None) -> float | None:
    """Convert seconds to rounded milliseconds."""
    return None if value is None else round(1e3 * value, 1)


def summary(answers: Sequence[Answer], seconds: float) -> dict[str, Any]:
    """Summarise counts, rate of answers, and latencies (ms) of successful requests."""
    latencies = [answer.latency for answer in answers if answer.ok]
    return {
        "requests": len(answers),
        "answered": len(latencies),
        "failed": sum(answer.failed for answer in answers),
        "mixed": mixed(answers),
        "told_to_retry": sum(len(answer.statuses) > 1 for answer in answers),
        "statuses": {str(k): v for k, v in sorted(Counter(s for a in answers for s in a.statuses).items())},
        "per_second": round(len(latencies) / seconds, 2),
        "mean_ms": milliseconds(statistics.fmean(latencies)) if latencies else None,
        "p50_ms": milliseconds(percentile(latencies, 0.5)),
        "p99_ms": milliseconds(percentile(latencies, 0.99)),
        "faults": dict(Counter(a.fault for a in answers if a.failed).most_common(5)),
    }


def read(path: Path) -> list[Answer]:
    """Read answers from a file."""
    with path.open(encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    return [Answer(**line | {name: tuple(line[name]) for name in ("statuses", "owners")}) for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--bodies", type=Path, required=True, help="file with one JSON body per line")
    parser.add_argument("--clients", type=int, help="clients of a closed loop")
    parser.add_argument("--rate", type=float, help="requests per second of an open loop, instead of clients")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--requests", type=int, help="maximum number of requests of a closed loop")
    parser.add_argument("--give-up", action="store_true", help="do not retry rejected requests")
    parser.add_argument("--key", help="API key")
    parser.add_argument("--out", type=Path, help="file for the answers")
    options = parser.parse_args()
    with options.bodies.open(encoding="utf-8") as lines:
        bodies = [json.loads(line) for line in lines]
    headers = {"Authorization": f"Bearer {options.key}"} if options.key else {}
    load = Load(options.url, bodies, headers, obey=not options.give_up)
    signal.signal(signal.SIGTERM, lambda *_: setattr(load, "over", True))
    with contextlib.suppress(ImportError):
        import uvloop

        uvloop.install()
    if options.rate:
        seconds = asyncio.run(load.constant(options.rate, options.seconds))
    else:
        seconds = asyncio.run(load.closed(options.clients or 64, options.seconds, options.requests))
    if options.out:
        with options.out.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(answer)) + "\n" for answer in load.answers)
    print(json.dumps({"seconds": round(seconds, 2)} | summary(load.answers, seconds)))


if __name__ == "__main__":
    main()
