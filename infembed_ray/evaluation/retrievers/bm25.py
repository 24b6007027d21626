"""BM25, through bm25s: a whole task is indexed and ranked in one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import bm25s
import numpy as np
import pyarrow as pa
import Stemmer
from bm25s.tokenization import Tokenizer

from infembed_ray.config import Bm25, RetrieverSettings, nearest
from infembed_ray.errors import InputError
from infembed_ray.evaluation.metrics import Run
from infembed_ray.evaluation.retrievers import formats
from infembed_ray.evaluation.tasks.task import Task

WORD = r"(?u)\b\w\w+\b"
"""What a term is, before it is stemmed: two letters or digits at least, in lower case."""


class Bm25Ranker:
    """Ranks the documents that share a term with a query; of its candidates, where a task has them, all.

    Args:
        settings: resolved, of kind `bm25`. Its formats say whether the instruction is part of the query.
        identity: hash of all that decides its rankings.
    """

    def __init__(self, settings: RetrieverSettings, identity: str) -> None:
        self.identity = identity
        self._settings = settings

    def rank(self, task: Task, depth: int) -> Run:
        """Query id -> document id -> score of the best `depth`; ties as in `metrics`, by document id, descending."""
        how = self._settings.bm25
        reader = tokenizer(how)
        terms = list(reader.streaming_tokenize(_texts(task.corpus), allow_empty=False))
        index = bm25s.BM25(k1=how.k1, b=how.b, method=how.variant)
        if vocabulary := reader.get_vocab_dict():  # bm25s cannot index texts without any term
            index.index((terms, vocabulary), show_progress=False)
        ids = task.corpus["id"].to_pylist()
        row_of = {document: row for row, document in enumerate(ids)}
        run = {}
        for query in task.queries:
            text = formats.query_text(self._settings, query)
            (asked,) = reader.streaming_tokenize([text], update_vocab=False, allow_empty=False)
            scores = index.get_scores_from_ids(asked) if asked else np.zeros(len(ids), dtype=np.float32)
            rows = np.flatnonzero(scores)
            if task.candidates is not None:
                rows = np.array([row_of[c] for c in dict.fromkeys(task.candidates[query.id]) if c in row_of], dtype=int)
            excluded = task.excluded.get(query.id, frozenset())
            rows = rows[[ids[row] not in excluded for row in rows]] if excluded else rows
            run[query.id] = _best(ids, scores, rows, depth)
        return run


def tokenizer(how: Bm25, where: str = "bm25") -> Tokenizer:
    """What makes terms of texts.

    Raises:
        InputError: there is no such stemmer or list of stopwords; `where` names the setting.
    """
    stem = None
    if how.stemmer is not None:
        if how.stemmer not in Stemmer.algorithms():
            known = nearest(how.stemmer, Stemmer.algorithms())
            raise InputError(f"{where}.bm25.stemmer={how.stemmer}: no such stemmer, {known}")
        stem = Stemmer.Stemmer(how.stemmer).stemWord
    try:
        return Tokenizer(splitter=WORD, stopwords=how.stopwords, stemmer=stem)
    except ValueError as error:
        raise InputError(
            f"{where}.bm25.stopwords={how.stopwords}: bm25s has no such list; give a language like en, or null"
        ) from error


def _best(ids: Sequence[str], scores: np.ndarray, rows: np.ndarray, depth: int) -> dict[str, float]:
    """The best of some rows, the last place by id as well."""
    if len(rows) > depth:
        last = np.partition(scores[rows], -depth)[-depth]
        rows = rows[scores[rows] >= last]
    ordered = sorted(((float(scores[row]), ids[row]) for row in rows), reverse=True)
    return {document: score for score, document in ordered[:depth]}


def _texts(corpus: pa.Table) -> Iterator[str]:
    """The passages of a corpus, which may be larger than memory, some at a time."""
    for batch in corpus.select(["text"]).to_batches(max_chunksize=1024):
        yield from batch.column(0).to_pylist()
