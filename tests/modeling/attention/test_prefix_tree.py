"""Trees against each text encoded by itself, by transformers as it comes: the same embeddings and gradients."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import nn
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaModel,
    MistralConfig,
    MistralModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2Model,
)

from infembed_ray.modeling.attention import prefix_tree
from infembed_ray.modeling.attention.prefix_tree import TreeLayout
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.modeling.layout import padded, pool
from infembed_ray.modeling.tokenizer import TextFormat, Tokens

SHAPE = {
    "vocab_size": 2000,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
INSTRUCTIONS = [
    "For nurses, in plain words; no brand names, and nothing older than the guideline of 2020.",
    "For nurses, in plain words; with the names of the brands",
    "As a table. ",  # ends in a space
    "Réponse en français, sans abréviations\u00a0!",
]
QUERIES = [
    "how is aspirin dosed",
    "how is aspirin dosed",  # twice
    "how is aspirin dosed in children under twelve",  # continues another
    " leading space",
    "\nleading newline\n",
    ", and punctuation?",
    "\u0301combining accent",
    "\U0001f48a pills \U0001f469\u200d\U0001f52c",
    "ing",
    "",
    "多音字",
]
TEXTS = [*INSTRUCTIONS, *QUERIES, "how is the word dosed, in the names of all; ing"] * 3


def byte_level_bpe():
    """As GPT-2, Qwen and Llama 3 have it: a space belongs to the word after it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, special_tokens=["<pad>"])
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def bpe_across_words():
    """Without pre-tokenizer: merges run across the border of instruction and query."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=["<pad>", "<unk>"])
    tokenizer.train_from_iterator([f"{i} {q}" for i in INSTRUCTIONS for q in QUERIES], trainer)
    return tokenizer


def sentencepiece_bpe():
    """As Llama 2 and Mistral have it: one word piece over the whole text, BOS and byte fallback."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = ["<pad>", "<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=len(special) + 120, special_tokens=special)
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 2)])
    return tokenizer


TOKENIZERS = ["wordpiece", "byte_level_bpe", "bpe_across_words", "sentencepiece_bpe"]
PARTING = ("wordpiece", "byte_level_bpe")
"""Those that always part at spaces."""


def tokenizer_named(name, minilm):
    if name == "wordpiece":
        return AutoTokenizer.from_pretrained(minilm)
    return PreTrainedTokenizerFast(tokenizer_object=globals()[name](), pad_token="<pad>")


class Ids:
    """A tokenizer where only ids are given."""

    pad_token_id = 0


def encoder_of(config=Qwen2Config, model=Qwen2Model, pooling="last", tokenizer=None, **options):
    torch.manual_seed(0)
    backbone = model(config(**{**SHAPE, **options}))
    return InstructionEncoder(backbone, tokenizer or Ids(), pooling, TextFormat())


def pairs(instructions=4, queries=5):
    """All pairs of random ids, of uneven lengths."""
    generator = torch.Generator().manual_seed(1)

    def ids(length):
        return torch.randint(1, 2000, (length,), generator=generator).tolist()

    first = [ids(20 + 7 * n) for n in range(instructions)]
    then = [ids(3 + 2 * n) for n in range(queries)]
    return [Tokens(i + q, "query", len(i)) for i in first for q in then]


def alone(encoder, sequences):
    """Each text by itself, without padding, in transformers' eager attention."""
    used = encoder.backbone.config._attn_implementation
    encoder.backbone.set_attn_implementation("eager")
    vectors = []
    for text in sequences:
        layout = padded([text], 0)
        states = encoder.backbone(input_ids=layout.input_ids).last_hidden_state
        vectors.append(nn.functional.normalize(pool(states, layout, encoder.pooling), dim=-1))
    encoder.backbone.set_attn_implementation(used)
    return torch.cat(vectors)


def as_trees(encoder, sequences, batch_tokens=1 << 40, flex=False):
    embeddings = [None] * len(sequences)
    for rows, layout in prefix_tree.forests(sequences, batch_tokens, flex):
        for row, vector in zip(rows, encoder(layout.to(encoder.device)), strict=True):
            embeddings[row] = vector
    return torch.stack(embeddings)


def gradients(encoder, embeddings):
    encoder.zero_grad()
    weights = torch.randn(embeddings.shape, generator=torch.Generator().manual_seed(2))
    (embeddings * weights.to(embeddings.device)).sum().backward()
    return torch.cat([p.grad.flatten() for p in encoder.parameters() if p.grad is not None])


@pytest.mark.parametrize("batch_tokens", [1 << 40, 100])
@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
@pytest.mark.parametrize(
    ("config", "model"),
    [(Qwen2Config, Qwen2Model), (LlamaConfig, LlamaModel), (MistralConfig, MistralModel)],
    ids=["qwen2", "llama", "mistral"],
)
def test_trees_give_the_embeddings_and_gradients_of_each_text_alone(config, model, pooling, batch_tokens):
    encoder = encoder_of(config, model, pooling)
    sequences = pairs()
    one_by_one, trees = alone(encoder, sequences), as_trees(encoder, sequences, batch_tokens)
    torch.testing.assert_close(trees, one_by_one, atol=1e-6, rtol=0)
    expected, found = gradients(encoder, one_by_one), gradients(encoder, trees)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.integration
