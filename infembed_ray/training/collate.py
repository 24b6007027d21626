"""Collation: training records -> training tuples -> batches of token sequences (paper, section 5.2)."""

import hashlib
import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from infembed_ray.config.training import IQNegatives
from infembed_ray.modeling.cross_encoder import CrossEncoder
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.modeling.tokenizer import Tokens, render
from infembed_ray.records.tuples import Example, TrainingRecord
from infembed_ray.training.losses import NCE, Objective


@dataclass(frozen=True)
class TrainingTuple:
    """A row of a batch: a matched (I, Q, P), and the passages that do not answer it.

    Attributes:
        instruction: Empty if there is none.
        poisoned: An instruction under which the passage does not answer the query; empty if none is known.
        other_positives: Other passages that answer it. They are no negatives, and are not encoded.
        negatives: Hard negatives.
        scores: A teacher's scores of the passage and then of the negatives; empty if there are none.
    """

    instruction: str
    query: str
    passage: str
    poisoned: str = ""
    other_positives: tuple[str, ...] = ()
    negatives: tuple[str, ...] = ()
    scores: tuple[float, ...] = ()


def flatten(record: TrainingRecord) -> tuple[TrainingTuple, ...]:
    """Return the tuples of a record. An example is one, with its first positive.

    An InF-IR record is three: (I+, Q+, P+), (I-, Q+, P1-), (I+, Q-, P2-). Each is a positive; its hard negatives are the
    other two, in the same batch.
    """
    if isinstance(record, Example):
        scores = record.positive_scores[:1] + record.negative_scores if record.positive_scores else ()
        first, *others = record.positives
        own, poisoned = record.instruction or "", record.negative_instruction or ""
        return (TrainingTuple(own, record.query, first, poisoned, tuple(others), record.negatives, scores),)
    good, bad = record.instruction_positive, record.instruction_negative
    return (
        TrainingTuple(good, record.query_positive, record.document_positive, bad),
        TrainingTuple(bad, record.query_positive, record.hard_negative_document_1, good),
        TrainingTuple(good, record.query_negative, record.hard_negative_document_2, bad),
    )


def contrasted(record: TrainingRecord) -> list[TrainingTuple]:
    """Return the tuples of a record with all passages that a cross-encoder contrasts as hard negatives, in an order of their own.

    These are the row's hard negatives and the passages of the record's other tuples, without those that answer it.
    """
    rows = flatten(record)
    passages = sorted({passage for row in rows for passage in (row.passage, *row.negatives)})
    answers = {(row.instruction, row.query, p) for row in rows for p in (row.passage, *row.other_positives)}
    candidates = [tuple(p for p in passages if (row.instruction, row.query, p) not in answers) for row in rows]
    return [replace(row, negatives=negatives) for row, negatives in zip(rows, candidates, strict=True)]


def drawn(record: TrainingRecord, hard_negatives: int | None, seed: str) -> TrainingRecord:
    """Draw what a step uses of an example's passages: one positive, which comes first, and at most `hard_negatives` negatives.

    With the seed of the step, a record draws the same on every worker. An InF-IR record stays whole.
    """
    if not isinstance(record, Example):
        return record
    rng = random.Random(f"{seed}/{record.id}")
    positives = rng.sample(range(len(record.positives)), len(record.positives))
    most = len(record.negatives) if hard_negatives is None else min(hard_negatives, len(record.negatives))
    negatives = sorted(rng.sample(range(len(record.negatives)), most))
    changed: dict[str, Any] = {}
    for names, chosen in (("positives", "positive_scores"), positives), (("negatives", "negative_scores"), negatives):
        for name in names:
            values = getattr(record, name)
            changed[name] = tuple(values[n] for n in chosen) if values else ()
    return replace(record, **changed)


def sample_instructions(pool: Sequence[str], count: int | None, rng: random.Random) -> list[str]:
    """Sample instructions without repetition, enough for `count` negatives of any row; `count=None` takes the whole pool."""
    # Two more than a row adds to its poisoned instruction, because its own and its poisoned one may be sampled.
    return list(pool) if count is None else rng.sample(pool, min(len(pool), count + 1))


def other_instructions(row: TrainingTuple, sampled: Sequence[str], count: int | None) -> list[str]:
    """Return the instruction negatives of a row: other instructions for its query.

    The record's own poisoned instruction comes first, then the sampled ones in their order. An instruction equal to the
    row's own is no negative, because rows of one record share I+. A row without an instruction takes none of the sampled
    ones: its passage may answer the query under any of them. There are at most `count`; None: all.
    """
    first = [row.poisoned] if row.poisoned not in ("", row.instruction) else []
    rest = [i for i in sampled if i not in (row.instruction, row.poisoned)] if row.instruction else []
    return (first + rest)[:count]


