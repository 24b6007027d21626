"""The stand-in's Batch API. The log has each request of a batch as it ended, with the batch's id, and `submitted` for the batch."""

import asyncio
import hashlib
import json
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.support.stand_in_answers import REQUEST_FAULTS, Behaviour, draw, prompt_tokens


class Batches:
    """State that batches share with online requests, and the routes of files and batches."""

    def __init__(self, behaviour: Behaviour, log: Path) -> None:
        self._behaviour = behaviour
        self._log = log.open("a", encoding="utf-8", buffering=1)
        self._attempts: Counter[str] = Counter()
        self._answered = 0
        self._open = asyncio.Event()
        self._open.set()
        self._files: dict[str, bytes] = {}
        self._batches: dict[str, dict[str, Any]] = {}
        self._enqueued: list[tuple[dict[str, Any], str, int]] = []
        """Accepted batches, with their models and prompt tokens."""
        self._first_batch = 0.0
        self._working: set[asyncio.Task[None]] = set()

    def batch_routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [
            web.post("/v1/files", self._upload),
            web.get("/v1/files/{id}/content", self._download),
            web.post("/v1/batches", self._submit),
            web.get("/v1/batches", self._list),
            web.get("/v1/batches/{id}", self._describe),
        ]

    def _refused(self, body: dict[str, Any]) -> str | None:
        """Return a parameter of a body that its model refuses."""
        used = [*body, body.get("response_format", {}).get("type")]
        pairs = (each.split(":") for each in self._behaviour.refused_parameters.split(",") if each)
        return next((name for model, name in pairs if model == body["model"] and name in used), None)

    def _keep(self, content: bytes) -> str:
        self._files[f"file-{len(self._files)}"] = content
        return f"file-{len(self._files) - 1}"

    async def _upload(self, request: web.Request) -> web.StreamResponse:
        if self._behaviour.key and request.headers.get("Authorization") != f"Bearer {self._behaviour.key}":
            return error_response(401, "Incorrect API key provided.", "invalid_api_key")
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
        refusal = self._enqueue(batch)
        if refusal and self._behaviour.enqueued_status:
            return error_response(self._behaviour.enqueued_status, refusal, "token_limit_exceeded")
        self._batches[batch_id] = batch
        if refusal:
            error = {"code": "token_limit_exceeded", "message": refusal, "param": None, "line": None}
            batch |= {"status": "failed", "errors": {"object": "list", "data": [error]}}
            await self._open.wait()
            return web.json_response({**batch, "status": "validating", "errors": None})
        self._log.write(json.dumps({"batch": batch_id, "ended": "submitted", "time": time.time()}) + "\n")
        task = asyncio.create_task(self._process(batch))
        self._working.add(task)
        task.add_done_callback(self._working.discard)
        await self._open.wait()
        return web.json_response(batch)

    def _enqueue(self, batch: dict[str, Any]) -> str | None:
        """Count a batch's prompt tokens against its model's quota; return the refusal if they exceed it."""
        how = self._behaviour
        if not how.enqueued_tokens:
            return None
        lines = [json.loads(line) for line in self._files[batch["input_file_id"]].splitlines()]
        model, tokens = lines[0]["body"]["model"], sum(prompt_tokens(line["body"]) for line in lines)
        ended = ("completed", "failed", "expired")
        others = [tokens for other, owner, tokens in self._enqueued if owner == model and other["status"] not in ended]
        self._first_batch = self._first_batch or time.monotonic()
        taken = how.enqueued_tokens if time.monotonic() - self._first_batch < how.enqueued_elsewhere_s else sum(others)
        entry = {"batch": batch["id"], "tokens": tokens, "in_queue": taken + tokens, "model": model}
        refused = taken + tokens > how.enqueued_tokens
        entry["ended"] = "over_enqueued_tokens" if refused else "enqueued"
        self._log.write(json.dumps({**entry, "time": time.time()}) + "\n")
        if refused:
            return how.enqueued_refusal.format(model=model, limit=how.enqueued_tokens)
        self._enqueued.append((batch, model, tokens))
        return None

    async def _list(self, request: web.Request) -> web.StreamResponse:
        newest_first = list(reversed(self._batches))
        start = newest_first.index(request.query["after"]) + 1 if "after" in request.query else 0
        page = newest_first[start : start + 2]  # small pages, so that clients have to turn them
        more = start + 2 < len(newest_first)
        return web.json_response({"data": [self._batches[each] for each in page], "has_more": more})

    async def _describe(self, request: web.Request) -> web.StreamResponse:
        batch = self._batches.get(request.match_info["id"])
        return web.json_response(batch) if batch else error_response(404, "No such batch.", "not_found")

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
        await asyncio.sleep(how.batch_s)
        await self._open.wait()
        if how.batch_expired:
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
        fault = draw(how, ("batch_fault",), random.Random(f"{how.seed}/{digest}/{batch_id}"))
        always = draw(how, REQUEST_FAULTS, random.Random(f"{how.seed}/{digest}"))
        status, said = 200, {}
        refused = self._refused(body)
        if fault or always == "bad_request" or refused:
            status = 500 if fault else 400
            code = "server_error" if fault else "invalid_request_error"
            said = {"error": {"message": "Not answered.", "type": "error", "code": code, "param": refused}}
        else:
            said = how.completion(body, always)
            self._answered += 1
        ended = "answered" if status == 200 else fault or "bad_request"
        entry = {"request": digest, "attempt": self._attempts[digest], "model": body["model"], "batch": batch_id}
        entry["fault"] = always
        self._log.write(json.dumps({**entry, "ended": ended, "time": time.time()}) + "\n")
        return {
            "id": f"batch_req_{digest[:8]}",
            "custom_id": line["custom_id"],
            "response": {"status_code": status, "request_id": digest[:8], "body": said},
            "error": None,
        }


def error_response(
    status: int, message: str, code: str, retry_after_s: float | None = None, param: str | None = None
) -> web.Response:
    """Return an error as OpenAI words it."""
    headers = {} if retry_after_s is None else {"Retry-After": f"{retry_after_s:g}"}
    body = {"error": {"message": message, "type": "error", "param": param, "code": code}}
    return web.json_response(body, status=status, headers=headers)
