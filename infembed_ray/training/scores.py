"""Similarities and masks of a batch: what an objective needs from its embeddings."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

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


def score_batch(objective: Objective, batch: Batch, queries: Tensor, passages: Tensor) -> Scores:
    """Compute the similarities of a batch and mask its in-batch negatives (paper, section 5.2).

    Passages and (instruction, query) pairs are those of all workers. A candidate is a negative of a row unless the tuple
    that it forms is a known positive: a tuple of the step, on any worker, with equal tokens. So a passage is not a
    negative of an instruction and query that it answers in another row, nor is a pair of another row with the same
    passage, nor an instruction for which another row has the same query and passage. For `nce{PIQ}`, every tuple but the
    row's own is a negative, as in Eq. 1. The hard negatives of all rows are candidates wherever passages are, after the
    passages of the rows. A passage that answers a row's pair, but is not the one drawn for it, is no negative of that pair.

    Args:
        objective: Objective, whose variables decide the candidates.
        batch: This worker's share of the step.
        queries: (n, d) unit vectors of `batch.queries`.
        passages: (m, d) unit vectors of `batch.passages`, or (m,) scores of a cross-encoder's pairs: a row's candidates are
            its own hard negatives then.
    """
    if passages.ndim == 1:
        return _score_pairs(batch, passages)
    device = queries.device
    own_rows, query_ids, passage_ids = (_on(v, device) for v in (batch.own, batch.query_ids, batch.passage_ids))
    own, own_ids = queries[own_rows], query_ids[own_rows]  # iq_ii
    (passages, hard), (passage_ids, hard_ids) = (x.tensor_split([len(own)]) for x in (passages, passage_ids))
    all_own, all_passages = (gather_rows(x, batch.sizes) for x in (own, passages))
    all_own_ids, all_passage_ids = gather_rows(torch.stack([own_ids, passage_ids], dim=1), batch.sizes).unbind(1)
    positives = _tuple_ids(all_own_ids, all_passage_ids)
    if any(batch.hard_counts):
        all_passages = torch.cat([all_passages, gather_rows(hard, batch.hard_sizes)])
        all_passage_ids = torch.cat([all_passage_ids, gather_rows(hard_ids, batch.hard_sizes)])
    if any(batch.other_sizes):
        rows, others = _on(batch.other_positives, device).reshape(-1, 2).unbind(1)
        positives = torch.cat([positives, gather_rows(_tuple_ids(own_ids[rows], others), batch.other_sizes)])

    def unknown(queries_of: Tensor, passages_of: Tensor) -> Tensor:
        return ~torch.isin(_tuple_ids(queries_of, passages_of), positives)

    def paired(candidates: list[list[int]]) -> Negatives:
        """Return the similarities (B, most) of p_i with the candidate queries of each row."""
        index = _on(_rectangle(candidates, batch.own), device)
        return Negatives((passages @ queries.T).gather(1, index), unknown(query_ids[index], passage_ids.unsqueeze(1)))

    negatives: dict[Variable, Negatives] = {}
    pairs = Negatives(passages @ all_own.T, unknown(all_own_ids, passage_ids.unsqueeze(1)))
    if "P" in objective.variables:
        negatives["P"] = Negatives(own @ all_passages.T, unknown(own_ids.unsqueeze(1), all_passage_ids))
    if "I" in objective.variables:
        negatives["I"] = paired(batch.instruction_candidates)
    if "IQ" in objective.variables:
        negatives["IQ"] = paired(batch.query_candidates) if batch.query_candidates else pairs
    if "PIQ" in objective.variables:
        similarities, ids = _every_tuple(batch, queries, query_ids, all_passages, all_passage_ids)
        mask = ids != _tuple_ids(own_ids, passage_ids).unsqueeze(1)
        negatives["PIQ"] = Negatives(similarities.expand(len(own), -1), mask)
    return Scores((own * passages).sum(dim=1), negatives)


def _score_pairs(batch: Batch, scores: Tensor) -> Scores:
    rows = batch.sizes[batch.rank]
    counts = batch.hard_counts[sum(batch.sizes[: batch.rank]) :][:rows]
    negatives = pad_sequence(scores[rows:].split(counts), batch_first=True)
    mask = torch.arange(negatives.shape[1], device=scores.device) < _on(counts, scores.device).unsqueeze(1)
    return Scores(scores[:rows], {"P": Negatives(negatives, mask)})


def _every_tuple(
    batch: Batch, queries: Tensor, query_ids: Tensor, passages: Tensor, passage_ids: Tensor
) -> tuple[Tensor, Tensor]:
    """Return similarities and hashes of all tuples of all workers, p_m . iq_jk of all rows k, then j, then m."""
    index = _on(batch.instruction_candidates, queries.device)
    pairs = gather_rows(queries[index], batch.sizes).flatten(0, 1)
    ids = gather_rows(query_ids[index], batch.sizes).flatten()
    return (pairs @ passages.T).flatten(), _tuple_ids(ids.unsqueeze(1), passage_ids).flatten()


def _rectangle(candidates: list[list[int]], own: list[int]) -> list[list[int]]:
    """Extend shorter rows by their own positive, which is masked; the width is 0 if no row has candidates."""
    most = max(map(len, candidates))
    return [row + [mine] * (most - len(row)) for row, mine in zip(candidates, own, strict=True)]


def _on(values: Sequence[Any], device: torch.device) -> Tensor:
    return on_device(torch.tensor(values, dtype=torch.long), device)


def _tuple_ids(query_ids: Tensor, passage_ids: Tensor) -> Tensor:
    """Hash (instruction, query, passage) from the hashes of its texts; integers wrap around."""
    return query_ids * _ODD + passage_ids
