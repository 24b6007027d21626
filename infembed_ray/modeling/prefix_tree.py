"""Texts that begin alike share the encoding of that beginning: exact, under causal attention.

A causal backbone's states of a token depend on the tokens before it only. So texts that start with the same ids (all
queries under one instruction, above all) are one tree: what they share lies in the input once, every text branches off
where it differs, and a token attends its ancestors. The encodings (I_j, Q_i) of all j and i, which the instruction's
marginal asks for (paper, section 5.2), then cost B instructions and B x B queries instead of B x B texts.

The trees of a pass lie one after another in a single row, without padding. In depth-first order a subtree is a range,
so one number a token says the whole mask: token q may attend token k if k <= q < end(k).

Sharing looks at token ids alone. It needs no rule about where a tokenizer ends the instruction: texts whose last
instruction token was merged with the query's first simply part one token earlier.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from infembed_ray.modeling.layout import Layout, Tokens
from infembed_ray.modeling.packing import ATTENTION as PACKED

FLEX = "flex_attention"
WORTHWHILE = 0.1
"""The least share of tokens to save."""
PAIRS_PER_TOKEN = 1024
"""Attended pairs that cost about as much as one token's way through the linear layers (twice that on CPU at 256 wide
and ten times on a GPU at 1.5B, where short trees matter less): what decides whether a text joins the tree before it."""


def obstacle(backbone: Any, longest: int) -> str | None:
    """Why the trees of a causal backbone would not be exact; None if they are.

    Args:
        backbone: after `packing.enable_packing`.
        longest: tokens of the longest text.
    """
    config = backbone.config
    if config._attn_implementation not in (PACKED, FLEX):
        return f"its {config._attn_implementation} attention does not take trees"
    for name in ("sliding_window", "attention_chunk_size"):
        window = getattr(config, name, None)
        if window is not None and longest > window:
            return f"a text has {longest} tokens and {name} is {window}"
    return None


def saves(sequences: Sequence[Tokens]) -> bool:
    """Do the texts begin alike in enough of their tokens to share them?"""
    ordered = sorted(s.ids for s in sequences)
    shared = sum(_common(before, ids) for before, ids in pairwise(ordered))
    return shared >= WORTHWHILE * sum(map(len, ordered))


def forests(sequences: Sequence[Tokens], batch_tokens: int) -> Iterator[tuple[list[int], Layout]]:
    """Lay texts of one side out as trees, in passes of at most `batch_tokens` tokens.

    A pass that ends within a tree repeats the shared tokens in the next. A longer text is a pass of its own.

    Yields:
        rows of `sequences`, and the layout of those texts in that order. Every row once.
    """
    rows: list[int] = []
    forest = _Forest()
    for row in sorted(range(len(sequences)), key=lambda row: sequences[row].ids):  # the order of a depth-first walk
        ids = sequences[row].ids
        if rows and len(forest.ids) + len(ids) - forest.shared(ids) > batch_tokens:
            yield rows, forest.layout(sequences[rows[0]])
            rows, forest = [], _Forest()
        forest.add(ids)
        rows.append(row)
    if rows:
        yield rows, forest.layout(sequences[rows[0]])


class _Forest:
    """Trees under construction: texts are added in the order of their ids."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.positions: list[int] = []
        self.ends: list[int] = []
        self.tokens: list[int] = []
        self.lengths: list[int] = []
        self._last: list[int] = []  # ids of the last text
        self._path: list[int] = []  # and their places
        self._root = 0  # place of the last tree

    def shared(self, ids: list[int]) -> int:
        """How many leading tokens a text takes from the tree before it; 0: it starts a tree.

        It joins if the tokens that spares are worth the pairs that a wider tree attends.
        """
        shared = _common(self._last, ids)
        width = len(self.ids) - self._root
        joined = (width + len(ids) - shared) ** 2
        apart = width**2 + len(ids) ** 2
        return shared if joined - apart < shared * PAIRS_PER_TOKEN else 0

    def add(self, ids: list[int]) -> None:
        shared, start = self.shared(ids), len(self.ids)
        if not shared:
            self._root = start
        self._close(shared)
        self._path += range(start, start + len(ids) - shared)
        self._last = ids
        self.ids += ids[shared:]
        self.positions += range(shared, len(ids))
        self.ends += [0] * (len(ids) - shared)
        self.tokens += self._path
        self.lengths.append(len(ids))

    def _close(self, depth: int) -> None:
        """No later token descends from the last path's tokens beyond `depth`."""
        for place in self._path[depth:]:
            self.ends[place] = len(self.ids)
        del self._path[depth:]

    def layout(self, like: Tokens) -> Layout:
        self._close(0)
        ids = torch.tensor([self.ids])
        return Layout(
            input_ids=ids,
            attention_mask=None,
            tokens=torch.tensor(self.tokens),
            lengths=torch.tensor(self.lengths),
            side=like.side,
            position_ids=torch.tensor([self.positions]),
            ends=torch.tensor(self.ends),
        )


def _common(a: list[int], b: list[int]) -> int:
    """How many leading ids are equal."""
    for n, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return n
    return min(len(a), len(b))


@dataclass(frozen=True)
class Trees:
    """What attention along the trees of a forest needs.

    Attributes:
        sizes: tokens of each tree.
        masks: (size, size) of each tree, 0 where a token may attend another and -inf elsewhere; None for a single text.
    """

    sizes: list[int]
    masks: list[Tensor | None]

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any
    ) -> tuple[Tensor, None]:
        """SDPA tree by tree, so that pairs of different trees are not even computed.

        Args:
            module: the attention layer.
            query, key, value: (1, heads, tokens, head size), of keys and values maybe fewer heads.
            options: of transformers' SDPA function.

        Returns:
            (1, tokens, heads, head size), and None for the weights.
        """
        masks = [mask if mask is None else mask.to(query.dtype) for mask in self.masks]
        parts = zip(*(states.split(self.sizes, dim=2) for states in (query, key, value)), masks, strict=True)
        return torch.cat([sdpa_attention_forward(module, *part, **options)[0] for part in parts], dim=1), None


def attention_inputs(backbone: Any, ends: Tensor) -> dict[str, Any]:
    """The arguments that make a backbone attend along the trees of a forest.

    Args:
        backbone: one without `obstacle`.
        ends: (tokens), of the layout.
    """
    size = len(ends)
    if backbone.config._attn_implementation == FLEX:

        def ancestor(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & (query < ends[key])

        return {"attention_mask": create_block_mask(ancestor, 1, None, size, size, device=str(ends.device))}
    places = torch.arange(size, device=ends.device)
    roots = [0, *((ends.cummax(0).values[:-1] <= places[1:]).nonzero().squeeze(1) + 1).tolist(), size]
    sizes = [after - root for root, after in pairwise(roots)]
    masks = [_mask(of_tree - root, backbone.dtype) for root, of_tree in zip(roots, ends.split(sizes), strict=False)]
    return {"attention_mask": None, "trees": Trees(sizes, masks)}


def _mask(ends: Tensor, dtype: torch.dtype) -> Tensor | None:
    if bool((ends == len(ends)).all()):
        return None  # one text: plain causal attention
    places = torch.arange(len(ends), device=ends.device)
    ancestor = (places <= places.unsqueeze(1)) & (places.unsqueeze(1) < ends)
    # Additive: SDPA would make it so anew from a bool mask in every layer.
    return torch.zeros(ancestor.shape, dtype=dtype, device=ends.device).masked_fill_(~ancestor, -torch.inf)
