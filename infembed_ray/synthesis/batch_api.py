"""Answers at half the price from the Batch API, which processes files of requests within a day.

A wave of batches asks the next request of every row, as far as the budget covers it. Requests, the intention to submit and
the batch's id are on disk before each next step, so no batch is submitted twice. The online run then replays the journal.
"""

import asyncio
import contextlib
import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openai.types import Batch as RemoteBatch
from openai.types import BatchError

from infembed_ray.config.synthesis import SynthesizeSettings
from infembed_ray.llm import prices
from infembed_ray.llm.batch_client import EXCEEDED, BatchClient, QuotaExceeded
from infembed_ray.llm.chat import Completion, Request, RunFailure
from infembed_ray.llm.endpoint import one_line
from infembed_ray.llm.journal import Journal
from infembed_ray.llm.lanes import Dialect
from infembed_ray.llm.ledger import USD, worst_case
from infembed_ray.llm.prices import BATCH_PRICE
from infembed_ray.progress import counted, say
from infembed_ray.records.tables import Seed
from infembed_ray.storage import durable
from infembed_ray.synthesis.batch_files import NoAnswer, RequestBatch, prompt_tokens, read_answers, upload_line
from infembed_ray.synthesis.pipeline import kind_of, next_request

MOST_BYTES = 200 * 10**6
"""OpenAI's limit of one input file."""
MOST_REQUESTS = 50_000
"""OpenAI's limit of one batch."""
ATTEMPTS = 3
"""Batches of a run that a request is put into until one answers it."""
ADMISSION_S = 24 * 3600.0
"""Time for which other jobs may hold all of a quota."""

_ENDED = {"completed", "failed", "expired", "cancelled"}
_APPENDED_TOGETHER = 500  # answers that share a sync of the journal
_STATED = re.compile(r"limit:?\s+(?:of\s+)?(\d[\d,]*)", re.IGNORECASE)


@dataclass
class BatchReport:
    """What batches did in this run."""

    batches: int = 0
    """Collected batches, including those that an earlier run submitted."""
    answered: int = 0
    unanswered: dict[str, int] = field(default_factory=dict)
    """Reason -> number of requests that no batch answers (`batches.rest`)."""
    refused_for_quota: int = 0
    """Batches that the endpoint refused because of its quota of enqueued tokens; their requests went out again."""
    usd: float | None = 0.0
    """Price of the answers; None if the price table lacks a model."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Key -> why the request is unanswered; it must not be asked online."""

    def figures(self) -> dict[str, Any]:
        """Return the manifest's figures."""
        return {name: value for name, value in vars(self).items() if name != "left_out"}


