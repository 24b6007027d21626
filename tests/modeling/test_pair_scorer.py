from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder as Reference

from infembed_ray.config.evaluation import RetrieverSettings
from infembed_ray.modeling.pair_scorer import CrossEncoder
from infembed_ray.modeling.rerankers import Classifier
from tests.evaluation.retrievers import models

pytestmark = pytest.mark.integration

PASSAGES = ["aspirin is a drug", "bread is baked from flour and water " * 4, "", "no brand names, in plain words " * 2]


def test_a_cross_encoder_scores_passages_under_an_instruction_as_sentence_transformers_does(tmp_path: Path) -> None:
    path = models.bert(tmp_path, labels=1)
    formats = {"instructed_query": "{instruction} {query}", "plain_query": "{query}"}
    settings = RetrieverSettings(kind="classifier", model=path, pair_length=64, **formats)
    scorer = CrossEncoder(Classifier(settings, "cpu", 4096))
    reference = Reference(path, device="cpu", max_length=64)
    for instruction, asked in (("for nurses", "for nurses how is aspirin dosed"), (None, "how is aspirin dosed")):
        expected = reference.predict([(asked, p) for p in PASSAGES], activation_fn=torch.nn.Identity())
        for batch_tokens in (8, 4096):
            scores = scorer.score("how is aspirin dosed", instruction, PASSAGES, batch_tokens)
            np.testing.assert_allclose(scores, expected, atol=1e-5)
    pairs = scorer.tokenize("how is aspirin dosed", None, PASSAGES)
    assert [scorer.cost(pair) for pair in pairs] == [len(pair["input_ids"]) for pair in pairs]
