"""Instructions that were encoded before are not encoded again: exact, under causal attention.

Under causal attention the states of an instruction depend on the instruction alone, whatever query follows it. What a
later query needs of them are their keys and values in every layer (and their sum, where the mean is pooled). The
first query under an instruction is encoded as any text, and what its instruction left in the layers is kept; those
that follow compute their own tokens only, at the positions after it. Keys are kept as attention sees them, rotated.

Found by the token ids of the actual joint tokenisation, so it is exact for any tokenizer: where one merges tokens across
the border, `Tokens.instruction` says so, and the text is encoded whole.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.modeling.layout import Layout, Tokens
from infembed_ray.modeling.packing import ATTENTION as PACKED
from infembed_ray.modeling.pooling import pool, truncate
from infembed_ray.modeling.prefix_tree import obstacle as no_trees

Key = tuple[int, ...]
"""Ids of an instruction."""


def obstacle(encoder: InstructionEncoder) -> str | None:
    """Why an encoder's queries cannot go on from a cached instruction; None if they can."""
    config: Any = encoder.backbone.config
    if not encoder.causal:
        return "its tokens attend to what follows them too"
    if encoder.interaction is not None:
        return "it embeds instruction and query apart"
    if encoder.pooling == "cls":
        return "it pools the first token, which no query changes"
    if config._attn_implementation != PACKED:
        return f"its {config._attn_implementation} attention does not take encoded prefixes"
    return no_trees(encoder.backbone, encoder.text.query_length)


@dataclass(eq=False)
class Prefix:
    """An encoded instruction.

    Attributes:
        length: its tokens.
        layers: attention layer -> its keys and values, (1, key-value heads, length, head size) each.
        states: (d,) sum of its last hidden states.
    """

    length: int
    layers: dict[nn.Module, tuple[Tensor, Tensor]] = field(default_factory=dict)
    states: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def bytes(self) -> int:
        """Memory it takes."""
        return sum(states.nbytes for pair in self.layers.values() for states in pair)


class PrefixCache:
    """Embeds texts, with the instructions of queries in a cache: the least recently used leave it first.

    Args:
        encoder: one without `obstacle`; is set to evaluation, and must not be trained on.
        max_bytes: of all keys and values kept.
    """

    def __init__(self, encoder: InstructionEncoder, max_bytes: int) -> None:
        self._encoder = encoder.eval()
        self._max_bytes = max_bytes
        self._prefixes: OrderedDict[Key, Prefix] = OrderedDict()
        self.bytes = 0
        """Of the keys and values kept."""
        self.hits = 0
        """Texts whose instruction was not computed."""
        self.misses = 0
        """Texts whose instruction was."""

    def remaining(self, tokens: Tokens) -> int:
        """How many of a text's tokens would have to be computed now. May be asked from any thread."""
        cached = _key(tokens) in self._prefixes
        return len(tokens) - tokens.instruction if cached else len(tokens)

    @torch.inference_mode()
    def embed(self, sequences: Sequence[Tokens], batch_tokens: int = 4096) -> np.ndarray:
        """As `InstructionEncoder.embed`."""
        rows = [row for row, tokens in enumerate(sequences) if tokens.side == "query"]
        if not any(_key(sequences[row]) for row in rows):
            return self._encoder.embed(sequences, batch_tokens)
        embeddings = np.zeros((len(sequences), self._encoder.dimension), dtype=np.float32)
        if passages := [row for row, tokens in enumerate(sequences) if tokens.side == "passage"]:
            embeddings[passages] = self._encoder.embed([sequences[row] for row in passages], batch_tokens)
        fresh: dict[Key, Prefix] = {}  # of these texts, however little the cache can keep
        while rows:
            texts, rest = self._next_pass(rows, sequences, fresh, batch_tokens)
            embeddings[[text.row for text in texts]] = self._forward(texts).cpu().numpy()
            for key, prefix in ((text.key, text.carries) for text in texts if text.carries is not None):
                fresh[key] = prefix
                self._keep(key, prefix)
            rows = rest
        return embeddings

    def _next_pass(
        self, rows: list[int], sequences: Sequence[Tokens], fresh: dict[Key, Prefix], batch_tokens: int
    ) -> tuple[list[_Text], list[int]]:
        """Texts of the next forward pass, and the rows left for later: those whose instruction is in it, too."""
        texts: list[_Text] = []
        rest: list[int] = []
        carried: set[Key] = set()
        room = batch_tokens
        for row in rows:
            key, ids = _key(sequences[row]), sequences[row].ids
            after = fresh.get(key) or self._prefixes.get(key)
            own = ids[after.length :] if after else ids
            if key in carried or (texts and len(own) > room):
                rest.append(row)
                continue
            room -= len(own)
            text = _Text(row, key, own, after)
            if after is not None:
                self.hits += 1
                if key in self._prefixes:
                    self._prefixes.move_to_end(key)
            elif key:
                self.misses += 1
                carried.add(key)
                text.carries = Prefix(len(key))
            texts.append(text)
        texts.sort(key=lambda text: (text.key if text.after else (), len(text.ids)))  # equal ones are one attention
        return texts, rest

    def _forward(self, texts: list[_Text]) -> Tensor:
        """(texts, d) unit vectors."""
        encoder = self._encoder
        device = encoder.device
        backbone = encoder.backbone_of("query")
        lengths = [len(text.ids) for text in texts]
        befores = [text.after.length if text.after else 0 for text in texts]
        positions = [torch.arange(before, before + length) for before, length in zip(befores, lengths, strict=True)]
        branches = Branches(texts, encoder.dtype, device)
        states = backbone(
            input_ids=torch.tensor([[token for text in texts for token in text.ids]], device=device),
            attention_mask=None,
            position_ids=torch.cat(positions).unsqueeze(0).to(device),
            use_cache=False,
            branches=branches,
        ).last_hidden_state
        for start, prefix in branches.carried:
            prefix.states = states[0, start : start + prefix.length].float().sum(dim=0)
        own = torch.tensor(lengths, device=device)
        layout = Layout(states, None, torch.arange(states.shape[1], device=device), own, "query")
        pooled = pool(states, layout, encoder.pooling)
        if encoder.pooling == "mean":
            none = torch.zeros_like(pooled[0])
            sums = torch.stack([none if text.after is None else text.after.states for text in texts])
            before = torch.tensor(befores, device=device)
            pooled = (pooled * own.unsqueeze(1) + sums) / (own + before).unsqueeze(1)
        return truncate(pooled, encoder.dimension)

    def _keep(self, key: Key, prefix: Prefix) -> None:
        self._prefixes[key] = prefix
        self.bytes += prefix.bytes
        while self.bytes > self._max_bytes:
            self.bytes -= self._prefixes.popitem(last=False)[1].bytes


