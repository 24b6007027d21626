"""Gradient caching against the whole graph, in float64, without DeepSpeed."""

import weakref

import pytest
import torch
from torch import nn

from infembed_ray.modeling.layout import padded
from infembed_ray.modeling.tokenizer import Tokens
from infembed_ray.training.grad_cache import GradCache, KeptGraphs


class Encoder(nn.Module):
    """Mean of token embeddings with dropout."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(50, 8, dtype=torch.float64)
        self.linear = nn.Linear(8, 6, dtype=torch.float64)
        self.dropout = nn.Dropout(0.3)

    def forward(self, layout):
        states = self.dropout(torch.tanh(self.linear(self.dropout(self.tokens(layout.input_ids)))))
        pooled = (states * layout.attention_mask.unsqueeze(2)).sum(1)
        return nn.functional.normalize(pooled, dim=1)


def layouts(first):
    """Return five layouts of one to three texts."""
    return [
        padded([Tokens([(first + 7 * n + k) % 50 for k in range(3 + n + t)]) for t in range(1 + n % 3)], 0)
        for n in range(5)
    ]


def step(passes_class):
    """Return loss, gradients and backward calls of a step with two calls of `encode`."""
    encoder = Encoder()
    calls = []

    def backward(loss, last):
        calls.append(last)
        loss.backward()

    passes = passes_class(encoder, backward)
    torch.manual_seed(1)
    queries, passages = passes.encode(layouts(1)), passes.encode(layouts(11))
    logits = queries @ passages.T / 0.3
    loss = nn.functional.cross_entropy(logits, torch.arange(len(queries)))
    passes.backward(loss)
    return loss.item(), {name: p.grad for name, p in encoder.named_parameters()}, calls


def test_gradients_match_the_whole_graph_with_dropout():
    loss, gradients, _ = step(GradCache)
    whole_loss, whole, _ = step(KeptGraphs)
    assert loss == whole_loss
    for name, gradient in whole.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-12, atol=1e-14)


def test_dropout_is_enabled_and_differs_between_passes():
    encoder = Encoder()
    passes = KeptGraphs(encoder, lambda loss, last: None)
    torch.manual_seed(1)
    one, two = passes.encode([layouts(1)[0], layouts(1)[0]])
    assert not torch.allclose(one, two)


def test_only_the_last_backward_pass_is_marked():
    assert step(GradCache)[2] == [False] * 9 + [True]
    assert step(KeptGraphs)[2] == [True]


def test_passes_that_the_loss_ignores_still_run_backward():
    encoder = Encoder()
    backward_passes = []
    passes = GradCache(encoder, lambda loss, last: (backward_passes.append(last), loss.backward()))
    passes.encode(layouts(1))
    passes.backward(passes.encode(layouts(11)).sum())
    assert len(backward_passes) == 10


@pytest.mark.parametrize("calls", [1, 2])
def test_there_is_never_more_than_one_graph(calls):
    encoder = Encoder()
    alive = weakref.WeakSet()
    most = []

    def forward(layout):
        embeddings = encoder(layout)
        if embeddings.requires_grad:
            alive.add(embeddings)
        most.append(len(alive))
        return embeddings

    passes = GradCache(forward, lambda loss, last: loss.backward())
    embeddings = [passes.encode(layouts(n)) for n in range(calls)]
    passes.backward(sum(e.sum() for e in embeddings))
    assert max(most) == 1
    assert len(most) == 5 * calls + 5 * calls - 1  # every pass twice, except the newest
