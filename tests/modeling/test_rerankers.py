"""Batched rerankers against an independent computation, one pair at a time."""

import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import CrossEncoder
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from infembed_ray.errors import InputError
from infembed_ray.evaluation.retrievers import baselines
from infembed_ray.evaluation.tasks.task import Query
from tests.evaluation.retrievers import models

pytestmark = pytest.mark.integration

NURSES = Query("1", "how is aspirin dosed", "for nurses")
PLAIN = Query("2", "what is bread")
PASSAGES = ["aspirin is a drug", "bread is baked from flour and water " * 4, "", "no brand names, in plain words " * 2]
PAIRS = [(query, passage) for query in (NURSES, PLAIN) for passage in PASSAGES]
PROMPT = "Query: {query}\nDocument: {passage}\nRelevant:"


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    return models.t5(tmp_path_factory.mktemp("t5"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return models.llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def berts(tmp_path_factory):
    return {labels: models.bert(tmp_path_factory.mktemp(f"bert{labels}"), labels) for labels in (0, 1, 2, 3)}


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    return models.byte_level(tmp_path_factory.mktemp("byte_level"))


def load(batch_tokens=64, **settings):
    resolved = baselines.resolve("x", settings)
    return baselines.load(resolved, "cpu", batch_tokens)


def monot5(model, **settings):
    return load(baseline="monot5-base", model=model, **settings)


def causal(model, **settings):
    formats = {"instructed_query": "{query} {instruction}", "plain_query": "{query}", "pair": PROMPT}
    return load(kind="causal", model=model, **(formats | {"answers": ("▁true", "▁false")} | settings))


def classifier(model, **settings):
    return load(
        kind="classifier", model=model, instructed_query="{query} {instruction}", plain_query="{query}", **settings
    )


def asked(query: Query) -> str:
    return f"{query.query} {query.instruction}" if query.instruction else query.query


def logit(probability: float) -> float:
    return math.log(probability / (1 - probability))


def test_monot5_gives_the_log_odds_of_true_as_the_first_generated_token(t5):
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(t5), AutoTokenizer.from_pretrained(t5)
    false, true = tokenizer.convert_tokens_to_ids(["▁false", "▁true"])
    expected = []
    for query, passage in PAIRS:
        ids = tokenizer(f"Query: {asked(query)} Document: {passage} Relevant:", return_tensors="pt").input_ids
        made = model.generate(ids, max_new_tokens=1, do_sample=False, return_dict_in_generate=True, output_logits=True)
        expected.append(logit(made.logits[0][0].double()[[false, true]].softmax(0)[1].item()))
    scores = monot5(t5).score(PAIRS)
    np.testing.assert_allclose(scores, expected, atol=1e-4)
    assert scores.dtype == np.float32
    assert scores.std() > 0.1


def test_a_causal_reranker_gives_the_log_odds_of_its_next_token(llama):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(llama), AutoTokenizer.from_pretrained(llama)
    false, true = tokenizer.convert_tokens_to_ids(["▁false", "▁true"])
    expected = []
    for query, passage in PAIRS:
        ids = tokenizer(f"Query: {asked(query)}\nDocument: {passage}\nRelevant:", return_tensors="pt").input_ids
        with torch.inference_mode():
            expected.append(logit(model(ids).logits[0, -1].double()[[false, true]].softmax(0)[1].item()))
    for batch_tokens in (1, 64, 10_000):
        scores = (
            causal(llama).score(PAIRS) if batch_tokens == 64 else causal(llama, batch_tokens=batch_tokens).score(PAIRS)
        )
        np.testing.assert_allclose(scores, expected, atol=1e-4)
    assert np.std(expected) > 0.1


def test_a_classifier_of_one_class_scores_as_sentence_transformers_cross_encoder_does(berts):
    theirs = CrossEncoder(berts[1], device="cpu", max_length=64)
    expected = theirs.predict([(asked(q), p) for q, p in PAIRS], activation_fn=torch.nn.Identity())
    np.testing.assert_allclose(classifier(berts[1], pair_length=64).score(PAIRS), expected, atol=1e-5)


def test_long_passages_are_truncated_but_not_query_or_prompt(t5, llama, berts):
    long = "bread is baked from flour and water " * 40
    for make, model, before, after in (
        (monot5, t5, "Query: how is aspirin dosed for nurses Document: ", " Relevant:"),
        (causal, llama, "Query: how is aspirin dosed for nursesDocument: ", "Relevant:"),  # it knows no line ends
    ):
        reranker = make(model, pair_length=48)
        (read,) = reranker._tokenize([(asked(NURSES), long)])
        assert 46 <= len(read["input_ids"]) <= 48
        kept = reranker.tokenizer.decode(read["input_ids"], skip_special_tokens=True)
        assert kept.startswith(before)
        assert kept.endswith(after)
        passage = kept.removeprefix(before).removesuffix(after)
        assert passage
        assert long.startswith(passage)
        whole = make(model, pair_length=200).score([(NURSES, passage)])
        np.testing.assert_allclose(reranker.score([(NURSES, long)]), whole, atol=1e-5)
    reranker = classifier(berts[2], pair_length=24)
    kept = reranker.tokenizer.decode(reranker._tokenize([(asked(NURSES), long)])[0]["input_ids"])
    assert kept.startswith(f"[CLS] {asked(NURSES)} [SEP] bread")


def test_a_query_longer_than_a_pair_is_truncated(t5, berts):
    endless = Query("3", "how is aspirin dosed " * 40)
    for reranker in (monot5(t5, pair_length=32), classifier(berts[1], pair_length=32)):
        assert len(reranker._tokenize([(endless.query, "a passage")])[0]["input_ids"]) <= 32
        assert np.isfinite(reranker.score([(endless, "a passage")] * 3)).all()


@pytest.mark.parametrize("pair_length", range(36, 40))
def test_truncation_never_divides_a_character_of_several_tokens(byte_level, pair_length):
    reranker = causal(byte_level, answers=("y", "n"), pair="Q: {query} D: {passage} R:", pair_length=pair_length)
    (read,) = reranker._tokenize([("what", "\N{BREAD}" * 40)])
    assert pair_length - 4 < len(read["input_ids"]) <= pair_length
    kept = reranker.tokenizer.decode(read["input_ids"])
    assert set(kept.removeprefix("Q: what D: ").removesuffix(" R:")) == {"\N{BREAD}"}


def test_adapters_are_merged_or_refused(llama, tmp_path):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    tuned = get_peft_model(
        AutoModelForCausalLM.from_pretrained(llama), LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    )
    tuned.save_pretrained(tmp_path / "adapter")
    tuned.merge_and_unload().save_pretrained(tmp_path / "merged")
    AutoTokenizer.from_pretrained(llama).save_pretrained(tmp_path / "merged")
    scores = causal(llama, adapter=str(tmp_path / "adapter")).score(PAIRS)
    np.testing.assert_allclose(scores, causal(str(tmp_path / "merged")).score(PAIRS), atol=1e-4)
    assert np.abs(scores - causal(llama).score(PAIRS)).max() > 0.01
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(b"cut short")
    with pytest.raises(InputError, match=r"adapter=.*no adapters of this model"):
        causal(llama, adapter=str(tmp_path / "adapter"))


def test_answers_must_be_in_the_vocabulary(t5):
    with pytest.raises(InputError, match=r"answers=.*'maybe' is not in the vocabulary of model="):
        monot5(t5, answers=("maybe", "▁false"))


def test_a_score_that_is_not_finite_names_the_pair(berts, tmp_path):
    broken = models.bert(tmp_path, 1)
    weights = load_file(tmp_path / "model.safetensors")
    weights["classifier.weight"][:] = 3e38  # finite, but no product with it
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=r"score of 'how is aspirin dosed' with 'aspirin is a drug' is not finite"):
        classifier(broken).score(PAIRS)
