"""Mining: search an index for each tuple, score what it finds, and keep hard negatives. Does not depend on Ray."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import accumulate, pairwise

import numpy as np

from infembed_ray.config.evaluation import RetrieverSettings
from infembed_ray.config.mining import MineSettings
from infembed_ray.errors import InputError
from infembed_ray.evaluation.retrievers import baselines
from infembed_ray.evaluation.retrievers.retriever import PairReranker, TextEncoder
from infembed_ray.evaluation.tasks.task import Query
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.records import tables, tuples
from infembed_ray.records.tables import Record
from infembed_ray.records.tuples import Example
from infembed_ray.retrieval.index import Index
from infembed_ray.storage.places import Place
from infembed_ray.training.collate import flatten

BATCH_TOKENS = 32_768
"""Tokens per encoding batch, with padding."""
DEPTH, DEPTH_PER_NEGATIVE = 100, 5
"""Minimum number of passages that the search finds per tuple, and their number per negative."""
KnownPositives = Mapping[int, Collection[str]]
"""Key of an (instruction, query) that several tuples have -> the positives of all of them."""


def read(settings: MineSettings, path: Place) -> Iterator[Example]:
    """Stream the tuples to mine for.

    An InF-IR record is three tuples. The other two passages of the record are negatives of each.

    Raises:
        InputError: a row cannot be used, or a column map of several columns is given for InF-IR records.
    """
    if tuples.found_in(path, "records", settings.columns):
        yield from tuples.stream(path, "records", settings.columns)
        return
    columns = tuples.single(settings.columns)
    for record in tables.stream(path, Record, "records", columns):
        yield from _as_examples(record)


def _as_examples(record: Record) -> Iterator[Example]:
    """Yield a record's tuples as examples."""
    rows = flatten(record)
    for number, row in enumerate(rows, start=1):
        yield Example(
            id=f"{record.id}/{number}",
            query=row.query,
            positives=(row.passage,),
            negatives=tuple(dict.fromkeys(other.passage for other in rows if other.passage != row.passage)),
            instruction=row.instruction,
            negative_instruction=row.poisoned,
            source=record.source,
            split=record.split,
        )


def known_positives(rows: Callable[[], Iterable[Example]]) -> dict[int, set[str]]:
    """Collect the positives of each (instruction, query) that several tuples have.

    Args:
        rows: Returns all tuples; it is called twice, so that only repeated queries are held.
    """
    uses = Counter(map(_key, rows()))
    positives: dict[int, set[str]] = {key: set() for key, count in uses.items() if count > 1}
    if positives:
        for row in rows():
            if (key := _key(row)) in positives:
                positives[key].update(row.positives)
    return positives


