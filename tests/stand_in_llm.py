"""A stand-in for an OpenAI-compatible endpoint: a real HTTP server that answers the pipeline's prompts by rule.

    python tests/stand_in_llm.py --port 0 --latency-s 0.1 --rate-limited 0.05 --log requests.jsonl

prints its URL, then serves until it is interrupted. `StandIn` does the same from a test. The same request always gets
the same answer; faults are drawn per attempt, refusals and useless answers per request. The log has one line for each
request as it ended:

    answered     the client took all of the answer from its end of the connection
    undelivered  the answer was sent, but the client died or hung up before it took it
    remembered   answered once more, from memory, as the client sent an `Idempotency-Key` that was answered before
    abandoned    the client had gone before there was an answer; a real server stops its work then, and so does this one
    ...          the fault's name

Between the first two TCP decides: a process that ends closes its connections with FIN if it had read everything that
reached it, with RST if not.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from itertools import count
from pathlib import Path
from typing import Any

from aiohttp import web


@dataclass(frozen=True)
class Behaviour:
    """How the endpoint behaves. Rates are shares of 1."""

    latency_s: float = 0.0
    jitter_s: float = 0.0
    """Up to this much is added to the latency, evenly spread."""
    key: str = ""
    """The bearer key to require; empty: none."""
    models: str = ""
    """The models there are, with commas between; empty: any."""
    quota: int = 0
    """Answers until the quota is used up; 0: no end."""
    seed: int = 0
    # Faults of an attempt.
    rate_limited: float = 0.0
    retry_after_s: float = 0.05
    server_error: float = 0.0
    hang: float = 0.0
    dropped: float = 0.0
    """The connection is closed without an answer."""
    truncated: float = 0.0
    """Half of a response body."""
    # Faults of a request, the same at every attempt.
    bad_request: float = 0.0
    refusal: float = 0.0
    empty: float = 0.0
    cut_off: float = 0.0
    malformed: float = 0.0
    """An answer that is not in the format asked for."""
    mistaken: float = 0.0
    """The judge picks another candidate than the right one."""
    # Faults of the requests whose prompt holds the given text; empty: of none.
    surrogate: str = ""
    """Half of a surrogate pair at the end of the answer."""
    infinite_usage: str = ""
    """`"usage": 1e999`, which parses as infinity."""
    deep: str = ""
    """A member of the response that is nested 10,000 deep."""
    refused_model: str = ""
    """HTTP 400 for this model, whatever the prompt."""
    # Batches.
    batch_s: float = 0.0
    """What the processing of a batch takes."""
    batch_expired: float = 0.0
    """Share of its requests that are not answered when a batch expires; 0: batches complete."""
    batch_failed: float = 0.0
    """A whole batch is refused when its file is validated."""
    batch_fault: float = 0.0
    """A request of a batch is not answered."""


ATTEMPT_FAULTS = ("rate_limited", "server_error", "hang", "dropped", "truncated")
REQUEST_FAULTS = ("bad_request", "refusal", "empty", "cut_off", "malformed")


# ------------------------------------------------------------------------------------------- what the model says

AUDIENCES = ("schoolchildren", "engineers", "beginners", "journalists", "policy makers", "patients", "shoppers")
ANGLES = ("costs", "history", "risks", "safety rules", "regional differences", "common mistakes", "alternatives")
_WORD = re.compile(r"[a-z][a-z'-]+")
_STAMP = re.compile(r"\(Note \d+\)")
_SHOWN_AS_JSON = re.compile(r'^\{"(\w+)": "(<.*>)"\}$', re.MULTILINE)


def answer(body: Mapping[str, Any], mistaken: float = 0.0) -> str:
    """The answer to a request, however often it is asked again, in JSON where it wants that."""
    prompt = body["messages"][0]["content"]
    if "response_format" not in body:
        return say(prompt, mistaken)
    as_text = _SHOWN_AS_JSON.sub(lambda shown: f"{shown[1].capitalize()}: {shown[2]}", prompt)
    label, value = say(as_text, mistaken).split(": ", 1)
    return json.dumps({label.lower(): value})


def say(prompt: str, mistaken: float = 0.0) -> str:
    """The answer to one of the pipeline's prompts, always the same."""
    rng = random.Random(prompt)
    if "Candidates:" in prompt:
        return f"Answer: {_judge(prompt, rng, mistaken)}"
    if "Passage: <" in prompt:
        return f"Passage: {_passage(_field(prompt, 'Query'), _field(prompt, 'Instruction'), rng)}"
    document = _field(prompt, "Document")
    if "Query: <" in prompt:
        return f"Query: {_other_query(_field(prompt, 'Positive Query'), rng)}"
    if "Other Document:" in prompt:
        return f"Instruction: Nothing but the text that carries {_STAMP.findall(document)[0]} will do for me."
    if "Positive Instruction:" in prompt:
        positive = _field(prompt, "Positive Instruction")
        audience, angle = _other(AUDIENCES, positive, rng), _other(ANGLES, positive, rng)
        return f"Instruction: Written for {audience} and only about the {angle}; not what a general overview says."
    mentioned = ", ".join(rng.sample(sorted(_words(document)), k=min(4, len(_words(document)))))
    audience, angle = rng.choice(AUDIENCES), rng.choice(ANGLES)
    return f"Instruction: I want a text for {audience} that touches on {mentioned}; nothing about the {angle}, please."


