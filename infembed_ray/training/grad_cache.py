"""The forward and backward passes of a step: with every graph kept, or by GradCache (Gao et al., arXiv 2101.06983).

A contrastive loss needs all embeddings at once, their graphs it does not. GradCache embeds without graph, takes the
loss's gradient with respect to the embeddings (and the learned temperature), then repeats pass after pass with graph
and back-propagates `embeddings . gradient`, whose gradient is that of the loss: the memory of one pass, whatever the
batch.

Dropout is seeded anew for each pass, so that the repeated pass drops what the first one dropped, and both classes,
given the same layouts, draw the same: their gradients are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from infembed_ray.modeling.layout import Layout

Forward = Callable[[Layout], tuple[Tensor, Tensor | None]]
"""A layout -> its (texts, d) embeddings and the learned temperature, if there is one."""
Backward = Callable[[Tensor, bool], None]
"""Back-propagates a scalar; True for the last time in a step."""


class Passes(Protocol):
    """What a step asks of its passes.

    Attributes:
        temperature: the learned one, with gradient, once something is encoded; None if it is not learned.
    """

    temperature: Tensor | None

    def encode(self, layouts: Sequence[Layout]) -> Tensor:
        """(texts, d) embeddings of all texts of the layouts, in their order, for the loss to depend on."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss of everything encoded since the last call."""
        ...


class KeptGraphs:
    """Keeps the graphs of all passes for one backward pass."""

    def __init__(self, forward: Forward, backward: Backward) -> None:
        self._forward = forward
        self._backward = backward
        self.temperature: Tensor | None = None

    def encode(self, layouts: Sequence[Layout]) -> Tensor:
        """See `Passes.encode`."""
        parts = []
        for layout in layouts:
            torch.manual_seed(_next_seed())
            embeddings, self.temperature = self._forward(layout)
            parts.append(embeddings)
        return torch.cat(parts)

    def backward(self, loss: Tensor) -> None:
        """See `Passes.backward`."""
        self.temperature = None
        self._backward(loss, True)


@dataclass
class _Pass:
    layout: Layout
    seed: int
    embeddings: Tensor
    """A leaf, where the loss leaves its gradient."""


class GradCache:
    """Repeats the passes one by one for the backward passes.

    All but the newest: that one keeps its graph, and is the first to be back-propagated, so that there is still never
    more than one graph. Every worker embeds as many layouts as the others (see `Engine.encode`), hence goes through
    equally many forward and backward passes, as ZeRO's collectives demand.
    """

    def __init__(self, forward: Forward, backward: Backward) -> None:
        self._forward = forward
        self._backward = backward
        self._passes: list[_Pass] = []
        self._newest: tuple[Tensor, Tensor | None] | None = None
        self.temperature: Tensor | None = None

    def encode(self, layouts: Sequence[Layout]) -> Tensor:
        """See `Passes.encode`."""
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
        """See `Passes.backward`."""
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
            self.temperature = None  # one pass takes all of its gradient
        self._backward(surrogate, last)

    def _run(self, layout: Layout, seed: int) -> tuple[Tensor, Tensor | None]:
        torch.manual_seed(seed)
        return self._forward(layout)


def _next_seed() -> int:
    return int(torch.randint(2**63 - 1, ()))
