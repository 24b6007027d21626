"""Answers at half the price from the Batch API, which processes files of requests within a day.

The steps of a row depend on one another, so batches go in waves: a wave asks the next request of every row, and its answers
in the journal decide the next wave. A request that a batch leaves unanswered (expired, cancelled, faulty) is not batched
again; the online run that follows asks it, and replays everything else.

You never pay for the same request twice. A batch's requests are on disk before the upload, the intention to submit before
the submission, and the batch's id before the wait. A run that finds an intention without an id searches the endpoint for
the batch's tag; a run that finds an id waits for that batch and collects it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from openai.types import Batch as RemoteBatch

from infembed_ray import durable
from infembed_ray.config.synthesis import SynthesizeSettings
from infembed_ray.llm import dialects, prices
from infembed_ray.llm.batch_client import BatchClient
from infembed_ray.llm.chat import Completion, Dialect, Request, RunFailure, Unjournaled
from infembed_ray.llm.client import replaying
from infembed_ray.llm.journal import Journal
from infembed_ray.llm.prices import BATCH_PRICE
from infembed_ray.llm.rate_limits import USD, worst_case
from infembed_ray.progress import counted, say
from infembed_ray.records import Seed
from infembed_ray.synthesis.batch_files import Batch, read_answers, upload_line
from infembed_ray.synthesis.pipeline import synthesize
from infembed_ray.synthesis.preflight import probes

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
    """Reason -> number of requests left to the online run."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    usd: float | None = 0.0
    """Price of the answers; None if the price table lacks a model."""
    probe_usd: float = 0.0
    """Price of the short requests that found out the models' parameters."""


