"""Prefix cache: encode each instruction once and reuse its keys and values; exact under causal attention.

The first query under an instruction is encoded whole, and the cache keeps what its instruction left in the layers. Later
queries compute only their own tokens. Instructions are found by the token ids of the joint text, so the cache is exact for
every tokenizer: if one merges tokens across the border, `Tokens.instruction` is 0 and the text is encoded whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import Any

import numpy as np
import torch
from cachetools import LRUCache
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from infembed_ray.modeling.attention.packing import packed
from infembed_ray.modeling.attention.prefix_tree import obstacle as tree_obstacle
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.modeling.layout import on_device, pool, truncate
from infembed_ray.modeling.pipeline import CPU_BATCH_TOKENS
from infembed_ray.modeling.tokenizer import Tokens

Key = tuple[int, ...]
"""Token ids of an instruction."""


def obstacle(encoder: InstructionEncoder) -> str | None:
    """Return why an encoder's queries cannot start from a cached instruction; None if they can."""
    if not encoder.causal:
        return "its attention is bidirectional"
    if encoder.interaction is not None:
        return "it encodes instruction and query separately"
    if encoder.pooling == "cls":
        return "it pools the first token, which does not depend on the query"
    return tree_obstacle(encoder.backbone, encoder.text.query_length)


@dataclass(eq=False)
class Prefix:
    """An encoded instruction of `length` tokens: keys and values (1, heads, length, head size) of each attention layer.

    `states` is the (d,) sum of the last hidden states.
    """

    length: int
    layers: dict[nn.Module, tuple[Tensor, Tensor]] = field(default_factory=dict)
    states: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def bytes(self) -> int:
        """Memory of keys and values."""
        return sum(states.nbytes for pair in self.layers.values() for states in pair)


class PrefixCache:
    """Embeds texts with a least-recently-used cache of the instructions of queries.

    Args:
        encoder: an encoder without `obstacle`. It is set to evaluation mode, and its weights must not change.
        max_bytes: limit of the memory of all cached keys and values.

    Attributes:
        hits: texts whose instruction was cached.
        misses: texts whose instruction was computed.
    """

    def __init__(self, encoder: InstructionEncoder, max_bytes: int) -> None:
        self._encoder = encoder.eval()
        self._prefixes = LRUCache[Key, Prefix](max_bytes, lambda prefix: prefix.bytes)
        self.hits = self.misses = 0

    @property
    def bytes(self) -> int:
        """Memory of the cached keys and values."""
        return int(self._prefixes.currsize)

    def remaining(self, tokens: Tokens) -> int:
        """Return how many of a text's tokens are not cached now. Thread-safe."""
        cached = _key(tokens) in self._prefixes
        return len(tokens) - tokens.instruction if cached else len(tokens)

    @torch.inference_mode()
    def embed(self, sequences: Sequence[Tokens], batch_tokens: int | None = None) -> np.ndarray:
        """Embed texts like `InstructionEncoder.embed`."""
        rows = [row for row, tokens in enumerate(sequences) if tokens.side == "query"]
        if not any(_key(sequences[row]) for row in rows):
            return self._encoder.embed(sequences, batch_tokens)
        embeddings = np.zeros((len(sequences), self._encoder.dimension), dtype=np.float32)
        if passages := [row for row, tokens in enumerate(sequences) if tokens.side == "passage"]:
            embeddings[passages] = self._encoder.embed([sequences[row] for row in passages], batch_tokens)
        fresh: dict[Key, Prefix] = {}  # prefixes of these texts, also those that the cache cannot keep
        while rows:
            texts, rest = self._next_pass(rows, sequences, fresh, batch_tokens or CPU_BATCH_TOKENS)
            embeddings[[text.row for text in texts]] = self._forward(texts).cpu().numpy()
            for key, prefix in ((text.key, text.prefix) for text in texts if text.prefix is not None):
                fresh[key] = prefix
                with suppress(ValueError):  # larger than the cache
                    self._prefixes[key] = prefix
            rows = rest
        return embeddings

    def _next_pass(
        self, rows: list[int], sequences: Sequence[Tokens], fresh: dict[Key, Prefix], batch_tokens: int
    ) -> tuple[list[_Text], list[int]]:
        """Choose the texts of the next forward pass; rows whose instruction is computed in it wait for the next one."""
        texts: list[_Text] = []
        rest: list[int] = []
        computed: set[Key] = set()
        remaining = batch_tokens
        for row in rows:
            key, ids = _key(sequences[row]), sequences[row].ids
            after = self._prefixes.get(key) or fresh.get(key)
            own = ids[after.length :] if after else ids
            if key in computed or (texts and len(own) > remaining):
                rest.append(row)
                continue
            remaining -= len(own)
            text = _Text(row, key, own, after)
            if after is not None:
                self.hits += 1
            elif key:
                self.misses += 1
                computed.add(key)
                text.prefix = Prefix(len(key))
            texts.append(text)
        # Equal shapes are attended together.
        texts.sort(key=lambda text: (text.key if text.after else (), len(text.ids)))
        return texts, rest

    def _forward(self, texts: list[_Text]) -> Tensor:
        """Return (texts, d) unit vectors."""
        encoder = self._encoder
        backbone = encoder.backbone_of("query")
        befores = [text.after.length if text.after else 0 for text in texts]
        layout = packed([Tokens(text.ids, "query") for text in texts], befores).to(encoder.device)
        attend = PrefixedAttention(texts, encoder.dtype, encoder.device)
        inputs = layout.backbone_inputs(backbone) | {"attend": attend}
        states = backbone(**inputs, use_cache=False).last_hidden_state
        for start, prefix in attend.computed:
            prefix.states = states[0, start : start + prefix.length].float().sum(dim=0)
        pooled = pool(states, layout, encoder.pooling)
        if encoder.pooling == "mean":
            none = torch.zeros_like(pooled[0])
            sums = torch.stack([none if text.after is None else text.after.states for text in texts])
            own, before = (on_device(n.unsqueeze(1), encoder.device) for n in (layout.lengths, torch.tensor(befores)))
            pooled = (pooled * own + sums) / (own + before)
        return truncate(pooled, encoder.dimension)


