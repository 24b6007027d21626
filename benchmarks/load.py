"""Load on an HTTP API: clients that wait for their answers, or requests at a constant rate whether it answers or not.

    python benchmarks/load.py URL --bodies FILE --rate 50 --seconds 180 --out answers.jsonl     # an open loop
    python benchmarks/load.py URL --bodies FILE --clients 64 --seconds 20 --out answers.jsonl   # a closed loop

At a constant rate a latency counts from the moment at which the request was to be sent, so whatever stalls client or
server counts for all the requests that it holds up, not for one alone (Tene's coordinated omission). A request that is told
to come back (429 or 503 with `Retry-After`) does so when it is told to; its latency then goes on to count to the end. A request
whose connection breaks is sent once more on another one, as our client and OpenAI's do.
SIGTERM ends the load before its time: what is under way is waited for.

A line of the file of bodies is one JSON body; they are sent in turn. A line of answers is an `Answer`. The last line that
is printed is one JSON object, as `summary` makes it.
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
"""Of a request that is told again and again to come back."""
PATIENCE_S = 60.0
"""For one attempt to be answered."""


@dataclass(frozen=True)
class Answer:
    """What became of a request.

    Attributes:
        at: wall-clock time at which it was to be sent.
        latency: seconds from then to its last attempt's answer.
        statuses: of all attempts, the last one final; 0: no answer at all.
        told: did every attempt but the last come with `Retry-After`, and the last one, unless it was a success? One broken
            connection is allowed.
        first: seconds to the first attempt's answer, whatever it said.
        version: `index_version` of the answer.
        owners: what the ids of its hits say before their first dash, if there is one, each once: the index they are of.
        fault: of the client or the connection, where there was no answer; or what the API said.
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
        """Answered in the end."""
        return self.statuses[-1] == 200

    @property
    def failed(self) -> bool:
        """Neither answered in the end nor told, each time, to come back."""
        return not (self.ok and self.told)


class Load:
    """Requests to one URL.

    Args:
        url: with path.
        bodies: JSON values, sent in turn.
        headers: of every request.
        obey: come back when told to; false: one attempt each.
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
        """`clients` that each send a request when the one before is answered; returns the seconds that they took.

        Args:
            clients: at a time.
            seconds: for which requests are sent; those under way are waited for.
            requests: most of them; None: as many as go.
        """
        began, left = time.monotonic(), itertools.count() if requests is None else iter(range(requests))

        async def client(session: aiohttp.ClientSession) -> None:
            while not self.over and time.monotonic() - began < seconds and next(left, None) is not None:
                self.answers.append(await self._ask(session, time.monotonic()))

        async with self._session() as session:
            await asyncio.gather(*(client(session) for _ in range(clients)))
        return time.monotonic() - began

    async def constant(self, rate: float, seconds: float) -> float:
        """`rate` requests a second, evenly spaced, whatever becomes of them; returns the seconds to the last answer."""
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
        """One request to its end; `due` is the monotonic time at which it was to be sent."""
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
                broken += 1 if isinstance(error, aiohttp.ClientConnectionError) else 2  # a time-out is final
            statuses.append(status)
            first = time.monotonic() - due if first is None else first
            if status == 200:
                break
            told = told and (broken == 1 if status == 0 else status in TOLD_TO_RETRY and retry_after is not None)
            if not told or len(statuses) >= self._attempts:
                break
            await asyncio.sleep(float(retry_after or 0))
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
    """Answers whose hits are of more than one index, or of another one than the answer says."""
    answers = [answer for answer in answers if answer.owners]
    pairs = Counter((answer.version, answer.owners[0]) for answer in answers if len(answer.owners) == 1)
    of = {version: owner for (version, owner), _ in reversed(pairs.most_common())}  # the most usual one stays
    return sum(len(a.owners) > 1 or of[a.version] != a.owners[0] for a in answers)


def percentile(values: Sequence[float], share: float) -> float | None:
    """The value below which that share of them is, by nearest rank; None of none."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else None


def milliseconds(value: float | None) -> float | None:
    """Of seconds, rounded."""
    return None if value is None else round(1e3 * value, 1)


def summary(answers: Sequence[Answer], seconds: float) -> dict[str, Any]:
    """Counts, rate of answers, latencies in milliseconds of what was answered in the end."""
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
    """Answers as they were written."""
    with path.open(encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    return [Answer(**line | {name: tuple(line[name]) for name in ("statuses", "owners")}) for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--bodies", type=Path, required=True, help="a JSON body a line")
    parser.add_argument("--clients", type=int, help="that wait for their answers")
    parser.add_argument("--rate", type=float, help="requests a second, instead of clients")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--requests", type=int, help="most of them, of clients")
    parser.add_argument("--give-up", action="store_true", help="do not come back when told to")
    parser.add_argument("--key", help="API key")
    parser.add_argument("--out", type=Path, help="file of the answers")
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
