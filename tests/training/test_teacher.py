"""False-negative screening with MiniLM as the teacher."""

import pytest
import torch

from infembed_ray.config.training import TrainSettings
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.records.tables import Record
from infembed_ray.training.collate import collate
from infembed_ray.training.losses import Objective
from infembed_ray.training.scores import score_batch
from infembed_ray.training.teacher import Teacher


def record(n, passage, hard):
    return Record(
        id=f"r{n}",
        query_positive="what lowers a fever",
        instruction_positive="For parents of small children.",
        instruction_negative="For nurses on a ward.",
        query_negative=f"opening hours of library {n}",
        document_positive=passage,
        hard_negative_document_1=hard,
        hard_negative_document_2=f"Library {n} opens at {n + 8} on weekdays.",
    )


@pytest.fixture(scope="module")
def shares():
    answer = "Paracetamol lowers a fever in small children; parents should mind the dose."
    again = "For small children, parents can lower a fever with paracetamol, minding the dose."
    return [[record(0, answer, answer + " Nurses too."), record(1, again, "Nurses on a ward chart a fever hourly.")]]


@pytest.mark.parametrize("same_tower", [False, True])
def test_false_negative_of_another_record_is_masked_but_not_the_own_hard_negative(minilm, shares, same_tower):
    settings = TrainSettings(
        records="r", model="m", output="o", teacher=minilm, teacher_margin=0.15, same_tower_negatives=same_tower
    )
    objective = Objective.parse("multi{P,I,IQ}")
    encoder = InstructionEncoder.from_pretrained(minilm)
    batch = collate(encoder, shares, 0, objective)
    queries, passages = (torch.from_numpy(encoder.embed(texts)) for texts in (batch.queries, batch.passages))
    scores = score_batch(objective, batch, queries, passages, same_tower)
    teacher = Teacher(InstructionEncoder.from_pretrained(minilm), settings)
    kept = teacher.screen(scores, shares, 0)
    p = scores.negatives["P"]
    assert p.mask[1, 0]
    assert p.similarities[1, 0] > scores.positive[1] - 0.15
    for variable in ("P", "IQ"):
        before, after = scores.negatives[variable].mask, kept.negatives[variable].mask
        assert (before & ~after).any()
        assert not (after & ~before).any()
        for first in (0, 3):  # the rows of a record are not screened
            own = slice(first, first + 3)
            assert torch.equal(before[own, own], after[own, own])
    assert torch.equal(kept.negatives["I"].mask, scores.negatives["I"].mask)
    assert torch.equal(kept.positive, scores.positive)
