"""Interaction II: instruction and query are encoded apart and meet in one cross-attention (paper, Eq. 4).

    iq_jk = softmax((i_j W_i) (q_k W_q1)^T / sqrt(d)) (q_k W_q2)

Each text goes through the backbone once, however many pairs it is part of. i_j and q_k are token states, (|I|, d) and
(|Q|, d), not the vectors of Eq. 2: over one query vector the softmax would be 1, and the instruction without a say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.utils import cached_file

from infembed_ray.errors import InputError
from infembed_ray.modeling.layout import Layout, Tokens
from infembed_ray.modeling.pooling import PoolingMode

FILE = "interaction.safetensors"
_BLOCK = 1 << 20
"""Most attention weights at a time: 4 MB, little beside what the backbone keeps of the same texts."""


class CrossAttention(nn.Module):
    """The three matrices of Eq. 4, and one vector for each (instruction, query) pair.

    Eq. 4 gives a row for each instruction token. They are pooled as the encoder pools a text: the mean of the rows,
    or the row of the last or the first (cls) token, which is the one that has read the whole instruction there.

    Without an instruction, all tokens of the query count alike: mean(q_k) W_q2, which is Eq. 4 for i_j = 0.

    Args:
        dimension: d, of the token states.
    """

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.W_i = nn.Parameter(torch.zeros(dimension, dimension))
        self.W_q1 = nn.Parameter(torch.eye(dimension))
        self.W_q2 = nn.Parameter(torch.eye(dimension))

    def forward(self, states: Tensor, layout: Layout, mode: PoolingMode) -> Tensor:
        """Embed the pairs of a layout.

        Args:
            states: (rows, width, d) last hidden states of the layout.
            layout: with `pairs`; every query has at least one token.
            mode: how the rows of Eq. 4 become one vector.

        Returns:
            (pairs, d) in fp32 at least; not normalised.
        """
        assert layout.pairs is not None
        pairs, lengths = layout.pairs.cpu(), layout.lengths.cpu()  # one wait for the device instead of many
        first_query = int(pairs[:, 1].min())
        border = int(lengths[:first_query].sum())
        flat = states.flatten(0, 1)[layout.tokens]
        asking, counts = _asking(flat[:border], lengths[:first_query], mode)
        # Whoever has no instruction (-1, the last) has one token of zeros: the same score for every query token.
        asking = torch.cat([asking, asking.new_zeros(1, flat.shape[1])]) @ self.W_i
        instructions, present = _in_rows(asking, torch.cat([counts, counts.new_ones(1)]))
        keys, real = _in_rows(flat[border:] @ self.W_q1, lengths[first_query:])
        values, _ = _in_rows(flat[border:] @ self.W_q2, lengths[first_query:])
        pairs = torch.stack([pairs[:, 0] % len(instructions), pairs[:, 1] - first_query], dim=1)
        # A block of n pairs has at most n instructions and n queries.
        block = max(1, math.isqrt(_BLOCK // (instructions.shape[1] * keys.shape[1])))
        embeddings = []
        for some in pairs.split(block):
            (i, row), (q, column) = (side.unique(return_inverse=True) for side in some.unbind(1))
            grid = _attend(instructions[i], present[i], keys[q], values[q], real[q])
            embeddings.append(grid[row, column])
        return torch.cat(embeddings)

    def write(self, path: Path) -> None:
        """Write the matrices beside the backbone's weights."""
        save_file({name: matrix.detach().contiguous() for name, matrix in self.named_parameters()}, path / FILE)

    def read(self, path: str) -> None:
        """Read the matrices that `write` wrote, from a directory or the hub.

        Raises:
            InputError: there are none, or they are another model's.
        """
        file = cached_file(
            path, FILE, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
        )
        if file is None:
            raise InputError(f"model={path}: no {FILE}, which a cross_attention model has; give the whole checkpoint")
        saved = load_file(file)
        found = {name: tuple(matrix.shape) for name, matrix in saved.items()}
        needed = {name: tuple(matrix.shape) for name, matrix in self.named_parameters()}
        if found != needed:
            raise InputError(f"model={path}: {FILE} holds {found}, not {needed}; give the whole checkpoint")
        self.load_state_dict(saved)


