"""The marginal objectives as a loss module with the interface of sentence-transformers' losses."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from infembed_ray.config.training import Variable
from infembed_ray.errors import InputError
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.modeling.tokenizer import Tokens
from infembed_ray.records.tuples import TrainingRecord
from infembed_ray.training.collate import collate
from infembed_ray.training.losses import NCE, Negatives, Objective, marginal_loss
from infembed_ray.training.scores import score_batch


class MarginalLoss(nn.Module):
    """Compute a training objective of a batch of records, or of embeddings (paper, Eq. 6-21).

    ```python
    from infembed_ray import InstructionEncoder, MarginalLoss, load_records

    encoder = InstructionEncoder.from_pretrained("runs/quickstart/checkpoint")
    MarginalLoss(encoder, "multi{P,I}")(load_records("runs/quickstart/records")[:4]).backward()
    ```

    Args:
        encoder: embeds the texts, on any device; its parameters are the module's. None: for embeddings only.
        objective: `uni{...}` or `multi{...}` over P, I and IQ, or `nce{PIQ}`.
        temperature: divisor of the cosines.
        instruction_negatives: I-negatives per row of records; None: all other instructions of the batch.
        count_positive_once: `multi` only; False counts the positive once for each variable, as Eq. 18-21 do.

    Raises:
        InputError: there is no such objective.
    """

    def __init__(
        self,
        encoder: InstructionEncoder | None = None,
        objective: str = "multi{P,I}",
        temperature: float = 0.05,
        instruction_negatives: int | None = None,
        count_positive_once: bool = True,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.objective = Objective.parse(objective)
        self.temperature = temperature
        self.instruction_negatives = instruction_negatives
        self.count_positive_once = count_positive_once

    def forward(self, records: Sequence[TrainingRecord]) -> Tensor:
        """Return the scalar loss of records as one batch: an InF-IR record gives three rows, an example gives one.

        A known positive of the batch is never a negative.

        Raises:
            InputError: the loss has no encoder.
        """
        if self.encoder is None:
            raise InputError("encoder=None: a loss of records needs an encoder; give one, or give embeddings")
        batch = collate(self.encoder, [records], 0, self.objective, instruction_negatives=self.instruction_negatives)
        queries, passages = (_embed(self.encoder, texts) for texts in (batch.queries, batch.passages))
        scores = score_batch(self.objective, batch, queries, passages)
        return self._loss(scores.positive, scores.negatives)

    def compute_loss_from_embeddings(
        self, queries: Tensor, passages: Tensor, instructed: Tensor | None = None
    ) -> Tensor:
        """Return the scalar loss of B rows; all other rows are negatives.

        Args:
            queries: (B, d) embeddings iq_ii of each row's instruction and query; they are normalised here.
            passages: (B, d) embeddings p_i.
            instructed: (B, N, d) embeddings iq_ji of each row's query under N other instructions; needed for I.

        Raises:
            InputError: the shapes do not fit, `instructed` is missing, or the objective is `nce{PIQ}`.
        """
        if self.objective == NCE:
            raise InputError(f"objective={NCE}: needs all pairs of instructions and queries; give records")
        if queries.shape != passages.shape or queries.ndim != 2:
            fault = f"shape {tuple(passages.shape)}, and queries have {tuple(queries.shape)}"
            raise InputError.of("passages", None, fault, "give (B, d) of both")
        queries, passages = normalize(queries, dim=-1), normalize(passages, dim=-1)
        cosines = queries @ passages.T
        others = ~torch.eye(len(cosines), dtype=torch.bool, device=cosines.device)
        negatives: dict[Variable, Negatives] = {"P": Negatives(cosines, others), "IQ": Negatives(cosines.T, others)}
        if "I" in self.objective.variables:
            if instructed is None or instructed.ndim != 3 or instructed[:, 0].shape != queries.shape:
                shape = None if instructed is None else tuple(instructed.shape)
                remedy = f"{self.objective} contrasts instructions: give (B, N, d) with B, d = {tuple(queries.shape)}"
                raise InputError(f"instructed: {shape}; {remedy}")
            similarities = torch.einsum("bd,bnd->bn", passages, normalize(instructed, dim=-1))
            negatives["I"] = Negatives(similarities, torch.ones_like(similarities, dtype=torch.bool))
        return self._loss(cosines.diagonal(), negatives)

    def _loss(self, positive: Tensor, negatives: Mapping[Variable, Negatives]) -> Tensor:
        return marginal_loss(self.objective, positive, negatives, self.temperature, self.count_positive_once)


def _embed(encoder: InstructionEncoder, texts: Sequence[Tokens]) -> Tensor:
    """Embed texts of one side in one pass, with gradients; (texts, d) unit vectors in their order."""
    passes = list(encoder.layouts(texts, batch_tokens=sum(map(len, texts)) ** 2))
    order = torch.tensor([row for rows, _ in passes for row in rows], device=encoder.device)
    return torch.cat([encoder(layout) for _, layout in passes])[order.argsort()]
