"""Training loop of one worker. It does not import Ray: a plain call runs it as well."""

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from infembed_ray.config.training import TrainSettings
from infembed_ray.errors import InputError
from infembed_ray.modeling.layout import truncate
from infembed_ray.modeling.pipeline import ahead
from infembed_ray.records.tuples import TrainingRecord
from infembed_ray.storage import durable
from infembed_ray.storage.steps import STATES
from infembed_ray.training.checkpoints.manager import CheckpointManager
from infembed_ray.training.collate import Batch
from infembed_ray.training.collectives import mean_over_workers, world
from infembed_ray.training.distillation import distill
from infembed_ray.training.engine import Engine
from infembed_ray.training.export import export
from infembed_ray.training.losses import Objective, marginal_loss
from infembed_ray.training.observability import logs
from infembed_ray.training.observability.metrics import Meter, Monitor, RunLog, measure, rounded
from infembed_ray.training.preparation import Prepared, Preparer
from infembed_ray.training.sampler import Sampler
from infembed_ray.training.scores import Scores, score_batch
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
        torch.manual_seed(settings.seed)
        self._encoder = load_for_training(settings, device)
        self._engine = Engine(self._encoder, settings)
        self._rank, _ = world()  # the engine connects the workers
        self._preparer = Preparer(settings, records, self._rank, self._encoder)
        self._sampler = Sampler.from_settings(settings, records)
        self._checkpoints = CheckpointManager(directory / STATES, settings, self._sampler)
        self._progress = self._checkpoints.resume(self._engine)
        self._run_log = None
        if self._rank == 0:
            logs.begin(directory, self._progress.step)
            self._run_log = RunLog(settings, directory, self._progress.step, self._log_event)
        self._monitor = Monitor(settings.learning_rate, self._log_event)
        self._meter = Meter(device, self._encoder.dtype)
        self._validation = Validation(settings)
        self._preemption_noticed = False

    def _log_event(self, event: logs.Event) -> None:
        if self._rank == 0:
            logs.append_event(self._directory, event)

    def train(self) -> None:
        """Run the steps that are left."""
        self._engine.train()
        done = self._progress.step
        if done > 0:
            self._check_embeddings()
        with closing(ahead(map(self._preparer.prepare, enumerate(self._sampler.rows(done), done)))) as steps:
            while self._stopped is None and not self._is_done:
                self._train_step(steps)
        if self._stopped is None and self._progress.best is None:  # else the best is exported, whose score is finite
            self._check_embeddings()

    @property
    def _is_done(self) -> bool:
        return self._progress.step >= self._sampler.steps or self._validation.exhausted(self._progress)

    @property
    def _stopped(self) -> str | None:
        """Why the run stops before its end, the same on every worker."""
        return self._monitor.stopped or self._checkpoints.stopped

    def _check_embeddings(self) -> None:
        """Stop the run if the model gives embeddings that are not finite. Its weights may be finite then, but too large."""
        texts = self._encoder.tokenize_queries(["a"], [None]), self._encoder.tokenize_passages(["a"])
        total = sum(float(self._engine.embed(side).sum()) for side in texts)
        self._monitor.check(self._progress.step, "the sum of the model's embeddings", total)

    def _train_step(self, steps: Iterator[Prepared]) -> None:
        self._meter.begin()
        with self._meter.data():
            prepared = next(steps)
        # Seeded anew for each step and worker: a resumed run draws the same dropout masks as one that was not
        # interrupted, so that no generator's state need be saved.
        torch.manual_seed(random.Random(f"{prepared.seed}/{self._rank}").getrandbits(63))
        loss, scores = self._forward(prepared)
        share = prepared.batch.share
        measured = {"loss": loss.detach(), **measure(scores, self._settings.temperature)}
        means, work, preempted = self._agree({name: share * value for name, value in measured.items()})
        number = self._progress.step + 1
        self._monitor.check(number, "the loss", means["loss"], prepared.ids)
        self._monitor.check_negatives(number, means["without_negatives"], prepared.ids)
        if self._monitor.stopped is not None:
            return
        self._engine.backward(loss * share)
        rate = learning_rate(self._settings, self._progress.step, self._sampler.steps)
        norm = self._engine.update(rate)
        self._monitor.check(number, "the norm of the gradients", norm, prepared.ids)
        if self._monitor.stopped is None:
            self._log_step(len(prepared.ids), means | self._meter.end(*work), rate, norm)
            self._save_if_due(preempted)

    def _forward(self, prepared: Prepared) -> tuple[Tensor, Scores]:
        """Return this worker's loss of a step, and the scores of its whole embeddings."""
        batch = prepared.batch
        embeddings = torch.cat([self._engine.encode(*group) for group in prepared.groups])
        queries, passages = embeddings.tensor_split([len(batch.queries)])
        compared = [(queries, passages)]
        for dimensions in self._settings.matryoshka:
            compared.append((truncate(queries, dimensions), truncate(passages, dimensions)))
        scores = [score_batch(self._objective, batch, *both) for both in compared]
        losses = [self._loss(batch, *both) for both in zip(scores, compared, strict=True)]
        return torch.stack(losses).mean(), scores[0]

    def _loss(self, batch: Batch, scores: Scores, embeddings: tuple[Tensor, Tensor]) -> Tensor:
        settings = self._settings
        positive, negatives, weights = scores.positive, scores.negatives, settings.term_weights
        loss = marginal_loss(self._objective, positive, negatives, settings.temperature, weights=weights)
        if (taught := settings.distillation) is None:
            return loss
        return (1 - taught.weight) * loss + taught.weight * distill(taught, batch, *embeddings, settings.temperature)

    def _agree(self, measured: Mapping[str, Tensor]) -> tuple[dict[str, float], list[float], bool]:
        """Exchange in one collective everything about a step that the workers must know alike, before its backward pass.

        Returns:
            Measures, averaged over all rows; slots, tokens and FLOPs, averaged over workers (see `flops.Workload`); and
            whether any worker has a preemption notice.
        """
        sums = torch.stack(list(measured.values()))
        parts = (sums, self._engine.work.take(), sums.new_tensor([float(self._preempted())]))
        *means, slots, tokens, flops, notices = mean_over_workers(torch.cat(parts)).tolist()
        return dict(zip(measured, map(rounded, means), strict=True)), [slots, tokens, flops], notices > 0

    def _log_step(self, records: int, figures: Mapping[str, float | None], rate: float, norm: float) -> None:
        """Advance the progress, evaluate if it is time, and log the step."""
        consumed = self._progress.consumed + records
        progress = replace(self._progress, step=self._progress.step + 1, consumed=consumed, score=None)
        self._progress, validated = self._validation.after(progress, self._sampler.steps, self._engine)
        if self._run_log is not None:
            moment = {"time": int(time.time()), "learning_rate": rate, "grad_norm": norm}
            self._run_log.write(self._progress.step, records, **moment, **figures, **validated)

    def _save_if_due(self, preempted: bool) -> None:
        self._checkpoints.commit()
        step = self._progress.step
        due = step % self._settings.checkpoint_every == 0 or step == self._sampler.steps
        newly_preempted = preempted and not self._preemption_noticed
        self._preemption_noticed = preempted
        if due or newly_preempted or self._validation.needs_checkpoint(self._progress):
            self._checkpoints.save(self._engine, self._progress, wait=newly_preempted)

    def finish(self) -> None:
        """Close the logs, wait for uploads, export the model, and delete what only this node has of it.

        Raises:
            InputError: an anomaly stopped the run, or checkpoints could not be saved.
        """
        if self._run_log is not None:
            self._run_log.close()
        self._checkpoints.commit(wait=True)
        if self._stopped is None:
            self._checkpoints.require_saved(self._progress)
        self._engine.close()
        self.stop_uploads()  # before the model is written
        if self._stopped is not None:
            self._checkpoints.upload_run_files()
            raise InputError(self._stopped)
        if self._rank == 0:
            checkpoint, exported = self._checkpoints.result()
            export(checkpoint, self._settings, self._directory, exported.exclusion_weight)
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
