"""Interaction II against Eq. 4 written out, on a real encoder and a tiny decoder, through everything built on it."""

import math
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModel

from infembed_ray.config.training import TrainSettings
from infembed_ray.errors import InputError
from infembed_ray.modeling.attention.packing import packed
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.modeling.interaction import FILE, CrossAttention, pair_batches, paired
from infembed_ray.modeling.layout import padded
from infembed_ray.modeling.tokenizer import Tokens
from infembed_ray.training.loop import train_worker
from infembed_ray.training.observability.logs import read_metrics
from tests.modeling import backbones
from tests.support.workers import run_workers
from tests.training.test_collate import record

INSTRUCTIONS = [
    "For nurses, in plain words; no brand names.",
    "As a table.",
    "For nurses, in plain words; no brand names.",
]
QUERIES = ["how is aspirin dosed", "how is aspirin dosed", "what does a rather long question about this look like"]

PADDED = partial(padded, pad_id=0)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    return backbones.write("qwen2", tmp_path_factory.mktemp("decoder"))


@pytest.fixture
def backbone(request):
    return request.getfixturevalue(request.param)


both = pytest.mark.parametrize("backbone", ["minilm", "decoder"], indirect=True)


def crossed(path, **options):
    """An encoder whose three matrices are no longer the initial ones, so that the instruction has a say."""
    encoder = InstructionEncoder.from_pretrained(path, interaction="cross_attention", **options)
    torch.manual_seed(1)
    with torch.no_grad():
        for matrix in encoder.interaction.parameters():
            matrix.copy_(torch.eye(len(matrix)) + 0.3 * torch.randn_like(matrix) / math.sqrt(len(matrix)))
    return encoder


def equation_4(instruction, query, matrices, mode):
    """One pair, token by token, in float64. `instruction` may be None."""
    w_i, w_q1, w_q2 = (np.asarray(m.detach(), dtype=np.float64) for m in matrices)
    rows = []
    for i in [np.zeros(len(w_i))] if instruction is None else instruction:
        scores = [float((i @ w_i) @ (q @ w_q1)) / math.sqrt(len(w_i)) for q in query]
        exponentials = [math.exp(s - max(scores)) for s in scores]
        rows.append(sum(e / sum(exponentials) * (q @ w_q2) for e, q in zip(exponentials, query, strict=True)))
    return {"mean": np.mean(rows, axis=0), "last": rows[-1], "cls": rows[0]}[mode]


