"""Time that a training step waits for its data, and the CPU time that preparing them takes.

    python benchmarks/data_preparation.py [--records 32 256 1024] [--workers 8] [--steps N]

The first of `--workers` workers prepares its share of steps as `infembed train` does: it reads the records, draws
negatives, tokenizes, collates and lays the passes out. The records are real ones, repeated with a number in every text so
that all are different. The backbone is a decoder of random weights with MiniLM's tokenizer; the objective is multi{P,I} with
five I-negatives.

A step is a pause instead of kernels: as long as a model of `--parameters` takes for the same tokens on an A100 at 40 % of
its peak in bf16 (6 N FLOPs per token). The thread that prepares has the CPU for itself then, as on a GPU machine.

The last line is one JSON object; per number of records:
    prepare_ms                       CPU time of preparing a step, all threads
    step_ms                          duration of the pause
    data_seconds                     mean time that a step waits for its data, without the first step of the run
    data_seconds_without_thread      the same if each step prepares its own data
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from datetime import date
from itertools import count

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import material
import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2Model

from infembed_ray.config.training import TrainSettings
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.modeling.pipeline import ahead
from infembed_ray.modeling.tokenizer import TextFormat
from infembed_ray.records.tables import Record
from infembed_ray.training.preparation import Prepared, Preparer

FLOPS_PER_SECOND = 0.4 * 312e12
TEXTS = [f.name for f in fields(Record) if f.name.startswith(("query", "instruction", "document", "hard"))]


def records(number: int) -> list[Record]:
    """Return `number` records that differ in every text."""
    real, _ = material.records(200)
    turns = (divmod(n, len(real)) for n in range(number))
    return [
        replace(real[at], id=f"{turn}/{at}", **{name: f"{turn} {getattr(real[at], name)}" for name in TEXTS})
        for turn, at in turns
    ]


def encoder() -> InstructionEncoder:
    tokenizer = AutoTokenizer.from_pretrained(material.minilm())
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    backbone = Qwen2Model(Qwen2Config(vocab_size=len(tokenizer), num_key_value_heads=2, **shape))
    return InstructionEncoder(backbone, tokenizer, "last", TextFormat()).train()


def preparer(rows: list[Record], model: InstructionEncoder) -> Preparer:
    return Preparer(TrainSettings(records="-", model="-", output="-"), rows, 0, model)


def shares(records: int, workers: int) -> list[list[int]]:
    return [list(range(records))[rank::workers] for rank in range(workers)]


def cpu_ms(prepares: Preparer, rows: list[list[int]], steps: int) -> float:
    prepares.prepare((0, rows))  # warm-up
    began = time.process_time()
    for n in range(steps):
        prepares.prepare((n, rows))
    return 1000 * (time.process_time() - began) / steps


def waits(batches: Iterator[Prepared], pause: float, steps: int) -> float:
    """Return the mean seconds that a step waits for its batch, without the first."""
    waited = []
    for _ in range(steps + 1):
        began = time.perf_counter()
        next(batches)
        waited.append(time.perf_counter() - began)
        time.sleep(pause)
    return statistics.mean(waited[1:])


def measure(size: int, model: InstructionEncoder, options: argparse.Namespace) -> dict[str, float]:
    rows, of_workers = records(size), shares(size, options.workers)
    prepares = preparer(rows, model)
    prepared = prepares.prepare((0, of_workers))
    tokens = sum(layout.input_ids.numel() for _, layout in (p for _, passes in prepared.groups for p in passes))
    pause = 6 * options.parameters * tokens / FLOPS_PER_SECOND
    items = ((n, of_workers) for n in count())
    threaded = ahead(map(prepares.prepare, items))
    found = {
        "tokens": tokens,
        "prepare_ms": cpu_ms(prepares, of_workers, options.steps),
        "step_ms": 1000 * pause,
        "data_seconds": waits(threaded, pause, options.steps),
        "data_seconds_without_thread": waits(map(prepares.prepare, items), 0.0, options.steps),
    }
    threaded.close()
    return {name: float(f"{value:.3g}") for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, nargs="+", default=[32, 256, 1024], help="per step, of all workers")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--parameters", type=float, default=1.5e9, help="of the model whose steps are waited for")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = encoder()
    figures = {}
    for size in options.records:
        figures[size] = measure(size, model, options)
        print(size, figures[size], flush=True)
    machine = f"{os.cpu_count()} vCPU, {platform.system()}, torch {torch.__version__}, {date.today().isoformat()}"
    print(json.dumps({"records": figures, "workers": options.workers, "machine": machine}))


if __name__ == "__main__":
    main()
