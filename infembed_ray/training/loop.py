"""The training loop of one worker. Knows nothing of Ray: torchrun or a plain call run it as well."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from infembed_ray.config import TrainSettings
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.modeling.pooling import truncate
from infembed_ray.records import Record
from infembed_ray.storage import STATES, write_json
from infembed_ray.training.backbone import load_encoder
from infembed_ray.training.collectives import from_first, mean_over_workers, world
from infembed_ray.training.engine import Engine, export, learning_rate
from infembed_ray.training.metrics import MetricsLog, measure
from infembed_ray.training.objectives import Objective, marginal_loss
from infembed_ray.training.sampler import Sampler
from infembed_ray.training.scores import Scores, score_batch
from infembed_ray.training.teacher import Teacher
from infembed_ray.training.tuples import Batch, collate

_COMPLETE = "complete.json"


def train_worker(settings: TrainSettings, records: Sequence[Record], directory: Path, device: torch.device) -> None:
    """Train to the end, resuming from the newest whole state under `directory`, and export the checkpoint.

    Every worker calls it; worker 0 writes `metrics.jsonl` (one line a step) and the exported checkpoint.

    Args:
        settings: of the run.
        records: all of them, in the same order on every worker.
        directory: shared by all workers.
        device: of this worker.
    """
    objective = Objective.of(settings)
    torch.manual_seed(settings.seed)
    encoder = load_encoder(settings, device, quantized=settings.lora is not None and settings.lora.quantized)
    engine = Engine(encoder, settings)
    teacher = None
    if settings.teacher is not None:
        teacher = Teacher(InstructionEncoder.from_pretrained(settings.teacher, device=device), settings)
    rank, _ = world()
    sampler = Sampler.of(settings, len(records))
    states = directory / STATES
    start = 0
    newest = from_first(newest_state(states))  # a file system may show the others an older state
    if newest is not None:
        progress = engine.load(states, newest)
        start = int(progress["step"])
    metrics = MetricsLog(directory, start) if rank == 0 else None
    engine.train()
    for step, rows in enumerate(sampler.rows(start), start=start):
        began = time.monotonic()
        # Seeded anew for each step and worker, so that a resumed run draws the dropout masks (on CPU and GPU) that the
        # uninterrupted one would have drawn. No generator's state need be saved.
        torch.manual_seed(random.Random(f"{settings.seed}/{step}/{rank}").getrandbits(63))
        shares = [[records[r] for r in share] for share in rows]
        batch = collate(
            encoder,
            shares,
            rank,
            objective,
            instruction_negatives=settings.instruction_negatives,
            iq_negatives=settings.iq_negatives,
            seed=f"{settings.seed}/{step}",
        )
        queries, passages = engine.encode(batch.queries), engine.encode(batch.passages)
        scores = score_batch(objective, batch, queries, passages, settings.same_tower_negatives)
        if teacher is not None:
            scores = teacher.screen(scores, shares, rank)
        temperature = engine.temperature
        losses = [
            marginal_loss(
                objective,
                compared.positive,
                compared.negatives,
                temperature,
                settings.count_positive_once,
                settings.term_weights,
                settings.label_smoothing,
            )
            for compared in [scores, *_shorter(settings, objective, batch, queries, passages, scores)]
        ]
        loss = torch.stack(losses).mean()
        rate = learning_rate(settings, step, sampler.steps)
        engine.backward(loss * batch.share)
        norm = engine.update(rate)
        measured = {"loss": loss.detach(), **measure(scores, temperature)}
        means = mean_over_workers(torch.stack(list(measured.values())), batch.share)
        if metrics is not None:
            metrics.write(
                step=step + 1,
                learning_rate=rate,
                temperature=float(temperature),
                grad_norm=norm,
                tokens=batch.tokens,
                seconds=time.monotonic() - began,
                **dict(zip(measured, means.tolist(), strict=True)),
            )
        done = step + 1
        if done % settings.checkpoint_every == 0 or done == sampler.steps:
            _save_state(engine, states, done)
    last = newest_state(states)
    engine.close()
    if rank == 0 and last is not None:
        export(states / last, load_encoder(settings), directory)


def _shorter(
    settings: TrainSettings, objective: Objective, batch: Batch, queries: Tensor, passages: Tensor, scores: Scores
) -> Iterator[Scores]:
    """The scores of the leading components of the embeddings, among the same negatives (Matryoshka)."""
    for dimensions in settings.matryoshka:
        cut = [truncate(embeddings, dimensions) for embeddings in (queries, passages)]
        shorter = score_batch(objective, batch, cut[0], cut[1], settings.same_tower_negatives)
        negatives = {v: replace(n, mask=scores.negatives[v].mask) for v, n in shorter.negatives.items()}
        yield replace(shorter, negatives=negatives)


def newest_state(states: Path) -> str | None:
    """Name of the newest state whose completeness marker, written last, is there."""
    whole = sorted(marker.parent.name for marker in states.glob(f"step-*/{_COMPLETE}"))
    return whole[-1] if whole else None


def _save_state(engine: Engine, states: Path, step: int) -> None:
    """Save, mark as whole, then drop the states before it."""
    tag = f"step-{step:08d}"
    engine.save(states, tag, {"step": step})
    if world()[0] == 0:
        write_json(states / tag / _COMPLETE, {"step": step})
        for old in states.glob("step-*"):
            if old.name < tag:
                shutil.rmtree(old)
