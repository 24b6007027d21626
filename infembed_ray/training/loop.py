"""The training loop of one worker. Knows nothing of Ray: torchrun or a plain call run it as well."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from infembed_ray.config import TrainSettings
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.records import Record
from infembed_ray.storage import STATES, write_json
from infembed_ray.training.collectives import mean_over_workers, world
from infembed_ray.training.engine import Engine, export, learning_rate
from infembed_ray.training.metrics import MetricsLog
from infembed_ray.training.objectives import Objective, marginal_loss
from infembed_ray.training.sampler import Sampler
from infembed_ray.training.scores import score_batch
from infembed_ray.training.tuples import collate

_COMPLETE = "complete.json"


def load_encoder(settings: TrainSettings, device: torch.device | str = "cpu") -> InstructionEncoder:
    """The backbone of a run, in fp32: DeepSpeed casts it and keeps fp32 master weights."""
    return InstructionEncoder.from_pretrained(
        settings.model,
        template=settings.template,
        pooling=settings.pooling,
        query_length=settings.query_length,
        passage_length=settings.passage_length,
        device=device,
    )


def train_worker(settings: TrainSettings, records: Sequence[Record], directory: Path, device: torch.device) -> None:
    """Train to the end, resuming from the newest whole state under `directory`, and export the checkpoint.

    Every worker calls it; worker 0 writes `metrics.jsonl` (one line a step) and the exported checkpoint.

    Args:
        settings: of the run.
        records: all of them, in the same order on every worker.
        directory: shared by all workers.
        device: of this worker.
    """
    objective = Objective.parse(settings.objective)
    torch.manual_seed(settings.seed)
    encoder = load_encoder(settings, device)
    engine = Engine(encoder, settings)
    rank, _ = world()
    sampler = Sampler.of(settings, len(records))
    states = directory / STATES
    start = 0
    newest = newest_state(states)
    if newest is not None:
        progress = engine.load(states, newest)
        start = int(progress["step"])
    metrics = MetricsLog(directory, start) if rank == 0 else None
    engine.train()
    for step, rows in enumerate(sampler.rows(rank, start), start=start):
        began = time.monotonic()
        # Seeded anew for each step and worker, so that a resumed run draws the negatives and the dropout masks (on
        # CPU and GPU) that the uninterrupted one would have drawn. No generator's state need be saved.
        rng = random.Random(f"{settings.seed}/{step}/{rank}")
        torch.manual_seed(rng.getrandbits(63))
        negatives = settings.instruction_negatives if "I" in objective.variables else 0
        batch = collate(encoder, [records[r] for r in rows], negatives, rng)
        scores = score_batch(objective, batch, engine.encode)
        loss = marginal_loss(
            objective, scores.positive, scores.negatives, settings.temperature, settings.count_positive_once
        )
        rate = learning_rate(settings, step, sampler.steps)
        norm = engine.step(loss, rate)
        hits = torch.stack(
            [(scores.positive > _hardest(n.similarities, n.mask)).float().mean() for n in scores.negatives.values()]
        )
        means = mean_over_workers(torch.cat([torch.stack([loss.detach().float(), scores.positive.mean()]), hits]))
        if metrics is not None:
            metrics.write(
                step=step + 1,
                loss=round(float(means[0]), 6),
                learning_rate=rate,
                grad_norm=round(norm, 6),
                positive_similarity=round(float(means[1]), 4),
                accuracy={v: round(float(h), 4) for v, h in zip(scores.negatives, means[2:], strict=True)},
                tokens=batch.tokens,
                seconds=round(time.monotonic() - began, 3),
            )
        done = step + 1
        if done % settings.checkpoint_every == 0 or done == sampler.steps:
            _save_state(engine, states, done)
    last = newest_state(states)
    engine.close()
    if rank == 0 and last is not None:
        export(states / last, load_encoder(settings), directory)


def _hardest(similarities: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(B,) best similarity of a negative of each row; -2, below any cosine, where a row has none."""
    if similarities.shape[1] == 0:
        return similarities.new_full((similarities.shape[0],), -2.0)
    return similarities.masked_fill(~mask, -2.0).max(dim=1).values


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
