"""The training loop of one worker. Knows nothing of Ray: torchrun or a plain call run it as well."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from infembed_ray.config import TrainSettings
from infembed_ray.errors import InputError
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.modeling.pooling import truncate
from infembed_ray.records import Record
from infembed_ray.storage import STATES, write_json
from infembed_ray.training.backbone import load_encoder
from infembed_ray.training.collectives import from_first, mean_over_workers, world
from infembed_ray.training.engine import Engine, export
from infembed_ray.training.events import EventLog
from infembed_ray.training.metrics import Meter, measure, read_metrics, rounded
from infembed_ray.training.monitor import Monitor
from infembed_ray.training.objectives import Objective, marginal_loss
from infembed_ray.training.run_log import RunLog
from infembed_ray.training.sampler import Sampler
from infembed_ray.training.schedule import learning_rate
from infembed_ray.training.scores import Scores, score_batch
from infembed_ray.training.states import States
from infembed_ray.training.teacher import Teacher
from infembed_ray.training.tuples import Batch, collate
from infembed_ray.training.validation import EXPORTED, Validation


def train_worker(
    settings: TrainSettings,
    records: Sequence[Record],
    directory: Path,
    device: torch.device,
    preempted: Callable[[], bool] = lambda: False,
) -> None:
    """Train to the end, resuming from the newest whole state under `directory`, and export the checkpoint.

    Every worker calls it; worker 0 writes `metrics.jsonl` and `samples.jsonl` (one line a step) and the exported checkpoint.

    Args:
        settings: of the run.
        records: all of them, in the same order on every worker.
        directory: shared by all workers.
        device: of this worker.
        preempted: has this worker heard that a machine of the run is about to go? If any has, all save a state at the
            end of that step.
    """
    objective = Objective.of(settings)
    torch.manual_seed(settings.seed)
    encoder = load_encoder(settings, device, quantized=settings.lora is not None and settings.lora.quantized)
    engine = Engine(encoder, settings)
    teacher = None
    if settings.teacher is not None:
        teacher = Teacher(InstructionEncoder.from_pretrained(settings.teacher, device=device), settings)
    rank, _ = world()
    sampler = Sampler.of(settings, records, encoder)
    states = States(directory / STATES, settings, sampler)
    progress = states.resume(engine)
    events = EventLog(directory, progress.step, writes=rank == 0)
    log = RunLog(settings, directory, progress.step, events) if rank == 0 else None
    before = read_metrics(directory) if rank == 0 else []  # it may be cutting the log that others would read
    losses = from_first([line["loss"] for line in before if line["without_negatives"] != 1])
    monitor = Monitor(settings, events, losses)
    meter = Meter(device, encoder.dtype)
    validation = Validation(settings)
    engine.train()
    steps = -(-sampler.steps // settings.accumulation)
    told = False
    for step, batches in enumerate(_of_steps(sampler, settings.accumulation, progress.step), start=progress.step):
        if validation.over(progress):
            break
        meter.begin()
        rate = learning_rate(settings, step, steps)
        sums, ids = torch.zeros(()), []
        for number, rows in enumerate(batches):
            seed = f"{settings.seed}/{step * settings.accumulation + number}"
            # Seeded anew for each batch and worker, so that a resumed run draws the dropout masks (on CPU and GPU) that
            # the uninterrupted one would have drawn. No generator's state need be saved.
            torch.manual_seed(random.Random(f"{seed}/{rank}").getrandbits(63))
            with meter.data():
                shares = [[records[r] for r in share] for share in rows]
                batch = collate(
                    encoder,
                    shares,
                    rank,
                    objective,
                    instruction_negatives=settings.instruction_negatives,
                    iq_negatives=settings.iq_negatives,
                    seed=seed,
                )
            ids += [record.id for share in shares for record in share]
            queries, passages = engine.encode(batch.queries), engine.encode(batch.passages)
            scores = score_batch(objective, batch, queries, passages, settings.same_tower_negatives)
            if teacher is not None:
                scores = teacher.screen(scores, shares, rank)
            temperature = engine.temperature
            compared = [scores, *_shorter(settings, objective, batch, queries, passages, scores)]
            loss = torch.stack([_loss(settings, objective, c, temperature) for c in compared]).mean()
            share = batch.share / len(batches)
            measured = {"loss": loss.detach(), **measure(scores, temperature)}
            sums = sums + share * torch.stack(list(measured.values()))
            last = number == len(batches) - 1
            if last:
                # All that workers have to agree on, by one collective; before the gradients are complete, because a
                # step that is not approved is one whose gradients are NaN: no ZeRO stage makes an update from them.
                heard = sums.new_tensor([float(preempted())])
                agreed = mean_over_workers(torch.cat([sums, engine.work.take(), heard])).tolist()
                *_, slots, tokens, flops, of_workers = agreed
                means = dict(zip(measured, map(rounded, agreed), strict=False))
                approved = monitor.approves(step + 1, means, ids)
                share = share if approved else math.nan
            engine.backward(loss * share, last)
        norm = engine.update(rate)
        if approved:
            monitor.check_gradients(step + 1, norm, ids)
        if monitor.stopped is not None:
            break
        took = meter.end(slots, tokens, flops)
        progress = replace(progress, step=step + 1, consumed=progress.consumed + len(ids), score=None)
        progress, validated = validation.after(progress, steps, engine)
        if log is not None:
            log.write(
                step + 1,
                ids,
                time=int(time.time()),
                learning_rate=rate,
                temperature=float(temperature),
                grad_norm=norm,
                **means,
                **took,
                **validated,
            )
        just_told, told = of_workers > 0 and not told, of_workers > 0
        due = progress.step % settings.checkpoint_every == 0 or progress.step == steps
        if due or just_told or validation.keeps(progress):
            states.save(engine, progress)
    if log is not None:
        log.close()
    states.settle()
    if monitor.stopped is None:
        states.require_saved(progress)
    engine.close()
    if monitor.stopped is not None:
        raise InputError(monitor.stopped)
    if rank == 0:
        state, made = states.result()
        export(state, load_encoder(settings), directory)
        write_json(directory / EXPORTED, {"step": made.step, "score": made.score})


def _of_steps(sampler: Sampler, accumulation: int, start: int) -> Iterator[list[list[list[int]]]]:
    """The batches of every step from `start` on: as many as accumulate, in the last one of the run maybe fewer."""
    batches = sampler.rows(start * accumulation)
    while of_step := list(islice(batches, accumulation)):
        yield of_step


def _loss(settings: TrainSettings, objective: Objective, scores: Scores, temperature: Tensor | float) -> Tensor:
    return marginal_loss(
        objective,
        scores.positive,
        scores.negatives,
        temperature,
        settings.count_positive_once,
        settings.term_weights,
        settings.label_smoothing,
    )


def _shorter(
    settings: TrainSettings, objective: Objective, batch: Batch, queries: Tensor, passages: Tensor, scores: Scores
) -> Iterator[Scores]:
    """The scores of the leading components of the embeddings, among the same negatives (Matryoshka)."""
    for dimensions in settings.matryoshka:
        cut = [truncate(embeddings, dimensions) for embeddings in (queries, passages)]
        shorter = score_batch(objective, batch, cut[0], cut[1], settings.same_tower_negatives)
        negatives = {v: replace(n, mask=scores.negatives[v].mask) for v, n in shorter.negatives.items()}
        yield replace(shorter, negatives=negatives)
