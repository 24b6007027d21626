"""Answers at half the price through the Batch API: files of requests, answered within a day.

The steps of a row follow one another, so rows go in waves: the next request of every row, in batches; then, their
answers being in the journal, the next ones. What a batch leaves unanswered (expired, cancelled, a faulty row) is not
put into a batch again: the online run that follows asks it. That run is an ordinary one; it replays all the rest.

Nothing is paid twice. A batch's requests are on the disk before they are uploaded, the intention to submit them before
they are submitted, the batch's id before it is waited for. A run that finds an intention without an id looks for the
batch at the endpoint, by the tag in its metadata. A run that finds an id waits for that batch and collects it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import math
import os
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

import aiohttp

from infembed_ray.config import Batches, Endpoint, SynthesizeSettings
from infembed_ray.progress import say
from infembed_ray.records import Seed
from infembed_ray.storage import write_json
from infembed_ray.synthesis import prices
from infembed_ray.synthesis.chat import Completion, Request, RunFailure, Unjournaled
from infembed_ray.synthesis.client import Unanswered, authorization, completion_in, one_line, pause_s, replaying
from infembed_ray.synthesis.journal import Journal, sync_directory
from infembed_ray.synthesis.limits import USD, worst_case
from infembed_ray.synthesis.prices import BATCH_PRICE
from infembed_ray.synthesis.steps import synthesize

MOST_BYTES = 200 * 10**6
"""Of one input file, OpenAI's limit; the one on requests is the setting's default."""

_CHAT = "/v1/chat/completions"
_ENDED = {"completed", "failed", "expired", "cancelled"}
_CANCELLABLE = {"validating", "in_progress"}
_TAG = "infembed_ray"
_AT_ONCE = 500  # answers that share a sync of the journal

T = TypeVar("T")


@dataclass
class Report:
    """What batches did in this run."""

    batches: int = 0
    """Collected, those that an earlier run submitted included."""
    answered: int = 0
    unanswered: dict[str, int] = field(default_factory=dict)
    """Why -> how many requests were left to the online run."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    usd: float | None = 0.0
    """What the answers cost; None where the price table does not know a model."""


async def answer_in_batches(
    seeds: Iterable[Seed],
    pool: Sequence[str],
    settings: SynthesizeSettings,
    journal: Journal,
    directory: Path,
    spent_usd: float = 0.0,
) -> Report:
    """Fill the journal with the answers that the seeds need, as far as batches give them.

    Args:
        seeds: the run's, read once a wave.
        pool: passages to draw distractors from.
        settings: of the run; `settings.batches` and `settings.endpoint` say how and where.
        journal: looked up, and given the answers.
        directory: of the batches' files, the same from run to run.
        spent_usd: what is spent of `settings.limits.budget_usd` already.

    Raises:
        RunFailure: the endpoint refuses the key or has no Batch API, or another run uses the directory.
    """
    assert settings.batches is not None
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(directory):
            async with _Api(settings.endpoint) as api:
                work = _Work(api, settings, settings.batches, journal, directory, spent_usd)
                await work.carry_out(work.interrupted())
                finished: set[int] = set()
                while wave := await work.next_wave(seeds, pool, finished):
                    await work.carry_out(wave)
    except OSError as error:
        raise RunFailure(f"journal={directory.parent}: cannot be written ({error.strerror})") from error
    return work.report


