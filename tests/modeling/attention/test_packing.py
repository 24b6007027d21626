"""Packed sequences against the same texts one at a time: embeddings and gradients, on every family they are used for."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaModel,
    MistralConfig,
    MistralModel,
    ModernBertConfig,
    ModernBertModel,
    MPNetConfig,
    MPNetModel,
    Qwen2Config,
    Qwen2Model,
    XLMRobertaConfig,
    XLMRobertaModel,
)

from infembed_ray.modeling.attention.packing import (
    ATTENTION,
    enable_packing,
    first_position,
    packed,
    packing_pays,
)
from infembed_ray.modeling.layout import padded
from infembed_ray.modeling.tokenizer import Tokens

PAD = 0
VOCABULARY = 64
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_MARKS = {"pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
BACKBONES = {
    "bert: learned positions": lambda: BertModel(BertConfig(**_SIZES, **_NO_DROPOUT)),
    "xlm-roberta: positions that start behind the padding's": lambda: XLMRobertaModel(
        XLMRobertaConfig(**_SIZES, **_NO_DROPOUT, pad_token_id=PAD)
    ),
    "modernbert: rotary positions, sliding windows": lambda: ModernBertModel(
        ModernBertConfig(**_SIZES, **_MARKS, local_attention=8)
    ),
    "llama": lambda: LlamaModel(LlamaConfig(**_SIZES)),
    "qwen2: grouped heads": lambda: Qwen2Model(Qwen2Config(**_SIZES, num_key_value_heads=2)),
    "mistral: a causal sliding window": lambda: MistralModel(
        MistralConfig(**_SIZES, num_key_value_heads=2, sliding_window=5)
    ),
}
CAUSAL = {"llama", "qwen2: grouped heads", "mistral: a causal sliding window"}


def built(family):
    torch.manual_seed(0)
    return BACKBONES[family]().eval()


def texts_of(lengths):
    generator = torch.Generator().manual_seed(1)
    return [Tokens(torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()) for length in lengths]


def states_packed(backbone, texts):
    """Token states of a packed row, text by text."""
    layout = packed(texts, first_position(backbone))
    states = backbone(**layout.backbone_inputs(backbone)).last_hidden_state[0]
    return states[layout.tokens].split(layout.lengths.tolist())


def states_alone(reference, texts):
    """The same of transformers' eager attention, one text at a time: no mask, no padding, no position ids."""
    return [reference(input_ids=torch.tensor([t.ids])).last_hidden_state[0] for t in texts]


def pair(family):
    """The backbone as we read packed rows with it, and an untouched copy."""
    reference = built(family)
    backbone = copy.deepcopy(reference)
    reference.set_attn_implementation("eager")
    assert enable_packing(backbone)
    return backbone, reference


@pytest.mark.parametrize("family", BACKBONES)
def test_packed_texts_have_the_same_gradients_as_alone(family):
    backbone, reference = pair(family)
    texts = texts_of([13, 7, 7, 3])
    torch.manual_seed(2)
    directions = [torch.randn(len(t), 32) for t in texts]
    for model, states in ((backbone, states_packed(backbone, texts)), (reference, states_alone(reference, texts))):
        sum((s * d).sum() for s, d in zip(states, directions, strict=True)).backward()
        assert any(p.grad is not None for p in model.parameters())
    for (name, got), expected in zip(backbone.named_parameters(), reference.parameters(), strict=True):
        if expected.grad is None:
            assert got.grad is None, name
            continue
        scale = expected.grad.abs().max().clamp(min=1e-3)
        assert (got.grad - expected.grad).abs().max() <= 1e-4 * scale, name


@pytest.fixture(scope="module")
def pairs():
    return {family: pair(family) for family in BACKBONES}


@pytest.mark.parametrize("family", BACKBONES)
@settings(max_examples=15)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8))
def test_any_mix_of_lengths_is_exact(pairs, family, lengths):
    backbone, reference = pairs[family]
    texts = texts_of(lengths)
    with torch.no_grad():
        got = states_packed(backbone, texts)
        assert [len(s) for s in got] == lengths
        for packed_states, expected in zip(got, states_alone(reference, texts), strict=True):
            torch.testing.assert_close(packed_states, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", sorted(CAUSAL))
def test_a_bidirectional_decoder_looks_ahead_in_packed_and_padded_rows(family):
    """Without padding transformers drops the mask, and then looks at the layer's flag alone."""
    backbone = built(family)
    backbone.config.is_causal = False
    enable_packing(backbone)
    texts = texts_of([9, 9])
    changed = [Tokens([*texts[0].ids[:-1], (texts[0].ids[-1] + 1) % VOCABULARY]), texts[1]]
    with torch.no_grad():
        before, after = states_packed(backbone, texts), states_packed(backbone, changed)
        layout = padded(texts, PAD)
        in_rows = backbone(input_ids=layout.input_ids, attention_mask=layout.attention_mask).last_hidden_state
    assert (before[0][0] - after[0][0]).abs().max() > 1e-4
    torch.testing.assert_close(before[1], after[1])
    torch.testing.assert_close(torch.stack(before), in_rows, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", BACKBONES)
def test_padded_rows_are_unchanged_by_enabled_packing(family):
    backbone, reference = pair(family)
    layout = padded(texts_of([12, 5, 8]), PAD)
    real = layout.attention_mask.bool()
    with torch.no_grad():
        got, expected = (
            m(input_ids=layout.input_ids, attention_mask=layout.attention_mask).last_hidden_state[real]
            for m in (backbone, reference)
        )
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_unsupported_backbones_are_left_unchanged():
    relative = MPNetModel(MPNetConfig(**_SIZES))  # a position bias computed from the place in the row
    assert not enable_packing(relative)
    chosen = BertModel(BertConfig(**_SIZES))
    chosen.set_attn_implementation("eager")
    assert not enable_packing(chosen)
    assert chosen.config._attn_implementation == "eager"
    mixed = Qwen2Model(Qwen2Config(**_SIZES, num_key_value_heads=2))
    mixed.config.layer_types = ["full_attention", "chunked_attention", "full_attention"]
    assert not enable_packing(mixed)


def test_a_saved_model_does_not_ask_for_packing(tmp_path):
    backbone = built("llama")
    enable_packing(backbone)
    backbone.save_pretrained(tmp_path)
    assert ATTENTION not in (tmp_path / "config.json").read_text()
    assert LlamaModel.from_pretrained(tmp_path).config._attn_implementation == "sdpa"


def test_rows_are_packed_on_a_cpu_and_where_cuda_has_one_kernel_for_them():
    assert packing_pays(torch.device("cpu"), torch.float32, drops=True)
    assert not packing_pays(torch.device("cuda"), torch.float32, drops=False)
    assert not packing_pays(torch.device("cuda"), torch.bfloat16, drops=True)
    assert not packing_pays(torch.device("mps"), torch.float16, drops=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", BACKBONES)
def test_the_variable_length_kernel_of_cuda_agrees_with_texts_alone(family):
    backbone, reference = (m.to("cuda", torch.bfloat16) for m in pair(family))
    texts = texts_of([17, 9, 9, 1, 30])
    layout = packed(texts, first_position(backbone)).to(torch.device("cuda"))
    with torch.no_grad():
        states = backbone(**layout.backbone_inputs(backbone)).last_hidden_state[0]
        alone = [reference(input_ids=torch.tensor([t.ids], device="cuda")).last_hidden_state[0] for t in texts]
    torch.testing.assert_close(states, torch.cat(alone), atol=5e-2, rtol=5e-2)
