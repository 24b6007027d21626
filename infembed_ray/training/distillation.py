"""Distillation: a teacher's scores of a row's passage and hard negatives train the similarities."""

from __future__ import annotations

import torch
from torch import Tensor

from infembed_ray.config.training import Distillation
from infembed_ray.modeling.layout import on_device
from infembed_ray.training.collate import Batch


def distill(
    settings: Distillation, batch: Batch, queries: Tensor, passages: Tensor, temperature: float | Tensor
) -> Tensor:
    """Compute the distillation loss of a batch; see `distillation_loss`.

    Args:
        settings: Loss, and the temperature of the teacher.
        batch: This worker's share of the micro-batch.
        queries: (n, d) unit vectors of `batch.queries`.
        passages: (m, d) unit vectors of `batch.passages`.
        temperature: Divisor of the similarities.
    """
    device = queries.device
    own = queries[on_device(torch.tensor(batch.own), device)]
    first = sum(batch.sizes[: batch.rank])
    counts = torch.tensor(batch.hard_counts[first : first + len(own)])
    lengths = torch.tensor([len(scores) for scores in batch.teacher])
    # Column 0 is the row's passage, and column n its n-th hard negative.
    columns = torch.arange(max(1, *lengths.tolist()))
    mask = columns < lengths.unsqueeze(1)
    index = (len(own) + counts.cumsum(0) - counts).unsqueeze(1) + columns - 1
    index[:, 0] = torch.arange(len(own))
    teacher = torch.zeros(mask.shape, dtype=queries.dtype)
    teacher[mask] = torch.tensor([s for scores in batch.teacher for s in scores], dtype=queries.dtype)
    index, mask, teacher = (on_device(x, device) for x in (index * mask, mask, teacher))
    return distillation_loss(settings, (own @ passages.T).gather(1, index), teacher, mask, temperature)


def distillation_loss(
    settings: Distillation, similarities: Tensor, teacher: Tensor, mask: Tensor, temperature: float | Tensor
) -> Tensor:
    """Compare the similarities of each row's candidates with a teacher's scores.

    With logits s = similarities / temperature and t = teacher / teacher_temperature, and the positive in column 0:

        margin_mse  mean over the negatives n of ((s_0 - s_n) - (t_0 - t_n)) ** 2 (arXiv 2010.02666)
        kl          KL(softmax(t) || softmax(s)) over all candidates

    Args:
        settings: Loss, and the temperature of the teacher.
        similarities: (B, 1 + N) cosine similarities.
        teacher: (B, 1 + N) scores of the teacher.
        mask: (B, 1 + N) bool, False where there is no candidate.
        temperature: Divisor of the similarities. A tensor of one element receives a gradient.

    Returns:
        Scalar mean over all B rows. A row without negatives or without scores counts as 0.
    """
    student, taught = similarities / temperature, teacher / settings.teacher_temperature
    if settings.loss == "margin_mse":
        wrong = (student[:, :1] - student[:, 1:]) - (taught[:, :1] - taught[:, 1:])
        squared = wrong.masked_fill(~mask[:, 1:], 0.0).square().sum(dim=1)
        return (squared / mask[:, 1:].sum(dim=1).clamp(min=1)).mean()
    least = torch.finfo(student.dtype).min
    ours, theirs = (logits.masked_fill(~mask, least).log_softmax(dim=1) for logits in (student, taught))
    return (theirs.exp() * (theirs - ours).masked_fill(~mask, 0.0)).sum(dim=1).mean()
