"""The encoder against sentence-transformers and transformers themselves, on real and tiny backbones of many families."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModel, AutoTokenizer

from infembed_ray.errors import InputError
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.modeling.layout import length_sorted_batches
from tests.modeling.backbones import DECODERS, FAMILIES

INSTRUCTIONS = ["For nurses, in plain words; no brand names.", "As a table."]
QUERIES = ["how is aspirin dosed", "what does a very long question about a simple thing look like in practice"]
PASSAGES = ["Aspirin.", "what does a passage about bread say " * 5, "word " * 200]


def sentence_transformer(path):
    return pytest.importorskip("sentence_transformers").SentenceTransformer(str(path), device="cpu")


@pytest.mark.integration
@pytest.mark.parametrize("pooling", ["auto", "mean", "last", "cls"])
@pytest.mark.parametrize("family", ["minilm", *FAMILIES])
def test_sentence_transformers_gives_the_same_embeddings_for_a_saved_checkpoint(
    family, pooling, backbone_path, tmp_path
):
    ours = InstructionEncoder.from_pretrained(
        backbone_path(family), pooling=pooling, query_length=64, passage_length=64
    )
    ours.save_pretrained(tmp_path)
    theirs = sentence_transformer(tmp_path)
    texts = [f"{i} {q}" for i, q in zip(INSTRUCTIONS, QUERIES, strict=True)]
    again = InstructionEncoder.from_pretrained(str(tmp_path))
    assert (again.pooling, again.text) == (ours.pooling, ours.text)
    mine = again.encode_queries(QUERIES, INSTRUCTIONS)
    np.testing.assert_allclose(mine, ours.encode_queries(QUERIES, INSTRUCTIONS), atol=1e-6)
    assert (mine * theirs.encode(texts)).sum(axis=1).min() >= 0.9999
    assert (again.encode_passages(PASSAGES) * theirs.encode(PASSAGES)).sum(axis=1).min() >= 0.9999
    assert theirs.encode(texts).shape == (2, ours.dimension)


@pytest.mark.parametrize("family", ["minilm", "qwen2"])
def test_a_single_text_has_a_single_vector_as_in_sentence_transformers(family, backbone_path, tmp_path):
    encoder = InstructionEncoder.from_pretrained(backbone_path(family))
    encoder.save_pretrained(tmp_path)
    theirs = sentence_transformer(tmp_path)
    query, instruction, passage = QUERIES[0], INSTRUCTIONS[0], PASSAGES[1]
    for mine, text in (
        (encoder.encode_passages(passage), passage),
        (encoder.encode_queries(query), query),
        (encoder.encode_queries(query, instruction), f"{instruction} {query}"),
    ):
        assert mine.shape == theirs.encode(text).shape == (encoder.dimension,)
        assert mine @ theirs.encode(text) >= 0.9999
    assert (encoder.encode_passages(passage) == encoder.encode_passages([passage])[0]).all()
    assert (encoder.encode_queries(query, instruction) == encoder.encode_queries([query], [instruction])[0]).all()
    assert (encoder.encode_queries(query, [instruction]) == encoder.encode_queries(query, instruction)).all()
    of_all = encoder.encode_queries(QUERIES, instruction)
    assert (of_all == encoder.encode_queries(QUERIES, [instruction] * 2)).all()
    assert of_all.shape == (2, encoder.dimension)
    assert encoder.encode_queries([], instruction).shape == (0, encoder.dimension)


def test_encode_takes_texts_as_they_are_and_agrees_with_sentence_transformers(backbone_path, tmp_path, capsys):
    encoder = InstructionEncoder.from_pretrained(
        backbone_path("minilm"), query_prefix="query: ", passage_prefix="passage: "
    )
    encoder.save_pretrained(tmp_path)
    theirs = sentence_transformer(tmp_path)
    expected = theirs.encode(PASSAGES, prompt="")
    vectors = encoder.encode(PASSAGES, show_progress_bar=True)
    assert "encode: 3/3" in capsys.readouterr().out
    assert (vectors * expected).sum(axis=1).min() >= 0.9999
    assert (vectors * encoder.encode_passages(PASSAGES)).sum(axis=1).max() < 0.9999
    np.testing.assert_allclose(encoder.encode([f"passage: {p}" for p in PASSAGES]), encoder.encode_passages(PASSAGES))
    np.testing.assert_allclose(
        encoder.encode([f"query: {q}" for q in QUERIES]), encoder.encode_queries(QUERIES), atol=1e-6
    )
    assert encoder.encode("Aspirin.").shape == (encoder.dimension,)
    assert encoder.encode([]).shape == (0, encoder.dimension)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("first", "second"), [((3, 8), (5, 8)), ((8,), (5, 8)), ((3, 8), (8,)), ((8,), (8,))])
def test_similarity_is_the_matrix_of_cosines_as_in_sentence_transformers(first, second):
    random = np.random.default_rng(0)
    a, b = random.normal(size=first), random.normal(size=second)
    expected = pytest.importorskip("sentence_transformers.util").cos_sim(a, b).numpy()
    found = InstructionEncoder.similarity(a, b)
    assert (found.shape, found.dtype) == (expected.shape, np.float32)
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("queries", "instructions", "counts"),
    [
        (QUERIES, INSTRUCTIONS[:1], "1 for 2 queries"),
        (QUERIES, [], "0 for 2 queries"),
        ("q", ["i", "j"], "2 for 1 quer"),
    ],
)
def test_a_wrong_number_of_instructions_is_an_error_with_both_counts(queries, instructions, counts, backbone_path):
    with pytest.raises(InputError, match=rf"^instructions: {counts}.*; give one for each query"):
        InstructionEncoder.from_pretrained(backbone_path("minilm")).encode_queries(queries, instructions)


@pytest.mark.parametrize("family", DECODERS)
def test_with_last_token_pooling_every_text_ends_with_eos_also_a_truncated_one(family, backbone_path, tmp_path):
    encoder = InstructionEncoder.from_pretrained(backbone_path(family), passage_length=16)
    eos = encoder.tokenizer.eos_token_id
    plain = AutoTokenizer.from_pretrained(backbone_path(family))
    short, long = encoder.tokenize_passages(["how is aspirin", "word " * 50])
    assert short.ids == [*plain("how is aspirin")["input_ids"], eos]
    assert (len(long), long.ids[-1]) == (16, eos)
    for keeps in ({"pooling": "mean"}, {"append_eos": False}):
        other = InstructionEncoder.from_pretrained(backbone_path(family), **keeps)
        assert other.tokenize_passages(["how is aspirin"])[0].ids == short.ids[:-1]
    # What is made for embedding is left as it is.
    other.save_pretrained(tmp_path)
    again = InstructionEncoder.from_pretrained(str(tmp_path))
    assert again.pooling == "last"
    assert again.tokenize_passages(["how is aspirin"])[0].ids == short.ids[:-1]


def test_the_tokens_of_the_instruction_are_marked_with_and_without_eos(backbone_path):
    for family in DECODERS:
        counts = set()
        for append_eos in (True, False):
            encoder = InstructionEncoder.from_pretrained(backbone_path(family), append_eos=append_eos)
            tokens = encoder.tokenize_queries(["how is aspirin dosed"], ["in plain words ;"])[0]
            counts.add(tokens.instruction)
            assert encoder.tokenizer.decode(tokens.ids[: tokens.instruction]).endswith("in plain words ;")
        assert len(counts) == 1


@pytest.mark.parametrize("family", ["qwen2", "llama", "mistral"])
def test_a_bidirectional_decoder_attends_in_both_directions_also_in_sentence_transformers(
    family, backbone_path, tmp_path
):
    causal = InstructionEncoder.from_pretrained(backbone_path(family), pooling="cls", append_eos=False)
    both = InstructionEncoder.from_pretrained(
        backbone_path(family), pooling="cls", append_eos=False, bidirectional=True
    )
    assert (causal.causal, both.causal) == (True, False)
    texts = ["how is aspirin dosed", "how is bread dosed"]
    assert np.ptp(causal.encode_passages(texts), axis=0).max() < 1e-6  # the first token has seen nothing else
    assert np.ptp(both.encode_passages(texts), axis=0).max() > 1e-2
    assert InstructionEncoder.from_pretrained(backbone_path(family), bidirectional=True).pooling == "mean"
    both.save_pretrained(tmp_path)
    assert not InstructionEncoder.from_pretrained(str(tmp_path)).causal
    assert (both.encode_passages(texts) * sentence_transformer(tmp_path).encode(texts)).sum(axis=1).min() >= 0.9999
    for text in texts:  # a batch without padding, which transformers' SDPA would read causally
        assert both.encode_passages([text])[0] @ sentence_transformer(tmp_path).encode(text) >= 0.9999
    alone = AutoModel.from_pretrained(tmp_path, attn_implementation="eager")
    for text, mine in zip(texts, both.encode_passages(texts), strict=True):
        ids = torch.tensor([both.tokenizer(text)["input_ids"]])
        first = alone(input_ids=ids).last_hidden_state[0, 0]
        np.testing.assert_allclose(mine, (first / first.norm()).detach(), atol=1e-5)
    assert InstructionEncoder.from_pretrained(str(tmp_path), bidirectional=False).causal


@pytest.mark.integration
@pytest.mark.parametrize("family", ["minilm", "qwen2"])
def test_separate_encoders_are_the_two_routes_of_sentence_transformers(family, backbone_path, tmp_path):
    encoder = InstructionEncoder.from_pretrained(backbone_path(family), share_encoder=False, query_prefix="query: ")
    np.testing.assert_array_equal(  # they start equal
        encoder.encode_queries(["query: how"]), encoder.encode_passages(["query: query: how"])
    )
    with torch.no_grad():
        for parameter in encoder.passage_backbone.parameters():
            parameter.mul_(1.1)
    encoder.save_pretrained(tmp_path)
    again = InstructionEncoder.from_pretrained(str(tmp_path))
    theirs = sentence_transformer(tmp_path)
    queries, passages = again.encode_queries(QUERIES), again.encode_passages(PASSAGES)
    np.testing.assert_allclose(queries, encoder.encode_queries(QUERIES), atol=1e-6)
    np.testing.assert_allclose(passages, encoder.encode_passages(PASSAGES), atol=1e-6)
    assert (queries * theirs.encode_query(QUERIES)).sum(axis=1).min() >= 0.9999
    assert (passages * theirs.encode_document(PASSAGES)).sum(axis=1).min() >= 0.9999
    assert (passages * encoder.encode_queries(PASSAGES)).sum(axis=1).min() < 0.9999
    with pytest.raises(InputError, match=r"share_encoder=true: .* has separate encoders"):
        InstructionEncoder.from_pretrained(str(tmp_path), share_encoder=True)


def test_prefixes_are_written_before_the_texts_and_saved_as_prompts(minilm, tmp_path):
    encoder = InstructionEncoder.from_pretrained(minilm, query_prefix="query: ", passage_prefix="passage: ")
    plain = InstructionEncoder.from_pretrained(minilm)
    np.testing.assert_allclose(encoder.encode_queries(["q"], ["i"]), plain.encode_passages(["query: i q"]), atol=1e-6)
    np.testing.assert_allclose(encoder.encode_passages(["p"]), plain.encode_passages(["passage: p"]), atol=1e-6)
    encoder.save_pretrained(tmp_path)
    theirs = sentence_transformer(tmp_path)
    assert (encoder.encode_queries(QUERIES) * theirs.encode_query(QUERIES)).sum(axis=1).min() >= 0.9999
    assert (encoder.encode_passages(PASSAGES) * theirs.encode_document(PASSAGES)).sum(axis=1).min() >= 0.9999
    assert InstructionEncoder.from_pretrained(str(tmp_path)).text == encoder.text
    assert InstructionEncoder.from_pretrained(str(tmp_path), query_prefix="").text.query_prefix == ""


@pytest.mark.parametrize("family", ["minilm", "qwen2"])
def test_fewer_dimensions_are_the_first_components_normalised(family, backbone_path, tmp_path):
    whole = InstructionEncoder.from_pretrained(backbone_path(family))
    short = InstructionEncoder.from_pretrained(backbone_path(family), dimensions=16)
    expected = whole.encode_passages(PASSAGES)[:, :16]
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(short.encode_passages(PASSAGES), expected, atol=1e-6)
    short.save_pretrained(tmp_path)
    again = InstructionEncoder.from_pretrained(str(tmp_path))
    assert (again.dimension, whole.dimension) == (16, whole.backbone.config.hidden_size)
    theirs = sentence_transformer(tmp_path).encode(PASSAGES, normalize_embeddings=True)
    assert (again.encode_passages(PASSAGES) * theirs).sum(axis=1).min() >= 0.9999
    with pytest.raises(InputError, match=r"dimensions=1000: embeddings of .* have"):
        InstructionEncoder.from_pretrained(backbone_path(family), dimensions=1000)


@pytest.mark.parametrize("family", ["minilm", "qwen2"])
def test_a_backbone_in_bf16_gives_unit_vectors_in_fp32_near_those_of_fp32(family, backbone_path):
    whole = InstructionEncoder.from_pretrained(backbone_path(family)).eval()
    half = InstructionEncoder.from_pretrained(backbone_path(family), dtype=torch.bfloat16).eval()
    _, layout = next(half.layouts(half.tokenize_passages(PASSAGES), 10_000))
    embeddings = half(layout)
    assert embeddings.dtype == torch.float32
    torch.testing.assert_close(embeddings.norm(dim=1), torch.ones(len(PASSAGES)), atol=1e-6, rtol=0)
    assert (embeddings * whole(layout)).sum(dim=1).min() > 0.995


def test_decoders_pool_the_last_token_and_encoders_the_mean_by_default(backbone_path, tmp_path):
    assert InstructionEncoder.from_pretrained(backbone_path("qwen2")).pooling == "last"
    assert InstructionEncoder.from_pretrained(backbone_path("minilm")).pooling == "mean"
    told = InstructionEncoder.from_pretrained(backbone_path("qwen2"), pooling="mean", template="query_first")
    told.save_pretrained(tmp_path)
    saved = InstructionEncoder.from_pretrained(str(tmp_path))
    assert (saved.pooling, saved.text.template) == ("mean", "query_first")


def test_texts_are_truncated_to_their_lengths(minilm):
    encoder = InstructionEncoder.from_pretrained(minilm, query_length=16, passage_length=32)
    assert len(encoder.tokenize_queries(["word " * 100], ["do this"])[0]) == 16
    assert len(encoder.tokenize_passages(["word " * 100])[0]) == 32
    # MiniLM's sentence-transformers directory says 256; it has 512 positions.
    assert InstructionEncoder.from_pretrained(minilm).text.passage_length == 256
    assert InstructionEncoder.from_pretrained(minilm, passage_length=4096).text.passage_length == 512


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 200))
def test_length_sorted_batches_hold_every_row_once_within_the_budget(lengths, budget):
    batches = list(length_sorted_batches(lengths, budget))
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[row] for row in batch) <= budget
