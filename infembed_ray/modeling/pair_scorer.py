"""Scorers of (query, passage) pairs for re-ranking: cross-encoders here, late interaction in its own module."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from infembed_ray.modeling.formats import Question
from infembed_ray.modeling.layout import length_sorted_batches
from infembed_ray.modeling.rerankers import ModelReranker, tokens_of


class PairScorer(ABC):
    """Scores passages for a query under its instruction; higher is more relevant."""

    def score(self, query: str, instruction: str | None, texts: Sequence[str], batch_tokens: int = 4096) -> np.ndarray:
        """Score passages, in passes of `batch_tokens` tokens with padding: (len(texts)) float32.

        Raises:
            InputError: a score is not finite.
        """
        pairs = self.tokenize(query, instruction, texts)
        scores = np.zeros(len(pairs), dtype=np.float32)
        for rows in length_sorted_batches([self.cost(pair) for pair in pairs], batch_tokens):
            scores[rows] = self.relevance([pairs[row] for row in rows])
        return scores

    @abstractmethod
    def tokenize(self, query: str, instruction: str | None, texts: Sequence[str]) -> list[Any]:
        """Return the input of `relevance` for every passage."""

    @abstractmethod
    def cost(self, pair: Any) -> int:
        """Return the number of tokens that the model has to compute for a pair."""

    @abstractmethod
    def relevance(self, pairs: Sequence[Any]) -> np.ndarray:
        """Score pairs of any queries, in one batch: (len(pairs)) float32."""


class CrossEncoder(PairScorer):
    """A model that reads query and passage as one text."""

    def __init__(self, reranker: ModelReranker) -> None:
        self._reranker = reranker

    def tokenize(self, query: str, instruction: str | None, texts: Sequence[str]) -> list[dict[str, list[int]]]:
        """As `PairScorer.tokenize`."""
        question = Question(query, instruction)
        return self._reranker.tokenized([(question, text) for text in texts])

    def cost(self, pair: dict[str, list[int]]) -> int:
        """As `PairScorer.cost`."""
        return tokens_of(pair)

    def relevance(self, pairs: Sequence[dict[str, list[int]]]) -> np.ndarray:
        """As `PairScorer.relevance`."""
        return self._reranker.relevance(pairs)