async def answer_in_batches(
    seeds: Iterable[Seed],
    pool: Sequence[str],
    settings: SynthesizeSettings,
    journal: Journal,
    directory: Path,
    spent_usd: float = 0.0,
) -> BatchReport:
    """Fill the journal with the answers that the seeds need, as far as batches provide them.

    Args:
        seeds: of the run; read once per wave.
        pool: passages to draw distractors from.
        settings: of the run; `batches` and `endpoint` apply.
        journal: read, and given the answers.
        directory: of the batches' files, the same in every run on this journal.
        spent_usd: what is already spent of `settings.limits.budget_usd`.

    Raises:
        RunFailure: the endpoint refuses the key or has no Batch API, or another run uses the directory.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        busy = RunFailure(f"journal={directory.parent}: another run has batches there; wait for it")
        with durable.exclusive_lock(directory / ".lock", busy=busy):
            async with contextlib.aclosing(BatchClient(settings.endpoint)) as client:
                runner = _BatchRunner(client, settings, journal, directory, spent_usd)
                await runner.complete(runner.unfinished())
                finished: set[int] = set()
                while wave := await runner.next_wave(seeds, pool, finished):
                    await runner.learn()
                    await runner.complete(wave)
    except OSError as error:
        raise RunFailure(f"journal={directory.parent}: cannot be written ({error.strerror})") from error
    return runner.report


class _BatchRunner:
    """Drafts, submits, awaits and collects all batches of a run."""

    def __init__(
        self, client: BatchClient, settings: SynthesizeSettings, journal: Journal, directory: Path, spent_usd: float
    ) -> None:
        assert settings.batches is not None
        self._client = client
        self._settings = settings
        self._batches = settings.batches
        self._journal = journal
        self._directory = directory
        self._prices = prices.load(settings.prices)
        self._committed_usd = spent_usd
        """Spent, and the worst case of what is submitted."""
        self._online: set[str] = set()
        """Keys of requests that are left to the online run."""
        self._collecting = asyncio.Lock()
        self._dialects: Mapping[str, Dialect] | None = None
        self.report = BatchReport()

    async def learn(self) -> None:
        """Find out the parameters of the models, once."""
        if self._dialects is None:
            endpoint = {"endpoint": self._settings.endpoint}
            learned = await dialects.learn(endpoint, probes(self._settings), self._prices)
            self._dialects = learned.dialects[0]
            for line in learned.report:
                say(f"synthesize: {line}")
            self._committed_usd += learned.used[USD]
            self.report.probe_usd = learned.used[USD]

    def unfinished(self) -> list[Batch]:
        """Return the batches that an earlier run submitted and did not collect; note what others left unanswered."""
        for leftover in self._directory.glob("*.partial"):  # of a killed run; the lock admits one run at a time
            leftover.unlink()
        found = []
        for batch in map(Batch.load, sorted(self._directory.glob("*.json"))):
            if batch.stage == "collected":
                self._online.update(batch.unanswered)
            elif batch.stage == "prepared":
                batch.discard()  # drafted again if it is still needed
            elif batch.base_url != self._settings.endpoint.base_url:
                raise RunFailure(
                    f"endpoint.base_url={self._settings.endpoint.base_url}: a batch waits at {batch.base_url}; "
                    f"set that, or remove {batch.path('json')} to forget it"
                )
            else:
                self._committed_usd += batch.worst_usd
                found.append(batch)
        return found

    async def next_wave(self, seeds: Iterable[Seed], pool: Sequence[str], finished: set[int]) -> list[Batch]:
        """Prepare batches of every row's next request; add rows that need no further batch to `finished`."""
        wave: list[Batch] = []
        drafts: defaultdict[str, list[Request]] = defaultdict(list)  # by model
        sizes: Counter[str] = Counter()
        drafted: set[str] = set()
        for index, seed in enumerate(seeds):
            if index in finished:
                continue
            request = await self._next_request(seed, pool)
            if request is None or request.key in self._online:
                finished.add(index)
            elif request.key not in drafted:
                drafted.add(request.key)
                draft, size = drafts[request.model], len(upload_line(request))
                if len(draft) == self._batches.max_requests or sizes[request.model] + size > MOST_BYTES:
                    wave.append(self._prepare(draft))
                    draft.clear()
                    sizes[request.model] = 0
                draft.append(request)
                sizes[request.model] += size
        return wave + [self._prepare(draft) for draft in drafts.values()]

    def _prepare(self, requests: Sequence[Request]) -> Batch:
        worst_usd = BATCH_PRICE * sum(worst_case(request, self._prices)[USD] for request in requests)
        worst_usd = worst_usd if math.isfinite(worst_usd) else 0.0  # unknown price: there is no budget
        return Batch.prepare(self._directory, self._settings.endpoint.base_url, requests, worst_usd)

    async def _next_request(self, seed: Seed, pool: Sequence[str]) -> Request | None:
        """Return the first request of a row that the journal does not answer; None if it answers all."""
        try:
            await synthesize(seed, pool, self._settings, replaying(self._journal))
        except Unjournaled as missing:
            return missing.request
        return None

    async def complete(self, batches: Sequence[Batch]) -> None:
        """Submit what is not submitted yet, wait for all batches, and collect them."""
        tasks = [asyncio.create_task(self._complete(batch)) for batch in batches]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # after one failure; the next run resumes the others
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _complete(self, batch: Batch) -> None:
        if batch.stage == "prepared":
            budget = self._settings.limits.budget_usd
            if budget is not None and self._committed_usd + batch.worst_usd > budget:
                self._online.update(request.key for request in batch.read())
                self._count_unanswered("the budget", batch.requests)
                batch.discard()
                return
            self._committed_usd += batch.worst_usd
            batch.save(file_id=await self._upload(batch))
            batch.save(stage="submitting", submitted=time.time())
            await self._submit(batch, doubtful=False)
            say(f"synthesize: batch {batch.batch_id}: {counted(batch.requests, 'request')} submitted")
        elif batch.stage == "submitting":
            await self._submit(batch, doubtful=True)
        await self._collect(batch, await self._wait(batch))

    async def _upload(self, batch: Batch) -> str:
        deployments, learned = self._settings.endpoint.deployments, self._dialects or {}
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
            unanswered = await self._journal_answers(batch, *read_answers(files), f"the batch {remote.status}")
        batch.save(stage="collected", unanswered=unanswered)
        self._online.update(unanswered)
        for file in (batch.path("requests"), *files):
            file.unlink(missing_ok=True)
        self.report.batches += 1
        answered = batch.requests - len(unanswered)
        say(f"synthesize: batch {batch.batch_id}: {remote.status}, {answered} of {batch.requests} answered")

    async def _journal_answers(
        self, batch: Batch, answers: Mapping[str, Completion], faults: Mapping[str, str], otherwise: str
    ) -> list[str]:
        """Append the answers to the journal; return the keys of the requests without one."""
        unanswered: list[str] = []
        spent_usd = 0.0
        new: list[tuple[Request, Completion]] = []
        for request in batch.read():
            completion = answers.get(request.key)
            if completion is None:
                unanswered.append(request.key)
                self._count_unanswered(faults.get(request.key, otherwise), 1)
                continue
            spent_usd += self._count_answered(request, completion)
            if self._journal.get(request.key) is None:  # otherwise a crash interrupted an earlier collection
                new.append((request, completion))
                if len(new) == _APPENDED_TOGETHER:
                    await self._append(new)
        await self._append(new)
        self._committed_usd += spent_usd - batch.worst_usd
        return unanswered

    async def _append(self, exchanges: list[tuple[Request, Completion]]) -> None:
        await asyncio.gather(*(self._journal.append(*exchange) for exchange in exchanges))
        exchanges.clear()

    def _count_unanswered(self, reason: str, requests: int) -> None:
        self.report.unanswered[reason] = self.report.unanswered.get(reason, 0) + requests

    def _count_answered(self, request: Request, completion: Completion) -> float:
        """Count an answer; return its price, 0 if it is unknown."""
        usd = self._prices.usd(request.model, completion)
        report = self.report
        report.answered += 1
        report.prompt_tokens += completion.prompt_tokens
        report.completion_tokens += completion.completion_tokens
        report.usd = None if report.usd is None or usd is None else report.usd + usd
        return usd or 0.0
