"""Collation: InF-IR records -> training tuples -> batches of token sequences (paper, section 5.2)."""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from infembed_ray.config.training import IQNegatives
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.modeling.layout import Tokens
from infembed_ray.records import Record
from infembed_ray.training.losses import NCE, Objective

ROWS = 3
"""Training tuples per record."""


@dataclass(frozen=True)
class TrainingTuple:
    """A matched (I, Q, P). `poisoned` is the other instruction of the same record."""

    instruction: str
    query: str
    passage: str
    poisoned: str


def flatten(record: Record) -> tuple[TrainingTuple, TrainingTuple, TrainingTuple]:
    """Return the three tuples of a record: (I+, Q+, P+), (I-, Q+, P1-), (I+, Q-, P2-).

    Each is a positive; its hard negatives are the other two, in the same batch.
    """
    good, bad = record.instruction_positive, record.instruction_negative
    return (
        TrainingTuple(good, record.query_positive, record.document_positive, bad),
        TrainingTuple(bad, record.query_positive, record.hard_negative_document_1, good),
        TrainingTuple(good, record.query_negative, record.hard_negative_document_2, bad),
    )


def token_counts(encoder: InstructionEncoder, records: Sequence[Record]) -> list[int]:
    """Count the tokens of each record's three tuples, truncated as for training, without sampled negatives and padding."""
    rows = [t for record in records for t in flatten(record)]
    joint = encoder.tokenize_queries([t.query for t in rows], [t.instruction for t in rows])
    passages = encoder.tokenize_passages([t.passage for t in rows])
    of_rows = [len(q) + len(p) for q, p in zip(joint, passages, strict=True)]
    return [sum(of_rows[n : n + ROWS]) for n in range(0, len(of_rows), ROWS)]


def draw_instructions(pool: Sequence[str], count: int | None, rng: random.Random) -> list[str]:
    """Draw instructions without repetition, enough for `count` negatives of any row; `count=None` takes the whole pool.

    They are two more than a row adds to its poisoned instruction, because its own and its poisoned one may be drawn.
    """
    return list(pool) if count is None else rng.sample(pool, min(len(pool), count + 1))


def other_instructions(row: TrainingTuple, drawn: Sequence[str], count: int | None) -> list[str]:
    """Return the instruction negatives of a row: other instructions for its query.

    The record's own poisoned instruction comes first, then the drawn ones in their order. An instruction equal to the
    row's own is no negative, because rows of one record share I+.

    Args:
        row: Training tuple.
        drawn: Distinct instructions; see `draw_instructions`.
        count: Maximum number of negatives; None: all.
    """
    first = [row.poisoned] if row.poisoned != row.instruction else []
    return (first + [i for i in drawn if i not in (row.instruction, row.poisoned)])[:count]


@dataclass(frozen=True)
class Batch:
    """One worker's share of a micro-batch, tokenized.

    Attributes:
        queries: The distinct (instruction, query) texts that the objective needs.
        own: `queries[own[i]]` is the (I_i, Q_i) of row i.
        instruction_candidates: `queries[n]` for n in `instruction_candidates[i]` are the (I_j, Q_i) of row i; for
            `nce{PIQ}`, j runs over all rows of the micro-batch. Empty if the objective does not contrast instructions.
        query_candidates: The same for the (I_i, Q_k) of row i. Empty unless the negatives of IQ are these.
        passages: B passages.
        query_ids, passage_ids: Hashes of the tokens of `queries` and `passages`, the same on every worker.
        sizes: Rows of every worker, in rank order.
        rank: Rank of this worker.
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
        """Number of tokens, without padding."""
        return sum(map(len, self.queries)) + sum(map(len, self.passages))

    @property
    def share(self) -> float:
        """Factor on this worker's mean over its rows, so that the mean over workers is the mean over all rows."""
        return self.sizes[self.rank] * len(self.sizes) / sum(self.sizes)


def collate(
    encoder: InstructionEncoder,
    shares: Sequence[Sequence[Record]],
    rank: int,
    objective: Objective,
    *,
    instruction_negatives: int | None = None,
    shared_instructions: bool | None = None,
    iq_negatives: IQNegatives = "kk",
    seed: str = "",
) -> Batch:
    """Flatten a worker's records, pair instructions with queries as the objective needs, and tokenize.

    Args:
        encoder: Encoder whose tokenizer is used.
        shares: Records of the micro-batch, of every worker in rank order.
        rank: Rank of this worker.
        objective: Objective that decides which texts are needed.
        instruction_negatives: I-negatives per row, drawn from the instructions of all workers; a row gets the same ones
            on any worker. None: all instructions of this worker's share, so that the number of joint texts grows only
            with its own rows.
        shared_instructions: Draw one set of instructions for all rows of the micro-batch, so that the queries under an
            instruction share its encoding as a prefix; False: draw for each row; None: True for a causal backbone.
        iq_negatives: `ik` pairs each row's instruction with all queries of this worker's share.
        seed: Seed of the drawn instructions.
    """
    step = [[t for record in share for t in flatten(record)] for share in shares]
    sizes = [len(share) for share in step]
    rows = step[rank]
    texts = _JointTexts()
    own = [texts.index(t.instruction, t.query) for t in rows]
    everyones = [t for share in step for t in share]
    instruction_candidates: list[list[int]] = []
    query_candidates: list[list[int]] = []
    if objective == NCE:
        instruction_candidates = [[texts.index(other.instruction, t.query) for other in everyones] for t in rows]
    elif "I" in objective.variables:
        pool = sorted({t.instruction for t in (rows if instruction_negatives is None else everyones)})
        shared = encoder.causal if shared_instructions is None else shared_instructions
        shared = shared or instruction_negatives is None
        drawn = draw_instructions(pool, instruction_negatives, random.Random(seed)) if shared else []
        for n, t in enumerate(rows, start=sum(sizes[:rank])):
            if not shared:
                drawn = draw_instructions(pool, instruction_negatives, random.Random(f"{seed}/{n}"))
            others = other_instructions(t, drawn, instruction_negatives)
            instruction_candidates.append([texts.index(instruction, t.query) for instruction in others])
    if "IQ" in objective.variables and iq_negatives == "ik":
        queries = sorted({t.query for t in rows})
        query_candidates = [[texts.index(t.instruction, q) for q in queries if q != t.query] for t in rows]
    joint = encoder.tokenize_queries([q for _, q in texts], [i for i, _ in texts])
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


class _JointTexts(dict[tuple[str, str], int]):
    """The distinct (instruction, query) texts of a batch -> their index, in order of first use."""

    def index(self, instruction: str, query: str) -> int:
        return self.setdefault((instruction, query), len(self))


def _identity(tokens: Tokens) -> int:
    """Hash tokens to the same number in every process, unlike Python's `hash`."""
    digest = hashlib.blake2b(array("q", tokens.ids).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)