@given(
    st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=8), min_size=1, max_size=20),
    st.sampled_from([4, 20, 1 << 40]),
)
def test_a_token_attends_to_the_prefix_of_its_text_only(texts, budget):
    """The mask of every forest, against the texts themselves."""
    seen = []
    for rows, layout in prefix_tree.forests([Tokens(ids) for ids in texts], budget):
        seen += rows
        ids, positions = layout.input_ids[0], layout.position_ids[0]
        assert len(rows) == 1 or len(ids) <= budget
        place = torch.arange(len(ids))
        attends = (place <= place.unsqueeze(1)) & (place.unsqueeze(1) < layout.ends)
        for row, path in zip(rows, layout.tokens.split(layout.lengths.tolist()), strict=True):
            assert ids[path].tolist() == texts[row]
            assert positions[path].tolist() == list(range(len(path)))
            for n, token in enumerate(path):
                assert attends[token].nonzero().flatten().tolist() == path[: n + 1].tolist()
        # What SDPA is given, tree by tree, is the same mask.
        trees = layout.backbone_inputs(encoder_of().backbone)["attend"]
        masks = [
            torch.ones(size, size).tril() if mask is None else (mask == 0).float()
            for size, mask in zip(trees.sizes, trees.masks, strict=True)
        ]
        assert torch.equal(torch.block_diag(*masks).bool(), attends)
    assert sorted(seen) == list(range(len(texts)))


@given(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=8), min_size=1, max_size=20))
def test_every_shared_token_is_encoded_once(texts):
    """Where the trees are small enough: as many tokens as there are distinct beginnings."""
    [(_, layout)] = prefix_tree.forests([Tokens(ids) for ids in texts], 1 << 40)
    assert layout.input_ids.numel() == len({tuple(ids[: n + 1]) for ids in texts for n in range(len(ids))})


def test_a_tree_is_divided_where_its_width_costs_more_than_the_shared_tokens():
    """A thousand queries under one instruction: neither one tree of 12,000 tokens nor a thousand trees."""
    sequences = [Tokens([*range(1, 49), 100 + n, *range(11)], "query", 48) for n in range(1000)]
    [(_, layout)] = prefix_tree.forests(sequences, 1 << 40)
    trees = layout.backbone_inputs(encoder_of().backbone)["attend"]
    assert max(trees.sizes) < 4096
    assert layout.input_ids.numel() < 1000 * 12 * 1.1


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("length", [12, 256])
def test_the_marked_tokens_belong_to_the_instruction_only(name, length, minilm):
    """Whatever the query: the same ids, and none that reads a character of the query. Or nothing is marked."""
    tokenizer = tokenizer_named(name, minilm)
    encoder = encoder_of(vocab_size=max(len(tokenizer), 600), tokenizer=tokenizer)
    encoder.text = dataclasses.replace(encoder.text, query_length=length)
    for instruction in INSTRUCTIONS:
        marked = [t.ids[: t.instruction] for t in encoder.tokenize_queries(QUERIES, [instruction] * len(QUERIES))]
        assert len({tuple(ids) for ids in marked if ids}) <= 1
        for ids, query in zip(marked, QUERIES, strict=True):
            if ids:
                offsets = tokenizer(f"{instruction} {query}", return_offsets_mapping=True)["offset_mapping"]
                assert max(end for _, end in offsets[: len(ids)]) <= len(instruction) + 1
    if name in PARTING and length == 256:  # tokenizers that part at spaces
        plain = encoder.tokenize_queries(QUERIES[:3], [INSTRUCTIONS[0]] * 3)
        assert all(t.instruction > 10 for t in plain)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"config": MistralConfig, "model": MistralModel, "sliding_window": 16}, "sliding_window is 16"),
        ({"attn_implementation": "eager"}, "its eager attention"),
    ],
)
def test_without_exact_trees_texts_are_encoded_alone_and_one_line_is_logged(options, reason, capsys):
    encoder = encoder_of(**options).eval()
    sequences = pairs()
    for _ in range(2):
        assert not any(isinstance(layout, TreeLayout) for _, layout in encoder.layouts(sequences, 1 << 40))
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1
    assert reason in said[0]
    with torch.no_grad():
        expected = alone(encoder, sequences)
    torch.testing.assert_close(torch.from_numpy(encoder.embed(sequences)), expected, atol=1e-5, rtol=0)


def test_bidirectional_backbones_and_texts_that_share_nothing_have_no_trees(capsys):
    torch.manual_seed(0)
    shape = {k: v for k, v in SHAPE.items() if k != "num_key_value_heads"}
    bert = InstructionEncoder(BertModel(BertConfig(**shape)), Ids(), "mean", TextFormat())
    both_ways = encoder_of(is_causal=False)
    apart = [Tokens([n, *range(100 + n, 130)]) for n in range(1, 20)]
    for encoder, sequences in ((bert, pairs()), (both_ways, pairs()), (encoder_of(), apart)):
        assert not any(isinstance(layout, TreeLayout) for _, layout in encoder.layouts(sequences, 1 << 40))
    assert not capsys.readouterr().out
