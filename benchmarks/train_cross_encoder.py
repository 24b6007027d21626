"""Trains a small instruction-aware cross-encoder from MiniLM, to measure and test the re-ranking stage with.

    python benchmarks/train_cross_encoder.py --data DATA --output DIRECTORY [--minutes 20] [--cpu-minutes 20]

A step has one InF-IR record of DATA/infir_mini/train.jsonl: its three requests (instruction and query), each over the three
passages of the record, with the softmax loss over the three scores. Every third step has plain pairs of DATA/msmarco_seeds
instead, each with passages of two other pairs whose MiniLM vectors are near its query. Pairs that
the evaluation uses (the first 1,000, its distractors, and those of dev.jsonl) are left out. The input is
`{instruction} {query}` and the passage. DIRECTORY is a model for `kind: classifier`.

Plain torch and transformers, one thread. The last line is one JSON object: steps, seconds, the mean loss of the last tenth.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from statistics import fmean

import material
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.records.tables import Record, read

DISTRACTORS = 1000
"""Seeds from the first that the evaluation has as distractors."""
LENGTH = 144
LEARNING_RATE = 1e-4
FROZEN_LAYERS = 3
"""Lower layers that stay as they are, which saves a third of the time."""

Lists = list[tuple[str, list[str]]]
"""Requests with their passages, of which the first is relevant."""


def record_lists(records: list[Record]) -> list[Lists]:
    """Return the three requests of every record with its passages."""
    made = []
    for record in records:
        good, bad = record.instruction_positive, record.instruction_negative
        passages = [record.document_positive, record.hard_negative_document_1, record.hard_negative_document_2]
        requests = [(good, record.query_positive), (bad, record.query_positive), (good, record.query_negative)]
        made.append(
            [
                (f"{instruction} {query}", [passages[right], *passages[:right], *passages[right + 1 :]])
                for right, (instruction, query) in enumerate(requests)
            ]
        )
    return made


def plain_lists(data: Path) -> Lists:
    """Return the queries of the seeds that the evaluation does not use, each with its passage and two near ones."""
    held_out = {json.loads(line)["query_positive"] for line in (data / "infir_mini" / "dev.jsonl").open()}
    rows = [json.loads(line) for line in (data / "msmarco_seeds" / "seeds.jsonl").open()][DISTRACTORS:]
    rows = [row for row in rows if row["query"] not in held_out]
    encoder = InstructionEncoder.from_pretrained(material.minilm())
    queries = encoder.encode_queries([row["query"] for row in rows])
    passages = encoder.encode_passages([row["passage"] for row in rows])
    near = (-(queries @ passages.T)).argsort(axis=1)
    return [
        (row["query"], [row["passage"], *(rows[other]["passage"] for other in near[number][:5] if other != number)][:3])
        for number, row in enumerate(rows)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="directory with infir_mini/ and msmarco_seeds/")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=20.0, help="at most")
    parser.add_argument("--cpu-minutes", type=float, default=20.0, help="at most, of CPU time of this process")
    parser.add_argument("--seed", type=int, default=42)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    rng = random.Random(arguments.seed)

    tokenizer = AutoTokenizer.from_pretrained(material.minilm())
    model = AutoModelForSequenceClassification.from_pretrained(material.minilm(), num_labels=1).train()
    for frozen in (model.bert.embeddings, *model.bert.encoder.layer[:FROZEN_LAYERS]):
        frozen.requires_grad_(False)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE, weight_decay=0.01
    )
    of_records = record_lists(read(arguments.data / "infir_mini" / "train.jsonl", Record, "records"))
    plain = plain_lists(arguments.data)

    losses: list[float] = []
    order: list[int] = []
    began, cpu_began = time.monotonic(), time.process_time()

    def done() -> float:
        spent = time.monotonic() - began, time.process_time() - cpu_began
        return max(spent[0] / arguments.minutes, spent[1] / arguments.cpu_minutes) / 60

    while (share := done()) < 1:
        if len(losses) % 3 == 2:
            lists = rng.sample(plain, 3)
        else:
            order = order or rng.sample(range(len(of_records)), len(of_records))
            lists = of_records[order.pop()]
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, len(losses) / 20, max(0.02, 1.5 * (1 - share)))
        pairs = [(request, passage) for request, passages in lists for passage in passages]
        batch = tokenizer(*map(list, zip(*pairs, strict=True)), truncation="only_second", max_length=LENGTH,
                          padding=True, return_tensors="pt")  # fmt: skip
        with torch.autocast("cpu", torch.bfloat16):
            scores = model(**batch).logits.float().view(len(lists), -1)
        loss = torch.nn.functional.cross_entropy(scores, torch.zeros(len(lists), dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if len(losses) % 20 == 0:
            print(f"step {len(losses)}, {share:.0%} of the time: loss {fmean(losses[-20:]):.3f}", flush=True)
    model.save_pretrained(arguments.output)
    tokenizer.save_pretrained(arguments.output)
    last = losses[-max(1, len(losses) // 10) :]
    print(json.dumps({"steps": len(losses), "seconds": round(time.monotonic() - began), "loss": round(fmean(last), 4)}))


if __name__ == "__main__":
    main()
