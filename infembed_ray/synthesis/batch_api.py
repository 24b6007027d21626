"""Answers at half the price from the Batch API, which processes files of requests within a day.

The steps of a row depend on one another, so batches go in waves: a wave asks the next request of every row, and its answers
in the journal decide the next wave. The batches of a wave are submitted as the endpoint's quota of enqueued tokens and the
budget admit them. A request that a batch leaves unanswered (expired, cancelled, faulty) goes out again with the next wave,
at most `batches.attempts` times; `batches.rest` then decides. The online run that follows replays the journal.

A batch is not submitted twice. Its requests are on disk before the upload, the intention to submit before
the submission, and the batch's id before the wait. A run that finds an intention without an id searches the endpoint for
the batch's tag; a run that finds an id waits for that batch and collects it. A batch that the endpoint refuses because of
its quota costs nothing; its requests go out in new batches.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openai.types import Batch as RemoteBatch
from openai.types import BatchError

from infembed_ray.config.synthesis import SynthesizeSettings
from infembed_ray.llm import prices
from infembed_ray.llm.batch_client import BatchClient
from infembed_ray.llm.batch_quota import EXCEEDED, EnqueuedTokens, QuotaExceeded, prompt_tokens
from infembed_ray.llm.chat import IGNORED, UNCAPPED, Completion, Request, RunFailure
from infembed_ray.llm.dialects import Dialects, learn
from infembed_ray.llm.endpoint import one_line
from infembed_ray.llm.journal import Journal
from infembed_ray.llm.prices import BATCH_PRICE
from infembed_ray.llm.rate_limits import USD, worst_case
from infembed_ray.progress import counted, say
from infembed_ray.records.tables import Seed
from infembed_ray.storage import durable
from infembed_ray.synthesis.batch_files import Batch, Fault, read_answers, upload_line
from infembed_ray.synthesis.batch_rest import Rest
from infembed_ray.synthesis.pipeline import next_request
from infembed_ray.synthesis.preflight import endpoints, probes

MOST_BYTES = 200 * 10**6
"""OpenAI's limit of one input file. The limit of its requests is the setting's default."""

_ENDED = {"completed", "failed", "expired", "cancelled"}
_CANCELLABLE = {"validating", "in_progress"}
_APPENDED_TOGETHER = 500  # answers that share a sync of the journal


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
    prompt_tokens: int = 0
    completion_tokens: int = 0
    usd: float | None = 0.0
    """Price of the answers; None if the price table lacks a model."""
    probe_usd: float = 0.0
    """Price of the short requests that found out the models' parameters."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Key -> why the request is unanswered; it must not be asked online."""
    dialects: Dialects | None = None
    """Of the models, if they had to be asked."""

    def figures(self) -> dict[str, Any]:
        """Return the manifest's figures."""
        return {name: value for name, value in vars(self).items() if name not in ("left_out", "dialects")}


