"""Words of texts, and hashes of their n-grams.

An n-gram's hash is a sum of its words' hashes, each times an odd constant of its place, modulo 2^64: numpy makes all n-grams of
a text at once.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from functools import cache, lru_cache
from hashlib import blake2b

import numpy as np

_WORDS = 1 << 17
"""Words whose hashes are remembered."""
_MARKS = "".join(mark for mark in map(chr, range(0x10000)) if unicodedata.category(mark)[0] == "M")
"""Accents and vowel signs, which belong to words but not to Python's word characters."""
_NOT_WORDS = re.compile(rf"[^\w{_MARKS}]+")
_UNSPACED = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\U00020000-\U0003ffff]")
"""Characters of scripts without spaces (Chinese, Japanese, Thai, Lao, Burmese, Khmer): each counts as a word."""


def normalised(text: str) -> str:
    """Return the words in lower case, separated by single spaces, with Unicode NFKC normalisation."""
    if not text.isascii():
        text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
        text = _UNSPACED.sub(r" \g<0> ", text)
    return " ".join(_NOT_WORDS.sub(" ", text.casefold().replace("_", " ")).split())


def hashes(words: Sequence[str], length: int) -> np.ndarray:
    """Return the uint64 hashes of all runs of `length` words, in order; of all words if they are fewer; none of no words."""
    length = min(length, len(words))
    every = np.fromiter(map(_hash, words), dtype=np.uint64, count=len(words))
    runs = max(0, len(words) - length + 1) if words else 0
    total = np.zeros(runs, dtype=np.uint64)
    for place, factor in enumerate(odd(1, length)):
        total += every[place : place + runs] * factor
    return total


@cache
def odd(seed: int, number: int) -> np.ndarray:
    """Return fixed random odd factors."""
    drawn = np.random.default_rng(seed).integers(0, 2**63, size=number, dtype=np.uint64)
    return drawn * np.uint64(2) + np.uint64(1)


@lru_cache(maxsize=_WORDS)
def _hash(word: str) -> int:
    return int.from_bytes(blake2b(word.encode(), digest_size=8).digest(), "big")
