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

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from infembed_ray.modeling.attention.flex import FlexTreeAttention
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
    """Prefix trees in a single row.

    Attributes:
        ends: (width) end of each token's subtree: token q may attend to token k if k <= q < ends[k].
        flex: whether FlexAttention attends, rather than SDPA with a dense mask of each tree.
    """

    ends: Tensor = field(kw_only=True)
    flex: bool = False

    def backbone_inputs(self, backbone: Any) -> dict[str, Any]:
        device = self.input_ids.device
        if self.flex:
            attend: Attend = FlexTreeAttention.from_ends(self.ends, device)
        else:
            attend = TreeAttention.from_ends(self.ends, backbone.dtype, device)
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
        single = [
            bool((of_tree == len(of_tree) + root).all())
            for root, of_tree in zip(roots, ends.split(sizes), strict=False)
        ]
        trees = zip(roots, single, on_device(ends, device).split(sizes), strict=False)
        return cls(sizes, [None if alone else _mask(of_tree - root, dtype) for root, alone, of_tree in trees])

    def __call__(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        masks = [mask if mask is None else mask.to(query.dtype) for mask in self.masks]
        parts = zip(*(states.split(self.sizes, dim=2) for states in (query, key, value)), masks, strict=True)
        return torch.cat([sdpa_attention_forward(module, *part, **options)[0] for part in parts], dim=1)


def obstacle(backbone: Any, longest: int) -> str | None:
    """Return why trees would not be exact for a causal backbone with texts of up to `longest` tokens; None if they are."""
    config = backbone.config
    if config._attn_implementation != PACKED:
        return f"its {config._attn_implementation} attention does not take trees"
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
) -> Iterator[tuple[list[int], TreeLayout]]:
    """Lay out texts of one side as trees, in passes of at most `batch_tokens` tokens.

    A tree that continues in the next pass repeats the shared tokens there. A longer text is a pass of its own.

    Args:
        sequences: texts of one side.
        batch_tokens: tokens per pass.
        flex: attend by FlexAttention.

    Yields:
        rows of `sequences`, and the layout of those texts in that order. Every row once.
    """
    rows: list[int] = []
    forest = _Forest(flex)
    for row in sorted(range(len(sequences)), key=lambda row: sequences[row].ids):  # the order of a depth-first walk
        ids = sequences[row].ids
        if rows and len(forest.ids) + len(ids) - forest.shared(ids) > batch_tokens:
            yield rows, forest.layout(sequences[rows[0]].side)
            rows, forest = [], _Forest(flex)
        forest.add(ids)
        rows.append(row)
    if rows:
        yield rows, forest.layout(sequences[rows[0]].side)


class _Forest:
    """Trees under construction. Texts must be added in the order of their ids."""

    def __init__(self, flex: bool) -> None:
        self.flex = flex
        self.ids: list[int] = []
        self.positions: list[int] = []
        self.ends: list[int] = []
        self.tokens: list[int] = []
        self.lengths: list[int] = []
        self._last: list[int] = []  # ids of the last text
        self._path: list[int] = []  # places of the last text
        self._root = 0  # place of the last tree

    def shared(self, ids: list[int]) -> int:
        """Return how many leading tokens a text takes from the last tree; 0 if it starts a tree.

        A text joins a tree if the saved tokens cost more than the additional pairs of a wider tree.
        """
        shared = _common(self._last, ids)
        width = len(self.ids) - self._root
        joined = (width + len(ids) - shared) ** 2
        separate = width**2 + len(ids) ** 2
        return shared if joined - separate < shared * PAIRS_PER_TOKEN else 0

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
        """End the subtrees of the last path's tokens beyond `depth`."""
        for place in self._path[depth:]:
            self.ends[place] = len(self.ids)
        del self._path[depth:]

    def layout(self, side: Side) -> TreeLayout:
        self._close(0)
        ids = torch.tensor([self.ids])
        return TreeLayout(
            input_ids=ids,
            attention_mask=None,
            tokens=torch.tensor(self.tokens),
            lengths=torch.tensor(self.lengths),
            side=side,
            position_ids=torch.tensor([self.positions]),
            ends=torch.tensor(self.ends),
            flex=self.flex,
        )


def _common(a: list[int], b: list[int]) -> int:
    """Return the number of equal leading ids."""
    for n, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return n
    return min(len(a), len(b))


def _mask(ends: Tensor, dtype: torch.dtype) -> Tensor:
    places = torch.arange(len(ends), device=ends.device)
    ancestor = (places <= places.unsqueeze(1)) & (places.unsqueeze(1) < ends)
    # Additive, because SDPA would convert a bool mask in every layer.
    return torch.zeros(ancestor.shape, dtype=dtype, device=ends.device).masked_fill_(~ancestor, -torch.inf)
