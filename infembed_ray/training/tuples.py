"""From InF-IR records to training tuples and batches of token sequences (paper, section 5.2)."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.records import Record


@dataclass(frozen=True)
class TrainingTuple:
    """One matched (I, Q, P). `poisoned` is the instruction of the same record that this tuple does not have."""

    instruction: str
    query: str
    passage: str
    poisoned: str


def flatten(record: Record) -> tuple[TrainingTuple, TrainingTuple, TrainingTuple]:
    """The three tuples of a record: (I+, Q+, P+), (I-, Q+, P1-), (I+, Q-, P2-).

    Each is a positive of its own; its hard negatives are the other two, in the same batch.
    """
    good, bad = record.instruction_positive, record.instruction_negative
    return (
        TrainingTuple(good, record.query_positive, record.document_positive, bad),
        TrainingTuple(bad, record.query_positive, record.hard_negative_document_1, good),
        TrainingTuple(good, record.query_negative, record.hard_negative_document_2, bad),
    )


def instruction_negatives(tuples: Sequence[TrainingTuple], count: int, rng: random.Random) -> list[list[str]]:
    """For every tuple, up to `count` other instructions to read its query under.

    The record's own poisoned instruction comes first, the rest are drawn from the batch without repetition. An
    instruction equal to the tuple's own is never drawn: rows of one record share I+.
    """
    pool = sorted({t.instruction for t in tuples})
    drawn = []
    for t in tuples:
        first = [t.poisoned] if t.poisoned != t.instruction else []
        others = [i for i in pool if i not in (t.instruction, t.poisoned)]
        rest = rng.sample(others, min(len(others), max(0, count - len(first))))
        drawn.append((first + rest)[:count])
    return drawn


@dataclass(frozen=True)
class Batch:
    """One worker's share of a step, tokenised.

    Attributes:
        queries: B token lists of (I_i, Q_i), then those of all I-negatives (I_j, Q_i), row after row.
        passages: B token lists.
        negative_counts: B numbers of I-negatives a row.
        instruction_query_ids, passage_ids: B identities of the texts; equal text, equal number, on every worker.
    """

    queries: list[list[int]]
    passages: list[list[int]]
    negative_counts: list[int]
    instruction_query_ids: list[int]
    passage_ids: list[int]

    @property
    def tokens(self) -> int:
        """Real tokens in the batch."""
        return sum(map(len, self.queries)) + sum(map(len, self.passages))


def collate(encoder: InstructionEncoder, records: Sequence[Record], negatives: int, rng: random.Random) -> Batch:
    """Flatten, draw `negatives` I-negatives a row, tokenise."""
    tuples = [t for record in records for t in flatten(record)]
    drawn = instruction_negatives(tuples, negatives, rng)
    pairs = [(t.instruction, t.query) for t in tuples]
    pairs += [(instruction, t.query) for t, row in zip(tuples, drawn, strict=True) for instruction in row]
    return Batch(
        queries=encoder.tokenize_queries([q for _, q in pairs], [i for i, _ in pairs]),
        passages=encoder.tokenize_passages([t.passage for t in tuples]),
        negative_counts=[len(row) for row in drawn],
        instruction_query_ids=[_identity(t.instruction, t.query) for t in tuples],
        passage_ids=[_identity(t.passage) for t in tuples],
    )


def _identity(*texts: str) -> int:
    """A number that is the same for the same text in every process (Python's hash is not)."""
    digest = hashlib.blake2b("\0".join(texts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)
