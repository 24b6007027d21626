"""Similarities and masks of a batch against loops over its texts."""

import random

import torch

from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.training.objectives import Objective
from infembed_ray.training.scores import score_batch
from infembed_ray.training.tuples import collate, flatten
from tests.training.test_tuples import record


def test_similarities_and_masks_follow_the_definitions(minilm):
    encoder = InstructionEncoder.from_pretrained(minilm).eval()
    records = [record(1), record(2), record(2)]  # the same record twice: all of it duplicates
    batch = collate(encoder, records, negatives=3, rng=random.Random(1))
    with torch.no_grad():
        scores = score_batch(Objective.parse("multi{P,I,IQ}"), batch, lambda s: encoder(*encoder.pad(s)))
    tuples = [t for r in records for t in flatten(r)]
    queries = encoder.encode_queries([t.query for t in tuples], [t.instruction for t in tuples])
    passages = encoder.encode_passages([t.passage for t in tuples])
    similarity = torch.from_numpy(queries @ passages.T)
    torch.testing.assert_close(scores.positive, similarity.diagonal(), atol=1e-5, rtol=0)
    torch.testing.assert_close(scores.negatives["P"].similarities, similarity, atol=1e-5, rtol=0)
    torch.testing.assert_close(scores.negatives["IQ"].similarities, similarity.T, atol=1e-5, rtol=0)
    for i, a in enumerate(tuples):
        for m, b in enumerate(tuples):
            same = a.passage == b.passage or (a.instruction, a.query) == (b.instruction, b.query)
            assert bool(scores.negatives["P"].mask[i, m]) is not same
            assert bool(scores.negatives["IQ"].mask[i, m]) is not same
    first = encoder.encode_queries([tuples[0].query], [tuples[0].poisoned])[0] @ passages[0]
    assert abs(float(scores.negatives["I"].similarities[0, 0]) - float(first)) < 1e-5


def test_rows_with_fewer_instruction_negatives_are_masked_at_the_end(minilm):
    encoder = InstructionEncoder.from_pretrained(minilm).eval()
    batch = collate(encoder, [record(1)], negatives=3, rng=random.Random(1))
    assert batch.negative_counts == [1, 1, 1]  # one record holds two instructions only
    with torch.no_grad():
        scores = score_batch(Objective.parse("uni{I}"), batch, lambda s: encoder(*encoder.pad(s)))
    assert scores.negatives["I"].mask.tolist() == [[True]] * 3
