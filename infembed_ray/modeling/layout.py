"""How texts lie in the input of one forward pass: the seam between tokenising and the backbone.

A `Layout` says which tokens the backbone reads, which of them may attend which, and where each text's tokens are in
its output. Padded batches, packed sequences, shared prefixes and instruction-query pairs are all layouts, so a pass
over any of them is the same call, and pooling never needs to know which it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor

Side = Literal["query", "passage"]


@dataclass(frozen=True, slots=True)
class Tokens:
    """The token ids of one text.

    Attributes:
        ids: special tokens in, not padded.
        side: what the text is: encoders of two towers embed queries and passages differently.
        instruction: so many of the ids, at the start, are the instruction's and shared by all queries under it; 0
            where there is no instruction, or where it does not come first.
    """

    ids: list[int]
    side: Side = "passage"
    instruction: int = 0

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Layout:
    """The input of one forward pass, and where its texts are.

    Attributes:
        input_ids: (rows, width) token ids.
        attention_mask: (rows, width), 1 for real tokens and 0 for padding on either side; or None, for one row of texts
            one after the other, each attending to itself only (`packing`), or of prefix trees (`ends`).
        tokens: (sum of lengths) places of the texts' tokens in `input_ids.flatten()`, text after text; one place may
            belong to several texts.
        lengths: (texts) how many tokens each text has.
        side: of all its texts.
        position_ids: (rows, width) positions; None: 0, 1, 2, ... in every row.
        pairs: (embeddings, 2) where two texts make one embedding (Interaction II): its instruction, -1 for none, and its
            query among the texts, the instructions of which come before the queries. None: each text makes one.
        ends: (width) of a single row of prefix trees: token q may attend token k if k <= q < ends[k]. None: the
            attention mask says who attends whom.
    """

    input_ids: Tensor
    attention_mask: Tensor | None
    tokens: Tensor
    lengths: Tensor
    side: Side = "passage"
    position_ids: Tensor | None = None
    pairs: Tensor | None = None
    ends: Tensor | None = None

    def to(self, device: torch.device) -> Layout:
        """The same layout on another device."""

        def moved(value: Any) -> Any:
            return value.to(device) if isinstance(value, Tensor) else value

        return Layout(**{f.name: moved(getattr(self, f.name)) for f in fields(self)})


def padded(sequences: Sequence[Tokens], pad_id: int) -> Layout:
    """One text a row, padded on the right to the longest.

    Args:
        sequences: texts of one side.
        pad_id: what fills the rows up.
    """
    width = max(map(len, sequences))
    lengths = torch.tensor([len(s) for s in sequences])
    real = torch.arange(width) < lengths.unsqueeze(1)
    ids = torch.full(real.shape, pad_id)
    ids[real] = torch.tensor([token for s in sequences for token in s.ids])
    return Layout(ids, real.long(), real.flatten().nonzero().squeeze(1), lengths, sequences[0].side)


def length_sorted_batches(lengths: Sequence[int], batch_tokens: int, padded: bool = True) -> Iterator[list[int]]:
    """Rows grouped longest first, so that a group's tokens stay within `batch_tokens`.

    A row longer than `batch_tokens` makes a group of its own.

    Args:
        lengths: tokens of each row.
        batch_tokens: most tokens of a group.
        padded: its rows are padded to the longest, and padding counts.
    """
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    group: list[int] = []
    tokens = 0
    for row in order:
        size = lengths[group[0]] if padded and group else lengths[row]
        if group and tokens + size > batch_tokens:
            yield group
            group, tokens, size = [], 0, lengths[row]
        group.append(row)
        tokens += size
    if group:
        yield group