def paired(sequences: Sequence[Tokens], lay: Callable[[list[Tokens]], Layout]) -> Layout:
    """A layout of the distinct instructions and queries of some pairs, and which two make each embedding.

    Args:
        sequences: pairs, whose first `instruction` ids are one sequence and whose others are another.
        lay: lays texts of one side for the backbone. It gets the instructions, longest first, then so the queries.
    """
    parts = [_parts(s) for s in sequences]
    instructions = sorted(dict.fromkeys(i for i, _ in parts if i), key=len, reverse=True)
    queries = sorted(dict.fromkeys(q for _, q in parts), key=len, reverse=True)
    first = {ids: place for place, ids in enumerate(instructions)}
    second = {ids: place for place, ids in enumerate(queries, start=len(instructions))}
    texts = [Tokens(list(ids), sequences[0].side) for ids in (*instructions, *queries)]
    return replace(lay(texts), pairs=torch.tensor([[first.get(i, -1), second[q]] for i, q in parts]))


def pair_batches(sequences: Sequence[Tokens], batch_tokens: int, pack: bool = False) -> Iterator[list[int]]:
    """Rows grouped so that a group's distinct texts stay within `batch_tokens`.

    Pairs with the same instruction are neighbours, so that few passes encode it. A pair that is larger than
    `batch_tokens` makes a group of its own.

    Args:
        sequences: pairs, as of `paired`.
        batch_tokens: most tokens of a group.
        pack: the texts are not padded to the longest.
    """
    parts = [_parts(s) for s in sequences]
    longest = [max(map(len, pair)) for pair in parts]
    group: list[int] = []
    texts: set[tuple[str, tuple[int, ...]]] = set()
    tokens = 0
    for row in sorted(range(len(parts)), key=lambda row: (-longest[row], parts[row])):
        own = {text for text in zip(("instruction", "query"), parts[row], strict=True) if text[1]}
        new = own - texts
        more = sum(len(ids) for _, ids in new)
        if group and (tokens + more if pack else (len(texts) + len(new)) * longest[group[0]]) > batch_tokens:
            yield group
            group, texts, tokens = [], set(), 0
            new, more = own, sum(len(ids) for _, ids in own)
        group.append(row)
        texts |= new
        tokens += more
    if group:
        yield group


def _parts(pair: Tokens) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids of its instruction, and those of its query."""
    return tuple(pair.ids[: pair.instruction]), tuple(pair.ids[pair.instruction :])


def _asking(states: Tensor, lengths: Tensor, mode: PoolingMode) -> tuple[Tensor, Tensor]:
    """The token states whose rows of Eq. 4 are pooled, text after text, and how many each text has."""
    ends = lengths.cumsum(0)
    if mode == "mean":
        return states, lengths
    return states[ends - 1 if mode == "last" else ends - lengths], torch.ones_like(lengths)


def _in_rows(states: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """States of texts, text after text, as (texts, longest, d) with zeros after a text's last; True where it has one."""
    real = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
    real = real.to(states.device)
    rows = states.new_zeros(*real.shape, states.shape[1])
    rows[real] = states
    return rows, real


def _attend(instructions: Tensor, present: Tensor, keys: Tensor, values: Tensor, real: Tensor) -> Tensor:
    """Eq. 4 for each of m instructions with each of n queries, and the mean over the instruction's tokens.

    Args:
        instructions: (m, |I|, d) i_j W_i.
        present: (m, |I|) bool, which of these tokens there are.
        keys, values: (n, |Q|, d) q_k W_q1 and q_k W_q2.
        real: (n, |Q|) bool.

    Returns:
        (m, n, d) in fp32 at least.
    """
    scores = torch.einsum("mid,nqd->minq", instructions, keys) / math.sqrt(keys.shape[2])
    wide = torch.promote_types(scores.dtype, torch.float32)
    attention = scores.masked_fill(~real, -math.inf).softmax(dim=3, dtype=wide)
    # The mean of the rows of softmax(...) V is the mean of the rows of softmax(...), times V.
    share = present.to(wide) / present.sum(dim=1, keepdim=True)
    return torch.einsum("mnq,nqd->mnd", torch.einsum("mi,minq->mnq", share, attention), values.to(wide))
