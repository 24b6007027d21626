"""HTTP clients of a served API."""

import asyncio
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import aiohttp

from tests.serving.indexes import PASSAGES


def ask(
    url: str, body: dict[str, Any] | None = None, method: str | None = None, **headers: str
) -> tuple[int, dict[str, Any], dict[str, str]]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer), dict(answer.headers)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error), dict(error.headers)


def found(api: str, query: str, path: str = "/v1", **more: Any) -> list[str]:
    """Return the ids of the hits."""
    status, answer, _ = ask(f"{api}{path}/search", {"query": query, **more})
    assert status == 200, answer
    return [hit["id"] for hit in answer["hits"]]


def values(api: str, metric: str) -> set[float]:
    """Return the values of a metric of all replicas."""
    with urllib.request.urlopen(f"{api}/metrics", timeout=60) as page:
        lines = page.read().decode().splitlines()
    return {float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{metric}{{")}


class Answered(NamedTuple):
    status: int
    """0: the connection broke."""
    retry_after: str | None
    body: dict[str, Any]


@contextmanager
def under_load(api: str, clients: int = 4, path: str = "/v1/search") -> Iterator[list[Answered]]:
    """Search from several connections while the block runs; gives the answers so far."""
    answers: list[Answered] = []
    ended = threading.Event()

    async def client(session: aiohttp.ClientSession, number: int) -> None:
        while not ended.is_set():
            query = f"{list(PASSAGES.values())[number % len(PASSAGES)]} {len(answers)}"
            try:
                async with session.post(f"{api}{path}", json={"query": query, "top_k": 5}) as answer:
                    body = await answer.json() if answer.content_type == "application/json" else {}
                    answers.append(Answered(answer.status, answer.headers.get("Retry-After"), body))
            except aiohttp.ClientConnectionError:
                answers.append(Answered(0, None, {}))
            if answers[-1].status != 200:
                await asyncio.sleep(0.1)

    async def all_clients() -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
            await asyncio.gather(*(client(session, number) for number in range(clients)))

    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(asyncio.run, all_clients())
        try:
            yield answers
        finally:
            ended.set()
        running.result()