def _judge(prompt: str, rng: random.Random, mistaken: float) -> str:
    query, instruction = _field(prompt, "Query"), _field(prompt, "Instruction")
    shown = re.split(r"^\[\d+\] ", _field(prompt, "Candidates"), flags=re.MULTILINE)[1:]
    asked_for = _STAMP.findall(instruction) or [_stamp(query, instruction)]
    stamped = [number for number, text in enumerate(shown, start=1) if asked_for[0] in text]
    if stamped:
        right = stamped[0]
    else:
        wanted = _words(f"{query} {instruction}")
        unstamped = [number for number, text in enumerate(shown, start=1) if not _STAMP.search(text)]
        right = max(unstamped, key=lambda number: len(wanted & _words(shown[number - 1])), default=0)
    if rng.random() < mistaken:
        right = rng.choice([0, *(number for number in range(1, len(shown) + 1) if number != right)])
    return str(right or "none")


def _passage(query: str, instruction: str, rng: random.Random) -> str:
    detail = rng.sample(ANGLES, k=3)
    return (
        f"On {query}: this passage was put together for one request, namely {instruction.rstrip('.')}. "
        f"It starts from what most readers ask first, goes on to the {detail[0]} and the {detail[1]}, and ends with a "
        f"word about the {detail[2]}, as far as they matter here. {_stamp(query, instruction)}"
    )


def _other_query(query: str, rng: random.Random) -> str:
    words = query.split()
    words[rng.randrange(len(words))] = rng.choice(("modern", "northern", "wooden", "electric", "medieval"))
    return " ".join([*words, "compared"])


def _stamp(query: str, instruction: str) -> str:
    """What a passage written for (query, instruction) carries, so that the judge knows it again."""
    return f"(Note {int(hashlib.sha256(f'{query}/{instruction}'.encode()).hexdigest(), 16) % 1_000_000})"


def _field(prompt: str, name: str) -> str:
    found = re.search(rf"^{name}:\s(.*?)(?=\n\n[A-Z][A-Za-z ]*:\s|\n\nYour task|\n\nMany|\Z)", prompt, re.M | re.S)
    assert found is not None, f"no {name} in the prompt"
    return found[1].strip()


def _words(text: str) -> set[str]:
    return {word for word in _WORD.findall(text.lower()) if len(word) > 4}


def _other(options: Sequence[str], text: str, rng: random.Random) -> str:
    return rng.choice([option for option in options if option not in text])


# ------------------------------------------------------------------------------------------------- the server


