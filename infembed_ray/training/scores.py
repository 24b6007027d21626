"""From the embeddings of a batch to the similarities and masks an objective needs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from infembed_ray.config import Variable
from infembed_ray.training.collectives import gather_rows
from infembed_ray.training.objectives import Negatives, Objective
from infembed_ray.training.tuples import Batch

_ODD = 0x5851F42D4C957F2D
"""A multiplier that keeps (query, passage) apart from (passage, query), and from any other pair."""


@dataclass(frozen=True)
class Scores:
    """What `objectives.marginal_loss` takes: (B,) positives and the candidates of every variable."""

    positive: Tensor
    negatives: dict[Variable, Negatives]


def score_batch(
    objective: Objective, batch: Batch, queries: Tensor, passages: Tensor, same_tower_negatives: bool = False
) -> Scores:
    """Compare the embeddings of a batch (paper, section 5.2).

    Passages and (instruction, query) pairs are those of all workers. A candidate is a negative of a row unless the
    tuple it forms is a known positive: a tuple of the step, of whichever worker, token for token. So a passage is no
    negative for an instruction and query that it answers in another row, nor the pair of another row for a passage it
    shares, nor an instruction under which another row has the same query and passage. The row's own tuple is the first
    of the known ones. Of `nce{PIQ}` every tuple but the row's own is a negative, as Eq. 1 has it.

    Args:
        objective: which variables.
        batch: what was embedded.
        queries: (n, d) unit vectors of `batch.queries`.
        passages: (B, d) unit vectors of `batch.passages`.
        same_tower_negatives: the pairs of the other rows join the candidates of P, as similarities iq_ii . iq_kk
            (SamToNe, Moiseev et al., arXiv 2306.02516).
    """
    device = queries.device
    own_rows = torch.tensor(batch.own, device=device)
    own = queries[own_rows]  # iq_ii
    all_own, all_passages = (gather_rows(x, batch.sizes) for x in (own, passages))
    query_ids = torch.tensor(batch.query_ids, device=device)
    own_ids, passage_ids = query_ids[own_rows], torch.tensor(batch.passage_ids, device=device)
    all_own_ids, all_passage_ids = gather_rows(torch.stack([own_ids, passage_ids], dim=1), batch.sizes).unbind(1)
    known = _tuple_ids(all_own_ids, all_passage_ids)

    def unknown(queries_of: Tensor, passages_of: Tensor) -> Tensor:
        return ~torch.isin(_tuple_ids(queries_of, passages_of), known)

    def paired(candidates: list[list[int]]) -> Negatives:
        """Similarities (B, most) of p_i with the queries named for each row."""
        most = max(map(len, candidates))
        # Rows with fewer are filled up with their own positive, which is no negative.
        filled = [row + [mine] * (most - len(row)) for row, mine in zip(candidates, batch.own, strict=True)]
        index = torch.tensor(filled, dtype=torch.long, device=device)
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
        index = torch.tensor(batch.instruction_candidates, device=device)
        every_pair = gather_rows(queries[index], batch.sizes).flatten(0, 1)  # iq_jk of all rows k, then j
        every_id = gather_rows(query_ids[index], batch.sizes).flatten()
        triples = _tuple_ids(every_id.unsqueeze(1), all_passage_ids).flatten()
        similarities = (every_pair @ all_passages.T).flatten().expand(len(own), -1)
        negatives["PIQ"] = Negatives(similarities, triples != _tuple_ids(own_ids, passage_ids).unsqueeze(1))
    return Scores((own * passages).sum(dim=1), negatives)


def _tuple_ids(query_ids: Tensor, passage_ids: Tensor) -> Tensor:
    """Identities of (instruction, query, passage) from those of their texts; they wrap around, being hashes."""
    return query_ids * _ODD + passage_ids


def screened(negatives: Negatives, teacher: Tensor, teacher_positive: Tensor, margin: float, kept: Tensor) -> Negatives:
    """Drop the negatives that a teacher finds similar.

    A candidate whose teacher similarity is at least that of the row's positive less `margin` (both cosines) is no
    negative: the absolute margin of GISTEmbed and NV-Retriever.

    Args:
        negatives: (B, N) candidates.
        teacher: (B, N) the teacher's similarities of the same candidates.
        teacher_positive: (B,) the teacher's similarities of the positives.
        margin: 0 drops those as similar as the positive; more drops more.
        kept: (B, N) bool, candidates that the teacher has no say in.
    """
    similar = teacher >= teacher_positive.unsqueeze(1) - margin
    return Negatives(negatives.similarities, negatives.mask & (kept | ~similar))
