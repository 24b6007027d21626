"""Late interaction: MaxSim over the token vectors of an encoder (ColBERT, arXiv 2004.12832), without further training.

score = mean over the tokens of instruction and query of the largest cosine with a token of the passage
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import torch
from cachetools import LRUCache
from torch import Tensor

from infembed_ray.errors import InputError
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.modeling.formats import Asked
from infembed_ray.modeling.interaction import in_rows
from infembed_ray.modeling.layout import truncate
from infembed_ray.modeling.rerankers import PairScorer
from infembed_ray.modeling.tokenizer import Tokens

_Key = tuple[str, tuple[int, ...]]


class TokenPair(NamedTuple):
    """The tokens of a query under its instruction, and of a passage."""

    query: Tokens
    passage: Tokens


class LateInteraction(PairScorer):
    """MaxSim over the token vectors of an encoder; `cache_bytes` keep those of recent queries and passages."""

    def __init__(self, encoder: InstructionEncoder, cache_bytes: int = 0, batch_tokens: int = 4096) -> None:
        if encoder.interaction is not None:
            fault = "encodes instruction and query separately, so late interaction has no token vectors of both"
            raise InputError.of("model", encoder.source, fault, "give a checkpoint with interaction=joint")
        self.source, self.batch_tokens = encoder.source, batch_tokens
        self._encoder = encoder.eval()
        self._texts = encoder.texts
        self._cache = LRUCache[_Key, Tensor](cache_bytes, lambda vectors: vectors.nbytes)

    def tokenized(self, pairs: Sequence[tuple[Asked, str]]) -> list[TokenPair]:
        """As `PairScorer.tokenized`."""
        queries = list(dict.fromkeys(query for query, _ in pairs))
        asked = self._texts.tokenize_queries([q.query for q in queries], [q.instruction for q in queries])
        tokens = dict(zip(queries, asked, strict=True))
        passages = self._texts.tokenize_passages([text for _, text in pairs])
        return [TokenPair(tokens[query], passage) for (query, _), passage in zip(pairs, passages, strict=True)]

    def cost(self, pair: TokenPair) -> int:
        """As `PairScorer.cost`; a passage whose token vectors are in the cache counts one token."""
        return 1 if _key(pair.passage) in self._cache else len(pair.passage)

    @torch.inference_mode()
    def relevance(self, pairs: Sequence[TokenPair]) -> np.ndarray:
        """As `PairScorer.relevance`: (len(pairs)) float32 in [-1, 1]."""
        vectors = self._token_vectors([text for pair in pairs for text in pair])
        scores = torch.zeros(len(pairs), device=self._encoder.device)
        of_query: dict[_Key, list[int]] = {}
        for row, pair in enumerate(pairs):
            of_query.setdefault(_key(pair.query), []).append(row)
        for query, rows in of_query.items():
            passages = [vectors[_key(pairs[row].passage)] for row in rows]
            together, real = in_rows(torch.cat(passages), torch.tensor([len(passage) for passage in passages]))
            cosines = torch.einsum("qd,npd->nqp", vectors[query], together).masked_fill(~real.unsqueeze(1), -1.0)
            scores[rows] = cosines.amax(dim=2).mean(dim=1)
        return scores.cpu().numpy()

    def _token_vectors(self, texts: Sequence[Tokens]) -> dict[_Key, Tensor]:
        """Return the unit vectors of the tokens of each distinct text: (tokens, d) float32."""
        keyed = {_key(text): text for text in texts}
        vectors_of = {key: vectors for key in keyed if (vectors := self._cache.get(key)) is not None}
        new = [key for key in keyed if key not in vectors_of]
        sequences = [keyed[key] for key in new]
        for rows, layout in self._encoder.layouts(sequences, max(1, sum(map(len, sequences)))):
            flat = self._encoder.states(layout).flatten(0, 1)[layout.tokens]
            units = truncate(flat.float(), self._encoder.dimension)
            for row, vectors in zip(rows, units.split(layout.lengths.tolist()), strict=True):
                vectors_of[new[row]] = vectors
                with suppress(ValueError):  # larger than the cache
                    self._cache[new[row]] = vectors.clone()  # a view would keep the whole batch
        return vectors_of


def _key(text: Tokens) -> _Key:
    return text.side, tuple(text.ids)
