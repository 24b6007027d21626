"""Block masks of prefix trees against those that torch computes by token, and FlexAttention against each text alone."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import create_block_mask
from transformers import LlamaConfig, LlamaModel, Qwen2Config, Qwen2Model

from infembed_ray.config.training import Lora
from infembed_ray.modeling import adapters, linear
from infembed_ray.modeling.attention import flex
from infembed_ray.modeling.attention.flex import BLOCK, WIDTH, FlexTreeAttention
from infembed_ray.modeling.attention.prefix_tree import forests
from infembed_ray.modeling.layout import padded
from infembed_ray.modeling.tokenizer import Tokens
from tests.modeling.attention.test_prefix_tree import alone, as_trees, encoder_of, gradients, pairs

CPU = torch.device("cpu")


def full_blocks(mask):
    """Return the columns of the full blocks of each row."""
    rows = zip(mask.full_kv_num_blocks[0, 0].tolist(), mask.full_kv_indices[0, 0].tolist(), strict=True)
    return [set(columns[:number]) for number, columns in rows]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 150)), min_size=1, max_size=12), st.integers(0, 60))
def test_blocks_are_those_that_the_rule_for_tokens_gives(texts, shared):
    sequences = [Tokens([first] * shared + [5 + n] * length) for n, (first, length) in enumerate(texts)]
    [(_, dense)], [(_, layout)] = (forests(sequences, 1 << 40, flex) for flex in (False, True))
    mask, width = layout.backbone_inputs(None)["attend"].mask, layout.input_ids.shape[1]
    assert width % WIDTH == 0 <= width - layout.size < WIDTH
    assert layout.size == dense.size
    for name in ("input_ids", "position_ids"):
        assert torch.equal(getattr(layout, name)[:, : layout.size], getattr(dense, name))
    expected = create_block_mask(mask.mask_mod, 1, 1, width, width, device="cpu", BLOCK_SIZE=BLOCK)
    assert torch.equal(mask.to_dense(), expected.to_dense())
    assert full_blocks(mask) == full_blocks(expected)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_trees_by_flex_attention_give_the_embeddings_of_each_text_alone(pooling):
    encoder, sequences = encoder_of(pooling=pooling), pairs()
    with torch.no_grad():  # it has no backward pass on a CPU
        trees = as_trees(encoder, sequences, flex=True)
        torch.testing.assert_close(trees, as_trees(encoder, sequences), atol=1e-6, rtol=0)
        torch.testing.assert_close(trees, alone(encoder, sequences), atol=1e-6, rtol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_trees_by_flex_attention_give_the_gradients_of_dense_masks():
    encoder, sequences = encoder_of().cuda(), pairs()
    assert all(isinstance(x, flex.FlexTreeLayout) for _, x in encoder.train().layouts(sequences, 1 << 40))
    assert not any(isinstance(x, flex.FlexTreeLayout) for _, x in encoder.eval().layouts(sequences, 1 << 40))
    got, expected = (gradients(encoder, as_trees(encoder, sequences, flex=kind)) for kind in (True, False))
    assert (got - expected).abs().max() <= 1e-3 * expected.abs().max()


def test_without_the_kernel_of_torch_2_11_no_layer_is_compiled_on_a_gpu(monkeypatch):
    monkeypatch.setattr(flex, "varlen_attention", lambda: None)
    assert not flex.flex_pays(torch.device("cuda"))


def test_the_kernel_compiles_many_shapes_in_a_thread_and_then_fails(monkeypatch):
    """Autograd's thread recomputes layers; past the limit, the kernel may not compute all scores."""
    compiled = partial(torch.compile, backend="eager", fullgraph=True)
    monkeypatch.setattr(torch, "compile", lambda function, dynamic, **_: compiled(function, dynamic=False))
    monkeypatch.setattr(flex, "flex_attention", lambda query, *others, **_: query * 2)
    monkeypatch.setattr(flex, "_VARIANTS", 12)  # the default is 8
    kernel = flex._kernel.__wrapped__("cuda")
    monkeypatch.setattr(flex, "_kernel", lambda device: kernel)

    def run(width):
        states = torch.ones(1, 1, width, 1)
        return float(FlexTreeAttention(None)(torch.nn.Module(), states, states, states).sum())

    with ThreadPoolExecutor(1) as thread:
        assert [thread.submit(run, width).result() for width in range(2, 14)] == [2 * w for w in range(2, 14)]
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            thread.submit(run, 14).result()


