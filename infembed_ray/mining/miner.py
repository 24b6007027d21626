"""Mining: search an index for each tuple, score what it finds, and keep hard negatives. Does not depend on Ray."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import accumulate, pairwise

import numpy as np

from infembed_ray.config.evaluation import RetrieverSettings
from infembed_ray.config.mining import MineSettings
from infembed_ray.evaluation.retrievers import baselines
from infembed_ray.evaluation.retrievers.baselines import PairReranker, TextEncoder
from infembed_ray.evaluation.tasks.task import Query
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.records import tables, tuples
from infembed_ray.records.files import BadRows
from infembed_ray.records.tables import Record
from infembed_ray.records.tuples import Example
from infembed_ray.retrieval.index import Index
from infembed_ray.storage.places import Place
from infembed_ray.training.collate import flatten

DEPTH, DEPTH_PER_NEGATIVE = 100, 5
"""Minimum number of passages that the search finds per tuple, and their number per negative."""
KnownPositives = Mapping[int, Collection[str]]
"""Key of an (instruction, query) that several tuples have -> the positives of all of them."""


def read(settings: MineSettings, path: Place, bad: BadRows | None = None) -> Iterator[Example]:
    """Stream the tuples to mine for.

    An InF-IR record is three tuples. The other two passages of the record are negatives of each. `bad` takes the rows that
    cannot be used.

    Raises:
        InputError: a row cannot be used, or a column map of several columns is given for InF-IR records.
    """
    bad = bad or BadRows("records", settings.on_bad_row == "reject")
    if tuples.found_in(path, "records", settings.columns):
        yield from tuples.stream(path, "records", settings.columns, bad=bad)
        return
    for record in tables.stream(path, Record, "records", tuples.single(settings.columns), bad=bad):
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
        facts = Index.describe(index).facts
        self._encoder = InstructionEncoder.from_pretrained(facts.model, dimensions=facts.dimensions, device=device)
        self._index = Index.open(index, self._encoder.fingerprint())
        self._teacher = None if teacher is None else baselines.load(teacher, device)

    def mine(self, rows: Sequence[Example], known_positives: KnownPositives) -> Mined:
        """Add hard negatives to tuples; with a teacher, replace their scores by its scores of all passages.

        Args:
            known_positives: Further positives; see `known_positives`.
        """
        queries, instructions = [row.query for row in rows], [row.instruction for row in rows]
        vectors = self._encoder.encode_queries(queries, instructions)
        candidates: list[dict[str, float]] = []
        for row, hits in zip(rows, self._index.search(vectors, depth_of(self._settings)), strict=True):
            own = {*row.positives, *row.negatives, *known_positives.get(_key(row), ())}
            best_first: dict[str, float] = {}  # equal texts keep their highest score
            for hit in hits:
                if hit.text not in own:
                    best_first.setdefault((hit.chunk or hit).text, hit.score)
            candidates.append(best_first)
        texts = [[*row.positives, *row.negatives, *of_row] for row, of_row in zip(rows, candidates, strict=True)]
        scores = self._cosines(rows, vectors, candidates) if self._teacher is None else self._taught(rows, texts)
        return self._selected(rows, texts, scores)

    def _selected(self, rows: Sequence[Example], texts: Sequence[Sequence[str]], scores: Sequence[np.ndarray]) -> Mined:
        """Select among the texts after a row's own positives and negatives."""
        made, mined, too_similar, short = [], 0, 0, 0
        for row, texts_of_row, scored in zip(rows, texts, scores, strict=True):
            first, own = len(row.positives), len(row.positives) + len(row.negatives)
            judged = np.exp(-np.logaddexp(0.0, -scored)) if isinstance(self._teacher, PairReranker) else scored
            limit = bound(float(judged[:first].min()), self._settings.max_share)
            allowed = own + np.flatnonzero(judged[own:] < limit)
            places = [*range(first, own), *allowed[: self._settings.negatives].tolist()]
            new = len(places) - len(row.negatives)
            mined += new
            too_similar += len(texts_of_row) - own - len(allowed)
            short += new < self._settings.negatives
            row = replace(row, negatives=tuple(texts_of_row[place] for place in places))
            if self._teacher is not None:
                positive_scores, negative_scores = scored[:first].tolist(), scored[places].tolist()
                row = replace(row, positive_scores=tuple(positive_scores), negative_scores=tuple(negative_scores))
            elif row.positive_scores and new:
                row = replace(row, positive_scores=(), negative_scores=())  # the mined negatives have none
            made.append(row)
        return Mined(made, mined, too_similar, short)

    def _cosines(
        self, rows: Sequence[Example], vectors: np.ndarray, candidates: Sequence[Mapping[str, float]]
    ) -> list[np.ndarray]:
        """Return the cosines of each row's texts; NaN for its negatives, which nothing needs."""
        passages = [row.positives for row in rows]
        encoded = self._encoder.encode_passages([text for row in passages for text in row])
        return [
            np.concatenate([own, np.full(len(row.negatives), np.nan), [*of_row.values()]])
            for own, row, of_row in zip(_products(vectors, encoded, passages), rows, candidates, strict=True)
        ]

    def _taught(self, rows: Sequence[Example], texts: Sequence[Sequence[str]]) -> list[np.ndarray]:
        """Return the teacher's scores of the texts of each row: cosines, or logits of a reranker."""
        queries = [Query(row.id, row.query, row.instruction) for row in rows]
        if isinstance(self._teacher, TextEncoder):
            distinct = list(dict.fromkeys(text for of_row in texts for text in of_row))
            place = {text: number for number, text in enumerate(distinct)}
            encoded = self._teacher.encode_passages(distinct)[[place[text] for of_row in texts for text in of_row]]
            return _products(self._teacher.encode_queries(queries), encoded, texts)
        assert isinstance(self._teacher, PairReranker)
        pairs = [(query, text) for query, of_row in zip(queries, texts, strict=True) for text in of_row]
        return _divided(self._teacher.score(pairs), texts)


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


def _products(vectors: np.ndarray, embeddings: np.ndarray, texts: Sequence[Sequence[str]]) -> list[np.ndarray]:
    """Return the inner products of each row's vector with the embeddings of its texts, which follow one another."""
    return [of_row @ vector for vector, of_row in zip(vectors, _divided(embeddings, texts), strict=True)]


def _divided(values: np.ndarray, texts: Sequence[Sequence[str]]) -> list[np.ndarray]:
    """Divide values of texts that follow one another by the row of the texts."""
    return [values[a:b] for a, b in pairwise([0, *accumulate(map(len, texts))])]
