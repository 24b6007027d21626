"""The encoder against sentence-transformers and transformers themselves, on a real encoder and a tiny decoder."""

import json
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, Qwen2Config, Qwen2Model

from infembed_ray.errors import InputError
from infembed_ray.modeling.encoder import InstructionEncoder, length_sorted_batches, model_identity

INSTRUCTIONS = ["For nurses, in plain words; no brand names.", "As a table."]
QUERIES = ["how is aspirin dosed", "what does a very long question about a simple thing look like in practice"]


@pytest.fixture(scope="module")
def decoder(minilm, tmp_path_factory):
    """A random Qwen2 with MiniLM's tokenizer, saved as a plain Hugging Face directory."""
    path = tmp_path_factory.mktemp("decoder")
    tokenizer = AutoTokenizer.from_pretrained(minilm)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        architectures=["Qwen2ForCausalLM"],
    )
    Qwen2Model(config).save_pretrained(path)
    config.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("backbone", ["minilm", "decoder"])
def test_a_saved_checkpoint_embeds_as_sentence_transformers_does(backbone, request, tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    ours = InstructionEncoder.from_pretrained(request.getfixturevalue(backbone))
    ours.save_pretrained(tmp_path)
    theirs = sentence_transformers.SentenceTransformer(str(tmp_path), device="cpu")
    texts = [f"{i} {q}" for i, q in zip(INSTRUCTIONS, QUERIES, strict=True)]
    again = InstructionEncoder.from_pretrained(str(tmp_path))
    mine = again.encode_queries(QUERIES, INSTRUCTIONS)
    np.testing.assert_allclose(mine, ours.encode_queries(QUERIES, INSTRUCTIONS), atol=1e-6)
    assert (mine * theirs.encode(texts)).sum(axis=1).min() >= 0.9999
    assert theirs.encode(texts).shape == (2, ours.dimension)


def test_decoders_pool_the_last_token_and_encoders_the_mean_unless_told_otherwise(decoder, minilm, tmp_path):
    assert InstructionEncoder.from_pretrained(decoder).pooling == "last"
    assert InstructionEncoder.from_pretrained(minilm).pooling == "mean"
    InstructionEncoder.from_pretrained(decoder, pooling="mean", template="query_first").save_pretrained(tmp_path)
    saved = InstructionEncoder.from_pretrained(str(tmp_path))
    assert (saved.pooling, saved.text.template) == ("mean", "query_first")


@pytest.mark.parametrize("backbone", ["minilm", "decoder"])
def test_batching_does_not_change_an_embedding(backbone, request):
    encoder = InstructionEncoder.from_pretrained(request.getfixturevalue(backbone))
    texts = ["one", "two words", "a passage of somewhat greater length " * 5, "four"]
    together = encoder.encode_passages(texts, batch_tokens=64)
    alone = np.concatenate([encoder.encode_passages([t]) for t in texts])
    np.testing.assert_allclose(together, alone, atol=2e-6)
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, atol=1e-6)


def test_texts_are_cut_at_their_lengths(minilm):
    encoder = InstructionEncoder.from_pretrained(minilm, query_length=16, passage_length=32)
    assert len(encoder.tokenize_queries(["word " * 100], ["do this"])[0]) == 16
    assert len(encoder.tokenize_passages(["word " * 100])[0]) == 32
    assert InstructionEncoder.from_pretrained(minilm, passage_length=4096).text.passage_length == 512  # positions


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 200))
def test_length_sorted_batches_hold_every_row_once_within_the_budget(lengths, budget):
    batches = list(length_sorted_batches(lengths, budget))
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[row] for row in batch) <= budget


def test_copies_have_one_fingerprint(minilm, tmp_path):
    original = InstructionEncoder.from_pretrained(minilm)
    shutil.copytree(minilm, tmp_path / "copy")
    (tmp_path / "copy" / "manifest.json").write_text("{}")
    assert InstructionEncoder.from_pretrained(str(tmp_path / "copy")).fingerprint() == original.fingerprint()


def test_other_weights_tokenizers_and_templates_have_other_fingerprints(minilm, tmp_path):
    """Each differs from the same saved checkpoint in one thing only."""
    encoder = InstructionEncoder.from_pretrained(minilm)
    encoder.save_pretrained(tmp_path / "saved")
    with torch.no_grad():
        next(encoder.parameters()).add_(1.0)
    encoder.save_pretrained(tmp_path / "weights")
    shutil.copytree(tmp_path / "saved", tmp_path / "tokenizer")
    tokenizer = tmp_path / "tokenizer" / "tokenizer_config.json"
    tokenizer.write_text(tokenizer.read_text().replace('"do_lower_case": true', '"do_lower_case": false'))
    prints = [
        InstructionEncoder.from_pretrained(str(tmp_path / n)).fingerprint() for n in ("saved", "weights", "tokenizer")
    ]
    prints.append(InstructionEncoder.from_pretrained(str(tmp_path / "saved"), template="query_first").fingerprint())
    assert len(set(prints)) == 4


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, "pools by pooling_mode_max_tokens; set pooling="),
        ("modules.json", [{"type": "sentence_transformers.models.Dense"}], "has a Dense module"),
    ],
)
def test_what_would_silently_embed_otherwise_is_refused(minilm, tmp_path, file, content, message):
    shutil.copytree(minilm, tmp_path / "model")
    (tmp_path / "model" / file).write_text(json.dumps(content))
    with pytest.raises(InputError, match=message):
        InstructionEncoder.from_pretrained(str(tmp_path / "model"))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("/no/such/dir", "no such model directory"),
        ("./none", "no such model directory"),
        ("org/none", "neither a model directory"),
    ],
)
def test_a_model_that_does_not_exist_is_named(model, message):
    with pytest.raises(InputError, match=message):
        model_identity(model, "model")


def test_a_directory_without_a_model_is_named(tmp_path):
    with pytest.raises(InputError, match=r"no config.json in this directory"):
        model_identity(str(tmp_path), "model")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"no \*.safetensors in this directory"):
        model_identity(str(tmp_path), "model")
    with pytest.raises(InputError, match="cannot be loaded"):
        InstructionEncoder.from_pretrained(str(tmp_path))
