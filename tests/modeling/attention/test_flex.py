"""Block masks of prefix trees against the rule for tokens, and FlexAttention against dense masks."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

from infembed_ray.modeling.attention import flex
from infembed_ray.modeling.attention.flex import BLOCK, FlexTreeAttention
from infembed_ray.modeling.attention.prefix_tree import TreeAttention, forests
from infembed_ray.modeling.layout import padded
from infembed_ray.modeling.tokenizer import Tokens
from tests.modeling.attention.test_prefix_tree import alone, as_trees, encoder_of, gradients, pairs

CPU = torch.device("cpu")


def blocks(count, indices, width):
    """Return the (rows, columns) bool matrix of a mask's lists of blocks."""
    dense = torch.zeros(width, width, dtype=torch.bool)
    for row, (number, columns) in enumerate(zip(count[0, 0].tolist(), indices[0, 0].tolist(), strict=True)):
        dense[row, columns[:number]] = True
    return dense


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 150)), min_size=1, max_size=12),
    st.integers(0, 60),
)
def test_blocks_are_those_that_the_rule_for_tokens_gives(texts, shared):
    sequences = [Tokens([first] * shared + [5 + n] * length) for n, (first, length) in enumerate(texts)]
    [(_, layout)] = forests(sequences, 1 << 40)
    attention = FlexTreeAttention.from_ends(layout.ends, CPU)
    ends = torch.cat([layout.ends, torch.arange(len(layout.ends), attention.width) + 1])
    place = torch.arange(attention.width)
    attends = (place <= place.unsqueeze(1)) & (place.unsqueeze(1) < ends)
    by_block = attends.view(-1, BLOCK, attention.width // BLOCK, BLOCK).transpose(1, 2).flatten(2)
    any_, all_ = by_block.any(dim=2), by_block.all(dim=2)
    got, count = attention.mask, len(any_)
    full = blocks(got.full_kv_num_blocks, got.full_kv_indices, count)
    partial = blocks(got.kv_num_blocks, got.kv_indices, count)
    assert torch.equal(full | partial, any_)
    assert not (full & partial).any()
    assert torch.equal(full | all_, all_)  # a diagonal block is never full, except of one token
    theirs = create_block_mask(got.mask_mod, 1, 1, attention.width, attention.width, device="cpu", BLOCK_SIZE=BLOCK)
    assert torch.equal(got.to_dense(), theirs.to_dense())
    assert torch.equal(got.q_num_blocks + got.full_q_num_blocks, theirs.q_num_blocks + theirs.full_q_num_blocks)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_trees_by_flex_attention_give_the_embeddings_of_each_text_alone(pooling):
    encoder = encoder_of(pooling=pooling)
    sequences = pairs()
    with torch.no_grad():  # it has no backward pass on a CPU
        torch.testing.assert_close(
            as_trees(encoder, sequences, flex=True), alone(encoder, sequences), atol=1e-6, rtol=0
        )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_trees_by_flex_attention_give_the_gradients_of_each_text_alone():
    encoder = encoder_of().cuda()
    sequences = pairs()
    expected, found = (
        gradients(encoder, torch.cat([encoder(layout.to(encoder.device)) for _, layout in passes]))
        for passes in (
            [([row], padded([sequences[row]], 0)) for row in sorted(range(20), key=lambda row: sequences[row].ids)],
            list(forests(sequences, 1 << 40, flex=True)),
        )
    )
    assert (found - expected).abs().max() <= 1e-3 * expected.abs().max()


@pytest.mark.parametrize("in_a_thread", [False, True])
def test_the_kernel_compiles_many_shapes_and_then_fails(monkeypatch, in_a_thread):
    """As on torch 2.11, whose `torch.compile` takes no limit: past the limit, the kernel may not compute all scores."""
    original = torch.compile

    def compile_of_2_11(model, *, fullgraph=False, dynamic=None):
        return original(model, fullgraph=fullgraph, dynamic=dynamic, backend="eager")

    def attend(query, key, value, block_mask, scale, enable_gqa):
        return query * 2

    monkeypatch.setattr(torch, "compile", compile_of_2_11)
    monkeypatch.setattr(flex, "flex_attention", attend)
    monkeypatch.setattr(flex, "_SHAPES", 12)  # the default is 8
    compiled = flex._kernel.__wrapped__("cuda")
    monkeypatch.setattr(flex, "_kernel", lambda device: compiled)

    def run(width):
        states = torch.ones(1, 1, width, 1)
        return FlexTreeAttention(None, width)(torch.nn.Module(), states, states, states).sum()

    # A thread of autograd, which recomputes layers; the limit of this one was raised by other tests.
    with ThreadPoolExecutor(1) as thread, torch._dynamo.config.patch(recompile_limit=8):
        call = (lambda width: thread.submit(run, width).result()) if in_a_thread else run
        assert [call(width) for width in range(2, 2 + flex._SHAPES)] == [2 * w for w in range(2, 2 + flex._SHAPES)]
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            call(2 + flex._SHAPES)


@pytest.mark.slow
def test_the_compiled_kernel_reads_the_block_mask(monkeypatch):
    """Only the compiled kernel skips blocks; here it compiles for the CPU, without backward pass, once for two widths."""
    compiled = torch.compile(flex.flex_attention, fullgraph=True, dynamic=False)
    monkeypatch.setattr(flex, "_kernel", lambda device: compiled)
    for queries in (60, 61, 200):
        [(_, layout)] = forests(pairs(3, queries), 1 << 40)
        tokens = len(layout.ends)
        torch.manual_seed(0)
        states = [torch.randn(1, heads, tokens, 16) for heads in (4, 2, 2)]
        dense = TreeAttention.from_ends(layout.ends, torch.float32, CPU)
        module = torch.nn.Module()
        module.num_key_value_groups = 2
        with torch.no_grad():
            got = FlexTreeAttention.from_ends(layout.ends, CPU)(module, *states, scaling=0.25)
            expected = dense(module, *states, scaling=0.25, is_causal=True)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
