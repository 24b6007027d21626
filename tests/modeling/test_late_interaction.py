"""MaxSim against a brute-force loop over the token states of transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from infembed_ray.errors import InputError
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.modeling.formats import Question
from infembed_ray.modeling.late_interaction import LateInteraction
from tests.modeling import backbones

pytestmark = pytest.mark.integration

QUERY, INSTRUCTION = "how is aspirin dosed", "For nurses, in plain words; no brand names."
PLAIN, INSTRUCTED = Question(QUERY), Question(QUERY, INSTRUCTION)
PASSAGES = ["aspirin is a drug", "what does a passage about bread say " * 9, "bread", "For nurses , in plain words"]


@pytest.fixture(scope="module", params=["modernbert", "llama"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return backbones.write(request.param, tmp_path_factory.mktemp(request.param))


def by_hand(model: str, query: str, passages: list[str], end: bool) -> list[float]:
    tokenizer, backbone = AutoTokenizer.from_pretrained(model), AutoModel.from_pretrained(model).eval()

    def states(text: str) -> torch.Tensor:
        ids = tokenizer(text)["input_ids"] + ([tokenizer.eos_token_id] if end else [])
        with torch.inference_mode():
            found = backbone(input_ids=torch.tensor([ids])).last_hidden_state[0].double()
        return found / found.norm(dim=1, keepdim=True)

    asked, scores = states(query), []
    for passage in passages:
        tokens = states(passage)
        scores.append(sum(max(float(q @ t) for t in tokens) for q in asked) / len(asked))
    return scores


def test_scores_are_the_mean_over_query_tokens_of_the_largest_cosine(model: str) -> None:
    encoder = InstructionEncoder.from_pretrained(model)
    expected = by_hand(model, f"{INSTRUCTION} {QUERY}", PASSAGES, end=encoder.pooling == "last")
    for cache_bytes, batch_tokens in ((0, 4096), (2**20, 4096), (2**20, 16)):
        scorer = LateInteraction(encoder, cache_bytes, batch_tokens)
        for _ in range(2):  # the second time from the cache, if there is one
            scores = scorer.score([(INSTRUCTED, passage) for passage in PASSAGES])
            np.testing.assert_allclose(scores, expected, atol=1e-5)
            assert scores.dtype == np.float32
    assert np.std(expected) > 0.001


def test_an_instruction_changes_the_scores_and_pairs_of_several_queries_share_a_batch(model: str) -> None:
    scorer = LateInteraction(InstructionEncoder.from_pretrained(model))
    plain, instructed = ([(asked, passage) for passage in PASSAGES] for asked in (PLAIN, INSTRUCTED))
    scores = [*scorer.score(plain), *scorer.score(instructed)]
    assert np.abs(np.subtract(*np.split(np.array(scores), 2))).max() > 1e-3
    np.testing.assert_allclose(scorer.relevance(scorer.tokenized([*plain, *instructed])), scores, atol=1e-5)
    assert scorer.score([]).shape == (0,)


def test_a_cached_passage_costs_one_token(model: str) -> None:
    scorer = LateInteraction(InstructionEncoder.from_pretrained(model), cache_bytes=2**20)
    (pair,) = scorer.tokenized([(PLAIN, PASSAGES[1])])
    assert scorer.cost(pair) == len(pair.passage) > 20
    scorer.relevance([pair])
    assert scorer.cost(pair) == 1


def test_an_encoder_that_reads_instruction_and_query_separately_is_rejected(tmp_path: Path) -> None:
    path = backbones.write("modernbert", tmp_path)
    encoder = InstructionEncoder.from_pretrained(path, interaction="cross_attention")
    with pytest.raises(InputError, match=r"model=.*: encodes instruction and query separately"):
        LateInteraction(encoder)
