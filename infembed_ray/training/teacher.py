"""False-negative screening: a frozen teacher encoder masks in-batch negatives that it finds similar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from infembed_ray.config.training import TrainSettings
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.records.tuples import TrainingRecord
from infembed_ray.training.collate import collate, flatten
from infembed_ray.training.losses import Objective
from infembed_ray.training.scores import Scores, score_batch, screened

_ROWS_AS_CANDIDATES = Objective("multi", ("P", "IQ"))


class Teacher:
    """Screens the candidates of P and IQ that are rows of other records.

    The candidates of I, the queries of `iq_negatives=ik`, and the negatives of the row's own record (the other two rows of
    an InF-IR record, the hard negatives of an example) are not screened. They were judged negatives when they were written
    or mined, and a teacher that does not follow instructions would find them the most similar.

    Args:
        encoder: Teacher on this worker's device, with its own tokenizer and template.
    """

    def __init__(self, encoder: InstructionEncoder, settings: TrainSettings) -> None:
        self._encoder = encoder.eval().requires_grad_(False)
        self._settings = settings

    @torch.no_grad()
    def screen(self, scores: Scores, shares: Sequence[Sequence[TrainingRecord]], rank: int) -> Scores:
        """Return the scores with fewer negatives; every worker must call it.

        Args:
            scores: Scores of the model in training, for `shares` and `rank`.
            shares, rank: See `collate`.
        """
        batch = collate(self._encoder, shares, rank, _ROWS_AS_CANDIDATES)
        device = scores.positive.device
        queries, passages = (
            torch.from_numpy(self._encoder.embed(texts)).to(device) for texts in (batch.queries, batch.passages)
        )
        opinion = score_batch(_ROWS_AS_CANDIDATES, batch, queries, passages, self._settings.same_tower_negatives)
        tuples = [len(flatten(record)) for share in shares for record in share]
        records = torch.arange(len(tuples), device=device).repeat_interleave(torch.tensor(tuples, device=device))
        hard = records.repeat_interleave(torch.tensor(batch.hard_counts, device=device))
        first = sum(batch.sizes[:rank])
        mine = records[first : first + len(batch.own)].unsqueeze(1)
        of_candidates = {"P": torch.cat([records, hard, records]), "IQ": records}  # P: the last ones with SamToNe only
        negatives = dict(scores.negatives)
        for variable, theirs in opinion.negatives.items():
            if variable in negatives and not (variable == "IQ" and self._settings.iq_negatives == "ik"):
                judged = mine == of_candidates[variable][: theirs.similarities.shape[1]]
                negatives[variable] = screened(
                    negatives[variable], theirs.similarities, opinion.positive, self._settings.teacher_margin, judged
                )
        return replace(scores, negatives=negatives)
