"""Interaction II: instruction and query are encoded separately and combined by cross-attention (paper, Eq. 4).

    iq_jk = softmax((i_j W_i) (q_k W_q1)^T / sqrt(d)) (q_k W_q2)

Each text goes through the backbone once, for all of its pairs. i_j and q_k are token states, (|I|, d) and (|Q|, d),
instead of the vectors of Eq. 2: the softmax over a single query vector would be 1, and the instruction without effect.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from infembed_ray.config.training import PoolingMode
from infembed_ray.errors import InputError
from infembed_ray.modeling import pretrained
from infembed_ray.modeling.layout import Layout
from infembed_ray.modeling.tokenizer import Tokens

FILE = "interaction.safetensors"
_BLOCK = 1 << 20
"""Attention weights per block: 4 MB, which is small beside the backbone's activations of the same texts."""


class CrossAttention(nn.Module):
    """Cross-attention with the three matrices of Eq. 4: one vector per (instruction, query) pair.

    Eq. 4 gives one row per instruction token. The rows are pooled as the encoder pools texts: their mean, or the row of
    the last or first (cls) token.

    Without an instruction the embedding is mean(q_k) W_q2, which is Eq. 4 for i_j = 0.

    Args:
        dimension: width d of the token states.
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
            layout: a layout with `pairs`, whose queries have at least one token each.
            mode: pooling of the rows of Eq. 4.

        Returns:
            (pairs, d), not normalised, in fp32 at least.
        """
        assert layout.pairs is not None
        pairs, lengths = layout.pairs, layout.lengths
        first_query = int(pairs[:, 1].min())
        border = int(lengths[:first_query].sum())
        flat = states.flatten(0, 1)[layout.tokens]
        heads, counts = flat[:border], lengths[:first_query]
        if mode != "mean":  # only the row of one token is needed
            ends = counts.cumsum(0)
            heads, counts = heads[ends - (1 if mode == "last" else counts)], torch.ones_like(counts)
        # Index -1, no instruction, is the last: one token of zeros, with the same score for every query token.
        heads = torch.cat([heads, heads.new_zeros(1, flat.shape[1])]) @ self.W_i
        instructions, present = in_rows(heads, torch.cat([counts, counts.new_ones(1)]))
        keys, real = in_rows(flat[border:] @ self.W_q1, lengths[first_query:])
        values, _ = in_rows(flat[border:] @ self.W_q2, lengths[first_query:])
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
        """Write the matrices into a checkpoint directory."""
        save_file({name: matrix.detach().contiguous() for name, matrix in self.named_parameters()}, path / FILE)

    def read(self, path: str) -> None:
        """Read the matrices of a directory or a hub's model.

        Raises:
            InputError: the model has no matrices, or their shapes do not fit.
        """
        file = pretrained.cached(path, FILE)
        if file is None:
            fault = f"model={path}: has no {FILE}, which interaction=cross_attention needs; give the whole checkpoint"
            raise InputError(fault)
        saved = load_file(file)
        shapes, needed = ({name: tuple(m.shape) for name, m in of.items()} for of in (saved, self.state_dict()))
        if shapes != needed:
            raise InputError(f"model={path}: {FILE} has {shapes} instead of {needed}; give the whole checkpoint")
        self.load_state_dict(saved)
        pretrained.require_finite(f"model={path}", self.named_parameters())


def paired(sequences: Sequence[Tokens], lay: Callable[[list[Tokens]], Layout]) -> Layout:
    """Lay out the distinct instructions and queries of pairs by `lay`: first the instructions, each side longest first."""
    parts = [_parts(s) for s in sequences]
    instructions = sorted(dict.fromkeys(i for i, _ in parts if i), key=len, reverse=True)
    queries = sorted(dict.fromkeys(q for _, q in parts), key=len, reverse=True)
    first = {ids: place for place, ids in enumerate(instructions)}
    second = {ids: place for place, ids in enumerate(queries, start=len(instructions))}
    texts = [Tokens(list(ids), sequences[0].side) for ids in (*instructions, *queries)]
    return replace(lay(texts), pairs=torch.tensor([[first.get(i, -1), second[q]] for i, q in parts]))


def pair_batches(sequences: Sequence[Tokens], batch_tokens: int, pack: bool = False) -> Iterator[list[int]]:
    """Group rows so that the distinct texts of a group have at most `batch_tokens` tokens.

    Pairs with the same instruction are neighbours, so that few passes encode it. A larger pair is a group of its own.
    Texts that are not packed are padded to the longest.
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
    """Return the ids of the instruction and of the query."""
    return tuple(pair.ids[: pair.instruction]), tuple(pair.ids[pair.instruction :])


def in_rows(states: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Pad states with zeros: return (texts, longest, d), and (texts, longest) bool for the real ones."""
    real = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
    real = real.to(states.device)
    rows = states.new_zeros(*real.shape, states.shape[1])
    rows[real] = states
    return rows, real


def _attend(instructions: Tensor, present: Tensor, keys: Tensor, values: Tensor, real: Tensor) -> Tensor:
    """Compute Eq. 4 for m instructions with n queries, averaged over the instruction's tokens: (m, n, d), fp32 at least.

    `instructions` are (m, |I|, d) i_j W_i, and `keys` and `values` (n, |Q|, d) q_k W_q1 and q_k W_q2, with their masks.
    """
    scores = torch.einsum("mid,nqd->minq", instructions, keys) / math.sqrt(keys.shape[2])
    wide = torch.promote_types(scores.dtype, torch.float32)
    attention = scores.masked_fill(~real, -math.inf).softmax(dim=3, dtype=wide)
    # mean(softmax(...) V) = mean(softmax(...)) V
    share = present.to(wide) / present.sum(dim=1, keepdim=True)
    return torch.einsum("mnq,nqd->mnd", torch.einsum("mi,minq->mnq", share, attention), values.to(wide))