@given(st.data(), st.sampled_from(["mean", "last", "cls"]))
@settings(max_examples=40)
def test_every_pair_equals_equation_4_for_any_other_pairs_in_the_pass(data, mode):
    """Random states, texts of all lengths, any subset of the pairs in any order, some without an instruction.

    A matrix left out, or padding masked by -1e-8 as in the paper's code, would be off by far more than the tolerance.
    """
    text = st.lists(st.integers(1, 50), min_size=1, max_size=7)
    instructions = [*data.draw(st.lists(text, max_size=4)), []]
    queries = data.draw(st.lists(text, min_size=1, max_size=4))
    pair = st.tuples(st.sampled_from(instructions), st.sampled_from(queries))
    asked = data.draw(st.lists(pair, min_size=1, max_size=12))
    layout = paired([Tokens(i + q, "query", len(i)) for i, q in asked], PADDED)
    torch.manual_seed(0)
    table = torch.randn(51, 6, dtype=torch.float64) * 3
    table[0] = 1e30  # what stands in the padding must not matter
    attention = CrossAttention(6).double()
    for matrix in attention.parameters():
        torch.nn.init.normal_(matrix)
    found = attention(table[layout.input_ids], layout, mode).detach().numpy()
    expected = [
        equation_4(table[i].numpy() if i else None, table[q].numpy(), attention.parameters(), mode) for i, q in asked
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


def test_many_pairs_are_computed_in_blocks_with_the_same_result(monkeypatch):
    torch.manual_seed(0)
    asked = [Tokens([*range(i, i + 5), *range(q, q + 1 + q % 4)], "query", 5) for i in range(1, 8) for q in range(1, 8)]
    layout = paired(asked, PADDED)
    states = torch.randn(*layout.input_ids.shape, 6)
    attention = CrossAttention(6)
    torch.nn.init.normal_(attention.W_i)
    at_once = attention(states, layout, "mean")
    monkeypatch.setattr("infembed_ray.modeling.interaction._BLOCK", 100)
    torch.testing.assert_close(attention(states, layout, "mean"), at_once)


@both
def test_an_encoder_embeds_by_equation_4_over_states_of_each_text_alone_in_any_batches(backbone):
    encoder = crossed(backbone)
    instructions = [*INSTRUCTIONS, None, "Only what was written after 2020, please, and nothing at all by vendors."]
    queries = [*QUERIES, QUERIES[0], "short"]
    plain = AutoModel.from_pretrained(backbone).eval()

    def states(text):
        with torch.no_grad():
            return plain(**encoder.tokenizer(text, return_tensors="pt")).last_hidden_state[0].double().numpy()

    expected = [
        equation_4(states(i) if i else None, states(q), encoder.interaction.parameters(), encoder.pooling)
        for i, q in zip(instructions, queries, strict=True)
    ]
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    for batch_tokens in (None, 40):
        found = encoder.encode_queries(queries, instructions, batch_tokens=batch_tokens)
        np.testing.assert_allclose(found, expected, atol=2e-6)
    alone = [encoder.encode_queries([q], [i])[0] for q, i in zip(queries, instructions, strict=True)]
    np.testing.assert_allclose(alone, expected, atol=2e-6)


TEXTS = st.lists(st.integers(1, 4), max_size=6)


@given(st.lists(st.tuples(TEXTS, TEXTS.filter(bool)), max_size=30), st.integers(1, 60), st.booleans())
def test_pair_batches_hold_every_row_once_and_their_texts_within_the_budget(asked, budget, pack):
    sequences = [Tokens(i + q, "query", len(i)) for i, q in asked]
    batches = list(pair_batches(sequences, budget, pack))
    assert sorted(row for batch in batches for row in batch) == list(range(len(asked)))
    for batch in batches:
        layout = paired([sequences[row] for row in batch], packed if pack else PADDED)
        assert len(batch) == 1 or layout.input_ids.numel() <= budget


def test_gradients_of_equation_4_are_exact():
    torch.manual_seed(0)
    attention = CrossAttention(3).double()
    for matrix in attention.parameters():
        torch.nn.init.normal_(matrix)
    layout = paired([Tokens([1, 2, 3, 4], "query", 2), Tokens([5, 4, 3], "query", 1), Tokens([9], "query")], PADDED)
    states = torch.randn(*layout.input_ids.shape, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda *inputs: torch.func.functional_call(
            attention, dict(zip(("W_i", "W_q1", "W_q2"), inputs[1:], strict=True)), (inputs[0], layout, "mean")
        ),
        (states, *attention.parameters()),
    )


@both
def test_a_checkpoint_has_the_matrices_and_sentence_transformers_refuses_it(backbone, tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    encoder = crossed(backbone)
    encoder.save_pretrained(tmp_path)
    again = InstructionEncoder.from_pretrained(str(tmp_path))
    np.testing.assert_allclose(
        again.encode_queries(QUERIES, INSTRUCTIONS), encoder.encode_queries(QUERIES, INSTRUCTIONS), atol=1e-6
    )
    assert again.pooling == encoder.pooling
    assert set(load_file(tmp_path / FILE)) == {"W_i", "W_q1", "W_q2"}
    for options in ({}, {"trust_remote_code": True}):
        with pytest.raises((ValueError, AttributeError), match="CrossAttention"):
            sentence_transformers.SentenceTransformer(str(tmp_path), device="cpu", **options)


def test_a_checkpoint_without_its_matrices_is_refused(minilm, decoder, tmp_path):
    crossed(minilm).save_pretrained(tmp_path / "small")
    crossed(decoder).save_pretrained(tmp_path / "other")
    shutil.copy(tmp_path / "other" / FILE, tmp_path / "small" / FILE)
    with pytest.raises(InputError, match=rf"{FILE} has .*\(32, 32\).* give the whole checkpoint"):
        InstructionEncoder.from_pretrained(str(tmp_path / "small"))
    (tmp_path / "small" / FILE).unlink()
    with pytest.raises(InputError, match=f"has no {FILE}"):
        InstructionEncoder.from_pretrained(str(tmp_path / "small"))


def test_instruction_and_query_are_tokenised_and_truncated_separately(minilm):
    encoder = crossed(minilm, query_length=16)
    long, short = encoder.tokenize_queries(["word " * 100, "why"], ["do this " * 100, None])
    assert (long.instruction, len(long)) == (16, 32)
    assert short.instruction == 0
    cls, sep = encoder.tokenizer.cls_token_id, encoder.tokenizer.sep_token_id
    assert [long.ids[place] for place in (0, 15, 16, 31)] == [cls, sep, cls, sep]


# ------------------------------------------------------------------------------------------- what is built on it


def train(rank, settings, rows, directory):
    train_worker(settings, rows, directory, torch.device("cpu"))


@pytest.fixture(scope="module")
def trained(minilm, tmp_path_factory):
    """A checkpoint of the real loop."""
    directory = tmp_path_factory.mktemp("trained")
    settings = TrainSettings(
        records="-",
        model=minilm,
        output="-",
        objective="multi{P,I,IQ}",
        interaction="cross_attention",
        instruction_negatives=None,  # all: further pairs cost no encoding
        workers=1,
        zero_stage=0,
        records_per_step=4,
        epochs=6,
        learning_rate=3e-4,
        query_length=48,
    )
    run_workers(train, 1, settings, [record(n, f"good {n}" + " and further" * n) for n in range(8)], directory)
    return directory


@pytest.mark.integration
def test_training_lowers_the_loss_and_changes_all_three_matrices(trained):
    losses = [m["loss"] for m in read_metrics(trained)]
    assert len(losses) == 12
    assert np.mean(losses[-3:]) < 0.8 * np.mean(losses[:3])
    for name, matrix in load_file(trained / FILE).items():
        start = torch.zeros(384, 384) if name == "W_i" else torch.eye(384)
        assert (matrix - start).abs().max() > 1e-4, name
