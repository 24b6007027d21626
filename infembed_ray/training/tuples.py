"""From InF-IR records to training tuples and batches of token sequences (paper, section 5.2)."""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from infembed_ray.config import IQNegatives
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.modeling.layout import Tokens
from infembed_ray.records import Record
from infembed_ray.training.objectives import NCE, Objective

ROWS = 3
"""Training tuples that a record becomes."""


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


def token_counts(encoder: InstructionEncoder, records: Sequence[Record]) -> list[int]:
    """Tokens of every record's own three tuples, cut as they are for training; without drawn negatives and padding."""
    rows = [t for record in records for t in flatten(record)]
    joint = encoder.tokenize_queries([t.query for t in rows], [t.instruction for t in rows])
    passages = encoder.tokenize_passages([t.passage for t in rows])
    of_rows = [len(q) + len(p) for q, p in zip(joint, passages, strict=True)]
    return [sum(of_rows[n : n + ROWS]) for n in range(0, len(of_rows), ROWS)]


def other_instructions(row: TrainingTuple, pool: Sequence[str], count: int | None, rng: random.Random) -> list[str]:
    """Up to `count` other instructions to read a row's query under; None: all of the pool.

    The record's own poisoned instruction comes first, the rest are drawn without repetition. An instruction equal to
    the row's own is never drawn: rows of one record share I+.

    Args:
        row: whose query.
        pool: distinct instructions.
        count: how many.
        rng: draws them.
    """
    first = [row.poisoned] if row.poisoned != row.instruction else []
    rest = [i for i in pool if i not in (row.instruction, row.poisoned)]
    if count is not None:
        rest = rng.sample(rest, min(len(rest), max(0, count - len(first))))
    return (first + rest)[:count]


@dataclass(frozen=True)
class Batch:
    """One worker's share of a step, tokenised.

    Attributes:
        queries: the distinct (instruction, query) texts that the objective needs.
        own: `queries[own[i]]` is the (I_i, Q_i) of row i.
        instruction_candidates: `queries[n]` for n in `instruction_candidates[i]` are the (I_j, Q_i) of row i; of
            `nce{PIQ}`, j runs over all rows of the step. Empty where the objective exchanges no instructions.
        query_candidates: the same for the (I_i, Q_k) of row i. Empty where IQ's negatives are not these.
        passages: B passages.
        query_ids, passage_ids: identities of `queries` and `passages`; equal tokens, equal number, on every worker.
        sizes: rows of every worker, in rank order.
        rank: whose share it is.
    """

    queries: list[Tokens]
    own: list[int]
    instruction_candidates: list[list[int]]
    query_candidates: list[list[int]]
    passages: list[Tokens]
    query_ids: list[int]
    passage_ids: list[int]
    sizes: list[int]
    rank: int

    @property
    def tokens(self) -> int:
        """Real tokens in the batch."""
        return sum(map(len, self.queries)) + sum(map(len, self.passages))

    @property
    def share(self) -> float:
        """What this worker's mean over its rows is multiplied by, to make the mean over workers that over all rows."""
        return self.sizes[self.rank] * len(self.sizes) / sum(self.sizes)


def collate(
    encoder: InstructionEncoder,
    shares: Sequence[Sequence[Record]],
    rank: int,
    objective: Objective,
    *,
    instruction_negatives: int | None = None,
    iq_negatives: IQNegatives = "kk",
    seed: str = "",
) -> Batch:
    """Flatten a worker's records, pair instructions with queries as the objective needs, tokenise.

    Args:
        encoder: tokenises.
        shares: the records of the step, of every worker in rank order.
        rank: of this worker.
        objective: decides which texts are needed.
        instruction_negatives: I-negatives a row, drawn from the instructions of all workers, and for each row the same
            ones whichever worker has it. None: all instructions of this worker's share, so that its joint texts grow
            with its own rows only.
        iq_negatives: `ik` pairs every row's instruction with all queries of this worker's share.
        seed: of the drawn instructions.
    """
    step = [[t for record in share for t in flatten(record)] for share in shares]
    sizes = [len(share) for share in step]
    rows = step[rank]
    everyones = [t for share in step for t in share]
    places: dict[tuple[str, str], int] = {}  # of the distinct (instruction, query) texts, in order of first use

    def place(instruction: str, query: str) -> int:
        return places.setdefault((instruction, query), len(places))

    own = [place(t.instruction, t.query) for t in rows]
    instruction_candidates: list[list[int]] = []
    query_candidates: list[list[int]] = []
    if objective == NCE:
        instruction_candidates = [[place(other.instruction, t.query) for other in everyones] for t in rows]
    elif "I" in objective.variables:
        pool = sorted({t.instruction for t in (rows if instruction_negatives is None else everyones)})
        first = sum(sizes[:rank])
        instruction_candidates = [
            [
                place(i, t.query)
                for i in other_instructions(t, pool, instruction_negatives, random.Random(f"{seed}/{n}"))
            ]
            for n, t in enumerate(rows, start=first)
        ]
    if "IQ" in objective.variables and iq_negatives == "ik":
        queries = sorted({t.query for t in rows})
        query_candidates = [[place(t.instruction, q) for q in queries if q != t.query] for t in rows]
    joint = encoder.tokenize_queries([q for _, q in places], [i for i, _ in places])
    passages = encoder.tokenize_passages([t.passage for t in rows])
    return Batch(
        queries=joint,
        own=own,
        instruction_candidates=instruction_candidates,
        query_candidates=query_candidates,
        passages=passages,
        query_ids=[_identity(tokens) for tokens in joint],
        passage_ids=[_identity(tokens) for tokens in passages],
        sizes=sizes,
        rank=rank,
    )


def _identity(tokens: Tokens) -> int:
    """A number that is the same for the same tokens in every process (Python's hash is not)."""
    digest = hashlib.blake2b(array("q", tokens.ids).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)
