"""Queries after cached instructions, against each text encoded whole and by itself, by transformers as it comes."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModel

from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.modeling.prefix_cache import PrefixCache, obstacle
from infembed_ray.modeling.tokenizer import Tokens
from tests.modeling.backbones import DECODERS, alone

INSTRUCTIONS = [
    None,
    "For nurses, in plain words; no brand names.",
    "what does a passage about bread say, in plain words",
    "ends in a space ",
    "b",
]
QUERIES = [
    "how is aspirin dosed",
    "bread",
    "",
    "what does a passage about bread say , for nurses in plain words ; " * 4,
]
MIB = 2**20


@pytest.fixture
def encoder(backbone_path, request):
    family, pooling = request.param
    return InstructionEncoder.from_pretrained(backbone_path(family), pooling=pooling)


@pytest.fixture(scope="module")
def qwen2(backbone_path):
    return InstructionEncoder.from_pretrained(backbone_path("qwen2"), pooling="last")


def computed(encoder, run):
    """Tokens that a run puts through the backbone."""
    widths = []
    hook = encoder.backbone.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    run()
    hook.remove()
    return sum(widths)


@pytest.mark.parametrize("encoder", [(f, p) for f in DECODERS for p in ("last", "mean")], indirect=True)
def test_a_mixed_batch_gives_the_embeddings_of_each_text_alone(encoder):
    pairs = [(query, instruction) for query in QUERIES for instruction in INSTRUCTIONS]
    sequences = encoder.tokenize_queries(*map(list, zip(*pairs, strict=True))) + encoder.tokenize_passages(QUERIES)
    assert {t.instruction > 0 for t in sequences} == {True, False}
    expected = alone(encoder, sequences)
    cache = PrefixCache(encoder, MIB)
    np.testing.assert_allclose(cache.embed(sequences), expected, atol=1e-5)  # cold
    np.testing.assert_allclose(cache.embed(sequences), expected, atol=1e-5)  # warm
    np.testing.assert_allclose(cache.embed(sequences[::-1], batch_tokens=40), expected[::-1], atol=1e-5)
    each = np.concatenate([cache.embed([tokens]) for tokens in sequences])
    np.testing.assert_allclose(each, expected, atol=1e-5)


@settings(max_examples=25)
@given(
    texts=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12), st.integers(0, 9)), min_size=1, max_size=12),
    calls=st.integers(1, 3),
    batch_tokens=st.integers(1, 64),
    room=st.integers(0, 2000),
)
def test_the_cache_is_exact_for_any_ids_batches_and_sizes(qwen2, texts, calls, batch_tokens, room):
    """Also where prefixes begin alike, nothing follows them, and where nothing, or not all, fits the cache."""
    sequences = [
        Tokens([*([5 + family % 2] * shared), *range(10, 10 + own)] or [3], "query", shared)
        for family, shared, own in texts
    ]
    expected = np.concatenate([qwen2.embed([tokens]) for tokens in sequences])
    cache = PrefixCache(qwen2, room)
    for _ in range(calls):
        np.testing.assert_allclose(cache.embed(sequences, batch_tokens), expected, atol=1e-5)
        assert cache.bytes <= room
    assert cache.hits + cache.misses == calls * sum(0 < t.instruction < len(t) for t in sequences)


def test_an_instruction_is_computed_once_and_later_only_the_queries(qwen2):
    instruction = INSTRUCTIONS[1]
    sequences = qwen2.tokenize_queries(QUERIES[:2] * 2, [instruction] * 4)
    prefix = sequences[0].instruction
    own = sum(len(tokens) - prefix for tokens in sequences)
    cache = PrefixCache(qwen2, MIB)
    assert [cache.remaining(tokens) for tokens in sequences] == list(map(len, sequences))
    assert computed(qwen2, lambda: cache.embed(sequences)) == prefix + own
    assert sum(map(cache.remaining, sequences)) == own
    assert computed(qwen2, lambda: cache.embed(sequences)) == own
    assert (cache.hits, cache.misses) == (7, 1)


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("qwen2", {"pooling": "cls"}, "it pools the first token"),
        ("qwen2", {"bidirectional": True}, "bidirectional"),
        ("modernbert", {}, "bidirectional"),
        ("qwen2", {"interaction": "cross_attention"}, "separately"),
        ("mistral", {"pooling": "last"}, None),
    ],
)
def test_an_unsupported_model_has_an_obstacle_with_its_reason(family, options, reason, backbone_path):
    found = obstacle(InstructionEncoder.from_pretrained(backbone_path(family), **options))
    assert (found is None) if reason is None else (found is not None and reason in found)


def test_a_sliding_window_shorter_than_a_query_is_an_obstacle(backbone_path, tmp_path):
    model = AutoModel.from_pretrained(backbone_path("mistral"))
    model.save_pretrained(tmp_path)
    for file in Path(backbone_path("mistral")).glob("*token*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"sliding_window": 16}))
    assert "sliding_window is 16" in obstacle(InstructionEncoder.from_pretrained(str(tmp_path)))
    assert obstacle(InstructionEncoder.from_pretrained(str(tmp_path), query_length=16)) is None
