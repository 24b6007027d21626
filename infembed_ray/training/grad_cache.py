"""Forward and backward passes of a step: with all graphs kept, or by gradient caching (GradCache, arXiv 2101.06983).

A contrastive loss needs all embeddings at once, but not their graphs. GradCache embeds without graph, takes the gradient
of the loss with respect to the embeddings, then repeats each pass with graph and back-propagates `embeddings . gradient`,
whose gradient is that of the loss. It needs the memory of a single pass, whatever the batch size.

Dropout is seeded for each pass, so that a repeated pass drops the same elements. Both classes, given the same layouts,
draw the same seeds: their gradients are equal.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from infembed_ray.modeling.layout import Layout

Forward = Callable[[Layout], Tensor]
"""Layout -> its (texts, d) embeddings."""
Backward = Callable[[Tensor, bool], None]
"""Back-propagate a scalar; True for the last time in a step."""


class KeptGraphs:
    """Keep the graphs of all passes for a single backward pass."""

    def __init__(self, forward: Forward, backward: Backward) -> None:
        self._forward = forward
        self._backward = backward

    def encode(self, layouts: Sequence[Layout]) -> Tensor:
        """Return (texts, d) embeddings of all texts of the layouts, in their order, for the loss to depend on."""
        return torch.cat([self._run(layout, _next_seed()) for layout in layouts])

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss of everything encoded since the last call."""
        self._backward(loss, True)

    def _run(self, layout: Layout, seed: int) -> Tensor:
        torch.manual_seed(seed)
        return self._forward(layout)


class _Pass(NamedTuple):
    """A pass to repeat; its embeddings are a leaf that receives the gradient of the loss."""

    layout: Layout
    seed: int
    embeddings: Tensor


class GradCache(KeptGraphs):
    """Repeat the passes one by one for the backward passes.

    The newest pass is the exception: it keeps its graph and is back-propagated first, so that there is never more than
    one graph. Every worker runs equally many passes (see `Engine.encode`), as ZeRO's collectives require.
    """

    def __init__(self, forward: Forward, backward: Backward) -> None:
        super().__init__(forward, backward)
        self._passes: list[_Pass] = []
        self._newest: Tensor | None = None

    def encode(self, layouts: Sequence[Layout]) -> Tensor:
        """See `KeptGraphs.encode`."""
        self._newest = None
        done = len(self._passes)
        for n, layout in enumerate(layouts, start=1):
            seed = _next_seed()
            with torch.set_grad_enabled(n == len(layouts)):
                self._newest = self._run(layout, seed)
            self._passes.append(_Pass(layout, seed, self._newest.detach().requires_grad_()))
        return torch.cat([p.embeddings for p in self._passes[done:]])

    def backward(self, loss: Tensor) -> None:
        """See `KeptGraphs.backward`."""
        loss.backward()
        while self._passes:
            self._repeat(*self._passes.pop())

    def _repeat(self, layout: Layout, seed: int, cached: Tensor) -> None:
        """Run a pass with graph and back-propagate it; its graph ends with this call."""
        embeddings = self._run(layout, seed) if self._newest is None else self._newest
        self._newest = None
        gradient = torch.zeros_like(embeddings) if cached.grad is None else cached.grad
        self._backward((embeddings * gradient).sum(), not self._passes)


def _next_seed() -> int:
    return int(torch.randint(2**63 - 1, ()))
