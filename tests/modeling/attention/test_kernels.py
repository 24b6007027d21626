"""Measuring the attention kernels of an encoder."""

import math
import time

from infembed_ray.modeling.attention.kernels import Kernels, measure
from infembed_ray.modeling.attention.packing import PackedLayout
from infembed_ray.modeling.attention.prefix_tree import TreeLayout
from infembed_ray.modeling.tokenizer import Tokens
from tests.modeling.attention.test_prefix_tree import encoder_of, pairs

CANDIDATES = [Kernels(p, f) for p in (True, False) for f in (True, False)]
SIDES = [pairs(), [Tokens([n, *range(100, 110)]) for n in range(1, 6)]]


def test_every_candidate_lays_out_and_runs_each_side(monkeypatch):
    encoder = encoder_of().train()
    seen = {kernels: set() for kernels in CANDIDATES}

    def forward(layout):
        flex = layout.flex if isinstance(layout, TreeLayout) else None
        seen[encoder.kernels].add((layout.side, isinstance(layout, PackedLayout), flex))
        time.sleep(0.02 if flex else 0)
        return encoder(layout)

    seconds = measure(encoder, forward, SIDES, 1 << 40, CANDIDATES)
    for kernels, found in seen.items():
        assert found == {("query", False, kernels.flex_trees), ("passage", kernels.packed, None)}
    assert encoder.kernels == Kernels()
    assert min(seconds[0], seconds[2]) > 0.02
    assert all(parameter.grad is None for parameter in encoder.parameters())


def test_a_kernel_that_fails_is_never_the_fastest():
    def forward(layout):
        if isinstance(layout, TreeLayout) and layout.flex:
            raise RuntimeError("no Triton")

    seconds = measure(encoder_of(), forward, SIDES, 1 << 40, CANDIDATES)
    assert [math.isinf(s) for s in seconds] == [True, False, True, False]
