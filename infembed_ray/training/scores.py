"""From a batch to the similarities an objective needs: encode, gather, mask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from infembed_ray.training.collectives import gather_rows
from infembed_ray.training.objectives import Negatives, Objective, Variable
from infembed_ray.training.tuples import Batch

Encode = Callable[[list[list[int]]], Tensor]
"""Token lists -> (n, d) unit vectors, with gradient."""


@dataclass(frozen=True)
class Scores:
    """What `objectives.marginal_loss` takes: (B,) positives and the candidates of every variable."""

    positive: Tensor
    negatives: dict[Variable, Negatives]


def score_batch(objective: Objective, batch: Batch, encode: Encode) -> Scores:
    """Encode a batch and compare (paper, section 5.2).

    P and IQ candidates are those of all workers, I candidates the batch's own sampled ones. A candidate with the same
    passage or the same (instruction, query) text as the row (its own slot first of all) is a positive of that row too, so it is no negative.
    """
    size = len(batch.passages)
    queries = encode(batch.queries)
    passages = encode(batch.passages)
    own = queries[:size]  # iq_ii
    positive = (own * passages).sum(dim=1)
    negatives: dict[Variable, Negatives] = {}
    if {"P", "IQ"} & set(objective.variables):
        other = ~_same(batch.passage_ids, own.device) & ~_same(batch.instruction_query_ids, own.device)
        if "P" in objective.variables:
            negatives["P"] = Negatives(own @ gather_rows(passages).T, other)
        if "IQ" in objective.variables:
            negatives["IQ"] = Negatives(passages @ gather_rows(own).T, other)
    if "I" in objective.variables:
        negatives["I"] = _instruction_candidates(batch, queries[size:], passages)
    return Scores(positive, negatives)


def _same(ids: list[int], device: torch.device) -> Tensor:
    """(B, world size x B) bool: does the candidate carry the same text as the row?"""
    mine = torch.tensor(ids, device=device)
    return mine.unsqueeze(1) == gather_rows(mine).unsqueeze(0)


def _instruction_candidates(batch: Batch, candidates: Tensor, passages: Tensor) -> Negatives:
    """(B, most) similarities p_i . iq_ji of each row's own I-negatives; rows with fewer are masked at the end."""
    counts = torch.tensor(batch.negative_counts, device=passages.device)
    most = int(counts.max())
    mask = torch.arange(most, device=passages.device).unsqueeze(0) < counts.unsqueeze(1)
    rows = torch.repeat_interleave(torch.arange(len(counts), device=passages.device), counts)
    flat = (candidates * passages[rows]).sum(dim=1)
    similarities = torch.zeros(mask.shape, dtype=flat.dtype, device=flat.device).masked_scatter(mask, flat)
    return Negatives(similarities, mask)
