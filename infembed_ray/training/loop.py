"""Training loop of one worker. It does not import Ray: torchrun or a plain call run it as well."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from infembed_ray.config.training import TrainSettings
from infembed_ray.errors import InputError
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.modeling.pooling import truncate
from infembed_ray.modeling.tokenizer import Tokens
from infembed_ray.progress import say
from infembed_ray.records.tuples import TrainingRecord
from infembed_ray.storage import durable
from infembed_ray.storage.steps import STATES
from infembed_ray.training.backbone import load_encoder
from infembed_ray.training.checkpoints.manager import CheckpointManager
from infembed_ray.training.collate import Batch
from infembed_ray.training.collectives import from_first, mean_over_workers, world
from infembed_ray.training.distillation import distill
from infembed_ray.training.engine import Engine, connect
from infembed_ray.training.export import export
from infembed_ray.training.losses import Objective, marginal_loss
from infembed_ray.training.observability.anomalies import Monitor
from infembed_ray.training.observability.events import EventLog
from infembed_ray.training.observability.metrics import Meter, RunLog, measure, read_metrics, rounded
from infembed_ray.training.overlap import similar_words
from infembed_ray.training.preparation import Prepared, Preparer, ahead
from infembed_ray.training.sampler import Sampler
from infembed_ray.training.scores import Scores, score_batch
from infembed_ray.training.teacher import Teacher
from infembed_ray.training.validation import EXPORTED, Validation
from infembed_ray.training.zero_init import load_for_training


def train_worker(
    settings: TrainSettings,
    records: Sequence[TrainingRecord],
    directory: Path,
    device: torch.device,
    preempted: Callable[[], bool] = lambda: False,
) -> None:
    """Train to the end, resuming from the newest valid checkpoint in `directory`, and export the model.

    Every worker calls it. Worker 0 writes the logs (one line per step) and the exported model.

    Args:
        settings: Settings of the run.
        records: All records, in the same order on every worker.
        directory: Output of the run, shared by all workers, or if `settings.output` is a URI by those of a node.
        device: Device of this worker.
        preempted: Return whether this worker has a notice that a node of the run will be taken away. If any worker has,
            all save a checkpoint at the end of the step.

    Raises:
        InputError: an anomaly stopped the run, or checkpoints could not be saved.
    """
    trainer = _Trainer(settings, records, directory, device, preempted)
    try:
        trainer.train()
        trainer.finish()
    finally:
        trainer.stop_uploads()


@dataclass(frozen=True)
class _Agreed:
    """What all workers know of a step before its last backward pass, the same on each.

    Attributes:
        ids: Ids of the records, of all workers in rank order.
        means: Measures, averaged over all rows of the step.
        work: Slots, tokens and FLOPs, averaged over workers; see `flops.Workload`.
        preempted: Whether any worker has a preemption notice.
        approved: Whether the step may update the weights.
        temperature: Temperature of the similarities.
    """

    ids: list[str]
    means: dict[str, float]
    work: tuple[float, float, float]
    preempted: bool
    approved: bool
    temperature: float


class _Trainer:
    """One worker of a run; see `train_worker` for the arguments."""

    def __init__(
        self,
        settings: TrainSettings,
        records: Sequence[TrainingRecord],
        directory: Path,
        device: torch.device,
        preempted: Callable[[], bool],
    ) -> None:
        self._settings = settings
        self._records = records
        self._directory = directory
        self._preempted = preempted
        self._objective = Objective.from_settings(settings)
        self._similar = self._find_similar_words(device)
        torch.manual_seed(settings.seed)
        self._encoder = load_for_training(settings, device)
        self._engine = Engine(self._encoder, settings)
        self._teacher = None
        if settings.teacher is not None:
            self._teacher = Teacher(InstructionEncoder.from_pretrained(settings.teacher, device=device), settings)
        self._rank, _ = world()  # the engine connects the workers
        self._sampler = Sampler.from_settings(settings, records, self._encoder)
        self._steps = -(-self._sampler.steps // settings.accumulation)
        self._checkpoints = CheckpointManager(directory / STATES, settings, self._sampler)
        self._progress = self._checkpoints.resume(self._engine)
        events = EventLog(directory, self._progress.step, writes=self._rank == 0)
        self._log = RunLog(settings, directory, self._progress.step, events) if self._rank == 0 else None
        logged = read_metrics(directory) if self._rank == 0 else []  # other workers could read it while it is rewritten
        losses = from_first([line["loss"] for line in logged if line["without_negatives"] != 1])
        self._monitor = Monitor(settings, events, losses)
        self._meter = Meter(device, self._encoder.dtype)
        self._validation = Validation(settings)
        self._preemption_noticed = False

    def train(self) -> None:
        """Run the steps that are left."""
        self._engine.train()
        if self._progress.step > 0:
            self._check_embeddings()
        done = self._progress.step * self._settings.accumulation
        if done < self._sampler.steps:
            self._choose_kernels(done)
        with closing(ahead(self._preparer().prepare, enumerate(self._sampler.rows(done), done))) as batches:
            while self._stopped is None and not self._is_done:
                self._train_step(batches)
        if (
            self._stopped is None and self._progress.best is None
        ):  # otherwise the best is exported, whose score is finite
            self._check_embeddings()

    @property
    def _is_done(self) -> bool:
        return self._progress.step >= self._steps or self._validation.exhausted(self._progress)

    def _check_embeddings(self) -> None:
        """Stop the run if the model gives embeddings that are not finite. Its weights may be finite then, but too large."""
        texts = self._encoder.tokenize_queries(["a"], [None]), self._encoder.tokenize_passages(["a"])
        finite = all(bool(torch.isfinite(self._engine.embed(side)).all()) for side in texts)
        self._monitor.check_embeddings(self._progress.step, finite)

    def _find_similar_words(self, device: torch.device) -> dict[str, tuple[str, ...]]:
        """Find similar words for `overlap_synonyms` with the untrained model on worker 0, and give them to all."""
        settings = self._settings.model_copy(update={"lora": None})
        if not settings.overlap_synonyms:
            return {}
        connect(settings)
        if world()[0] > 0:
            return from_first({})
        return from_first(similar_words(load_encoder(settings, device), self._records))

    def _preparer(self) -> Preparer:
        return Preparer(self._settings, self._records, self._rank, self._encoder, self._similar)

    @property
    def _stopped(self) -> str | None:
        """Why the run stops before its end, the same on every worker."""
        return self._monitor.stopped or self._checkpoints.stopped

    def _choose_kernels(self, number: int) -> None:
        """Choose the attention kernels by the texts of this micro-batch, if there is a choice."""

        def sides() -> tuple[list[Tokens], list[Tokens]]:
            rows = next(self._sampler.rows(number))
            batch = self._preparer().prepare((number, rows)).batch
            return batch.queries, batch.passages

        chosen = self._engine.choose_kernels(sides)
        if chosen is not None and self._rank == 0:
            say(chosen)

    def _train_step(self, batches: Iterator[Prepared]) -> None:
        self._meter.begin()
        rate = learning_rate(self._settings, self._progress.step, self._steps)
        agreed = self._forward_backward(batches)
        norm = self._engine.update(rate)
        if agreed.approved:
            self._monitor.check_gradients(self._progress.step + 1, norm, agreed.ids)
        if self._monitor.stopped is None:
            self._log_step(agreed, rate, norm)
            self._save_if_due(agreed.preempted)

    def _forward_backward(self, batches: Iterator[Prepared]) -> _Agreed:
        """Back-propagate the micro-batches of a step; before the last backward pass, the workers agree on the step."""
        sums, ids = torch.zeros(()), []
        accumulation = self._settings.accumulation
        count = min(accumulation, self._sampler.steps - self._progress.step * accumulation)  # the last may have fewer
        for number in range(count):
            with self._meter.data():
                prepared = next(batches)
            # Seeded anew for each micro-batch and worker: a resumed run draws the same dropout masks as one that was not
            # interrupted, so that no generator's state need be saved.
            torch.manual_seed(random.Random(f"{prepared.seed}/{self._rank}").getrandbits(63))
            ids += [record.id for share in prepared.shares for record in share]
            loss, scores, temperature = self._forward(prepared)
            weight = prepared.batch.share / count
            measured = {"loss": loss.detach(), **measure(scores, temperature)}
            sums = sums + weight * torch.stack(list(measured.values()))
            if number < count - 1:
                self._engine.backward(loss * weight, last=False)
        agreed = self._agree(list(measured), sums, ids, float(temperature))
        self._engine.backward(loss * weight, last=True, discard=not agreed.approved)
        return agreed

    def _forward(self, prepared: Prepared) -> tuple[Tensor, Scores, Tensor | float]:
        """Return loss, scores and temperature of a micro-batch."""
        batch = prepared.batch
        queries = self._engine.encode(batch.queries, prepared.queries)
        passages = self._engine.encode(batch.passages, prepared.passages)
        same_tower = self._settings.same_tower_negatives
        scores = score_batch(self._objective, batch, queries, passages, same_tower)
        if self._teacher is not None:
            scores = self._teacher.screen(scores, prepared.shares, self._rank)
        compared = [(scores, queries, passages)]
        for dimensions in self._settings.matryoshka:  # leading components, contrasted with the same negatives
            cut = truncate(queries, dimensions), truncate(passages, dimensions)
            shorter = score_batch(self._objective, batch, *cut, same_tower)
            negatives = {v: replace(n, mask=scores.negatives[v].mask) for v, n in shorter.negatives.items()}
            compared.append((replace(shorter, negatives=negatives), *cut))
        temperature = self._engine.temperature
        loss = torch.stack([self._loss(batch, *c, temperature) for c in compared]).mean()
        return loss, scores, temperature

    def _loss(
        self, batch: Batch, scores: Scores, queries: Tensor, passages: Tensor, temperature: Tensor | float
    ) -> Tensor:
        loss = marginal_loss(
            self._objective,
            scores.positive,
            scores.negatives,
            temperature,
            self._settings.count_positive_once,
            self._settings.term_weights,
            self._settings.label_smoothing,
        )
        if (taught := self._settings.distillation) is None:
            return loss
        distilled = distill(taught, batch, queries, passages, temperature)
        return (1 - taught.weight) * loss + taught.weight * distilled

    def _agree(self, names: Sequence[str], sums: Tensor, ids: list[str], temperature: float) -> _Agreed:
        """Exchange in one collective everything that the workers must know alike, and judge the step."""
        preempted = sums.new_tensor([float(self._preempted())])
        parts = (sums, self._engine.work.take(), preempted)
        agreed = mean_over_workers(torch.cat(parts)).split([len(part) for part in parts])
        means, (slots, tokens, flops), (notices,) = (part.tolist() for part in agreed)
        measures = dict(zip(names, map(rounded, means), strict=True))
        approved = self._monitor.approves(self._progress.step + 1, measures, ids)
        return _Agreed(ids, measures, (slots, tokens, flops), notices > 0, approved, temperature)

    def _log_step(self, agreed: _Agreed, rate: float, norm: float) -> None:
        """Advance the progress, evaluate if it is time, and log the step."""
        seconds_and_memory = self._meter.end(*agreed.work)
        consumed = self._progress.consumed + len(agreed.ids)
        self._progress = replace(self._progress, step=self._progress.step + 1, consumed=consumed, score=None)
        self._progress, validated = self._validation.after(self._progress, self._steps, self._engine)
        if self._log is not None:
            self._log.write(
                self._progress.step,
                agreed.ids,
                time=int(time.time()),
                learning_rate=rate,
                temperature=agreed.temperature,
                grad_norm=norm,
                **agreed.means,
                **seconds_and_memory,
                **validated,
            )

    def _save_if_due(self, preempted: bool) -> None:
        self._checkpoints.commit()
        step = self._progress.step
        due = step % self._settings.checkpoint_every == 0 or step == self._steps
        newly_preempted = preempted and not self._preemption_noticed
        self._preemption_noticed = preempted
        if due or newly_preempted or self._validation.needs_checkpoint(self._progress):
            self._checkpoints.save(self._engine, self._progress, wait=newly_preempted)

    def finish(self) -> None:
        """Close the logs, wait for uploads, export the model, and delete what only this node has of it.

        Raises:
            InputError: an anomaly stopped the run, or checkpoints could not be saved.
        """
        if self._log is not None:
            self._log.close()
        self._checkpoints.settle()
        if self._stopped is None:
            self._checkpoints.require_saved(self._progress)
        self._engine.close()
        self.stop_uploads()  # before the model is written
        if self._stopped is not None:
            self._checkpoints.upload_run_files()
            raise InputError(self._stopped)
        if self._rank == 0:
            checkpoint, exported = self._checkpoints.result()
            export(checkpoint, self._settings, self._directory)
            durable.replace_json(self._directory / EXPORTED, {"step": exported.step, "score": exported.score})
            self._checkpoints.upload_run_files()
        self._checkpoints.clean_up()

    def stop_uploads(self) -> None:
        """Stop uploading the logs while they grow."""
        self._checkpoints.stop_uploads()


def learning_rate(settings: TrainSettings, step: int, steps: int) -> float:
    """Return the learning rate of step `step` (0-based) of `steps`.

    Linear warm-up to the peak, then linear decay to 0 (the paper's, appendix), half a cosine to 0, or constant.
    """
    warmup = int(settings.warmup_fraction * steps)
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    share = {"linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2, "constant": 1.0}
    return settings.learning_rate * share[settings.schedule]