# --------------------------------------------------- one row for both sides, as on a GPU, by a kernel that has gradients


def by_dense_mask(query, key, value, block_mask, scale, enable_gqa):
    """FlexAttention for the backward pass on a CPU."""
    place = torch.arange(query.shape[2])
    mask = block_mask.mask_mod(0, 0, place.unsqueeze(1), place)
    options = {"attn_mask": mask, "scale": scale, "enable_gqa": enable_gqa}
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, **options)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(flex, "_kernel", lambda device: by_dense_mask)
    monkeypatch.setattr("infembed_ray.modeling.encoder.flex_pays", lambda device: True)


def both_sides():
    return pairs() + [Tokens([3 + n, 7, *range(9, 9 + 5 * n)], "passage") for n in range(4)]


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_one_row_for_both_sides_has_the_embeddings_and_gradients_of_each_text_alone(as_on_a_gpu, pooling):
    encoder, sequences = encoder_of(pooling=pooling).double().train(), both_sides()
    [(rows, layout)] = encoder.layouts(sequences, 1 << 40)
    assert sorted(rows) == list(range(len(sequences)))
    assert layout.size < sum(map(len, sequences))
    in_order = torch.tensor(rows).argsort()
    one_row, each = encoder(layout)[in_order], torch.cat([encoder(padded([text], 0)) for text in sequences])
    torch.testing.assert_close(one_row, each, atol=1e-12, rtol=0)
    got, expected = gradients(encoder, one_row), gradients(encoder, each)
    assert (got - expected).abs().max() <= 1e-6 * expected.abs().max()  # Qwen2's norm is in fp32


@pytest.mark.parametrize(
    ("change", "passes"),
    [
        ({}, 1),
        ({"training": False}, 2),  # a search would wait for the compiler
        ({"passage_backbone": torch.nn.Identity()}, 2),
        ({"interaction": torch.nn.Identity()}, None),
        ({"_attention_dropout": 0.1}, 2),
    ],
)
def test_both_sides_share_a_row_only_where_one_backbone_reads_both(as_on_a_gpu, change, passes):
    encoder = encoder_of().train()
    for name, value in change.items():
        setattr(encoder, name, value)
    assert encoder._reads_trees is (passes == 1 or "training" in change)
    if passes is not None:
        assert len(list(encoder.lay_out(both_sides(), 1 << 40, torch.device("cpu"), torch.float32))) == passes


def test_a_limit_of_tokens_divides_the_row_and_keeps_every_text(as_on_a_gpu):
    encoder, sequences = encoder_of().train(), both_sides()
    divided = list(encoder.layouts(sequences, 40))
    assert len(divided) > 1
    assert all(layout.size <= 40 or len(rows) == 1 for rows, layout in divided)
    assert sorted(row for rows, _ in divided for row in rows) == list(range(len(sequences)))


@pytest.mark.parametrize("lora", [None, Lora(rank=4, dropout=0.1)])
@pytest.mark.parametrize(("config", "model"), [(Qwen2Config, Qwen2Model), (LlamaConfig, LlamaModel)])
def test_layers_compile_in_one_piece_and_once_for_rows_of_any_width(as_on_a_gpu, monkeypatch, config, model, lora):
    """The compiler traces the layers with the kernel; without a GPU, it only runs what it traced."""
    monkeypatch.setattr(linear, "onednn_pays", lambda: True)  # as on an AMD processor, that loads for a GPU
    encoder = encoder_of(config, model).train()
    if lora:
        adapters.add(encoder.backbones, lora)
    rows = [[Tokens([100 + n, *range(3, 3 + n)]) for n in range(count)] for count in (20, 40, 60)]
    layouts = [layout for texts in rows for _, layout in encoder.lay_out(texts, 1 << 40, CPU, torch.float32)]
    assert len({layout.input_ids.shape[1] for layout in layouts}) == 3
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=(counter := CompileCounter()), fullgraph=True))
    with torch.no_grad():
        torch.manual_seed(0)
        expected = [encoder(layout) for layout in layouts]
        encoder.compile_layers()
        torch.manual_seed(0)
        for layout, vectors in zip(layouts, expected, strict=True):
            torch.testing.assert_close(encoder(layout), vectors, atol=1e-5, rtol=0)
    assert counter.frame_count == 1