def _key(tokens: Tokens) -> Key:
    """Return the ids of a text's instruction; none without an instruction, or if nothing follows it."""
    return tuple(tokens.ids[: tokens.instruction]) if tokens.instruction < len(tokens) else ()


@dataclass
class _Text:
    """A text in a forward pass: its row, the ids of its instruction, and the ids to compute.

    `after` is the encoded instruction before them; `prefix` receives the keys and values of the text's own instruction.
    """

    row: int
    key: Key
    ids: list[int]
    after: Prefix | None
    prefix: Prefix | None = None


class PrefixedAttention:
    """Attention of a packed row of texts, each of which may follow an encoded prefix (an `Attend`).

    `computed` are (place in the row, prefix to fill) of the texts whose instruction is computed.
    """

    def __init__(self, texts: list[_Text], dtype: torch.dtype, device: torch.device) -> None:
        starts = accumulate((len(text.ids) for text in texts), initial=0)
        placed = zip(starts, texts, strict=False)
        self.computed = [(start, text.prefix) for start, text in placed if text.prefix is not None]
        runs = ((*run, len(list(same))) for run, same in groupby(texts, key=lambda text: (text.after, len(text.ids))))
        # Neighbours of equal length after the same prefix are attended as rows of a batch.
        self._runs = [(after, length, rows, _mask(length, after, dtype, device)) for after, length, rows in runs]
        self._sizes = [length * rows for _, length, rows, _ in self._runs]

    def __call__(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Keep the keys and values of the computed prefixes, and attend run by run."""
        for start, prefix in self.computed:
            end = start + prefix.length
            prefix.layers[module] = key[:, :, start:end].clone(), value[:, :, start:end].clone()
        attended = []
        parts = zip(self._runs, *(t.squeeze(0).split(self._sizes, dim=1) for t in (query, key, value)), strict=True)
        for (after, length, rows, mask), *states in parts:
            q, k, v = (s.unflatten(1, (rows, length)).transpose(0, 1) for s in states)
            if after is not None:
                before = (t.expand(rows, -1, -1, -1) for t in after.layers[module])
                k, v = (torch.cat(pair, dim=2) for pair in zip(before, (k, v), strict=True))
            attended.append(sdpa_attention_forward(module, q, k, v, mask, **options)[0].flatten(0, 1))
        return torch.cat(attended).unsqueeze(0)


def _mask(length: int, after: Prefix | None, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """Return (length, prefix + length), 0 where a token may attend and -inf elsewhere; None where SDPA needs no mask."""
    if after is None or length == 1:
        return None
    return torch.full((length, after.length + length), -torch.inf, dtype=dtype, device=device).triu(after.length + 1)
