"""Work of the host in a training step and in encoding, counted on a CPU.

    python benchmarks/host_cost.py [--layers N] [--rounds N]

A device waits for the host when it is done before the host has sent it the next operator. So the number of operators that the
host sends, and its time for them, bound a small step on a fast device. The backbone is Qwen2.5-0.5B's in depth and 64 wide, so
that computing takes little: the time of a step here is nearly all the host's.

    step       forward pass, backward pass and AdamW for multi{P,I} at the published lengths, 12 and 96 tuples
    row        the same with the layout of a GPU: one row of prefix trees, whose attention is one operator that computes nothing
    compiled   as `row` with compiled layers: an operator is then also a call of a compiled graph
    engine     the update through DeepSpeed, one worker
    encode     host seconds for 1 million tokens: tokenizing (one thread), and laying out

It also runs on the code of earlier versions, to compare: PYTHONPATH=CLONE python benchmarks/host_cost.py.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from string import ascii_lowercase
from typing import Any
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2Config, Qwen2Model

from benchmarks.gpu import measure, steps
from infembed_ray.config.training import TrainSettings
from infembed_ray.modeling import encoder as encoder_module
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.modeling.tokenizer import Tokens

VOCABULARY = 2048
ENCODED = 1_000_000
BATCH = 16_384
"""Tokens of a pass of encoding."""


class Sent(TorchDispatchMode):
    """Counts the operators that the host sends to the device."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class CountingGraphs:
    """A compiler that only counts the calls of its graphs."""

    calls = 0

    def __call__(self, graph: Any, _: Any) -> Callable[..., Any]:
        def call(inputs: list[Any]) -> Any:
            self.calls += 1
            return graph(*inputs)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call


def backbone(layers: int) -> Qwen2Model:
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen2Config(vocab_size=VOCABULARY, num_hidden_layers=layers, **shape)
    config._attn_implementation = "sdpa"
    return Qwen2Model(config)


