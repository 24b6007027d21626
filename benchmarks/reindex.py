"""Build an index again after a small part of its corpus changed, against a full build of the changed corpus.

    python benchmarks/reindex.py [--passages N] [--changed SHARE] [--factory TYPE]

The encoder is a random one-layer BERT of 64 dimensions with MiniLM's vocabulary: this measures what a build does besides encoding,
and counts what it encodes. A share of the passages get another text, a tenth as many are removed and as many are added. Builds run
in this process (`Index.build`), on one core. Both indexes answer the same 200 queries.

The last line is one JSON object:
    encoded         passages that the second build encoded; `new` is how many are new
    seconds         of the second build; `seconds_full` of the full one
    same_answers    share of the queries with the same ten ids in the same order; `largest_difference` of their scores
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faiss
import material
import torch
from transformers import AutoTokenizer, BertConfig, BertModel

from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.retrieval import build
from infembed_ray.retrieval.index import Index
from infembed_ray.storage.steps import read_manifest

WORDS = 20
"""Words of a passage."""
QUERIES = 200
SHARDS = 4
PHASES = ("partition_corpus", "sort_shards", "encode_passages", "write_shards")


def encoder(directory: Path) -> InstructionEncoder:
    """Write and load the random encoder."""
    tokenizer = AutoTokenizer.from_pretrained(material.minilm())
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 128}
    BertModel(BertConfig(vocab_size=len(tokenizer), **shape)).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return InstructionEncoder.from_pretrained(str(directory))


def corpora(count: int, share: float) -> tuple[dict[str, str], dict[str, str]]:
    """The passages before and after the change, by id."""
    vocabulary = (Path(material.minilm()) / "vocab.txt").read_text(encoding="utf-8").split()
    words = [word for word in vocabulary if word.isalpha()]
    rng = random.Random(0)

    def text() -> str:
        return " ".join(rng.choices(words, k=WORDS))

    before = {f"passage-{number:09d}": text() for number in range(count)}
    few = max(1, round(count * share / 10))
    ids = rng.sample(sorted(before), 11 * few)
    after = before | {id: text() for id in ids[:-few]} | {f"added-{number}": text() for number in range(few)}
    for id in ids[-few:]:
        del after[id]
    return before, after


def timed(seconds: dict[str, float], name: str) -> None:
    """Add the time of a step of the build to `seconds`."""
    step: Callable[..., Any] = getattr(build, name)

    def run(*arguments: Any) -> Any:
        began = time.perf_counter()
        try:
            return step(*arguments)
        finally:
            seconds[name] = round(time.perf_counter() - began, 1)

    setattr(build, name, run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passages", type=int, default=200_000)
    parser.add_argument("--changed", type=float, default=0.01, help="share of the passages")
    parser.add_argument("--factory", default="Flat", help="index type; Flat makes the answers comparable")
    options = parser.parse_args()
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    phases: dict[str, float] = {}
    for name in PHASES:
        timed(phases, name)
    before, after = corpora(options.passages, options.changed)
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        model = encoder(root / "model")

        def built(passages: dict[str, str], output: str) -> tuple[Index, float, dict[str, float]]:
            file = root / "corpus.jsonl"
            lines = (json.dumps({"id": id, "text": text}) + "\n" for id, text in passages.items())
            file.write_text("".join(lines), encoding="utf-8")
            began = time.perf_counter()
            made = Index.build(file, model, root / output, shards=SHARDS, factory=options.factory, recall_floor=0)
            return made, round(time.perf_counter() - began, 1), dict(phases)

        first, seconds_first, _ = built(before, "nightly")
        second, seconds, of_second = built(after, "nightly")
        full, seconds_full, of_full = built(after, "full")
        queries = model.encode_queries(random.Random(1).sample(sorted(after.values()), QUERIES))
        answers = [found.search(queries, 10) for found in (second, full)]
        pairs = list(zip(*answers, strict=True))
        same = [[hit.id for hit in ours] == [hit.id for hit in theirs] for ours, theirs in pairs]
        differences = [abs(a.score - b.score) for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True)]
        summary = {
            "passages": len(after),
            "new": sum(before.get(id) != text for id, text in after.items()),
            "encoded": read_manifest(second.path, "index")["counts"]["encoded"],
            "seconds": seconds,
            "seconds_full": seconds_full,
            "seconds_first": seconds_first,
            "phases": of_second,
            "phases_full": of_full,
            "same_answers": sum(same) / QUERIES,
            "largest_difference": max(differences),
            "bytes": second.facts.bytes,
        }
    assert first.version != second.version
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