async def answer_in_batches(
    seeds: Iterable[Seed],
    pool: Sequence[str],
    settings: SynthesizeSettings,
    journal: Journal,
    directory: Path,
    spent_usd: float = 0.0,
) -> BatchReport:
    """Fill the journal with the answers that the seeds need, as far as batches provide them. Each wave reads the seeds.

    Raises:
        RunFailure: the endpoint refuses the key or has no Batch API, another run uses the directory, the budget is used up,
            a batch failed as a whole, or `batches.rest` is stop and requests are left.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with durable.exclusive_lock(directory / ".lock"):
            async with contextlib.aclosing(BatchClient(settings.endpoint)) as client:
                runner = _BatchRunner(client, settings, journal, directory, spent_usd)
                await runner.complete(runner.unfinished())
                finished: set[int] = set()
                while wave := await runner.next_wave(seeds, pool, finished):
                    await runner.complete(wave)
                runner.settle_rest()
    except BlockingIOError as error:
        raise RunFailure(f"journal={directory.parent}: another run has batches there; wait for it") from error
    except OSError as error:
        raise RunFailure(f"journal={directory.parent}: cannot be written ({error.strerror})") from error
    return runner.report


@dataclass
class _Draft:
    """Requests to one model that become a batch."""

    requests: list[Request] = field(default_factory=list)
    size: int = 0
    """Bytes of the upload."""
    tokens: int = 0
    usd: float = 0.0
    """Worst case of its price."""


class _BatchRunner:
    """Drafts, submits, awaits and collects all batches of a run."""

    def __init__(
        self, client: BatchClient, settings: SynthesizeSettings, journal: Journal, directory: Path, spent_usd: float
    ) -> None:
        assert settings.batches is not None
        self._client = client
        self._settings, self._batches, self._base_url = settings, settings.batches, settings.endpoint.base_url
        self._journal, self._directory = journal, directory
        self._prices = prices.load(settings.prices)
        self._committed_usd = spent_usd
        """Spent, and the worst case of what is drafted or submitted."""
        self._dialects: defaultdict[str, Dialect] = defaultdict(lambda: Dialect(settings.endpoint))
        self._quotas: defaultdict[str, float] = defaultdict(lambda: math.inf)
        """Model -> most prompt tokens in batches that have not ended, as far as refusals have taught it."""
        self._floors: dict[str, float] = {}
        """Model -> least quota that refusals without a number teach."""
        self._running: dict[asyncio.Task[None], RequestBatch] = {}
        self._admitted = time.time()
        """When the endpoint last accepted a batch."""
        self._collecting = asyncio.Lock()
        self._attempts: Counter[str] = Counter()
        """Key -> batches that left the request unanswered."""
        self._faults: dict[str, NoAnswer] = {}
        """Key -> why the last batch left it unanswered."""
        self._left: set[str] = set()
        """Keys of requests that no batch answers."""
        self.report = BatchReport()

    def unfinished(self) -> list[RequestBatch]:
        """Return the batches that an earlier run submitted and did not collect."""
        for leftover in self._directory.glob("*.partial"):  # of a killed run; the lock admits one run at a time
            leftover.unlink()
        submitted = []
        for batch in map(RequestBatch.load, sorted(self._directory.glob("*.json"))):
            if batch.stage == "prepared":
                batch.discard()  # drafted again if it is still needed
            elif batch.base_url != self._base_url:
                remedy = f"set that, or remove {batch.path('json')} to forget it"
                raise RunFailure(f"endpoint.base_url={self._base_url}: a batch waits at {batch.base_url}; {remedy}")
            else:
                self._committed_usd += batch.worst_usd
                submitted.append(batch)
        return submitted

    # ------------------------------------------------------------------------------------------------- drafting

    async def next_wave(self, seeds: Iterable[Seed], pool: Sequence[str], finished: set[int]) -> list[RequestBatch]:
        """Prepare batches of every row's next request, as far as the budget covers them; RunFailure if it covers none.

        Rows that need no further batch are added to `finished`.
        """
        wave: list[RequestBatch] = []
        drafts: defaultdict[str, _Draft] = defaultdict(_Draft)  # by model
        drafted: set[str] = set()
        over_budget, budget_usd = 0, self._settings.limits.budget_usd
        for index, seed in enumerate(seeds):
            if index in finished:
                continue
            request = await next_request(seed, pool, self._settings, self._journal)
            if request is None or self._gives_up(request):
                finished.add(index)
            elif request.key in drafted:
                continue
            elif budget_usd is not None and self._committed_usd + self._worst_usd(request) > budget_usd:
                over_budget += 1
            else:
                drafted.add(request.key)
                wave += self._add(drafts, request)
        wave += [self._prepare(draft) for draft in drafts.values()]
        if over_budget and not wave:
            left = f"{counted(over_budget, 'request')} are left; raise it, the same command resumes"
            raise RunFailure(f"limits.budget_usd={budget_usd}: the budget is used up; {left}")
        return wave

    def _add(self, drafts: defaultdict[str, _Draft], request: Request) -> list[RequestBatch]:
        """Add a request to its model's draft; prepare and return the draft's batch first if it has no room."""
        model, full = request.model, []
        size, tokens = len(upload_line(request, request.body)), prompt_tokens(request)
        draft = drafts[model]
        if draft.requests and (
            len(draft.requests) == MOST_REQUESTS
            or draft.size + size > MOST_BYTES
            or draft.tokens + tokens > self._quotas[model]
        ):
            full = [self._prepare(drafts.pop(model))]
            draft = drafts[model]
        usd = self._worst_usd(request)
        draft.requests.append(request)
        draft.size, draft.tokens, draft.usd = draft.size + size, draft.tokens + tokens, draft.usd + usd
        self._committed_usd += usd
        return full

    def _prepare(self, draft: _Draft) -> RequestBatch:
        return RequestBatch.prepare(self._directory, self._base_url, draft.requests, draft.usd)

    def _worst_usd(self, request: Request) -> float:
        usd = BATCH_PRICE * worst_case(request, self._prices)[USD]
        return usd if math.isfinite(usd) else 0.0  # unknown price: there is no budget

    # ----------------------------------------------------------------------------------------------- scheduling

    async def complete(self, batches: Sequence[RequestBatch]) -> None:
        """Submit what is not submitted yet, as the quota admits it, wait for all batches, and collect them."""
        waiting = list(batches)
        try:
            while waiting or self._running:
                for batch in waiting[:]:
                    others, quota = self._enqueued(batch.model), self._quotas[batch.model]
                    if batch.stage != "prepared" or not others or others + batch.tokens <= quota:
                        waiting.remove(batch)
                        self._running[asyncio.create_task(self._complete(batch))] = batch
                ended, _ = await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    del self._running[task]
                    task.result()
        finally:
            for task in self._running:  # after one failure; the next run resumes the others
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)

    def _enqueued(self, model: str) -> int:
        """Return the tokens of our batches of a model that have not ended."""
        return sum(batch.tokens for batch in self._running.values() if batch.model == model)

    async def _complete(self, batch: RequestBatch) -> None:
        """Take a batch from its stage to the last, or forget it if the quota refuses it."""
        try:
            if batch.stage == "prepared":
                batch.save(file_id=await self._upload(batch))
                batch.save(stage="submitting")
                await self._submit(batch, doubtful=False)
                say(f"synthesize: batch {batch.batch_id}: {counted(batch.requests, 'request')} submitted")
            elif batch.stage == "submitting":
                await self._submit(batch, doubtful=True)
            assert batch.batch_id is not None
            while (remote := await self._client.describe(batch.batch_id)).status not in _ENDED:
                await asyncio.sleep(self._batches.poll_s)
            exceeded = [one_line(error.message or EXCEEDED) for error in _errors(remote) if error.code == EXCEEDED]
            if remote.status == "failed" and exceeded:
                raise QuotaExceeded(exceeded[0])
        except QuotaExceeded as refusal:
            await self._forget(batch, str(refusal))
            return
        self._admitted = time.time()
        await self._collect(batch, remote)

    async def _forget(self, batch: RequestBatch, refusal: str) -> None:
        """Discard a batch that the endpoint refused because of its quota, and lower the quota."""
        others = self._enqueued(batch.model) - batch.tokens
        if not others and time.time() - self._admitted > ADMISSION_S:
            fault = f"other jobs have used the quota of {batch.model} for {ADMISSION_S / 3600:g} hours ({refusal})"
            raise RunFailure(f"endpoint.base_url={batch.base_url}: {fault}; the same command resumes")
        if not self.report.refused_for_quota:
            say(f"synthesize: the endpoint's quota holds fewer batches ({refusal}); the others follow as those end")
        self.report.refused_for_quota += 1
        stated = _STATED.search(refusal)
        quota = int(stated[1].replace(",", "")) if stated else math.inf
        lowest, floor = self._quotas[batch.model], self._floors.setdefault(batch.model, batch.tokens / 8)
        # What the endpoint has taken, if it does not say; other jobs may have the quota for a while.
        self._quotas[batch.model] = quota if quota < lowest else min(lowest, max(others, batch.tokens / 2, floor))
        batch.discard()
        self._committed_usd -= batch.worst_usd
        if not others:
            await asyncio.sleep(self._batches.poll_s)

    async def _upload(self, batch: RequestBatch) -> str:
        dialect, upload = self._dialects[batch.model], batch.path("jsonl")
        with upload.open("wb") as stream:
            stream.writelines(upload_line(request, dialect.body(request)) for request in batch.read())
        try:
            return await self._client.upload(upload)
        finally:
            upload.unlink()

    async def _submit(self, batch: RequestBatch, doubtful: bool) -> None:
        assert batch.file_id is not None
        batch.save(stage="submitted", batch_id=await self._client.submit(batch.file_id, batch.tag, doubtful))

    # ----------------------------------------------------------------------------------------------- collecting

    async def _collect(self, batch: RequestBatch, remote: RemoteBatch) -> None:
        """Journal the answers of a batch that has ended."""
        files = []
        for kind, file_id in (("output", remote.output_file_id), ("error", remote.error_file_id)):
            if file_id:
                files.append(batch.path(kind))
                await self._client.download(file_id, files[-1])
        async with self._collecting:  # the answers of one batch at a time are in memory
            answered = await self._journal_answers(batch, *read_answers(files), f"the batch {remote.status}")
        batch.discard()
        self.report.batches += 1
        why = "".join(f" ({one_line(error.message)})" for error in _errors(remote)[:1])
        ended = f"batch {batch.batch_id}: {remote.status}{why}, {answered} of {batch.requests} answered"
        if remote.status in ("failed", "cancelled"):  # the endpoint refused its file, or an operator stopped it
            raise RunFailure(f"batches: {ended}; mend the cause and run the same command, which batches the rest again")
        say(f"synthesize: {ended}")

    async def _journal_answers(
        self, batch: RequestBatch, answers: Mapping[str, Completion], faults: Mapping[str, NoAnswer], otherwise: str
    ) -> int:
        """Append the answers to the journal, and note the requests without one; return the number of answers."""
        spent_usd, answered, change = 0.0, 0, None
        new: list[tuple[Request, Completion]] = []
        for request in batch.read():
            completion = answers.get(request.key)
            if completion is None:
                fault = faults.get(request.key, NoAnswer(otherwise))
                if fault.refused and not answers and change is None:
                    dialect = self._dialects[batch.model]
                    change = dialect.learn(request, dialect.encoded(request), fault.body)
                    if change:
                        say(f"synthesize: {self._base_url}: {batch.model} {change}")
                self._attempts[request.key] += 1
                self._faults[request.key] = fault._replace(refused=fault.refused and change is None)
                continue
            answered += 1
            usd = self._prices.usd(request.model, completion)
            self.report.answered += 1
            self.report.usd = None if self.report.usd is None or usd is None else self.report.usd + usd
            if self._journal.get(*request.keys) is None:  # otherwise a crash interrupted an earlier collection
                spent_usd += usd or 0.0
                new.append((request, completion))
                if len(new) == _APPENDED_TOGETHER:
                    await self._append(new)
        await self._append(new)
        self._committed_usd += spent_usd - batch.worst_usd
        return answered

    async def _append(self, exchanges: list[tuple[Request, Completion]]) -> None:
        await asyncio.gather(*(self._journal.append(*exchange) for exchange in exchanges))
        exchanges.clear()

    # ----------------------------------------------------------------------------------------------- what is left

    def _gives_up(self, request: Request) -> bool:
        """Return whether no further batch is to ask a request."""
        fault = self._faults.get(request.key)
        if fault is None or not (fault.refused or self._attempts[request.key] >= ATTEMPTS):
            return False
        self._left.add(request.key)
        return True

    def settle_rest(self) -> None:
        """Treat the requests that no batch answers as `batches.rest` says; RunFailure if it is stop."""
        examples = {kind_of(fault.reason): fault.reason for fault in map(self._faults.__getitem__, sorted(self._left))}
        reasons = Counter(kind_of(self._faults[key].reason) for key in self._left)
        self.report.unanswered = dict(reasons)
        if not self._left:
            return
        shown = ", ".join(f"{number} x {examples[reason]}" for reason, number in reasons.most_common(5))
        what = f"{counted(len(self._left), 'request')} that no batch answered ({shown})"
        if self._batches.rest == "online":
            say(f"synthesize: batches.rest=online: {what} and their rows' later steps are asked at full price")
            return
        if self._batches.rest == "stop" and not all(self._faults[key].refused for key in self._left):
            online = "batches.rest=online to ask them and their rows' later steps at full price"
            ways = f"set {online}, or batches.rest=dead_letter to do without these rows"
            raise RunFailure(
                f"batches.rest=stop: there are {what}; run the same command to batch them again, or {ways}"
            )
        say(f"synthesize: {what}: their rows become dead letters")
        self.report.left_out = {key: self._faults[key].reason for key in self._left}


def _errors(remote: RemoteBatch) -> list[BatchError]:
    return (remote.errors and remote.errors.data) or []