def nothing(self: Any, module: Any, query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
    """Stand in for the attention of trees: one operator and its derivative."""
    return query.transpose(1, 2)


def embeddings(encoder: InstructionEncoder, sides: steps.Sides) -> list[Tensor]:
    """Embed both sides as the engine of this version does: in one pass if it can."""
    together = [[*sides[0], *sides[1]]] if hasattr(encoder, "one_backbone") else list(sides)
    made = []
    for sequences in together:
        passes = list(encoder.layouts(sequences, steps.ONE_PASS))
        order = torch.tensor([row for rows, _ in passes for row in rows]).argsort()
        made.append(torch.cat([encoder(layout) for _, layout in passes])[order])
    return list(torch.cat(made).split([len(side) for side in sides]))


def step(encoder: InstructionEncoder, count: int, rounds: int) -> dict[str, float]:
    """Count and time the parts of a step."""
    sides = steps.texts(count, VOCABULARY)
    optimizer = torch.optim.AdamW(encoder.parameters(), fused=True)

    def parts() -> list[Callable[[], Any]]:
        losses: list[Tensor] = []
        return [
            lambda: losses.append(steps.loss_of(*embeddings(encoder, sides))),
            lambda: losses.pop().backward(),
            lambda: (optimizer.step(), optimizer.zero_grad()),
        ]

    def run(part: Callable[[], Any]) -> int:
        with Sent() as sent:
            part()
        return sent.count

    for part in parts():
        part()
    forward, backward, update = map(run, parts())
    taken = []
    for _ in range(rounds):
        times = [time.process_time()]
        for part in parts():
            part()
            times.append(time.process_time())
        taken.append([1e3 * (after - before) for before, after in pairwise(times)])
    ms = [statistics.median(of_part) for of_part in zip(*taken, strict=True)]
    counts = {"forward": forward, "backward": backward, "update": update, "all": forward + backward + update}
    return counts | {f"{name}, ms": value for name, value in zip(("forward", "backward", "update"), ms, strict=True)}


def in_a_row(layers: int, compiler: CountingGraphs | None, count: int, rounds: int) -> dict[str, float]:
    """As `step`, with the layout and perhaps the compiled layers of a GPU."""
    from infembed_ray.modeling.attention import flex

    with (
        mock.patch.object(encoder_module, "flex_pays", return_value=True),
        mock.patch.object(flex.FlexTreeAttention, "__call__", nothing),
    ):
        encoder = steps.encoder_of(backbone(layers)).train()
        if compiler is None:
            return step(encoder, count, rounds)
        torch._dynamo.reset()
        torch._dynamo.config.recompile_limit = 64
        for layer in encoder.backbone.layers:
            layer.compile(dynamic=True, backend=aot_autograd(fw_compiler=compiler, bw_compiler=compiler))
        sides = steps.texts(count, VOCABULARY)
        for _ in range(2):  # the first compiles
            before = compiler.calls
            steps.loss_of(*embeddings(encoder, sides)).backward()
        graphs = compiler.calls - before
        update = step(encoder, count, 1)["update"]
        # The operators inside of graphs would be counted too, so count the rest: a model without layers.
        encoder.backbone.layers = torch.nn.ModuleList()
        rest = step(encoder, count, 1)
        outside = rest["forward"] + rest["backward"]
        return {"graphs": graphs, "operators outside": outside, "all": graphs + outside + update}


def engine(layers: int, stage: int) -> dict[str, float]:
    """Count the operators of a step of 12 tuples in bf16 through DeepSpeed, with the passes of a CPU."""
    from infembed_ray.training.engine import Engine

    encoder = steps.encoder_of(backbone(layers).to(torch.bfloat16))
    paths = dict.fromkeys(("records", "model", "output"), "-")
    settings = TrainSettings.from_mapping(paths | {"zero_stage": stage, "precision": "bf16"})
    made = Engine(encoder, settings)
    made.train()
    sides = steps.texts(steps.TUPLES, VOCABULARY)
    counts: dict[str, float] = {}
    for _ in range(2):
        loss = steps.loss_of(*map(made.encode, sides))
        for name, part in {
            "backward": lambda loss=loss: made.backward(loss),
            "update": lambda: made.update(1e-5),
        }.items():
            with Sent() as sent:
                part()
            counts[name] = sent.count
    made.close()
    return counts


def encode(rounds: int) -> dict[str, float]:
    """Time what the host does before a pass, for texts of the published lengths."""
    rng = random.Random(0)
    words = [a + b for a in ascii_lowercase for b in ascii_lowercase]
    sentences = [" ".join(rng.choices(words, k=max(1, round(rng.lognormvariate(4.2, 0.4))))) for _ in range(14_000)]
    with tempfile.TemporaryDirectory() as directory:
        backbone(1).save_pretrained(directory)
        measure.tokenizer().save_pretrained(directory)
        encoder = InstructionEncoder.from_pretrained(Path(directory))
    taken: list[tuple[float, float]] = []
    for _ in range(rounds):
        start = time.process_time()
        sequences: list[Tokens] = encoder.tokenize_passages(sentences)
        middle = time.process_time()
        for _ in encoder.layouts(sequences, BATCH):
            pass
        million = ENCODED / sum(map(len, sequences))
        taken.append(((middle - start) * million, (time.process_time() - middle) * million))
    tokenizing, laying = (statistics.median(each) for each in zip(*taken, strict=True))
    return {"tokenize, s": tokenizing, "lay out, s": laying}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
    results: dict[str, dict[str, float]] = {}

    def show(name: str, figures: dict[str, float]) -> None:
        results[name] = figures
        print(f"{name:26}", "  ".join(f"{label} {value:,.4g}" for label, value in figures.items()), flush=True)

    for count in (steps.TUPLES, 96):
        encoder = steps.encoder_of(backbone(options.layers)).train()
        show(f"step, {count} tuples", step(encoder, count, options.rounds))
        if hasattr(encoder, "one_backbone"):
            show(f"row, {count} tuples", in_a_row(options.layers, None, count, options.rounds))
            show(f"compiled, {count} tuples", in_a_row(options.layers, CountingGraphs(), count, options.rounds))
    for stage in (1, 2):
        show(f"engine, ZeRO-{stage}", engine(options.layers, stage))
    show("encode, 1 million tokens", encode(options.rounds))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
