"""Similarities and masks of a batch: what an objective needs from its embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from infembed_ray.config.training import Variable
from infembed_ray.modeling.layout import on_device
from infembed_ray.training.collate import Batch
from infembed_ray.training.collectives import gather_rows
from infembed_ray.training.losses import Negatives, Objective

_ODD = 0x5851F42D4C957F2D
"""Odd multiplier that gives (query, passage) another hash than (passage, query)."""


@dataclass(frozen=True)
class Scores:
    """Input of `losses.marginal_loss`: (B,) positives and the candidates of every variable."""

    positive: Tensor
    negatives: dict[Variable, Negatives]


def score_batch(
    objective: Objective, batch: Batch, queries: Tensor, passages: Tensor, same_tower_negatives: bool = False
) -> Scores:
    """Compute the similarities of a batch and mask its in-batch negatives (paper, section 5.2).

    Passages and (instruction, query) pairs are those of all workers. A candidate is a negative of a row unless the tuple
    that it forms is a known positive: a tuple of the micro-batch, on any worker, with equal tokens. So a passage is not a
    negative of an instruction and query that it answers in another row, nor is a pair of another row with the same
    passage, nor an instruction for which another row has the same query and passage. For `nce{PIQ}`, every tuple but the
    row's own is a negative, as in Eq. 1.

    Args:
        objective: Objective, whose variables decide the candidates.
        batch: This worker's share of the micro-batch.
        queries: (n, d) unit vectors of `batch.queries`.
        passages: (B, d) unit vectors of `batch.passages`.
        same_tower_negatives: Whether the pairs of the other rows join the candidates of P, as similarities
            iq_ii . iq_kk (SamToNe, arXiv 2306.02516).
    """
    device = queries.device

    def indices(values: Sequence[Any]) -> Tensor:
        return on_device(torch.tensor(values, dtype=torch.long), device)

    own_rows, query_ids, passage_ids = map(indices, (batch.own, batch.query_ids, batch.passage_ids))
    own, own_ids = queries[own_rows], query_ids[own_rows]  # iq_ii
    all_own, all_passages = (gather_rows(x, batch.sizes) for x in (own, passages))
    all_own_ids, all_passage_ids = gather_rows(torch.stack([own_ids, passage_ids], dim=1), batch.sizes).unbind(1)
    known = _tuple_ids(all_own_ids, all_passage_ids)

    def unknown(queries_of: Tensor, passages_of: Tensor) -> Tensor:
        return ~torch.isin(_tuple_ids(queries_of, passages_of), known)

    def paired(candidates: list[list[int]]) -> Negatives:
        """Return the similarities (B, most) of p_i with the candidate queries of each row."""
        most = max(map(len, candidates))
        # Shorter rows are padded with their own positive, which is masked.
        filled = [row + [mine] * (most - len(row)) for row, mine in zip(candidates, batch.own, strict=True)]
        index = indices(filled)
        return Negatives((passages @ queries.T).gather(1, index), unknown(query_ids[index], passage_ids.unsqueeze(1)))

    negatives: dict[Variable, Negatives] = {}
    pairs = Negatives(passages @ all_own.T, unknown(all_own_ids, passage_ids.unsqueeze(1)))
    if "P" in objective.variables:
        similarities = own @ all_passages.T
        mask = unknown(own_ids.unsqueeze(1), all_passage_ids)
        if same_tower_negatives:
            similarities = torch.cat([similarities, own @ all_own.T], dim=1)
            mask = torch.cat([mask, mask & pairs.mask], dim=1)
        negatives["P"] = Negatives(similarities, mask)
    if "I" in objective.variables:
        negatives["I"] = paired(batch.instruction_candidates)
    if "IQ" in objective.variables:
        negatives["IQ"] = paired(batch.query_candidates) if batch.query_candidates else pairs
    if "PIQ" in objective.variables:
        index = indices(batch.instruction_candidates)
        every_pair = gather_rows(queries[index], batch.sizes).flatten(0, 1)  # iq_jk of all rows k, then j
        every_id = gather_rows(query_ids[index], batch.sizes).flatten()
        triples = _tuple_ids(every_id.unsqueeze(1), all_passage_ids).flatten()
        similarities = (every_pair @ all_passages.T).flatten().expand(len(own), -1)
        negatives["PIQ"] = Negatives(similarities, triples != _tuple_ids(own_ids, passage_ids).unsqueeze(1))
    return Scores((own * passages).sum(dim=1), negatives)


def _tuple_ids(query_ids: Tensor, passage_ids: Tensor) -> Tensor:
    """Hash (instruction, query, passage) from the hashes of its texts; integers wrap around."""
    return query_ids * _ODD + passage_ids


def screened(negatives: Negatives, teacher: Tensor, teacher_positive: Tensor, margin: float, kept: Tensor) -> Negatives:
    """Mask false negatives: those with a teacher similarity of at least that of the row's positive minus `margin`.

    This is the absolute margin of GISTEmbed and NV-Retriever, on cosines.

    Args:
        negatives: (B, N) candidates.
        teacher: (B, N) similarities of the candidates by the teacher.
        teacher_positive: (B,) similarities of the positives by the teacher.
        margin: Margin; a higher one masks more.
        kept: (B, N) bool, candidates that the teacher does not screen.
    """
    similar = teacher >= teacher_positive.unsqueeze(1) - margin
    return Negatives(negatives.similarities, negatives.mask & (kept | ~similar))
