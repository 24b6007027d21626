"""Numerical bounds of a whole model: bf16 against fp32, GradCache against kept graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu import measure
from benchmarks.gpu.suite import Context, Result
from infembed_ray.modeling.attention.packing import enable_packing, packed
from infembed_ray.modeling.layout import Layout, length_sorted_batches
from infembed_ray.modeling.tokenizer import Tokens
from infembed_ray.training.grad_cache import GradCache, KeptGraphs

TEMPERATURE = 0.05
COSINE, LOSS, GRADIENT = 1e-3, 2e-2, 0.1
"""Bounds of bf16: largest 1 - cosine of an embedding with that of fp32, relative loss, relative gradient of a 0.5B model.

bf16 rounds a value by up to 2**-9, and 24 layers add these errors up. A CPU measures 2e-4, 4e-3 and 0.026, and 3e-4 for
1 - cosine of the whole gradient. The loss is at temperature 0.05, which multiplies an error of a similarity by 20.
"""
CACHED = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Relative difference of gradients that are summed in another order."""


def bf16(context: Context) -> Iterator[Result]:
    """Compare one model in bf16 with the same weights in fp32: embeddings, contrastive loss, gradients."""
    vocabulary = measure.config_of("0.5B", context).vocab_size
    sides = [measure.texts(24, mean, vocabulary, seed=n) for n, mean in enumerate((59, measure.PASSAGE))]
    reference = measure.backbone_of("0.5B", context, torch.float32)
    low = measure.backbone_of("0.5B", context, torch.bfloat16)
    with torch.no_grad():
        for own, other in zip(low.parameters(), reference.parameters(), strict=True):
            own.copy_(other)
            other.copy_(own)  # rounded weights: what is compared is the computation
    expected, found = (_contrast(backbone, sides, context) for backbone in (reference, low))
    off = 1 - nn.functional.cosine_similarity(found[0], expected[0])
    gradient = [torch.cat([g.flatten().double() for g in gradients]) for *_, gradients in (expected, found)]
    yield Result(
        f"{'tiny' if context.tiny else '0.5B'}, 24 + 24 texts",
        {"1 - cosine of gradients": 1 - float(nn.functional.cosine_similarity(*gradient, dim=0))},
        {
            "1 - cosine": (float(off.max()), COSINE),
            "loss": (abs(found[1] - expected[1]) / expected[1], LOSS),
            "gradient": (measure.difference(found[2], expected[2]), GRADIENT),
        },
    )


def grad_cache(context: Context) -> Iterator[Result]:
    """Compare GradCache with kept graphs in the same passes, then grow the batch under GradCache."""
    size = "0.5B"
    vocabulary = measure.config_of(size, context).vocab_size
    backbone = measure.backbone_of(size, context)
    enable_packing(backbone)
    budget = 64 if context.tiny else 4096
    count = 8 if context.tiny else 128
    layouts = _layouts(count, vocabulary, budget, context)
    way = {"kept graphs": KeptGraphs, "GradCache": GradCache}
    found, taken, memory = {}, {}, {}
    for name, passes in way.items():
        runner = _runner(passes, backbone)
        with measure.Peak(context) as peak:
            _step(runner, backbone, layouts)
        found[name] = [p.grad.clone() for p in backbone.parameters() if p.grad is not None]
        memory[name] = peak.most - peak.before
        taken[name] = measure.seconds(lambda r=runner: _step(r, backbone, layouts), context, rounds=3)
    bound = CACHED[measure.dtype_of(context)]
    yield Result(
        f"{size}, {count} passages in {len(layouts)} passes",
        {
            "GradCache / kept graphs, time": taken["GradCache"] / taken["kept graphs"],
            **{f"{name}, GiB": number for name, number in measure.if_measured(**memory).items()},
        },
        {"gradients": (measure.difference(found["GradCache"], found["kept graphs"]), bound)},
    )
    found.clear()
    for times in (4, 16):
        if context.left < 0:
            return
        layouts = _layouts(times * count, vocabulary, budget, context)
        with measure.Peak(context) as peak:
            _step(_runner(GradCache, backbone), backbone, layouts)
        grown = measure.if_measured(GiB=peak.most - peak.before)
        yield Result(f"GradCache, {times * count} passages in {len(layouts)} passes", {**grown})


def _contrast(backbone: Any, sides: list[list[Tokens]], context: Context) -> tuple[Tensor, float, list[Tensor]]:
    """Return the embeddings, the loss of each query against all passages, and its gradients."""
    enable_packing(backbone)
    every = [text for side in sides for text in side]
    embeddings = measure.embed(backbone, [(list(range(len(every))), packed(every))], context.device)
    loss = _loss(embeddings)
    loss.backward()
    return embeddings.detach(), float(loss.detach()), [p.grad for p in backbone.parameters() if p.grad is not None]


def _loss(embeddings: Tensor) -> Tensor:
    """Return the contrastive loss of the first half with the second."""
    queries, passages = embeddings.chunk(2)
    scores = queries @ passages.T / TEMPERATURE
    return nn.functional.cross_entropy(scores, torch.arange(len(scores), device=scores.device))


def _layouts(count: int, vocabulary: int, budget: int, context: Context) -> list[Layout]:
    sample = measure.texts(count, measure.PASSAGE, vocabulary)
    groups = length_sorted_batches([len(text) for text in sample], budget, padded=False)
    return [packed([sample[row] for row in rows]).to(torch.device(context.device)) for rows in groups]


def _runner(kind: type[KeptGraphs], backbone: Any) -> KeptGraphs:
    def forward(layout: Layout) -> Tensor:
        rows = list(range(len(layout.lengths)))
        return measure.embed(backbone, [(rows, layout)], str(layout.input_ids.device))

    return kind(forward, lambda loss, last: loss.backward())


def _step(runner: KeptGraphs, backbone: Any, layouts: list[Layout]) -> None:
    backbone.zero_grad()
    runner.backward(_loss(runner.encode(layouts)))