def _key(row: Example) -> int:
    digest = blake2b(f"{row.instruction or ''}\0{row.query}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


@dataclass(frozen=True)
class Mined:
    """Tuples with mined negatives.

    Attributes:
        rows: The tuples, in their order.
        mined: Number of negatives that were added.
        too_similar: Number of passages that are left out as false negatives.
        short: Number of tuples with fewer mined negatives than asked for.
    """

    rows: list[Example]
    mined: int
    too_similar: int
    short: int


class Miner:
    """Mines negatives with the encoder of an index.

    Args:
        teacher: Resolved settings of the teacher; None: the encoder of the index judges.
        device: Torch device of both.

    Raises:
        InputError: the index, its encoder or the teacher cannot be loaded, or another encoder built the index.
    """

    def __init__(self, settings: MineSettings, index: str, teacher: RetrieverSettings | None, device: str) -> None:
        self._settings = settings
        self._index = Index.open(index)
        facts = self._index.facts
        self._encoder = InstructionEncoder.from_pretrained(facts.model, dimensions=facts.dimensions, device=device)
        self._index.require_encoder(self._encoder.fingerprint())
        self._teacher = None if teacher is None else baselines.load(teacher, device, BATCH_TOKENS)

    def mine(self, rows: Sequence[Example], known_positives: KnownPositives) -> Mined:
        """Add hard negatives to tuples; with a teacher, replace their scores by its scores of all passages.

        Args:
            known_positives: Further positives; see `known_positives`.
        """
        queries, instructions = [row.query for row in rows], [row.instruction for row in rows]
        vectors = self._encoder.encode_queries(queries, instructions, batch_tokens=BATCH_TOKENS)
        candidates: list[dict[str, float]] = []
        for row, hits in zip(rows, self._index.search(vectors, depth_of(self._settings)), strict=True):
            own = {*row.positives, *row.negatives, *known_positives.get(_key(row), ())}
            candidates.append({hit.text: hit.score for hit in reversed(hits) if hit.text not in own})
        # Equal texts keep their highest score; the order is that of the search.
        hits_of = [dict(reversed(of_row.items())) for of_row in candidates]
        texts = [[*row.positives, *row.negatives, *of_row] for row, of_row in zip(rows, hits_of, strict=True)]
        if self._teacher is None:
            positives = self._cosines(vectors, [row.positives for row in rows])
            scores = [
                np.concatenate([own, np.full(len(row.negatives), np.nan), [*of_row.values()]])
                for own, row, of_row in zip(positives, rows, hits_of, strict=True)
            ]
        else:
            scores = self._taught(rows, texts)
        return self._selected(rows, texts, scores)

    def _selected(self, rows: Sequence[Example], texts: Sequence[Sequence[str]], scores: Sequence[np.ndarray]) -> Mined:
        """Select among the texts after a row's own positives and negatives."""
        made, mined, too_similar, short = [], 0, 0, 0
        for row, texts_of_row, scored in zip(rows, texts, scores, strict=True):
            first, own = len(row.positives), len(row.positives) + len(row.negatives)
            judged = np.exp(-np.logaddexp(0.0, -scored)) if isinstance(self._teacher, PairReranker) else scored
            allowed = np.flatnonzero(
                judged[own:] < bound(float(judged[:first].min()), self._settings.max_share)
            ).tolist()
            chosen = allowed[: self._settings.negatives]
            places = [*range(first, own), *(own + place for place in chosen)]
            mined += len(chosen)
            too_similar += len(texts_of_row) - own - len(allowed)
            short += len(chosen) < self._settings.negatives
            row = replace(row, negatives=tuple(texts_of_row[place] for place in places))
            if self._teacher is not None:
                positive_scores, negative_scores = scored[:first].tolist(), scored[places].tolist()
                row = replace(row, positive_scores=tuple(positive_scores), negative_scores=tuple(negative_scores))
            elif row.positive_scores and chosen:
                row = replace(row, positive_scores=(), negative_scores=())  # the mined negatives have none
            made.append(row)
        return Mined(made, mined, too_similar, short)

    def _cosines(self, vectors: np.ndarray, passages: Sequence[Sequence[str]]) -> list[np.ndarray]:
        """Return the cosines of each row's vector with the passages of that row."""
        flat = [text for of_row in passages for text in of_row]
        embeddings = self._encoder.encode_passages(flat, batch_tokens=BATCH_TOKENS)
        return _products(vectors, embeddings, passages)

    def _taught(self, rows: Sequence[Example], texts: Sequence[Sequence[str]]) -> list[np.ndarray]:
        """Return the teacher's scores of the texts of each row: cosines, or logits of a reranker."""
        queries = [Query(row.id, row.query, row.instruction) for row in rows]
        if isinstance(self._teacher, TextEncoder):
            distinct = list(dict.fromkeys(text for of_row in texts for text in of_row))
            place = {text: number for number, text in enumerate(distinct)}
            embeddings = self._teacher.encode_passages(distinct)
            flat = embeddings[[place[text] for of_row in texts for text in of_row]]
            return _products(self._teacher.encode_queries(queries), flat, texts)
        assert isinstance(self._teacher, PairReranker)
        scores = self._teacher.score(
            [(query, text) for query, of_row in zip(queries, texts, strict=True) for text in of_row]
        )
        return _divided(scores, texts)


def depth_of(settings: MineSettings) -> int:
    """Return the number of passages that the search finds per tuple, of which negatives are taken."""
    return max(DEPTH, DEPTH_PER_NEGATIVE * settings.negatives)


def bound(positive: float, max_share: float) -> float:
    """Return the score from which a passage is a false negative (TopK-PercPos, arXiv 2407.15831).

    Args:
        positive: Score of the positive: a cosine, or a probability.
        max_share: Share of it. Below 0, the share counts from the positive downwards, too.
    """
    return positive - (1 - max_share) * abs(positive)


def require_teacher(teacher: RetrieverSettings) -> None:
    """Check that a retriever can score a query and a passage; InputError otherwise."""
    if teacher.kind == "bm25":
        raise InputError("teacher=bm25: ranks whole tasks; give an encoder or a reranker")


def _products(vectors: np.ndarray, embeddings: np.ndarray, texts: Sequence[Sequence[str]]) -> list[np.ndarray]:
    """Return the inner products of each row's vector with the embeddings of its texts, which follow one another."""
    return [of_row @ vector for vector, of_row in zip(vectors, _divided(embeddings, texts), strict=True)]


def _divided(values: np.ndarray, texts: Sequence[Sequence[str]]) -> list[np.ndarray]:
    """Divide values of texts that follow one another by the row of the texts."""
    return [values[a:b] for a, b in pairwise([0, *accumulate(map(len, texts))])]
