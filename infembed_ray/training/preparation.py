"""Preparation of steps in a thread, while the steps before them run: read, tokenize, collate and lay out."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

from infembed_ray.config.training import TrainSettings
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.modeling.layout import Layout
from infembed_ray.modeling.tokenizer import Tokens
from infembed_ray.records.tuples import TrainingRecord
from infembed_ray.training.collate import Batch, collate, drawn
from infembed_ray.training.losses import Objective

ONE_PASS = 1 << 40
"""Token limit of a pass without GradCache: all texts of a side, or of both on one backbone, in one pass."""

Pass = tuple[list[int], Layout]
"""Indices of some texts, and their layout; see `InstructionEncoder.layouts`."""


@dataclass(frozen=True)
class Prepared:
    """A step, ready for its forward passes.

    Attributes:
        seed: seed of what is drawn.
        ids: ids of the records of all workers, in rank order.
        batch: this worker's share.
        groups: its queries, then its passages, and their passes, on the CPU; one group if a backbone reads both.
    """

    seed: str
    ids: list[str]
    batch: Batch
    groups: list[tuple[list[Tokens], list[Pass]]]


class Preparer:
    """Prepares steps for one worker: a pure function of the settings, the records and their numbers."""

    def __init__(
        self,
        settings: TrainSettings,
        records: Sequence[TrainingRecord],
        rank: int,
        encoder: InstructionEncoder,
    ) -> None:
        self._settings = settings
        self._records = records
        self._rank = rank
        self._objective = Objective.from_settings(settings)
        # A tokenizer is not thread-safe, and a validation sets the encoder to `eval` in the meantime.
        self._encoder = copy.copy(encoder)
        self._encoder.tokenizer = copy.deepcopy(encoder.tokenizer)
        self._encoder.training = True

    def prepare(self, item: tuple[int, list[list[int]]]) -> Prepared:
        """Prepare the step of this number, from 0, and these rows, one list per worker in rank order."""
        number, rows = item
        settings = self._settings
        seed = f"{settings.seed}/{number}"
        shares = [[self._records[row] for row in share] for share in rows]
        batch = batch_of(settings, self._encoder, self._objective, shares, self._rank, seed)
        sides = [batch.queries, batch.passages]
        groups = [[*batch.queries, *batch.passages]] if self._encoder.one_backbone else sides
        laid_out = [(texts, passes(self._encoder, texts, settings.grad_cache_tokens)) for texts in groups]
        return Prepared(seed, [record.id for share in shares for record in share], batch, laid_out)


def batch_of(
    settings: TrainSettings,
    encoder: InstructionEncoder,
    objective: Objective,
    shares: Sequence[Sequence[TrainingRecord]],
    rank: int,
    seed: str,
) -> Batch:
    """Draw the passages of a step's records, and collate the share of one worker."""
    return collate(
        encoder,
        [[drawn(record, settings.hard_negatives, seed) for record in share] for share in shares],
        rank,
        objective,
        instruction_negatives=settings.instruction_negatives,
        iq_negatives=settings.iq_negatives,
        seed=seed,
    )


def passes(encoder: InstructionEncoder, sequences: Sequence[Tokens], batch_tokens: int | None) -> list[Pass]:
    """Divide texts into passes of at most `batch_tokens` tokens, or one pass for None, on the CPU."""
    return list(encoder.lay_out(sequences, batch_tokens or ONE_PASS, encoder.device, encoder.dtype))
