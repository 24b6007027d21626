"""Forward and backward passes of a step: with all graphs kept, or by gradient caching (GradCache, arXiv 2101.06983).

A contrastive loss needs all embeddings at once, but not their graphs. GradCache embeds without graph, takes the
gradient of the loss with respect to the embeddings (and the learned temperature), then repeats each pass with graph and
back-propagates `embeddings . gradient`, whose gradient is that of the loss. It needs the memory of a single pass,
whatever the batch size.

Dropout is seeded for each pass, so that a repeated pass drops the same elements. Both classes, given the same layouts,
draw the same seeds: their gradients are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from infembed_ray.modeling.layout import Layout

Forward = Callable[[Layout], tuple[Tensor, Tensor | None]]
"""Layout -> its (texts, d) embeddings, and the learned temperature if there is one."""
Backward = Callable[[Tensor, bool], None]
"""Back-propagate a scalar; True for the last time in a micro-batch."""


class KeptGraphs:
    """Keep the graphs of all passes for a single backward pass.

    Attributes:
        temperature: The learned temperature with gradient, once something is encoded; None if it is not learned.
    """

    def __init__(self, forward: Forward, backward: Backward) -> None:
        self._forward = forward
        self._backward = backward
        self.temperature: Tensor | None = None

    def encode(self, layouts: Sequence[Layout]) -> Tensor:
        """Return (texts, d) embeddings of all texts of the layouts, in their order, for the loss to depend on."""
        parts = []
        for layout in layouts:
            torch.manual_seed(_next_seed())
            embeddings, self.temperature = self._forward(layout)
            parts.append(embeddings)
        return torch.cat(parts)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss of everything encoded since the last call."""
        self.temperature = None
        self._backward(loss, True)


@dataclass
class _Pass:
    layout: Layout
    seed: int
    embeddings: Tensor
    """A leaf that receives the gradient of the loss."""


class GradCache(KeptGraphs):
    """Repeat the passes one by one for the backward passes.

    The newest pass is the exception: it keeps its graph and is back-propagated first, so that there is never more than
    one graph. Every worker runs equally many passes (see `Engine.encode`), as ZeRO's collectives require.
    """

    def __init__(self, forward: Forward, backward: Backward) -> None:
        super().__init__(forward, backward)
        self._passes: list[_Pass] = []
        self._newest: tuple[Tensor, Tensor | None] | None = None

    def encode(self, layouts: Sequence[Layout]) -> Tensor:
        """See `KeptGraphs.encode`."""
        self._newest = None
        done = len(self._passes)
        for n, layout in enumerate(layouts, start=1):
            seed = _next_seed()
            with torch.set_grad_enabled(n == len(layouts)):
                self._newest = self._run(layout, seed)
            embeddings, temperature = self._newest
            self._passes.append(_Pass(layout, seed, embeddings.detach().requires_grad_()))
        if self.temperature is None and temperature is not None:
            self.temperature = temperature.detach().requires_grad_()
        return torch.cat([p.embeddings for p in self._passes[done:]])

    def backward(self, loss: Tensor) -> None:
        """See `KeptGraphs.backward`."""
        loss.backward()
        while self._passes:
            cached = self._passes.pop()
            self._repeat(cached, last=not self._passes)
        self.temperature = None

    def _repeat(self, cached: _Pass, last: bool) -> None:
        embeddings, temperature = self._newest or self._run(cached.layout, cached.seed)
        self._newest = None
        gradient = cached.embeddings.grad
        surrogate = (embeddings * (torch.zeros_like(embeddings) if gradient is None else gradient)).sum()
        if temperature is not None and self.temperature is not None and self.temperature.grad is not None:
            surrogate = surrogate + (temperature * self.temperature.grad).sum()
            self.temperature = None  # one pass back-propagates all of its gradient
        self._backward(surrogate, last)

    def _run(self, layout: Layout, seed: int) -> tuple[Tensor, Tensor | None]:
        torch.manual_seed(seed)
        return self._forward(layout)


def _next_seed() -> int:
    return int(torch.randint(2**63 - 1, ()))
