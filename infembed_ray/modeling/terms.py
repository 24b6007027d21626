"""Terms of texts for BM25: words in lower case without stopwords, stemmed, as bm25s makes them."""

import sys

import Stemmer

from infembed_ray.config.base import nearest
from infembed_ray.config.evaluation import Bm25
from infembed_ray.errors import InputError

if _hidden := "jax" not in sys.modules:
    sys.modules["jax"] = None  # type: ignore[assignment]  # bm25s would start it, and it takes 75 % of a GPU's memory
try:
    import bm25s as bm25s
    from bm25s.tokenization import Tokenizer
finally:
    if _hidden:
        del sys.modules["jax"]

WORD = r"(?u)\b\w\w+\b"
"""A term before stemming: two or more letters or digits, in lower case."""


def tokenizer(bm25: Bm25, where: str = "bm25") -> Tokenizer:
    """Make the tokenizer that turns texts into terms.

    Raises:
        InputError: the stemmer is unknown; `where` names the retriever.
    """
    stem = None
    if bm25.stemmer is not None:
        if bm25.stemmer not in Stemmer.algorithms():
            others = nearest(bm25.stemmer, Stemmer.algorithms())
            raise InputError(f"{where}.bm25.stemmer={bm25.stemmer}: no such stemmer, {others}")
        stem = Stemmer.Stemmer(bm25.stemmer).stemWord
    return Tokenizer(splitter=WORD, stopwords="en", stemmer=stem)
