"""Offline encoding throughput against SentenceTransformer.encode, in one run on the same cores.

    python benchmarks/encode.py [--records N] [--rounds N]

Both encode real passages and (instruction, query) texts from strings to unit vectors, with MiniLM in fp32 and the same
number of threads. sentence-transformers uses the batch size that is fastest on this machine, which is measured first. The
two alternate, and medians of the rounds are reported. All embeddings must agree to a cosine of 0.9999, or the run fails.

The last line is one JSON object:
    vs_sentence_transformers    our texts per second / those of SentenceTransformer.encode
    packed_vs_padded            ours: packed sequences / length-sorted padded batches
    bf16_vs_fp32                ours: bf16 / fp32, with the lowest cosine; bf16 needs dtype=torch.bfloat16
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import material
import numpy as np
import torch

from infembed_ray.modeling import encoder as encoder_module
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.training.collate import flatten

Run = Callable[[], np.ndarray]
BATCH_SIZES = (8, 16, 32, 64)


def seconds(run: Run) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=100, help="each has three passages and three queries")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch-tokens", type=int, default=4096, help="of ours")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    records, source = material.records(options.records)
    tuples = [t for record in records for t in flatten(record)]
    passages, queries, instructions = zip(*((t.passage, t.query, t.instruction) for t in tuples), strict=True)
    texts = [*passages, *(f"{i} {q}" for q, i in zip(queries, instructions, strict=True))]
    path = material.minilm()

    def ours(encoder: InstructionEncoder) -> Run:
        def run() -> np.ndarray:
            tokens = encoder.tokenize_passages(passages) + encoder.tokenize_queries(queries, instructions)
            return encoder.embed(tokens, options.batch_tokens)

        return run

    def padded(run: Run) -> Run:
        def without_packing() -> np.ndarray:
            chosen, encoder_module.packing_pays = encoder_module.packing_pays, lambda *_: False
            try:
                return run()
            finally:
                encoder_module.packing_pays = chosen

        return without_packing

    runs: dict[str, Run] = {"ours": ours(InstructionEncoder.from_pretrained(path))}
    runs["padded"] = padded(runs["ours"])
    runs["bf16"] = ours(InstructionEncoder.from_pretrained(path, dtype=torch.bfloat16))
    absent: dict[str, str] = {}
    batch_size = None
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        absent["sentence_transformers"] = str(error)
    else:
        theirs = SentenceTransformer(path, device="cpu")

        def encode(size: int) -> Run:
            return lambda: theirs.encode(texts, batch_size=size)

        encode(32)()
        found = {size: seconds(encode(size)) for size in BATCH_SIZES}
        print(
            "SentenceTransformer.encode, seconds by batch size:", {k: round(v, 2) for k, v in found.items()}, flush=True
        )
        batch_size = min(found, key=found.__getitem__)
        runs["sentence_transformers"] = encode(batch_size)

    reference = {name: run() for name, run in runs.items()}  # this also warms up
    cosines = {name: float((reference["ours"] * v).sum(axis=1).min()) for name, v in reference.items()}
    assert min(cosines[name] for name in cosines if name != "bf16") >= 0.9999, cosines
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(options.rounds):
        for name, run in runs.items():
            taken[name].append(seconds(run))
        print(f"round {number + 1}", {name: round(values[-1], 3) for name, values in taken.items()}, flush=True)

    rates = {name: len(texts) / statistics.median(values) for name, values in taken.items()}

    def ratio(above: str, below: str) -> float | None:
        return round(rates[above] / rates[below], 3) if {above, below} <= set(rates) else None

    tokens = InstructionEncoder.from_pretrained(path).tokenizer(texts)["input_ids"]
    summary: dict[str, Any] = {
        "vs_sentence_transformers": ratio("ours", "sentence_transformers"),
        "packed_vs_padded": ratio("ours", "padded"),
        "bf16_vs_fp32": ratio("bf16", "ours"),
        "bf16_least_cosine": round(cosines["bf16"], 5),
        "least_cosine": round(cosines.get("sentence_transformers", float("nan")), 6),
        "texts_per_second": {name: round(rate, 1) for name, rate in rates.items()},
        "texts": len(texts),
        "tokens": sum(map(len, tokens)),
        "of": source,
        "sentence_transformers_batch_size": batch_size,
        "absent": absent,
        "threads": options.threads,
        "machine": f"{os.cpu_count()} vCPU, {platform.system()}, Python {platform.python_version()}, torch {torch.__version__}",
        "date": date.today().isoformat(),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
