"""Prefix trees: texts that start with the same tokens share their encoding; exact under causal attention.

Texts that start with the same ids, such as all queries under one instruction, form a tree: the shared prefix is in the
input once, each text branches off where it differs, and a token attends to its ancestors. The trees of a pass lie one
after another in one row, in depth-first order. A subtree is then a range, and one number per token gives the whole mask:
token q may attend to token k if k <= q < end(k).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from infembed_ray.modeling.attention.flex import FlexTreeLayout
from infembed_ray.modeling.attention.packing import ATTENTION as PACKED
from infembed_ray.modeling.attention.packing import Attend
from infembed_ray.modeling.layout import Layout, on_device
from infembed_ray.modeling.tokenizer import Side, Tokens

WORTHWHILE = 0.1
"""Smallest share of saved tokens that makes trees worthwhile."""
PAIRS_PER_TOKEN = 1024
"""Attended pairs that cost as much as one token in the linear layers: decides whether a text joins the tree before it.

Measured: half of this on a CPU at width 256, a tenth on a GPU at 1.5B parameters, where short trees matter less.
"""


@dataclass(frozen=True)
class TreeLayout(Layout):
    """Prefix trees in a single row, for SDPA with a dense mask of each tree.

    Attributes:
        ends: (width) end of each token's subtree: token q may attend to token k if k <= q < ends[k].
    """

    ends: Tensor = field(kw_only=True)

    def backbone_inputs(self, backbone: Any) -> dict[str, Any]:
        attend: Attend = TreeAttention.from_ends(self.ends, backbone.dtype, self.input_ids.device)
        return super().backbone_inputs(backbone) | {"attend": attend}


@dataclass(frozen=True)
class TreeAttention:
    """Attention along prefix trees (an `Attend`), tree by tree.

    Attributes:
        sizes: tokens of each tree.
        masks: (size, size) of each tree, 0 where a token may attend and -inf elsewhere; None for a single text.
    """

    sizes: list[int]
    masks: list[Tensor | None]

    @classmethod
    def from_ends(cls, ends: Tensor, dtype: torch.dtype, device: torch.device) -> TreeAttention:
        """Build the masks from the layout's ends, on the CPU, for a backbone of this precision and device."""
        later_roots = (ends.cummax(0).values[:-1] <= torch.arange(1, len(ends))).nonzero().squeeze(1) + 1
        roots = [0, *later_roots.tolist(), len(ends)]
        sizes = [after - root for root, after in pairwise(roots)]
        masks: list[Tensor | None] = []
        for root, of_tree, copy in zip(roots, ends.split(sizes), on_device(ends, device).split(sizes), strict=False):
            single = bool((of_tree == len(of_tree) + root).all())
            masks.append(None if single else _mask(copy - root, dtype))
        return cls(sizes, masks)

    def __call__(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        masks = [mask if mask is None else mask.to(query.dtype) for mask in self.masks]
        parts = zip(*(states.split(self.sizes, dim=2) for states in (query, key, value)), masks, strict=True)
        return torch.cat([sdpa_attention_forward(module, *part, **options)[0] for part in parts], dim=1)


def obstacle(backbone: Any, longest: int) -> str | None:
    """Return why trees would not be exact for a causal backbone with texts of up to `longest` tokens; None if they are."""
    config = backbone.config
    if config._attn_implementation != PACKED:
        return f"its {config._attn_implementation} attention does not take shared prefixes"
    for name in ("sliding_window", "attention_chunk_size"):
        window = getattr(config, name, None)
        if window is not None and longest > window:
            return f"a text has {longest} tokens and {name} is {window}"
    return None


def saves(sequences: Sequence[Tokens]) -> bool:
    """Return whether the texts share enough leading tokens for trees to be worthwhile."""
    ordered = sorted(s.ids for s in sequences)
    shared = sum(_common(before, ids) for before, ids in pairwise(ordered))
    return shared >= WORTHWHILE * sum(map(len, ordered))


def forests(
    sequences: Sequence[Tokens], batch_tokens: int, flex: bool = False
) -> Iterator[tuple[list[int], TreeLayout | FlexTreeLayout]]:
    """Lay out texts for one backbone as trees, in passes of at most `batch_tokens` tokens.

    A tree that continues in the next pass repeats the shared tokens there. A longer text is a pass of its own.

    Args:
        sequences: texts of one backbone.
        batch_tokens: tokens per pass.
        flex: for FlexAttention.

    Yields:
        rows of `sequences`, and the layout of those texts in that order. Every row once.
    """
    rows: list[int] = []
    forest = _Forest()
    for row in sorted(range(len(sequences)), key=lambda row: sequences[row].ids):  # the order of a depth-first walk
        ids = np.array(sequences[row].ids)
        if rows and forest.size + len(ids) - forest.shared(ids) > batch_tokens:
            yield rows, forest.layout(sequences[rows[0]].side, flex)
            rows, forest = [], _Forest()
        forest.add(ids)
        rows.append(row)
    if rows:
        yield rows, forest.layout(sequences[rows[0]].side, flex)


class _Forest:
    """Trees under construction. Texts must be added in the order of their ids, int64 arrays."""

    def __init__(self) -> None:
        self.size = 0
        self._ids: list[np.ndarray] = []  # of each text beyond what it shares
        self._depths: list[int] = []  # of their first tokens
        self._paths: list[np.ndarray] = []  # places of each text's tokens
        self._closed: list[tuple[np.ndarray, int]] = []  # places of tokens, and where their subtrees end
        self._last = self._path = np.empty(0, np.int64)  # ids and places of the last text
        self._root = 0  # place of the last tree

    def shared(self, ids: np.ndarray) -> int:
        """Return how many leading tokens a text takes from the last tree; 0 if it starts a tree.

        A text joins a tree if the saved tokens cost more than the additional pairs of a wider tree.
        """
        shared = _common(self._last, ids)
        width = self.size - self._root
        joined = (width + len(ids) - shared) ** 2
        separate = width**2 + len(ids) ** 2
        return shared if joined - separate < shared * PAIRS_PER_TOKEN else 0

    def add(self, ids: np.ndarray) -> None:
        shared, start = self.shared(ids), self.size
        if not shared:
            self._root = start
        self._closed.append((self._path[shared:], start))
        self.size += len(ids) - shared
        self._path = np.concatenate([self._path[:shared], np.arange(start, self.size)])
        self._last = ids
        self._ids.append(ids[shared:])
        self._depths.append(shared)
        self._paths.append(self._path)

    def layout(self, side: Side, flex: bool) -> TreeLayout | FlexTreeLayout:
        ends = np.empty(self.size, np.int64)
        for places, after in (*self._closed, (self._path, self.size)):
            ends[places] = after
        positions = [depth + np.arange(len(ids)) for ids, depth in zip(self._ids, self._depths, strict=True)]
        lengths = np.fromiter(map(len, self._paths), np.int64, len(self._paths))
        parts = (np.concatenate(self._ids), np.concatenate(positions), ends, np.concatenate(self._paths), lengths)
        row, depths, end, tokens, counts = map(torch.from_numpy, parts)
        if flex:
            return FlexTreeLayout.extended(row, depths, end, tokens=tokens, lengths=counts, side=side)
        return TreeLayout(row.unsqueeze(0), None, tokens, counts, side, depths.unsqueeze(0), ends=end)


def _common(a: Sequence[int] | np.ndarray, b: Sequence[int] | np.ndarray) -> int:
    """Return the number of equal leading ids."""
    least = min(len(a), len(b))
    differs = np.flatnonzero(np.asarray(a)[:least] != np.asarray(b)[:least])
    return int(differs[0]) if len(differs) else least


def _mask(ends: Tensor, dtype: torch.dtype) -> Tensor:
    places = torch.arange(len(ends), device=ends.device)
    ancestor = (places <= places.unsqueeze(1)) & (places.unsqueeze(1) < ends)
    # Additive, because SDPA would convert a bool mask in every layer.
    return torch.zeros(ancestor.shape, dtype=dtype, device=ends.device).masked_fill_(~ancestor, -torch.inf)
