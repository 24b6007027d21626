"""What one worker reads in a step: batches collated and laid out by the very code that trains, then counted."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import get_args

import torch

from infembed_ray import records as tables
from infembed_ray.config import PlanTrainSettings
from infembed_ray.errors import InputError
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.modeling.layout import Layout, Side
from infembed_ray.planning.backbones import TOKENS_PER_WORD, as_stand_in, stands_in
from infembed_ray.records import Record
from infembed_ray.storage import existing
from infembed_ray.training.flops import BackboneFlops
from infembed_ray.training.objectives import Objective
from infembed_ray.training.tuples import Batch, collate, token_counts

_SAMPLES = 4
"""Batches that are looked at."""
_MADE_UP = 512
"""Records that are made up at least: enough to tell their mean length, and to draw unlike batches from."""
_ONE_PASS = 1 << 40
_SPREAD = 0.4
"""Standard deviation of the logarithm of made-up lengths: about that of MS MARCO's passages."""
_LENGTHS = {
    "query_positive": "query",
    "query_negative": "query",
    "instruction_positive": "instruction",
    "instruction_negative": "instruction",
    "document_positive": "passage",
    "hard_negative_document_1": "passage",
    "hard_negative_document_2": "passage",
}
"""Column of a record -> which of `Mix`'s lengths it has."""


@dataclass(frozen=True)
class Workload:
    """One worker's part of a step; means over the batches looked at, except where it says most.

    Attributes:
        queries: instruction-query texts of a batch, each once: those of the tuples themselves, and the negatives'.
        own: of these, those of the tuples themselves.
        passages: of a batch.
        slots: places in all passes of a step, padding included, a shared prefix once.
        tokens: of these, those that hold a token.
        graph_slots: most slots of which graphs exist at once.
        passes: forward passes of a step, each side of each batch at least one.
        batches: of a step.
        flops: model FLOPs of a step, forward and backward.
        steps: of the whole run.
        records: of a batch, all workers together.
        whole_epoch: are those all that there are? A batch would hold more.
    """

    queries: float
    own: int
    passages: int
    slots: float
    tokens: float
    graph_slots: int
    passes: float
    batches: int
    flops: float
    steps: int
    records: int
    whole_epoch: bool


def workload(
    settings: PlanTrainSettings, encoder: InstructionEncoder, workers: int, device: torch.device, dtype: torch.dtype
) -> Workload:
    """Look at the first worker's share of some steps.

    Args:
        settings: of the run; its `workers` does not count.
        encoder: on the meta device.
        workers: that share a batch.
        device, dtype: that the run computes on and in: they decide whether texts are packed.

    Raises:
        InputError: fewer records in a batch than workers.
    """
    own = _own(settings)
    number = settings.mix.records if own is None else len(own)
    records = _made_up(settings, _MADE_UP) if own is None else own
    per_step = settings.records_per_step
    if settings.tokens_per_step is not None:
        per_step = max(1, round(settings.tokens_per_step / fmean(token_counts(encoder, records[:256]))))
    asked = -(-per_step // settings.accumulation)
    per_batch = min(asked, number)  # as the sampler has it
    if per_batch < workers:
        raise InputError(
            f"records_per_step={settings.records_per_step}: {per_batch} records a batch leave some of the {workers} "
            "GPUs without any; set more, or fewer nodes"
        )
    if own is None and 2 * per_batch > len(records):
        records = _made_up(settings, 2 * per_batch)
    encoder.train()
    budget = settings.grad_cache_tokens or _ONE_PASS
    batches = list(_batches(settings, encoder, records, per_batch, workers))
    passes = [
        [
            layout
            for side in (batch.queries, batch.passages)
            for _, layout in encoder.lay_out(side, budget, device, dtype)
        ]
        for batch in batches
    ]
    slots = [[layout.input_ids.numel() for layout in of_batch] for of_batch in passes]
    work = {side: BackboneFlops.of(encoder.backbone_of(side), encoder.causal) for side in get_args(Side)}
    flops = fmean(sum(_flops(layout, work[layout.side]) for layout in of_batch) for of_batch in passes)
    return Workload(
        queries=fmean(len(batch.queries) for batch in batches),
        own=len(set(batches[0].own)),
        passages=len(batches[0].passages),
        slots=settings.accumulation * fmean(map(sum, slots)),
        tokens=settings.accumulation * fmean(sum(map(_tokens, of_batch)) for of_batch in passes),
        graph_slots=max(map(max if settings.grad_cache_tokens else sum, slots)),
        passes=settings.accumulation * fmean(map(len, slots)),
        batches=settings.accumulation,
        flops=settings.accumulation * flops,
        steps=settings.epochs * -(-number // per_step),
        records=per_batch,
        whole_epoch=per_batch < asked,
    )


def _batches(
    settings: PlanTrainSettings, encoder: InstructionEncoder, records: list[Record], size: int, workers: int
) -> Iterator[Batch]:
    """The first worker's share of some batches."""
    objective = Objective.of(settings)
    rng = random.Random(settings.seed)
    for n in range(_SAMPLES):
        chosen = rng.sample(records, size)
        yield collate(
            encoder,
            [chosen[rank::workers] for rank in range(workers)],
            0,
            objective,
            instruction_negatives=settings.instruction_negatives,
            iq_negatives=settings.iq_negatives,
            seed=str(n),
        )


def _flops(layout: Layout, backbone: BackboneFlops) -> float:
    """Model FLOPs of a pass, forward and backward."""
    return _tokens(layout) * backbone.token + float(backbone.pairs(layout)) * backbone.pair


def _tokens(layout: Layout) -> int:
    """Tokens in a layout, a shared prefix once."""
    return layout.input_ids.numel() if layout.attention_mask is None else layout.tokens.numel()


def _own(settings: PlanTrainSettings) -> list[Record] | None:
    """The run's own records; None: they are not there yet."""
    if settings.records == "" or "://" in settings.records or not Path(settings.records).expanduser().exists():
        return None
    rows = list(tables.read(existing(settings.records, "records"), Record, "records", split=settings.split))
    if not stands_in(settings.model):
        return rows
    return [replace(row, **{name: as_stand_in(getattr(row, name)) for name in _LENGTHS}) for row in rows]


def _made_up(settings: PlanTrainSettings, number: int) -> list[Record]:
    """Records of random words, of lengths that are log-normal around the given means."""
    rng = random.Random(settings.seed)
    tokens_per_word = 1.0 if stands_in(settings.model) else TOKENS_PER_WORD

    def text(mean: int) -> str:
        length = mean / tokens_per_word * rng.lognormvariate(-(_SPREAD**2) / 2, _SPREAD)
        return " ".join(f"w{rng.randrange(4096)}" for _ in range(max(1, round(length))))

    return [
        Record(id=str(n), **{column: text(getattr(settings.mix, kind)) for column, kind in _LENGTHS.items()})
        for n in range(number)
    ]
