"""BM25 over the passages of a shard: term weights in memory-mapped postings, and the same formula for passages put since.

bm25s computes the weights when the shard is built. Each shard has its own document frequencies.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from infembed_ray.config.evaluation import Bm25
from infembed_ray.retrieval.passages import TEXT, open_passages, row_of
from infembed_ray.retrieval.shard_files import POSTINGS_FILE, TERMS_FILE
from infembed_ray.storage import durable

BM25 = Bm25()
"""Tokenization (English) and formula of all shards."""
_POSTING = np.dtype([("row", "<i4"), ("weight", "<f4")])
_DOCUMENTS, _LENGTH = b"documents", b"average_length"


def write(directory: Path, texts: Iterable[str]) -> None:
    """Write the terms and postings of a shard's passages, in the order of its rows. The terms of all passages are in memory."""
    from infembed_ray.modeling.terms import bm25s, tokenizer

    terms = tokenizer(BM25)
    documents = list(terms.streaming_tokenize(texts, allow_empty=False))
    vocabulary: dict[str, int] = terms.get_vocab_dict()
    names = sorted(vocabulary)
    index = bm25s.BM25(k1=BM25.k1, b=BM25.b)
    postings, ends = np.empty(0, _POSTING), np.empty(0, np.int64)
    if names:  # bm25s cannot index texts without terms
        index.index((documents, vocabulary), show_progress=False)
        starts = index.scores["indptr"].astype(np.int64)
        order = np.array([vocabulary[name] for name in names])
        counts = np.diff(starts)[order]
        ends = np.cumsum(counts)
        places = np.repeat(starts[order] - (ends - counts), counts) + np.arange(ends[-1])
        postings = np.empty(len(places), _POSTING)
        postings["row"], postings["weight"] = index.scores["indices"][places], index.scores["data"][places]
    length = sum(map(len, documents)) / max(1, len(documents))
    facts = {_DOCUMENTS: str(len(documents)).encode(), _LENGTH: repr(length).encode()}
    table = pa.table({"id": pa.array(names, TEXT), "end": ends}).replace_schema_metadata(facts)
    with durable.replacing(directory / TERMS_FILE) as stream, pa.ipc.new_file(stream, table.schema) as writer:
        writer.write_table(table.combine_chunks())
    with durable.replacing(directory / POSTINGS_FILE) as stream:
        np.lib.format.write_array(stream, postings)


class Lexical:
    """The BM25 index of a shard with n passages."""

    def __init__(self, terms: pa.Table, postings: np.ndarray) -> None:
        self._terms = terms
        self._postings = postings
        self._documents = int(terms.schema.metadata[_DOCUMENTS])
        self._length = float(terms.schema.metadata[_LENGTH])

    @classmethod
    def open(cls, directory: Path) -> Lexical:
        """Map the files of `write`."""
        return cls(open_passages(directory / TERMS_FILE), np.load(directory / POSTINGS_FILE, mmap_mode="r"))

    def scores(self, terms: Iterable[str]) -> np.ndarray:
        """BM25 of all passages for the terms of a query: (n,) float32, 0 for those without any of them."""
        scores = np.zeros(self._documents, np.float32)
        for term in terms:
            of_term = self._postings[slice(*self._range(term))]
            scores[of_term["row"]] += of_term["weight"]  # a passage has one posting of a term
        return scores

    def frequency(self, term: str) -> float:
        """Inverse document frequency of a term in the shard, as Lucene computes it."""
        start, end = self._range(term)
        return math.log(1 + (self._documents - (end - start) + 0.5) / (end - start + 0.5))

    def weight(self, count: int, length: int) -> float:
        """Weight of a term that occurs `count` times in a passage of `length` terms, before its document frequency."""
        relative = length / self._length if self._length else 1.0
        return count / (count + BM25.k1 * (1 - BM25.b + BM25.b * relative))

    def _range(self, term: str) -> tuple[int, int]:
        row = row_of(self._terms, term)
        if row is None:
            return 0, 0
        ends = self._terms.column("end")
        return (ends[row - 1].as_py() if row else 0), ends[row].as_py()


class DeltaTerms:
    """The terms of passages put since the shard was built, by row of the delta. Rows are appended; readers may run meanwhile."""

    def __init__(self) -> None:
        self._postings: dict[str, list[tuple[int, int, int]]] = {}

    def add(self, first: int, texts: Sequence[str]) -> None:
        """Add texts as the rows from `first` on."""
        for row, text in enumerate(texts, start=first):
            terms = terms_of(text)
            for term, count in Counter(terms).items():
                self._postings.setdefault(term, []).append((row, count, len(terms)))

    def scores(self, lexical: Lexical, terms: Iterable[str], rows: int) -> np.ndarray:
        """BM25 of the first `rows` rows, with the document frequencies and the average length of the shard: (rows,) float32."""
        scores = np.zeros(rows, np.float32)
        for term in terms:
            frequency = lexical.frequency(term)
            for row, count, length in self._postings.get(term, ()):
                if row < rows:
                    scores[row] += frequency * lexical.weight(count, length)
        return scores


def terms_of(text: str) -> list[str]:
    """The terms of a text, in order, with repetitions."""
    from infembed_ray.modeling.terms import tokenizer  # late: bm25s takes 17 MB, and most shards have no words

    (terms,) = tokenizer(BM25).tokenize([text], return_as="string", show_progress=False, allow_empty=False)
    return list(terms)
