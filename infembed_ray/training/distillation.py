"""Distillation: a teacher's scores of a row's passage and hard negatives train the similarities."""

import torch
from torch import Tensor

from infembed_ray.config.training import Distillation
from infembed_ray.modeling.layout import on_device
from infembed_ray.training.collate import Batch


def distill(settings: Distillation, batch: Batch, queries: Tensor, passages: Tensor, temperature: float) -> Tensor:
    """Compute the distillation loss of a worker's share of a step, from the (n, d) and (m, d) vectors of its texts."""
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
    settings: Distillation, similarities: Tensor, teacher: Tensor, mask: Tensor, temperature: float
) -> Tensor:
    """Compare the similarities of each row's candidates with a teacher's scores: KL(softmax(t) || softmax(s)).

    The logits are s = similarities / temperature and t = teacher / teacher_temperature.

    Args:
        settings: Temperature of the teacher.
        similarities: (B, 1 + N) cosine similarities.
        teacher: (B, 1 + N) scores of the teacher.
        mask: (B, 1 + N) bool, False where there is no candidate.
        temperature: Divisor of the similarities.

    Returns:
        Scalar mean over all B rows. A row without negatives or without scores counts as 0.
    """
    student, taught = similarities / temperature, teacher / settings.teacher_temperature
    least = torch.finfo(student.dtype).min
    ours, theirs = (logits.masked_fill(~mask, least).log_softmax(dim=1) for logits in (student, taught))
    return (theirs.exp() * (theirs - ours).masked_fill(~mask, 0.0)).sum(dim=1).mean()