async def answer_in_batches(
    seeds: Iterable[Seed],
    pool: Sequence[str],
    settings: SynthesizeSettings,
    journal: Journal,
    directory: Path,
    spent_usd: float = 0.0,
    learned: Dialects | None = None,
) -> BatchReport:
    """Fill the journal with the answers that the seeds need, as far as batches provide them.

    Args:
        seeds: of the run; read once per wave.
        directory: of the batches' files, the same in every run on this journal.
        learned: the dialects, if this run has asked the models before.

    Raises:
        RunFailure: the endpoint refuses the key or has no Batch API, another run uses the directory, the budget is used up,
            or `batches.rest` is stop and requests are left.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        busy = RunFailure(f"journal={directory.parent}: another run has batches there; wait for it")
        with durable.exclusive_lock(directory / ".lock", busy=busy):
            async with contextlib.aclosing(BatchClient(settings.endpoint)) as client:
                runner = _BatchRunner(client, settings, journal, directory, spent_usd, learned)
                await runner.complete(runner.unfinished())
                finished: set[int] = set()
                while wave := await runner.next_wave(seeds, pool, finished):
                    await runner.learn()
                    await runner.complete(wave)
                runner.settle_rest()
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
        self,
        client: BatchClient,
        settings: SynthesizeSettings,
        journal: Journal,
        directory: Path,
        spent_usd: float,
        learned: Dialects | None,
    ) -> None:
        assert settings.batches is not None
        self._client = client
        self._settings, self._batches = settings, settings.batches
        self._journal = journal
        self._directory = directory
        self._prices = prices.load(settings.prices)
        self._committed_usd = spent_usd
        """Spent, and the worst case of what is submitted."""
        self._quotas: defaultdict[str, EnqueuedTokens] = defaultdict(
            lambda: EnqueuedTokens(self._batches.enqueued_tokens)
        )
        """Model -> its quota of enqueued tokens."""
        self._running: dict[asyncio.Task[list[Batch]], Batch] = {}
        self._admitted = time.time()
        """When the endpoint last accepted a batch."""
        self._rest = Rest(settings)
        self._collecting = asyncio.Lock()
        self.report = BatchReport(dialects=learned)

    async def learn(self) -> None:
        """Find out the parameters of the models, once a run."""
        if self.report.dialects is None:
            learned = await learn(endpoints(self._settings), probes(self._settings), self._prices)
            self.report.dialects = learned.dialects
            for line in learned.report:
                say(f"synthesize: {line}")
            self._committed_usd += learned.used[USD]
            self.report.probe_usd = learned.used[USD]
        budget = self._settings.limits.budget_usd
        for model, dialect in (self.report.dialects or [{}])[0].items():
            if budget is not None and dialect.get(UNCAPPED) == IGNORED:
                raise RunFailure(
                    f"limits.budget_usd={budget:g}: {model} at {self._settings.endpoint.base_url} ignores max_tokens, so the cost of "
                    "a batch has no bound; set batches=null or limits.budget_usd=null"
                )

    def unfinished(self) -> list[Batch]:
        """Return the batches that an earlier run submitted and did not collect; note what others left unanswered."""
        for leftover in self._directory.glob("*.partial"):  # of a killed run; the lock admits one run at a time
            leftover.unlink()
        found = []
        for batch in map(Batch.load, sorted(self._directory.glob("*.json"))):
            here = batch.base_url == self._settings.endpoint.base_url
            if batch.stage == "collected":
                if here:  # what another endpoint refused or left unanswered says nothing about this one
                    self._rest.note(batch)
            elif batch.stage == "prepared":
                batch.discard()  # drafted again if it is still needed
            elif not here:
                raise RunFailure(
                    f"endpoint.base_url={self._settings.endpoint.base_url}: a batch waits at {batch.base_url}; "
                    f"set that, or remove {batch.path('json')} to forget it"
                )
            else:
                self._committed_usd += batch.worst_usd
                found.append(batch)
        return found

    # ------------------------------------------------------------------------------------------------- drafting

    async def next_wave(self, seeds: Iterable[Seed], pool: Sequence[str], finished: set[int]) -> list[Batch]:
        """Prepare batches of every row's next request; add rows that need no further batch to `finished`."""
        wave: list[Batch] = []
        drafts: dict[str, _Draft] = {}  # by model
        drafted: set[str] = set()
        for index, seed in enumerate(seeds):
            if index in finished:
                continue
            request = await next_request(seed, pool, self._settings, self._journal)
            if request is None or self._rest.gives_up(request, self._online_usd(request)):
                finished.add(index)
            elif request.key not in drafted:
                drafted.add(request.key)
                wave += self._add(drafts, request)
        return wave + [self._prepare(draft) for draft in drafts.values()]

    def _add(self, drafts: dict[str, _Draft], request: Request) -> list[Batch]:
        """Add a request to its model's draft; prepare and return the draft's batch first if it has no room."""
        model, full = request.model, []
        size, tokens, usd = len(upload_line(request)), prompt_tokens(request), self._worst_usd(request)
        draft = drafts.setdefault(model, _Draft())
        if draft.requests and (
            len(draft.requests) == self._batches.max_requests
            or draft.size + size > MOST_BYTES
            or draft.tokens + tokens > self._quotas[model].limit
            or usd <= self._left_usd < draft.usd + usd
        ):
            full = [self._prepare(draft)]
            draft = drafts[model] = _Draft()
        draft.requests.append(request)
        draft.size, draft.tokens, draft.usd = draft.size + size, draft.tokens + tokens, draft.usd + usd
        return full

    def _worst_usd(self, request: Request) -> float:
        usd = BATCH_PRICE * worst_case(request, self._prices)[USD]
        return usd if math.isfinite(usd) else 0.0  # unknown price: there is no budget

    @property
    def _left_usd(self) -> float:
        """What is left of the budget."""
        budget = self._settings.limits.budget_usd
        return math.inf if budget is None else budget - self._committed_usd

    def _prepare(self, draft: _Draft) -> Batch:
        return Batch.prepare(self._directory, self._settings.endpoint.base_url, draft.requests, draft.usd)

    def _prepare_all(self, requests: Iterable[Request]) -> list[Batch]:
        drafts: dict[str, _Draft] = {}
        full = [batch for request in requests for batch in self._add(drafts, request)]
        return full + [self._prepare(draft) for draft in drafts.values()]

    def _online_usd(self, request: Request) -> float:
        """Estimate the list price of a request by the mean of the answers so far."""
        usd, answered = self.report.usd, self.report.answered
        return usd / BATCH_PRICE / answered if usd and answered else worst_case(request, self._prices)[USD]

    # ----------------------------------------------------------------------------------------------- scheduling

    async def complete(self, batches: Sequence[Batch]) -> None:
        """Submit what is not submitted yet, as quota and budget admit it, wait for all batches, and collect them."""
        waiting = deque(batches)
        try:
            while waiting or self._running:
                for batch in list(waiting):
                    if batch.stage != "prepared" or self._fits(batch):
                        waiting.remove(batch)
                        self._start(batch)
                if not self._running:  # it does not even fit alone
                    waiting.extend(self._divide(waiting.popleft()))
                    continue
                ended, _ = await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    del self._running[task]
                    waiting.extend(task.result())
        finally:
            for task in self._running:  # after one failure; the next run resumes the others
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)

    def _fits(self, batch: Batch) -> bool:
        others = self._enqueued(batch.model)
        smallest = batch.requests == 1 and not others  # is sent, because the limit may be a wrong guess
        fits = smallest or others + batch.tokens <= self._quotas[batch.model].limit
        return fits and batch.worst_usd <= self._left_usd

    def _enqueued(self, model: str) -> int:
        """Return the tokens of our batches of a model that have not ended."""
        return sum(batch.tokens for batch in self._running.values() if batch.model == model)

    def _start(self, batch: Batch) -> None:
        if batch.stage == "prepared":
            self._committed_usd += batch.worst_usd
        self._running[asyncio.create_task(self._complete(batch))] = batch

    def _divide(self, batch: Batch) -> list[Batch]:
        """Replace a batch by smaller ones that fit; leave out each request that the budget does not cover."""
        requests = list(batch.read())
        batch.discard()
        fitting: list[Request] = []
        for request in requests:
            if self._worst_usd(request) <= self._left_usd:
                fitting.append(request)
            else:
                self._rest.note_over_budget(request)
        return self._prepare_all(fitting)

    async def _complete(self, batch: Batch) -> list[Batch]:
        """Take a batch from its stage to the last; return the batches that replace it if the quota refused it."""
        try:
            if batch.stage == "prepared":
                batch.save(file_id=await self._upload(batch))
                batch.save(stage="submitting", submitted=time.time())
                await self._submit(batch, doubtful=False)
                say(f"synthesize: batch {batch.batch_id}: {counted(batch.requests, 'request')} submitted")
            elif batch.stage == "submitting":
                await self._submit(batch, doubtful=True)
            remote = await self._wait(batch)
            if refusal := _quota_refusal(remote):
                raise QuotaExceeded(refusal)
        except QuotaExceeded as refusal:
            return await self._requeue(batch, str(refusal))
        self._admitted = time.time()
        await self._collect(batch, remote)
        return []

    async def _requeue(self, batch: Batch, refusal: str) -> list[Batch]:
        """Forget a batch that the endpoint refused because of its quota; return new ones of its requests."""
        others = self._enqueued(batch.model) - batch.tokens
        patience_h = self._batches.patience_h or 24.0
        if not others and time.time() - self._admitted > 3600 * patience_h:
            raise RunFailure(
                f"endpoint.base_url={batch.base_url}: other jobs have used the quota of {batch.model} for {patience_h:g} hours "
                f"({refusal}); the same command resumes"
            )
        if not self.report.refused_for_quota:
            say(f"synthesize: the endpoint's quota holds fewer batches ({refusal}); the others follow as those end")
        self.report.refused_for_quota += 1
        self._quotas[batch.model].learn(batch.tokens, others, refusal)
        requests = list(batch.read())
        batch.discard()
        self._committed_usd -= batch.worst_usd
        if not others:
            await asyncio.sleep(self._batches.poll_s)
        return self._prepare_all(requests)

    async def _upload(self, batch: Batch) -> str:
        deployments, learned = self._settings.endpoint.deployments, (self.report.dialects or [{}])[0]
        upload = batch.path("jsonl")
        with upload.open("wb") as stream:
            stream.writelines(
                upload_line(request, deployments.get(request.model), learned.get(request.model))
                for request in batch.read()
            )
        try:
            return await self._client.upload(upload)
        finally:
            upload.unlink()

    async def _submit(self, batch: Batch, doubtful: bool) -> None:
        assert batch.file_id is not None
        batch.save(stage="submitted", batch_id=await self._client.submit(batch.file_id, batch.tag, doubtful))

    async def _wait(self, batch: Batch) -> RemoteBatch:
        """Wait until the batch has ended; cancel it when the patience is over."""
        assert batch.batch_id is not None
        patience_s = math.inf if self._batches.patience_h is None else 3600 * self._batches.patience_h
        while True:
            remote = await self._client.describe(batch.batch_id)
            if remote.status in _ENDED:
                return remote
            if remote.status in _CANCELLABLE and time.time() - batch.submitted > patience_s:
                await self._client.cancel(batch.batch_id)
                say(f"synthesize: batch {batch.batch_id}: cancelled after {patience_s / 3600:g} hours")
            await asyncio.sleep(self._batches.poll_s)

    async def _collect(self, batch: Batch, remote: RemoteBatch) -> None:
        """Journal the answers of a batch that has ended."""
        files = []
        for kind, file_id in (("output", remote.output_file_id), ("error", remote.error_file_id)):
            if file_id:
                files.append(batch.path(kind))
                await self._client.download(file_id, files[-1])
        async with self._collecting:  # the answers of one batch at a time are in memory
            faults = await self._journal_answers(batch, *read_answers(files), f"the batch {remote.status}")
        batch.save(
            stage="collected",
            unanswered={key: fault.reason for key, fault in faults.items() if not fault.refused},
            refused={key: fault.reason for key, fault in faults.items() if fault.refused},
        )
        self._rest.note(batch)
        for file in (batch.path("requests"), *files):
            file.unlink(missing_ok=True)
        self.report.batches += 1
        answered = batch.requests - len(faults)
        why = "".join(f" ({one_line(error.message)})" for error in _errors(remote)[:1])
        say(f"synthesize: batch {batch.batch_id}: {remote.status}{why}, {answered} of {batch.requests} answered")

    async def _journal_answers(
        self, batch: Batch, answers: Mapping[str, Completion], faults: Mapping[str, Fault], otherwise: str
    ) -> dict[str, Fault]:
        """Append the answers to the journal; return the faults of the requests without one, by their keys."""
        unanswered: dict[str, Fault] = {}
        spent_usd = 0.0
        new: list[tuple[Request, Completion]] = []
        for request in batch.read():
            completion = answers.get(request.key)
            if completion is None:
                unanswered[request.key] = faults.get(request.key, Fault(otherwise, refused=False))
                continue
            usd = self._count_answered(request, completion)
            if self._journal.get(*request.keys) is None:  # otherwise a crash interrupted an earlier collection
                spent_usd += usd
                new.append((request, completion))
                if len(new) == _APPENDED_TOGETHER:
                    await self._append(new)
        await self._append(new)
        self._committed_usd += spent_usd - batch.worst_usd
        return unanswered

    async def _append(self, exchanges: list[tuple[Request, Completion]]) -> None:
        await asyncio.gather(*(self._journal.append(*exchange) for exchange in exchanges))
        exchanges.clear()

    def _count_answered(self, request: Request, completion: Completion) -> float:
        """Count an answer; return its price, 0 if it is unknown."""
        usd = self._prices.usd(request.model, completion)
        report = self.report
        report.answered += 1
        report.prompt_tokens += completion.prompt_tokens
        report.completion_tokens += completion.completion_tokens
        report.usd = None if report.usd is None or usd is None else report.usd + usd
        return usd or 0.0

    def settle_rest(self) -> None:
        """Treat the requests that no batch answers as `batches.rest` says; raises as `Rest.settle`."""
        self.report.unanswered = dict(self._rest.reasons)
        self.report.left_out = self._rest.settle()


def _errors(remote: RemoteBatch) -> list[BatchError]:
    return (remote.errors and remote.errors.data) or []


def _quota_refusal(remote: RemoteBatch) -> str | None:
    """Return the endpoint's message if it refused a batch because of its quota of enqueued tokens."""
    if remote.status != "failed":
        return None
    return next((one_line(error.message or EXCEEDED) for error in _errors(remote) if error.code == EXCEEDED), None)