class _Server:
    def __init__(self, behaviour: Behaviour, log: Path) -> None:
        self._behaviour = behaviour
        self._log = log.open("a", encoding="utf-8", buffering=1)
        self._attempts: Counter[str] = Counter()
        self._in_flight = 0
        self._answered = 0
        self._open = asyncio.Event()
        self._open.set()
        self._files: dict[str, bytes] = {}
        self._batches: dict[str, dict[str, Any]] = {}
        self._working: set[asyncio.Task[None]] = set()
        self._requests = count()
        self._remembered: dict[str, str] = {}
        self._sent: dict[asyncio.BaseTransport, int] = {}
        """Connection -> the answer that was sent on it last, as long as nobody knows whether it was taken."""

    async def start(self, port: int) -> int:
        """Serve on loopback; returns the port."""
        # As in a real server, a request whose client has gone ends at once.
        runner = web.AppRunner(self.application(), access_log=None, shutdown_timeout=0, handler_cancellation=True)
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

    def _ended(self, transport: asyncio.BaseTransport | None, error: BaseException | None) -> None:
        """A connection is closed: was the last answer on it taken?"""
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
                web.post("/v1/files", self._upload),
                web.get("/v1/files/{id}/content", self._download),
                web.post("/v1/batches", self._submit),
                web.get("/v1/batches", self._list),
                web.get("/v1/batches/{id}", self._describe),
                web.post("/v1/batches/{id}/cancel", self._cancel),
                web.post("/hold", self._hold),
                web.post("/release", self._release),
            ]
        )
        return application

    async def _hold(self, _: web.Request) -> web.Response:
        self._open.clear()
        return web.Response()

    async def _release(self, _: web.Request) -> web.Response:
        await asyncio.sleep(0.1)  # who hung up before this call is noticed before anybody is answered
        self._open.set()
        return web.Response()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        arrived, number = time.time(), next(self._requests)
        assert request.transport is not None
        self._sent.pop(request.transport, None)  # taken: the connection is used again
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
            if how in ("answered", "remembered"):
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

    async def _answer(self, request: web.Request, body: dict[str, Any], digest: str) -> tuple[str, web.StreamResponse]:
        how = self._behaviour
        if how.key and request.headers.get("Authorization") != f"Bearer {how.key}":
            return "refused_key", _error(401, "Incorrect API key provided.", "invalid_api_key")
        if how.models and body["model"] not in how.models.split(","):
            return "unknown_model", _error(404, f"The model `{body['model']}` does not exist.", "model_not_found")
        if how.quota and self._answered >= how.quota:
            return "over_quota", _error(429, "You exceeded your current quota.", "insufficient_quota")
        rng = random.Random(f"{how.seed}/{digest}/{self._attempts[digest]}")
        fault = _draw(how, ATTEMPT_FAULTS, rng)
        if fault == "rate_limited":
            return fault, _error(429, "Rate limit reached.", "rate_limit_exceeded", how.retry_after_s)
        await asyncio.sleep(how.latency_s + rng.uniform(0, how.jitter_s))
        if fault == "hang":
            request["fault"] = fault
            await asyncio.Event().wait()
        await self._open.wait()
        if fault == "server_error":
            return fault, _error(500, "The server had an error.", "server_error")
        if fault == "dropped":
            assert request.transport is not None
            request.transport.close()
            return fault, web.Response()
        always = _draw(how, REQUEST_FAULTS, random.Random(f"{how.seed}/{digest}"))
        if always == "bad_request" or body["model"] == how.refused_model:
            return "bad_request", _error(400, "This request is not acceptable.", "invalid_request_error")
        key = request.headers.get("Idempotency-Key")
        if key is not None and key in self._remembered:
            return "remembered", web.Response(text=self._remembered[key], content_type="application/json")
        completion = _completion(body, always, how.mistaken)
        request["usage"] = completion["usage"]
        text = _distorted(completion, body, how)
        if key is not None:
            self._remembered[key] = text
        if fault == "truncated":
            return fault, web.Response(text=text[: len(text) // 2], content_type="application/json")
        self._answered += 1
        return "answered", web.Response(text=text, content_type="application/json")

    # Batches. The log has each of their requests as it ended, with the batch's id, and `submitted` for the batch.

    def _keep(self, content: bytes) -> str:
        self._files[f"file-{len(self._files)}"] = content
        return f"file-{len(self._files) - 1}"

    async def _upload(self, request: web.Request) -> web.StreamResponse:
        if self._behaviour.key and request.headers.get("Authorization") != f"Bearer {self._behaviour.key}":
            return _error(401, "Incorrect API key provided.", "invalid_api_key")
        form = await request.post()
        uploaded = form["file"]
        assert isinstance(uploaded, web.FileField)
        assert form["purpose"] == "batch"
        return web.json_response({"id": self._keep(uploaded.file.read()), "object": "file"})

    async def _download(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=self._files[request.match_info["id"]])

    async def _submit(self, request: web.Request) -> web.StreamResponse:
        wanted = await request.json()
        batch_id = f"batch-{len(self._batches)}"
        batch = {**wanted, "id": batch_id, "object": "batch", "created_at": time.time(), "status": "validating"}
        self._batches[batch_id] = batch
        self._log.write(json.dumps({"batch": batch_id, "ended": "submitted", "time": time.time()}) + "\n")
        task = asyncio.create_task(self._process(batch))
        self._working.add(task)
        task.add_done_callback(self._working.discard)
        await self._open.wait()
        return web.json_response(batch)

    async def _list(self, request: web.Request) -> web.StreamResponse:
        newest_first = list(reversed(self._batches))
        start = newest_first.index(request.query["after"]) + 1 if "after" in request.query else 0
        page = newest_first[start : start + 2]  # small pages, so that clients have to turn them
        more = start + 2 < len(newest_first)
        return web.json_response({"data": [self._batches[each] for each in page], "has_more": more})

    async def _describe(self, request: web.Request) -> web.StreamResponse:
        batch = self._batches.get(request.match_info["id"])
        return web.json_response(batch) if batch else _error(404, "No such batch.", "not_found")

    async def _cancel(self, request: web.Request) -> web.StreamResponse:
        batch = self._batches[request.match_info["id"]]
        batch["status"] = "cancelling"
        return web.json_response(batch)

    async def _process(self, batch: dict[str, Any]) -> None:
        how = self._behaviour
        rng = random.Random(f"{how.seed}/{batch['metadata']}")
        lines = [json.loads(line) for line in self._files[batch["input_file_id"]].splitlines()]
        assert len({line["body"]["model"] for line in lines}) == 1, "one model a batch"
        assert len({line["custom_id"] for line in lines}) == len(lines)
        if rng.random() < how.batch_failed:
            batch["status"] = "failed"
            return
        batch["status"] = "in_progress"
        began = time.monotonic()
        while batch["status"] != "cancelling" and time.monotonic() - began < how.batch_s:
            await asyncio.sleep(0.02)
        await self._open.wait()
        if batch["status"] == "cancelling":
            done, end = len(lines) // 2, "cancelled"
        elif how.batch_expired:
            done, end = round(len(lines) * (1 - how.batch_expired)), "expired"
        else:
            done, end = len(lines), "completed"
        rng.shuffle(lines)
        results = [self._batch_result(batch["id"], line) for line in lines[:done]]
        late = {"code": f"batch_{end}", "message": "This request could not be executed in time."}
        results += [{"custom_id": line["custom_id"], "response": None, "error": late} for line in lines[done:]]
        answered = [each for each in results if each["response"] and each["response"]["status_code"] == 200]
        others = [each for each in results if each not in answered]
        for name, part in (("output", answered), ("error", others)):
            if part:
                content = "".join(json.dumps(each) + "\n" for each in part)
                batch[f"{name}_file_id"] = self._keep(content.encode())
        batch["request_counts"] = {"total": len(lines), "completed": len(answered), "failed": len(others)}
        batch["status"] = end

    def _batch_result(self, batch_id: str, line: dict[str, Any]) -> dict[str, Any]:
        how, body = self._behaviour, line["body"]
        digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        self._attempts[digest] += 1
        fault = _draw(how, ("batch_fault",), random.Random(f"{how.seed}/{digest}/{batch_id}"))
        always = _draw(how, REQUEST_FAULTS, random.Random(f"{how.seed}/{digest}"))
        status, said = 200, {}
        if fault or always == "bad_request":
            status = 500 if fault else 400
            code = "server_error" if fault else "invalid_request_error"
            said = {"error": {"message": "Not answered.", "type": "error", "code": code}}
        else:
            said = _completion(body, always, how.mistaken)
            self._answered += 1
        ended = "answered" if status == 200 else fault or "bad_request"
        entry = {"request": digest, "attempt": self._attempts[digest], "model": body["model"], "batch": batch_id}
        self._log.write(json.dumps({**entry, "ended": ended, "time": time.time()}) + "\n")
        return {
            "id": f"batch_req_{digest[:8]}",
            "custom_id": line["custom_id"],
            "response": {"status_code": status, "request_id": digest[:8], "body": said},
            "error": None,
        }


def _draw(behaviour: Behaviour, names: Sequence[str], rng: random.Random) -> str | None:
    """At most one of some faults, each with its rate."""
    at = rng.random()
    for name in names:
        at -= getattr(behaviour, name)
        if at < 0:
            return name
    return None


def _completion(body: dict[str, Any], fault: str | None, mistaken: float) -> dict[str, Any]:
    prompt = " ".join(message["content"] for message in body["messages"])
    text: str | None = answer(body, mistaken)
    refusal, finish_reason = None, "stop"
    if fault == "refusal":
        text, refusal = None, "I'm sorry, I can't help with that."
    elif fault == "empty":
        text = ""
    elif fault == "cut_off":
        text, finish_reason = text and text[: len(text) // 2], "length"
    elif fault == "malformed":
        text = "Certainly! Here is what you asked for."
    usage = {"prompt_tokens": len(prompt.split()), "completion_tokens": len((text or "").split())}
    message = {"role": "assistant", "content": text, "refusal": refusal}
    return {
        "id": "chatcmpl-stand-in",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": f"{body['model']}-2026-01-01",
        "choices": [{"index": 0, "message": message, "finish_reason": finish_reason}],
        "usage": {**usage, "total_tokens": sum(usage.values())},
    }


def _distorted(completion: dict[str, Any], body: dict[str, Any], how: Behaviour) -> str:
    """The response's body, with what the behaviour does to it."""
    prompt = " ".join(message["content"] for message in body["messages"])
    message = completion["choices"][0]["message"]
    if how.surrogate and how.surrogate in prompt:
        message["content"] += " \ud83d"
    raw = {}
    if how.infinite_usage and how.infinite_usage in prompt:
        raw["usage"] = "1e999"
    if how.deep and how.deep in prompt:
        raw["logprobs"] = "[" * 10_000 + "]" * 10_000
    text = json.dumps({**completion, **{name: f"<{name}>" for name in raw}})
    for name, value in raw.items():
        text = text.replace(f'"<{name}>"', value)
    return text


def _error(status: int, message: str, code: str, retry_after_s: float | None = None) -> web.Response:
    headers = {} if retry_after_s is None else {"Retry-After": f"{retry_after_s:g}"}
    body = {"error": {"message": message, "type": "error", "param": None, "code": code}}
    return web.json_response(body, status=status, headers=headers)


# --------------------------------------------------------------------------------------------- from outside


class StandIn:
    """A running stand-in endpoint, as a test sees it."""

    def __init__(self, address: str, log: Path) -> None:
        self._address = address
        self._log = log
        self.url = f"{address}/v1"

    def log(self, ended: str | None = None) -> list[dict[str, Any]]:
        """The requests so far, in the order in which they ended; those that ended in one way only."""
        lines = self._log.read_text(encoding="utf-8").splitlines()
        entries = [json.loads(line) for line in lines]
        undelivered = {entry["undelivered"]: entry["time"] for entry in entries if "undelivered" in entry}
        entries = [entry for entry in entries if "undelivered" not in entry]
        for entry in entries:
            if entry.get("number") in undelivered:
                entry |= {"ended": "undelivered", "lost": undelivered[entry["number"]]}
        return [entry for entry in entries if ended is None or entry["ended"] == ended]

    def hold(self) -> None:
        """Answer nothing until `release`."""
        self._post("hold")

    def release(self) -> None:
        self._post("release")

    def _post(self, path: str) -> None:
        urllib.request.urlopen(urllib.request.Request(f"{self._address}/{path}", method="POST"), timeout=10).close()


@contextmanager
def stand_in(**behaviour: Any) -> Iterator[StandIn]:
    """Run the server as a process of its own; the arguments are those of `Behaviour`."""
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "requests.jsonl"
        log.touch()
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in asdict(Behaviour(**behaviour)).items()]
        command = [sys.executable, __file__, "--port=0", f"--log={log}", *flags]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                yield StandIn(server.stdout.readline().strip().removesuffix("/v1"), log)
            finally:
                server.kill()


async def serve(behaviour: Behaviour, port: int, log: Path) -> None:
    """Serve on loopback until cancelled; the URL is printed when the port is open."""
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
