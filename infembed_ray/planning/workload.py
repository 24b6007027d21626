"""The workload of a training step: batches collated and laid out by the training code, then counted."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any, get_args

import torch

from infembed_ray.config.planning import PlanTrainSettings
from infembed_ray.errors import InputError
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.modeling.layout import Layout
from infembed_ray.modeling.tokenizer import Side
from infembed_ray.planning.backbones import TOKENS_PER_WORD, as_stand_in, stands_in
from infembed_ray.records.tables import Record
from infembed_ray.records.tuples import TrainingRecord
from infembed_ray.training import sources
from infembed_ray.training.collate import Batch, collate, drawn, token_counts
from infembed_ray.training.losses import Objective
from infembed_ray.training.observability.flops import BackboneFlops

_SAMPLES = 4
"""Batches to count."""
_SYNTHETIC = 512
"""Least number of synthetic records: enough for their mean length and for different batches."""
_ONE_PASS = 1 << 40
_SPREAD = 0.4
"""Standard deviation of the logarithm of synthetic lengths, about that of MS MARCO's passages."""
_LENGTHS = {
    "query_positive": "query",
    "query_negative": "query",
    "instruction_positive": "instruction",
    "instruction_negative": "instruction",
    "document_positive": "passage",
    "hard_negative_document_1": "passage",
    "hard_negative_document_2": "passage",
}
"""Column of a record -> the field of `Mix` with its mean length."""
_TEXTS = {*_LENGTHS, "query", "instruction", "negative_instruction"}
"""Columns of records and examples with one text of the training."""


@dataclass(frozen=True)
class Workload:
    """One worker's part of a step; means over `_SAMPLES` batches.

    Attributes:
        queries, passages: texts of a batch; `own`: queries of the records themselves, without drawn negatives.
        slots, tokens: positions of a step with and without padding; a shared prefix counts once.
        graph_slots: most positions whose graphs exist at once.
        passes, batches: forward passes and batches of a step.
        flops: model FLOPs of a step, forward and backward.
        steps: of the whole run.
        records: of a batch, all workers together; `whole_epoch`: these are all records there are.
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
    settings: PlanTrainSettings,
    encoder: InstructionEncoder,
    workers: int,
    device: torch.device,
    dtype: torch.dtype,
    own: Sequence[TrainingRecord] | None = None,
) -> Workload:
    """Count the first worker's share of some steps.

    Args:
        settings: of the run; its `workers` is ignored.
        encoder: on the meta device.
        workers: that share a batch.
        device, dtype: of the run; they decide whether texts are packed.
        own: the records of the run; None: those that the settings name, if they exist.

    Raises:
        InputError: a batch has fewer records than there are workers.
    """
    own = _existing_records(settings) if own is None else own
    number = settings.mix.records if own is None else len(own)
    records = _synthetic(settings, _SYNTHETIC) if own is None else own
    per_step = _records_per_step(settings, encoder, records)
    per_batch = _records_per_batch(settings, per_step, number, workers)
    if own is None and 2 * per_batch > len(records):
        records = _synthetic(settings, 2 * per_batch)
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
    work = {side: BackboneFlops.count(encoder.backbone_of(side), encoder.causal) for side in get_args(Side)}
    flops = fmean(
        sum(_tokens(p) * work[p.side].token + float(work[p.side].pairs(p)) * work[p.side].pair for p in of_batch)
        for of_batch in passes
    )
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
        whole_epoch=per_batch * settings.accumulation < per_step,
    )


def _batches(
    settings: PlanTrainSettings, encoder: InstructionEncoder, records: Sequence[TrainingRecord], size: int, workers: int
) -> Iterator[Batch]:
    """Yield the first worker's share of `_SAMPLES` batches."""
    objective = Objective.from_settings(settings)
    rng = random.Random(settings.seed)
    for n in range(_SAMPLES):
        chosen = [drawn(record, settings.hard_negatives, str(n)) for record in rng.sample(records, size)]
        yield collate(
            encoder,
            [chosen[rank::workers] for rank in range(workers)],
            0,
            objective,
            instruction_negatives=settings.instruction_negatives,
            shared_instructions=settings.shared_instructions,
            iq_negatives=settings.iq_negatives,
            seed=str(n),
        )


def _tokens(layout: Layout) -> int:
    """Tokens of a layout; a shared prefix counts once."""
    return layout.input_ids.numel() if layout.attention_mask is None else layout.tokens.numel()


def _records_per_step(
    settings: PlanTrainSettings, encoder: InstructionEncoder, records: Sequence[TrainingRecord]
) -> int:
    if settings.tokens_per_step is None:
        return settings.records_per_step
    return max(
        1,
        round(
            settings.tokens_per_step / fmean(token_counts(encoder, list(islice(records, 256)), settings.hard_negatives))
        ),
    )


def _records_per_batch(settings: PlanTrainSettings, per_step: int, number: int, workers: int) -> int:
    per_batch = min(-(-per_step // settings.accumulation), number)  # as the sampler does
    if per_batch < workers:
        raise InputError(
            f"records_per_step={settings.records_per_step}: {per_batch} records a batch leave some of the {workers} "
            "GPUs without any; set more, or fewer nodes"
        )
    return per_batch


def _existing_records(settings: PlanTrainSettings) -> list[TrainingRecord] | None:
    """The records of the run; None if they do not exist yet."""
    if not (settings.records or settings.sources):
        return None
    paths = [source.path for source in sources.named(settings).values()]
    if any("://" in path or not Path(path).expanduser().exists() for path in paths):
        return None
    rows = list(sources.read(settings, sources.locate(settings)))
    return [_as_stand_in(row) for row in rows] if stands_in(settings.model) else rows


def _as_stand_in(row: TrainingRecord) -> TrainingRecord:
    """Convert all texts of a record for the stand-in tokenizer."""
    changed: dict[str, Any] = {
        name: as_stand_in(value) for name, value in vars(row).items() if name in _TEXTS and value
    }
    for name in ("positives", "negatives"):
        if hasattr(row, name):
            changed[name] = tuple(map(as_stand_in, getattr(row, name)))
    return replace(row, **changed)


def _synthetic(settings: PlanTrainSettings, number: int) -> list[Record]:
    """Records of random words; lengths are log-normal around the means of `mix`."""
    rng = random.Random(settings.seed)
    tokens_per_word = 1.0 if stands_in(settings.model) else TOKENS_PER_WORD

    def text(mean: int) -> str:
        length = mean / tokens_per_word * rng.lognormvariate(-(_SPREAD**2) / 2, _SPREAD)
        return " ".join(f"w{rng.randrange(4096)}" for _ in range(max(1, round(length))))

    return [
        Record(id=str(n), **{column: text(getattr(settings.mix, kind)) for column, kind in _LENGTHS.items()})
        for n in range(number)
    ]
