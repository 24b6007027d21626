"""Distillation losses against loops in float64, and their gradients against finite differences."""

import math

import pytest
import torch

from infembed_ray.config.training import Distillation
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.training.collate import collate, flatten
from infembed_ray.training.distillation import distill, distillation_loss
from infembed_ray.training.losses import Objective
from tests.training.test_collate import example, record
from tests.training.test_scores import embed, model

TEMPERATURE = 0.1


def reference(student, teacher, divisor):
    """Loss of one row from lists of logits whose first is the positive's."""
    taught = [t / divisor for t in teacher]
    ours, theirs = (math.log(math.fsum(math.exp(x) for x in logits)) for logits in (student, taught))
    return math.fsum(math.exp(t - theirs) * ((t - theirs) - (s - ours)) for s, t in zip(student, taught, strict=True))


def case(rows=5, width=6):
    generator = torch.Generator().manual_seed(4)
    similarities = torch.rand(rows, width, generator=generator, dtype=torch.float64) * 2 - 1
    teacher = torch.randn(rows, width, generator=generator, dtype=torch.float64) * 8
    lengths = torch.tensor([width, 3, 1, 0, 2])
    return similarities, teacher, torch.arange(width) < lengths[:rows].unsqueeze(1)


@pytest.mark.parametrize("divisor", [1.0, 3.0])
def test_losses_match_loops_over_the_candidates(divisor):
    similarities, teacher, mask = case()
    settings = Distillation(teacher_temperature=divisor)
    got = distillation_loss(settings, similarities, teacher, mask, TEMPERATURE)
    expected = 0.0
    for row, keep in enumerate(mask):
        if keep.any():
            student = (similarities[row][keep] / TEMPERATURE).tolist()
            expected += reference(student, teacher[row][keep].tolist(), divisor)
    assert got.item() == pytest.approx(expected / len(mask), rel=1e-12)


def test_a_batch_matches_loops_over_its_texts_for_any_number_of_workers(minilm):
    """Rows of an InF-IR record have no scores and count as 0; so does an example without negatives."""
    encoder, weight = InstructionEncoder.from_pretrained(minilm), model().detach()
    records = [record(0), example(1, negatives=2), example(2, negatives=0), example(3, negatives=4, instruction="good")]
    settings, objective = Distillation(teacher_temperature=2.0), Objective.parse("uni{P}")

    def similarity(t, passage):
        (query,), (answer,) = (
            embed(weight, tokens)
            for tokens in (encoder.tokenize_queries([t.query], [t.instruction]), encoder.tokenize_passages([passage]))
        )
        return float(query @ answer)

    rows = [t for r in records for t in flatten(r)]
    expected = sum(
        reference([similarity(t, p) / TEMPERATURE for p in (t.passage, *t.negatives)], t.scores, 2.0)
        for t in rows
        if t.scores
    )
    for shares in ([records], [records[:2], records[2:]], [records[:1], records[1:]]):
        total = 0.0
        for rank in range(len(shares)):
            batch = collate(encoder, shares, rank, objective)
            queries, passages = (embed(weight, texts) for texts in (batch.queries, batch.passages))
            total += distill(settings, batch, queries, passages, TEMPERATURE) * batch.share / len(shares)
        assert total.item() == pytest.approx(expected / len(rows), rel=1e-9)
