"""Block masks of prefix trees against those that torch computes by token, and FlexAttention against each text alone."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

from infembed_ray.modeling.attention import flex
from infembed_ray.modeling.attention.flex import BLOCK, FlexTreeAttention
from infembed_ray.modeling.attention.prefix_tree import forests
from infembed_ray.modeling.tokenizer import Tokens
from tests.modeling.attention.test_prefix_tree import alone, as_trees, encoder_of, gradients, pairs


def full_blocks(mask):
    """Return the columns of the full blocks of each row."""
    rows = zip(mask.full_kv_num_blocks[0, 0].tolist(), mask.full_kv_indices[0, 0].tolist(), strict=True)
    return [set(columns[:number]) for number, columns in rows]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 150)), min_size=1, max_size=12), st.integers(0, 60))
def test_blocks_are_those_that_the_rule_for_tokens_gives(texts, shared):
    sequences = [Tokens([first] * shared + [5 + n] * length) for n, (first, length) in enumerate(texts)]
    [(_, layout)] = forests(sequences, 1 << 40)
    attention = FlexTreeAttention.from_ends(layout.ends, torch.device("cpu"))
    mask, width = attention.mask, attention.width
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
    assert all(layout.flex for _, layout in encoder.train().layouts(sequences, 1 << 40))
    assert not any(layout.flex for _, layout in encoder.eval().layouts(sequences, 1 << 40))
    got, expected = (gradients(encoder, as_trees(encoder, sequences, flex=kind)) for kind in (True, False))
    assert (got - expected).abs().max() <= 1e-3 * expected.abs().max()


def test_the_kernel_compiles_many_shapes_in_a_thread_and_then_fails(monkeypatch):
    """Autograd's thread recomputes layers; past the limit, the kernel may not compute all scores."""
    kernel = torch.compile(lambda query, *others, **_: query * 2, fullgraph=True, dynamic=False, backend="eager")
    monkeypatch.setattr(flex, "_kernel", lambda device: kernel)
    monkeypatch.setattr(flex, "_SHAPES", 12)  # the default is 8

    def run(width):
        states = torch.ones(1, 1, width, 1)
        return float(FlexTreeAttention(None, width)(torch.nn.Module(), states, states, states).sum())

    with ThreadPoolExecutor(1) as thread:
        assert [thread.submit(run, width).result() for width in range(2, 14)] == [2 * w for w in range(2, 14)]
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            thread.submit(run, 14).result()
