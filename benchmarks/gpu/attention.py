"""Packed texts and prefix trees on the device: exactness of both passes, and speed against padded texts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import measure
from benchmarks.gpu.suite import Context, Result
from infembed_ray.modeling.attention import prefix_tree
from infembed_ray.modeling.attention.flex import flex_pays
from infembed_ray.modeling.attention.packing import enable_packing, packed, packing_pays
from infembed_ray.modeling.layout import Layout, length_sorted_batches, padded
from infembed_ray.modeling.tokenizer import Tokens

ONE_PASS = 1 << 40
SLACK = 1.5
"""A way may differ from fp32 by this multiple of the padded texts' difference: rounding in another order, no more."""
FLOOR = {torch.float32: 1e-5, torch.bfloat16: 2e-3}
"""Difference that is always allowed, where the padded texts happen to differ less."""
EMBEDDINGS, GRADIENTS = "embeddings", "gradients"
Passes = list[tuple[list[int], Layout]]


def varlen(context: Context) -> Iterator[Result]:
    """Compare packed with padded texts: exactness on two layers, speed on eight."""
    vocabulary = measure.config_of("0.5B", context).vocab_size
    for size, mean in (("0.5B", measure.PASSAGE), ("1.5B", 0)):
        sample = measure.texts(6, 20 if context.tiny else mean, vocabulary)
        yield _exactness(f"{size}, 2 layers", size, context, sample, {"packed": _packed(sample)})
    pays = packing_pays(torch.device(context.device), measure.dtype_of(context), drops=False)
    for size, count in (("0.5B", 256), ("1.5B", 128), ("7B", 64)):
        if context.left < 0:
            return
        sample = measure.texts(8 if context.tiny else count, measure.PASSAGE, vocabulary)
        backbone = measure.backbone_of(size, context, layers=8)
        enable_packing(backbone)
        ways = {"packed": _packed(sample), "padded": _padded(sample), "padded, sorted": _padded(sample, 8192)}
        taken = {name: _time(backbone, passes, context) for name, passes in ways.items()}
        tokens = sum(map(len, sample))
        yield Result(
            f"{size}, 8 layers, {len(sample)} passages, forward and backward",
            {
                "packing pays": str(pays),
                "tokens": tokens,
                "padded tokens": ways["padded"][0][1].input_ids.numel(),
                "packed tokens/s": tokens / taken["packed"],
                "padded / packed": taken["padded"] / taken["packed"],
                "padded, sorted / packed": taken["padded, sorted"] / taken["packed"],
            },
        )
        del backbone
        measure.free()


def trees(context: Context) -> Iterator[Result]:
    """Compare B x B pairs of instruction and query as prefix trees, with both masks, with the same pairs one by one."""
    vocabulary = measure.config_of("1.5B", context).vocab_size
    sample = _pairs(3, vocabulary)
    ways = {"packed": _packed(sample), **_ways_of_trees(sample, context)}
    yield _exactness("3 x 3 pairs, 2 layers of 1.5B", "1.5B", context, sample, ways)
    for size, count in (("1.5B", 12), ("1.5B", 24), ("3B", 24)):
        if context.left < 0:
            return
        sample = _pairs(3 if context.tiny else count, vocabulary)
        ways = {"packed": _packed(sample), "padded": _padded(sample), **_ways_of_trees(sample, context)}
        backbone = measure.backbone_of(size, context, layers=4)
        enable_packing(backbone)
        taken, memory = {}, {}
        for name, passes in ways.items():
            with measure.Peak(context) as peak:
                taken[name] = _time(backbone, passes, context)
            memory[name] = peak.most - peak.before
        tokens, shared = sum(map(len, sample)), sum(layout.input_ids.numel() for _, layout in ways["dense trees"])
        figures: dict[str, float | str] = {"tokens": tokens, "as trees": shared, "tokens / as trees": tokens / shared}
        figures |= {f"{name}, ms": 1e3 * s for name, s in taken.items()}
        figures |= {f"packed / {name}": taken["packed"] / s for name, s in taken.items() if name.endswith("trees")}
        figures |= {f"{name}, GiB": number for name, number in measure.if_measured(**memory).items()}
        yield Result(f"{size}, 4 layers, {count} x {count} pairs, forward and backward", figures)
        del backbone
        measure.free()


def _exactness(name: str, size: str, context: Context, sample: list[Tokens], ways: dict[str, Passes]) -> Result:
    """Compare embeddings and gradients of some ways, and of padded texts, with padded texts in fp32 without TF32."""
    reference = measure.backbone_of(size, context, torch.float32, layers=2)
    expected = _both(reference, _padded(sample), context)
    backbone = measure.backbone_of(size, context, layers=2)
    with torch.no_grad():  # the same weights, rounded
        for own, other in zip(backbone.parameters(), reference.parameters(), strict=True):
            own.copy_(other)
    of_padded = _differences(_both(backbone, _padded(sample), context), expected)
    enable_packing(backbone)
    figures, checks = {f"padded, {what}": value for what, value in of_padded.items()}, {}
    for way, passes in ways.items():
        found = _differences(_both(backbone, passes, context), expected)
        for what, value in found.items():
            bound = SLACK * of_padded[what] + FLOOR[measure.dtype_of(context)]
            checks[f"{way}, {what}"] = (value, bound)
    return Result(f"{name}: difference to fp32", {**figures}, checks)


def _both(backbone: Any, passes: Passes, context: Context) -> tuple[Tensor, list[Tensor]]:
    return measure.gradients(backbone, lambda: measure.embed(backbone, passes, context.device))


def _differences(found: tuple[Tensor, list[Tensor]], expected: tuple[Tensor, list[Tensor]]) -> dict[str, float]:
    return {what: measure.difference(a, b) for what, a, b in zip((EMBEDDINGS, GRADIENTS), found, expected, strict=True)}


def _time(backbone: Any, passes: Passes, context: Context) -> float:
    def forward_and_backward() -> None:
        backbone.zero_grad()
        measure.embed(backbone, passes, context.device).sum().backward()

    return measure.seconds(forward_and_backward, context, warm_up=2)


def _packed(sample: list[Tokens]) -> Passes:
    order = sorted(range(len(sample)), key=lambda row: -len(sample[row]))
    return [(order, packed([sample[row] for row in order]))]


def _padded(sample: list[Tokens], budget: int = ONE_PASS) -> Passes:
    lengths = [len(text) for text in sample]
    return [(rows, padded([sample[row] for row in rows], 0)) for rows in length_sorted_batches(lengths, budget)]


def _ways_of_trees(sample: list[Tokens], context: Context) -> dict[str, Passes]:
    kinds = {"dense trees": False} | ({"flex trees": True} if flex_pays(torch.device(context.device)) else {})
    return {name: list(prefix_tree.forests(sample, ONE_PASS, flex)) for name, flex in kinds.items()}


def _pairs(count: int, vocabulary: int) -> list[Tokens]:
    """Make all pairs of `count` instructions and queries."""
    instructions = measure.texts(count, measure.INSTRUCTION, vocabulary, seed=1)
    queries = measure.texts(count, measure.QUERY, vocabulary, seed=2)
    return [Tokens(i.ids + q.ids, "query", len(i)) for i in instructions for q in queries]
