"""Encoders with formats against sentence-transformers and transformers."""

import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoTokenizer

from infembed_ray.config.training import Lora
from infembed_ray.errors import InputError
from infembed_ray.evaluation.retrievers import baselines
from infembed_ray.evaluation.retrievers.baselines import TextEncoder
from infembed_ray.evaluation.tasks.task import Query
from infembed_ray.modeling import adapters
from infembed_ray.modeling.encoder import InstructionEncoder
from tests.modeling import backbones

pytestmark = pytest.mark.integration

QUERIES = [
    Query("1", "how is aspirin dosed", "for nurses, in plain words"),
    Query("2", "what is bread"),
    Query("3", "how is bread baked, and why does it rise at all", "no brand names"),
]
PASSAGES = ["aspirin is a drug", "bread is baked from flour and water " * 9, "a passage about bread"]
E5 = {
    "instructed_query": "query: {query} {instruction}",
    "plain_query": "query: {query}",
    "passage": "passage: {passage}",
}
E5_TEXTS = [
    "query: how is aspirin dosed for nurses, in plain words",
    "query: what is bread",
    "query: how is bread baked, and why does it rise at all no brand names",
]


def load(batch_tokens=64, **settings):
    encoder = baselines.load(baselines.resolve("x", settings), "cpu", batch_tokens)
    assert isinstance(encoder, TextEncoder)
    return encoder


def close(actual, expected, atol=2e-6):
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, expected, atol=atol)


@pytest.fixture(scope="module")
def their_minilm(minilm):
    return SentenceTransformer(minilm, device="cpu")


def test_formats_give_the_embeddings_of_formatted_texts(minilm, their_minilm):
    encoder = load(model=minilm, **E5)
    close(encoder.encode_queries(QUERIES), their_minilm.encode(E5_TEXTS, normalize_embeddings=True))
    texts = [f"passage: {passage}" for passage in PASSAGES]
    close(encoder.encode_passages(PASSAGES), their_minilm.encode(texts, normalize_embeddings=True))


@pytest.mark.parametrize("how", [{}, {"share_encoder": False}, {"interaction": "cross_attention"}])
def test_our_checkpoints_keep_their_own_template(minilm, tmp_path, how):
    torch.manual_seed(0)
    own = InstructionEncoder.from_pretrained(minilm, template="instruct_query", query_prefix="q: ", **how)
    if own.passage_backbone is not None:
        with torch.no_grad():
            own.passage_backbone.embeddings.word_embeddings.weight.mul_(1.1)
    own.save_pretrained(tmp_path)
    encoder = baselines.load(baselines.resolve("x", str(tmp_path)))
    queries, instructions = [q.query for q in QUERIES], [q.instruction for q in QUERIES]
    close(encoder.encode_queries(QUERIES), own.encode_queries(queries, instructions))
    close(encoder.encode_passages(PASSAGES), own.encode_passages(PASSAGES))


def test_cross_attention_rejects_formats(minilm, tmp_path):
    InstructionEncoder.from_pretrained(minilm, interaction="cross_attention").save_pretrained(tmp_path)
    with pytest.raises(InputError, match="reads instruction and query separately, so it cannot use formats"):
        load(model=str(tmp_path), **E5)


def test_e5_mistral_ends_texts_with_eos_and_pools_it(tmp_path):
    model = backbones.write("mistral", tmp_path)
    encoder = load(baseline="e5-mistral", model=model, dtype="float32")
    tokenizer, plain = AutoTokenizer.from_pretrained(model), AutoModel.from_pretrained(model)
    text = "Instruct: for nurses, in plain words\nQuery: how is aspirin dosed"
    ids = tokenizer(text, return_tensors="pt").input_ids
    ids = torch.cat([ids, torch.tensor([[tokenizer.eos_token_id]])], dim=1)
    with torch.inference_mode():
        last = plain(ids).last_hidden_state[0, -1]
    close(encoder.encode_queries(QUERIES[:1])[0], torch.nn.functional.normalize(last, dim=0).numpy())


def test_saved_adapters_are_merged_into_the_model_they_were_trained_over(tmp_path):
    base = backbones.write("llama", tmp_path / "base")
    tuned = InstructionEncoder.from_pretrained(base, append_eos=True)
    adapters.add(tuned.backbones, Lora(rank=2, alpha=8, target_modules=("q_proj", "down_proj")))
    torch.manual_seed(1)
    for name, parameter in tuned.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    adapters.save(tuned.backbones, tmp_path / "adapter")
    encoder = load(baseline="repllama-v1-7b", model=base, adapter=str(tmp_path / "adapter"), dtype="float32")
    texts = ["query: how is aspirin dosed for nurses, in plain words", "query: what is bread"]
    close(encoder.encode_queries(QUERIES[:2]), tuned.encode_queries(texts), atol=1e-5)
    without = load(kind="encoder", model=base, **E5).encode_queries(QUERIES[:2])
    assert np.abs(without - encoder.encode_queries(QUERIES[:2])).max() > 0.01


def test_adapters_of_another_model_are_rejected(minilm, tmp_path):
    tuned = InstructionEncoder.from_pretrained(backbones.write("llama", tmp_path / "base"))
    adapters.add(tuned.backbones, Lora(target_modules=("q_proj",)))
    adapters.save(tuned.backbones, tmp_path / "adapter")
    with pytest.raises(InputError, match="no adapters of this model"):
        load(kind="encoder", model=minilm, adapter=str(tmp_path / "adapter"))


def test_the_identity_depends_on_weights_and_prompts(tmp_path):
    backbones.write("llama", tmp_path / "a")
    backbones.write("llama", tmp_path / "b")

    def of(**settings):
        return baselines.identity(baselines.resolve("x", settings))

    same = of(model=str(tmp_path / "a"))
    assert same == of(model=str(tmp_path / "b"))
    assert len({same, of(model=str(tmp_path / "a"), **E5), of(model=str(tmp_path / "a"), query_length=9)}) == 3
    weights = load_file(tmp_path / "b" / "model.safetensors")
    next(iter(weights.values())).view(-1)[0] = math.pi
    save_file(weights, tmp_path / "b" / "model.safetensors", {"format": "pt"})
    assert same != of(model=str(tmp_path / "b"))