def pending(directory: Path) -> list[Path]:
    """The files of batches that are submitted and not collected: a run without batches would pay for them again."""
    files = sorted(directory.glob("*.json"))
    return [file for file in files if _Batch.load(file).stage in ("submitting", "submitted")]


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    with (directory / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RunFailure(f"journal={directory.parent}: another run has batches there; wait for it") from error
        yield


# --------------------------------------------------------------------------------------------- batches on the disk


@dataclass
class _Batch:
    """A batch as it is on the disk: this in TAG.json and, until it is collected, its requests in TAG.requests."""

    directory: Path
    tag: str
    base_url: str
    requests: int
    worst_usd: float
    """At most so much is paid for it."""
    stage: Literal["prepared", "submitting", "submitted", "collected"] = "prepared"
    file_id: str | None = None
    batch_id: str | None = None
    submitted: float = 0.0
    """Unix time."""
    unanswered: list[str] = field(default_factory=list)
    """Keys of the requests without an answer, once it is collected."""

    @classmethod
    def load(cls, file: Path) -> _Batch:
        return cls(directory=file.parent, **json.loads(file.read_text(encoding="utf-8")))

    def save(self, **changes: Any) -> None:
        """Make the changes, durably."""
        for name, value in changes.items():
            setattr(self, name, value)
        values = {name: value for name, value in asdict(self).items() if name != "directory"}
        write_json(self.path("json"), values)
        sync_directory(self.directory)

    def path(self, kind: str) -> Path:
        return self.directory / f"{self.tag}.{kind}"

    def read(self) -> Iterator[Request]:
        """Its requests."""
        with self.path("requests").open(encoding="utf-8") as stream:
            for line in stream:
                values = json.loads(line)
                yield Request(**{**values, "messages": tuple(values["messages"])})

    def discard(self) -> None:
        """Forget a batch that was never submitted."""
        self.path("json").unlink()
        self.path("requests").unlink(missing_ok=True)


class _Draft:
    """Requests to one model on their way into a batch; a file, since there may be many."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / f"{uuid.uuid4().hex}.draft"
        self._stream = self._path.open("xb")
        self._keys = hashlib.sha256()
        self._worst_usd = 0.0
        self.requests = 0
        self.upload_bytes = 0

    def add(self, request: Request, worst_usd: float) -> None:
        self._stream.write(json.dumps(asdict(request), ensure_ascii=False).encode() + b"\n")
        self._keys.update(request.key.encode())
        self._worst_usd += worst_usd
        self.requests += 1
        self.upload_bytes += len(_upload_line(request))

    def finish(self, base_url: str) -> _Batch:
        with self._stream as stream:
            stream.flush()
            os.fsync(stream.fileno())
        tag = self._keys.hexdigest()[:24]
        batch = _Batch(self._path.parent, tag, base_url, self.requests, self._worst_usd)
        self._path.rename(batch.path("requests"))
        batch.save()
        return batch


def _upload_line(request: Request, deployment: str | None = None) -> bytes:
    body = request.body if deployment is None else {**request.body, "model": deployment}
    line = {"custom_id": request.key, "method": "POST", "url": _CHAT, "body": body}
    return json.dumps(line, ensure_ascii=False).encode() + b"\n"


# ---------------------------------------------------------------------------------------------------------- the work


class _Work:
    """All batches of a run, from drafting to collecting."""

    def __init__(
        self,
        api: _Api,
        settings: SynthesizeSettings,
        how: Batches,
        journal: Journal,
        directory: Path,
        spent_usd: float,
    ) -> None:
        self._api = api
        self._settings = settings
        self._how = how
        self._journal = journal
        self._directory = directory
        self._prices = prices.load(settings.prices)
        self._committed_usd = spent_usd
        """Spent, or at most to be spent on what is submitted."""
        self._left: set[str] = set()
        """Keys of requests that are for the online run."""
        self.report = Report()

    def interrupted(self) -> list[_Batch]:
        """The batches that an earlier run left to be waited for; what others left unanswered is noted."""
        for draft in self._directory.glob("*.draft"):
            draft.unlink()
        found = []
        for batch in map(_Batch.load, sorted(self._directory.glob("*.json"))):
            if batch.stage == "collected":
                self._left.update(batch.unanswered)
            elif batch.stage == "prepared":
                batch.discard()  # drafted anew, if it is still wanted
            elif batch.base_url != self._settings.endpoint.base_url:
                raise RunFailure(
                    f"endpoint.base_url={self._settings.endpoint.base_url}: a batch waits at {batch.base_url}; "
                    f"set that, or remove {batch.path('json')} to forget it"
                )
            else:
                self._committed_usd += batch.worst_usd
                found.append(batch)
        return found

    async def next_wave(self, seeds: Iterable[Seed], pool: Sequence[str], finished: set[int]) -> list[_Batch]:
        """Batches of the next request of every row; rows that need none from a batch are added to the finished ones."""
        wave: list[_Batch] = []
        drafts: dict[str, _Draft] = {}
        drafted: set[str] = set()
        journaled = replaying(self._journal)
        for index, seed in enumerate(seeds):
            if index in finished:
                continue
            try:
                await synthesize(seed, pool, self._settings, journaled)
            except Unjournaled as missing:
                request = missing.request
            else:
                finished.add(index)
                continue
            if request.key in self._left:
                finished.add(index)
            elif request.key not in drafted:
                drafted.add(request.key)
                draft = drafts.get(request.model)
                size = len(_upload_line(request))
                if draft and (draft.requests == self._how.max_requests or draft.upload_bytes + size > MOST_BYTES):
                    wave.append(draft.finish(self._settings.endpoint.base_url))
                    draft = None
                draft = drafts[request.model] = draft or _Draft(self._directory)
                worst_usd = BATCH_PRICE * worst_case(request, self._prices)[USD]
                draft.add(request, worst_usd if math.isfinite(worst_usd) else 0.0)  # inf: no budget, or no run
        wave += [draft.finish(self._settings.endpoint.base_url) for draft in drafts.values()]
        return wave

    async def carry_out(self, batches: Sequence[_Batch]) -> None:
        """Submit what is not submitted yet, wait for all, collect them."""
        tasks = [asyncio.create_task(self._carry_out(batch)) for batch in batches]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # what one failure interrupts is resumed, like all else, by the next run
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _carry_out(self, batch: _Batch) -> None:
        if batch.stage == "prepared":
            budget = self._settings.limits.budget_usd
            if budget is not None and self._committed_usd + batch.worst_usd > budget:
                self._left.update(request.key for request in batch.read())
                self._count("the budget", batch.requests)
                batch.discard()
                return
            self._committed_usd += batch.worst_usd
            batch.save(file_id=await self._upload(batch))
            batch.save(stage="submitting", submitted=time.time())
            batch.save(stage="submitted", batch_id=await self._api.submit(batch, doubtful=False))
            say(f"synthesize: batch {batch.batch_id}: {batch.requests} requests submitted")
        elif batch.stage == "submitting":
            batch.save(stage="submitted", batch_id=await self._api.submit(batch, doubtful=True))
        await self._collect(batch, await self._wait(batch))

    async def _upload(self, batch: _Batch) -> str:
        names = self._settings.endpoint.deployments
        upload = batch.path("jsonl")
        with upload.open("wb") as stream:
            stream.writelines(_upload_line(request, names.get(request.model)) for request in batch.read())
        try:
            return await self._api.upload(upload)
        finally:
            upload.unlink()

    async def _wait(self, batch: _Batch) -> dict[str, Any]:
        """The batch as the endpoint describes it when it has ended."""
        patience_s = math.inf if self._how.patience_h is None else 3600 * self._how.patience_h
        while True:
            described = await self._api.json("GET", f"batches/{batch.batch_id}")
            if described["status"] in _ENDED:
                return described
            if described["status"] in _CANCELLABLE and time.time() - batch.submitted > patience_s:
                await self._api.json("POST", f"batches/{batch.batch_id}/cancel")
                say(f"synthesize: batch {batch.batch_id}: cancelled after {patience_s / 3600:g} hours")
            await asyncio.sleep(self._how.poll_s)

    async def _collect(self, batch: _Batch, described: dict[str, Any]) -> None:
        """Journal the answers of a batch that has ended."""
        said = _Answers()
        for kind in ("output", "error"):
            if file_id := described.get(f"{kind}_file_id"):
                await self._api.download(file_id, batch.path(kind))
                said.index(batch.path(kind))
        unanswered: list[str] = []
        spent_usd = 0.0
        arrived: list[tuple[Request, Completion]] = []

        async def journal() -> None:
            await asyncio.gather(*(self._journal.append(*exchange) for exchange in arrived))
            arrived.clear()

        for request in batch.read():
            completion = said.completion(request.key)
            if completion is None:
                unanswered.append(request.key)
                self._count(said.faults.get(request.key) or f"the batch {described['status']}", 1)
                continue
            price = self._prices.usd(request.model, completion)
            self._add(completion, price)
            spent_usd += price or 0.0
            if self._journal.get(request.key) is None:  # else a crash interrupted the collecting
                arrived.append((request, completion))
                if len(arrived) == _AT_ONCE:
                    await journal()
        await journal()
        batch.save(stage="collected", unanswered=unanswered)
        self._left.update(unanswered)
        self._committed_usd += spent_usd - batch.worst_usd
        for kind in ("requests", "output", "error"):
            batch.path(kind).unlink(missing_ok=True)
        self.report.batches += 1
        answered = batch.requests - len(unanswered)
        say(f"synthesize: batch {batch.batch_id}: {described['status']}, {answered} of {batch.requests} answered")

    def _count(self, why: str, requests: int) -> None:
        self.report.unanswered[why] = self.report.unanswered.get(why, 0) + requests

    def _add(self, completion: Completion, usd: float | None) -> None:
        report = self.report
        report.answered += 1
        report.prompt_tokens += completion.prompt_tokens
        report.completion_tokens += completion.completion_tokens
        report.usd = None if report.usd is None or usd is None else report.usd + usd


class _Answers:
    """The lines of a batch's output and error files, by request."""

    def __init__(self) -> None:
        self._lines: dict[str, tuple[Path, int, int]] = {}
        self.faults: dict[str, str] = {}
        """Request's key -> why it has no answer."""

    def index(self, file: Path) -> None:
        at = 0
        with file.open("rb") as stream:
            for line in stream:
                try:
                    entry = json.loads(line)
                    key, response = str(entry["custom_id"]), entry.get("response") or {}
                    answered = response.get("status_code") == 200
                except (json.JSONDecodeError, UnicodeDecodeError, LookupError, TypeError, AttributeError) as error:
                    raise RunFailure(f"batches: the endpoint's file is damaged ({error}); run it again") from error
                except (ValueError, RecursionError):  # one line beyond Python's limits: its request is unanswered
                    at += len(line)
                    continue
                if answered:
                    self._lines[key] = (file, at, len(line))
                else:
                    self.faults[key] = _fault(entry, response)
                at += len(line)

    def completion(self, key: str) -> Completion | None:
        """The answer to a request; None if it has none, or none that can be read."""
        if key not in self._lines:
            return None
        file, at, length = self._lines[key]
        with file.open("rb") as stream:
            stream.seek(at)
            body = json.loads(stream.read(length))["response"].get("body")
        try:
            return replace(completion_in(body), batched=True)
        except Unanswered as fault:
            self.faults[key] = str(fault)
            return None


def _fault(entry: dict[str, Any], response: dict[str, Any]) -> str:
    """Why a line of an error file has no answer, in few words: its error's code, or its HTTP status."""
    body = response.get("body")
    error = entry.get("error") or (body.get("error") if isinstance(body, dict) else None)
    code = error.get("code") if isinstance(error, dict) else None
    return one_line(code or f"HTTP {response.get('status_code')}")


# ----------------------------------------------------------------------------------------------------- the endpoint


class _Ambiguous(Exception):
    """The request may have been carried out or not."""


class _Api:
    """Files and batches of an OpenAI-compatible endpoint."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        base = endpoint.base_url.rstrip("/")
        self._url = base if endpoint.api_version is None else f"{base}/openai"  # Azure's
        self._version = {} if endpoint.api_version is None else {"api-version": endpoint.api_version}

    async def __aenter__(self) -> _Api:
        self._session = aiohttp.ClientSession(
            headers=authorization(self._endpoint),
            timeout=aiohttp.ClientTimeout(sock_connect=self._endpoint.timeout_s, sock_read=self._endpoint.timeout_s),
            trust_env=True,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._session.close()

    async def json(self, method: str, path: str, query: Mapping[str, str] | None = None) -> dict[str, Any]:
        """The response of a call that may be repeated."""
        return await self._patiently("no answer about batches", lambda: self._once(method, path, query))

    async def upload(self, file: Path) -> str:
        """The id under which the endpoint keeps a file of requests."""

        async def attempt() -> str:
            form = aiohttp.FormData({"purpose": "batch"})
            with file.open("rb") as stream:
                form.add_field("file", stream, filename=file.name, content_type="application/jsonl")
                kept: str = (await self._once("POST", "files", data=form))["id"]
            return kept

        return await self._patiently("takes no file", attempt)

    async def submit(self, batch: _Batch, doubtful: bool) -> str:
        """The id of a batch whose file is uploaded.

        Args:
            batch: to submit.
            doubtful: it may have been submitted already. Then, and after any doubt that arises here, it is looked for
                and submitted only if it is not there.
        """

        async def attempt() -> str:
            nonlocal doubtful
            if doubtful and (known := await self._find(batch.tag)):
                return known
            doubtful = True
            wanted = {"input_file_id": batch.file_id, "endpoint": _CHAT, "completion_window": "24h"}
            created: str = (await self._once("POST", "batches", json={**wanted, "metadata": {_TAG: batch.tag}}))["id"]
            return created

        return await self._patiently("takes no batch", attempt)

    async def download(self, file_id: str, to: Path) -> None:
        """Write a file of the endpoint to the disk."""

        async def attempt() -> None:
            try:
                async with self._session.get(f"{self._url}/files/{file_id}/content", params=self._version) as response:
                    if not response.ok:
                        self._refuse(response.status, await response.read())
                    with to.open("wb") as stream:
                        async for block in response.content.iter_chunked(1 << 20):
                            stream.write(block)
            except (aiohttp.ClientError, asyncio.TimeoutError) as error:
                raise _Ambiguous(" ".join(str(error).split()) or "time-out") from error

        await self._patiently(f"file {file_id} cannot be downloaded", attempt)

    async def _find(self, tag: str) -> str | None:
        """The id of the batch with this tag, if the endpoint has one."""
        after: dict[str, str] = {}
        while True:
            page = await self._once("GET", "batches", {"limit": "100", **after})
            for described in page["data"]:
                if (described.get("metadata") or {}).get(_TAG) == tag:
                    found: str = described["id"]
                    return found
            if not page.get("has_more"):
                return None
            after = {"after": page["data"][-1]["id"]}

    async def _patiently(self, trouble: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """The result of the first attempt that has one."""
        for number in range(self._endpoint.max_retries + 1):
            try:
                return await attempt()
            except _Ambiguous as fault:
                reason = str(fault)
                await asyncio.sleep(pause_s(number, 0.0))
        raise RunFailure(f"endpoint.base_url={self._endpoint.base_url}: {trouble} ({reason}); the same command resumes")

    async def _once(
        self, method: str, path: str, query: Mapping[str, str] | None = None, **sent: Any
    ) -> dict[str, Any]:
        parameters = {**self._version, **(query or {})}
        try:
            async with self._session.request(method, f"{self._url}/{path}", params=parameters, **sent) as response:
                body = await response.read()
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            raise _Ambiguous(" ".join(str(error).split()) or "time-out") from error
        if not response.ok:
            self._refuse(response.status, body)
        try:
            described: dict[str, Any] = json.loads(body)
        except ValueError as error:
            raise _Ambiguous("the response is no JSON (cut short?)") from error
        return described

    def _refuse(self, status: int, body: bytes) -> None:
        said = f"HTTP {status}: {' '.join(body.decode(errors='replace').split())[:300]}"
        if status in (408, 429) or status >= 500:
            raise _Ambiguous(said)
        if status in (401, 403):
            raise RunFailure(
                f"endpoint.api_key_env={self._endpoint.api_key_env}: {self._url} refuses its key ({said}); set a valid one"
            )
        if status in (404, 405):
            raise RunFailure(f"batches: {self._url} has no Batch API, or no longer what it is asked for ({said})")
        raise RunFailure(f"batches: {self._url} refuses them ({said})")
