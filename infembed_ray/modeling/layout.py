"""Layouts: how texts lie in the input of one forward pass, and the pooling of its token states to one vector per text.

Padded batches, packed sequences, prefix trees and instruction-query pairs are layouts. The forward pass and the pooling
are the same for all of them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import Self

from infembed_ray.config.training import PoolingMode
from infembed_ray.modeling.tokenizer import Side, Tokens

_HOST = {"lengths", "pairs", "ends"}
"""Fields of layouts that stay on the CPU."""


@dataclass(frozen=True)
class Layout:
    """Padded texts, one per row: the input of one forward pass, and the place of each text in it.

    What decides shapes (`_HOST`) stays on the CPU, because reading it from a device would wait for the kernels in flight.

    Attributes:
        input_ids: (rows, width) token ids.
        attention_mask: (rows, width), 1 for tokens and 0 for padding; None for a single row without padding.
        tokens: (sum of lengths) places of the texts' tokens in `input_ids.flatten()`, text after text. Texts may share
            places.
        lengths: (texts) number of tokens of each text.
        side: side of all texts.
        position_ids: (rows, width) positions; None: 0, 1, 2, ... in every row.
        pairs: (embeddings, 2) for texts that make one embedding in pairs (Interaction II): index of the instruction, -1
            for none, and of the query. All instructions come before all queries. None: each text makes one embedding.
        token_type_ids: (rows, width) segments of pairs that a cross-encoder reads; None: none.
    """

    input_ids: Tensor
    attention_mask: Tensor | None
    tokens: Tensor
    lengths: Tensor
    side: Side = "passage"
    position_ids: Tensor | None = None
    pairs: Tensor | None = None
    token_type_ids: Tensor | None = None

    @property
    def size(self) -> int:
        """Number of places that hold a token, once for a shared prefix."""
        return self.input_ids.numel() if self.attention_mask is None else self.tokens.numel()

    def to(self, device: torch.device) -> Self:
        """Copy the layout to a device, except what stays on the CPU."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in _HOST}
        moved: dict[str, Any] = {name: on_device(v, device) for name, v in values.items() if isinstance(v, Tensor)}
        return replace(self, **moved)

    def backbone_inputs(self, backbone: Any) -> dict[str, Any]:
        """Return the keyword arguments of the backbone's forward pass."""
        mask = self.attention_mask
        if mask is None:
            # Without a mask, transformers would look for packed rows in the positions, and so wait for the kernels in
            # flight. It passes on a mask of four dimensions, which the layout's own attention does not read.
            mask = torch.empty((1, 1, 1, 1), dtype=torch.bool, device=self.input_ids.device)
        further = {"position_ids": self.position_ids, "token_type_ids": self.token_type_ids}
        given = {name: value for name, value in further.items() if value is not None}
        return {"input_ids": self.input_ids, "attention_mask": mask, **given}


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device; from the CPU to CUDA by pinned memory, which does not wait for the kernels in flight."""
    if tensor.device.type == "cpu" and device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def flattened(sequences: Sequence[Tokens]) -> tuple[np.ndarray, np.ndarray]:
    """Return the token ids, text after text, and the number of tokens of each text, as int64."""
    lengths = np.fromiter(map(len, sequences), np.int64, len(sequences))
    return np.fromiter(chain.from_iterable(s.ids for s in sequences), np.int64, lengths.sum()), lengths


def padded(sequences: Sequence[Tokens], pad_id: int) -> Layout:
    """Lay out one text of a side per row, padded on the right to the longest."""
    ids, lengths = flattened(sequences)
    real = np.arange(lengths.max()) < lengths[:, None]
    rows = np.full(real.shape, pad_id)
    rows[real] = ids
    arrays = rows, real.astype(np.int64), np.flatnonzero(real), lengths
    input_ids, mask, tokens, counts = map(torch.from_numpy, arrays)
    types = None
    if segments := [*chain.from_iterable(s.segments for s in sequences)]:
        types = torch.zeros_like(input_ids).masked_scatter(mask.bool(), torch.tensor(segments))
    return Layout(input_ids, mask, tokens, counts, sequences[0].side, token_type_ids=types)


def length_sorted_batches(lengths: Sequence[int], batch_tokens: int, padded: bool = True) -> Iterator[list[int]]:
    """Group rows longest first, with at most `batch_tokens` tokens per group; a longer row is a group of its own.

    If rows are `padded` to the longest of the group, padding counts.
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


def pool(states: Tensor, layout: Layout, mode: PoolingMode) -> Tensor:
    """Pool token states over the tokens of each text.

    Args:
        states: (rows, width, d) last hidden states, in any precision.
        layout: the layout that the states belong to.
        mode: `last` token, `mean` of the tokens, or `cls`, the first token.

    Returns:
        (texts, d), not normalised, in fp32 at least, because bf16 is too coarse for sums over hundreds of tokens.
    """
    flat = states.flatten(0, 1)
    lengths = on_device(layout.lengths, flat.device)
    ends = lengths.cumsum(0)
    wide = torch.promote_types(states.dtype, torch.float32)
    if mode != "mean":
        return flat[layout.tokens[ends - (1 if mode == "last" else lengths)]].to(wide)
    texts = torch.arange(len(ends), device=flat.device)
    text = torch.repeat_interleave(texts, lengths, output_size=len(layout.tokens))  # the size saves reading it back
    sums = flat.new_zeros(len(ends), flat.shape[1], dtype=wide).index_add(0, text, flat[layout.tokens].to(wide))
    return sums / lengths.unsqueeze(1)


def truncate(embeddings: Tensor, dimensions: int) -> Tensor:
    """Keep the first components of embeddings, as unit vectors (Matryoshka Representation Learning, Eq. 1).

    Args:
        embeddings: (..., d), normalised or not; the result is the same.
        dimensions: number of components, at most d.
    """
    return nn.functional.normalize(embeddings[..., :dimensions], dim=-1)