def _key(tokens: Tokens) -> Key:
    """Ids of a text's instruction; none where there is none, or nothing of the query is left behind it."""
    return tuple(tokens.ids[: tokens.instruction]) if tokens.instruction < len(tokens) else ()


@dataclass
class _Text:
    """A text in a forward pass.

    Attributes:
        row: which one it is.
        key: of its instruction; empty: it has none.
        ids: what is computed of it.
        after: the encoded instruction that they follow; None: the ids are the whole text.
        carries: where its instruction's keys and values are to be kept.
    """

    row: int
    key: Key
    ids: list[int]
    after: Prefix | None
    carries: Prefix | None = None


@dataclass(frozen=True)
class _Run:
    """Neighbours of equal length after the same prefix: one attention of `count` rows."""

    length: int
    count: int
    after: Prefix | None
    mask: Tensor | None


class Branches:
    """Attention of a packed row of texts, each of which may follow an encoded prefix.

    Attributes:
        carried: where in the row those texts start whose prefix is to be kept, and where it is.
    """

    def __init__(self, texts: list[_Text], dtype: torch.dtype, device: torch.device) -> None:
        self.carried: list[tuple[int, Prefix]] = []
        start = 0
        for text in texts:
            if text.carries is not None:
                self.carried.append((start, text.carries))
            start += len(text.ids)
        self._runs = [
            _Run(length, len(list(same)), after, _mask(length, after, dtype, device))
            for (after, length), same in groupby(texts, key=lambda text: (text.after, len(text.ids)))
        ]
        self._sizes = [run.length * run.count for run in self._runs]

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any
    ) -> tuple[Tensor, None]:
        """SDPA run by run.

        Args:
            module: the attention layer.
            query, key, value: (1, heads, tokens, head size), of keys and values maybe fewer heads.
            options: of transformers' SDPA function.

        Returns:
            (1, tokens, heads, head size), and None for the weights.
        """
        for start, prefix in self.carried:
            end = start + prefix.length
            prefix.layers[module] = key[:, :, start:end].clone(), value[:, :, start:end].clone()
        attended = []
        for run, *states in zip(
            self._runs, *(t.squeeze(0).split(self._sizes, dim=1) for t in (query, key, value)), strict=True
        ):
            q, k, v = (s.unflatten(1, (run.count, run.length)).transpose(0, 1) for s in states)
            if run.after is not None:
                before = (t.expand(run.count, -1, -1, -1) for t in run.after.layers[module])
                k, v = (torch.cat(pair, dim=2) for pair in zip(before, (k, v), strict=True))
            attended.append(sdpa_attention_forward(module, q, k, v, run.mask, **options)[0].flatten(0, 1))
        return torch.cat(attended).unsqueeze(0), None


def _mask(length: int, after: Prefix | None, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """(length, prefix + length), 0 where a token may attend and -inf elsewhere; None: SDPA knows by itself."""
    if after is None or length == 1:
        return None
    return torch.full((length, after.length + length), -torch.inf, dtype=dtype, device=device).triu(after.length + 1)