@dataclass(frozen=True)
class Batch:
    """One worker's share of a step, tokenized.

    Attributes:
        queries: The distinct (instruction, query) texts that the objective needs.
        own: `queries[own[i]]` is the (I_i, Q_i) of row i.
        instruction_candidates: `queries[n]` for n in `instruction_candidates[i]` are the (I_j, Q_i) of row i; for
            `nce{PIQ}`, j runs over all rows of the step. Empty if the objective does not contrast instructions.
        query_candidates: The same for the (I_i, Q_k) of row i. Empty unless the negatives of IQ are these.
        passages: B passages of the rows, then their hard negatives, row by row; for a cross-encoder each as a pair with its row's
            instruction and query, and nothing but sizes and counts is given besides.
        query_ids, passage_ids: Hashes of the tokens of `queries` and `passages`, the same on every worker.
        sizes: Rows of every worker, in rank order.
        rank: Rank of this worker.
        hard_counts: Number of hard negatives of every row, of all workers in rank order.
        other_positives: (row, hash of the tokens) of the passages that answer this worker's rows too.
        other_sizes: Number of those of every worker, in rank order.
        teacher: A teacher's scores of the passage of each row and then of its hard negatives; empty where there are none.
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
    hard_counts: list[int]
    other_positives: list[tuple[int, int]]
    other_sizes: list[int]
    teacher: list[tuple[float, ...]]

    @property
    def hard_sizes(self) -> list[int]:
        """Hard negatives of every worker, in rank order."""
        counts = iter(self.hard_counts)
        return [sum(islice(counts, size)) for size in self.sizes]

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
    shares: Sequence[Sequence[TrainingRecord]],
    rank: int,
    objective: Objective,
    *,
    instruction_negatives: int | None = None,
    iq_negatives: IQNegatives = "kk",
    seed: str = "",
) -> Batch:
    """Flatten a worker's records, pair instructions with queries as the objective needs, and tokenize.

    Args:
        encoder: Encoder whose tokenizer is used.
        shares: Records of the step, of every worker in rank order. Of an example, the first positive and all
            negatives are used; see `drawn`.
        rank: Rank of this worker.
        objective: Objective that decides which texts are needed.
        instruction_negatives: I-negatives per row, drawn from the instructions of all workers; a row gets the same ones
            on any worker. For a causal backbone they are drawn once for all rows, so that the queries under an instruction
            share its encoding as a prefix. None: all instructions of this worker's share.
        iq_negatives: `ik` pairs each row's instruction with all queries of this worker's share.
        seed: Seed of the drawn instructions.
    """
    if isinstance(encoder, CrossEncoder):
        return _collate_pairs(encoder, shares, rank)
    step = [[t for record in share for t in flatten(record)] for share in shares]
    sizes = [len(share) for share in step]
    rows = step[rank]
    texts = _JointTexts()
    own = [texts.index(t.instruction, t.query) for t in rows]
    everyones = [t for share in step for t in share]
    mine = range(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    others = _candidate_instructions(objective, everyones, mine, instruction_negatives, encoder.causal, seed)
    instruction_candidates = [[texts.index(i, t.query) for i in its] for t, its in zip(rows, others, strict=False)]
    query_candidates: list[list[int]] = []
    if "IQ" in objective.variables and iq_negatives == "ik":
        queries = sorted({t.query for t in rows})
        query_candidates = [[texts.index(t.instruction, q) for q in queries if q != t.query] for t in rows]
    joint = encoder.tokenize_queries([q for _, q in texts], [i for i, _ in texts])
    passages = encoder.tokenize_passages([t.passage for t in rows] + [p for t in rows for p in t.negatives])
    further = [(row, p) for row, t in enumerate(rows) for p in t.other_positives]
    further_ids = map(_identity, encoder.tokenize_passages([text for _, text in further]))
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
        hard_counts=[len(t.negatives) for t in everyones],
        other_positives=[(row, identity) for (row, _), identity in zip(further, further_ids, strict=True)],
        other_sizes=[sum(len(t.other_positives) for t in share) for share in step],
        teacher=[t.scores for t in rows],
    )


def _collate_pairs(encoder: CrossEncoder, shares: Sequence[Sequence[TrainingRecord]], rank: int) -> Batch:
    step = [[t for record in share for t in contrasted(record)] for share in shares]
    rows = [(t, t.passage) for t in step[rank]] + [(t, p) for t in step[rank] for p in t.negatives]
    texts = [(render("instruction_first", t.instruction, t.query), passage) for t, passage in rows]
    sizes, counts = [len(share) for share in step], [len(t.negatives) for share in step for t in share]
    pairs = encoder.tokenize_pairs(texts)
    return Batch([], [], [], [], pairs, [], [], sizes, rank, counts, other_positives=[], other_sizes=[], teacher=[])


def _candidate_instructions(
    objective: Objective, everyones: Sequence[TrainingTuple], mine: range, count: int | None, shared: bool, seed: str
) -> list[list[str]]:
    """Return the candidates for the instruction of each of the rows `mine`; no lists if instructions are not contrasted."""
    rows = everyones[mine.start : mine.stop]
    if objective == NCE:
        return [[other.instruction for other in everyones]] * len(rows)
    if "I" not in objective.variables:
        return []
    pool = sorted({t.instruction for t in (rows if count is None else everyones)} - {""})
    if shared or count is None:
        samples = [sample_instructions(pool, count, random.Random(seed))] * len(rows)
    else:
        samples = [sample_instructions(pool, count, random.Random(f"{seed}/{n}")) for n in mine]
    return [other_instructions(t, sampled, count) for t, sampled in zip(rows, samples, strict=True)]


class _JointTexts(dict[tuple[str, str], int]):
    """The distinct (instruction, query) texts of a batch -> their index, in order of first use."""

    def index(self, instruction: str, query: str) -> int:
        return self.setdefault((instruction, query), len(self))


def _identity(tokens: Tokens) -> int:
    """Hash tokens to the same number in every process."""
    digest = hashlib.blake2b(array("q", tokens.ids).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)
