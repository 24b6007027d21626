"""Time of a training step against sentence-transformers' MultipleNegativesRankingLoss, in one run.

    python benchmarks/training_step.py [--records N] [--steps N] [--rounds N] [--zero-stage N] [--only NAME ...]

A step tokenises the batch, embeds it with dropout, computes uni{P} at temperature 0.05 (the same loss), back-propagates,
clips to norm 1 and runs AdamW. All use the same MiniLM, batches of real records, fp32 and threads. All but DeepSpeed use the
fused torch.optim.AdamW. They alternate in rounds of several steps; figures are medians of the rounds. Without dropout the
first losses must agree to 1e-4, or the run fails.

    sentence_transformers    MultipleNegativesRankingLoss: queries and passages, each padded to the longest
    ours                     packed sequences, plain PyTorch
    engine                   ours under DeepSpeed with one worker, ZeRO 2 by default, as the product runs it
    grad_cache               the engine with GradCache in about `--chunks` passes

The last line is one JSON object:
    vs_sentence_transformers          their time / ours
    engine_vs_sentence_transformers   their time / ours under DeepSpeed
    padded_vs_packed                  our time padded / packed
    grad_cache_overhead               time with GradCache / without
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import date

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import material
import torch
from torch import Tensor, nn

from infembed_ray.config.training import TrainSettings
from infembed_ray.modeling import encoder as encoder_module
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.modeling.tokenizer import Tokens
from infembed_ray.records.tables import Record
from infembed_ray.training.collate import Batch, collate, flatten
from infembed_ray.training.losses import Objective, marginal_loss
from infembed_ray.training.scores import score_batch

RATE = 5e-5
TEMPERATURE = 0.05
UNI_P = Objective.parse("uni{P}")

NAMES = ["ours", "sentence_transformers", "engine", "grad_cache", "padded"]
Step = Callable[[list[Record]], float]
"""Takes an optimizer step on the tuples of records; returns the loss."""


def batch_of(encoder: InstructionEncoder, records: list[Record]) -> Batch:
    return collate(encoder, [records], 0, UNI_P)


def loss_of(batch: Batch, encode: Callable[[Sequence[Tokens]], Tensor]) -> Tensor:
    scores = score_batch(UNI_P, batch, encode(batch.queries), encode(batch.passages))
    return marginal_loss(UNI_P, scores.positive, scores.negatives, TEMPERATURE)


def update(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], loss: Tensor) -> float:
    loss.backward()
    nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def plain(path: str) -> tuple[Step, nn.Module]:
    """Make our step without DeepSpeed."""
    encoder = InstructionEncoder.from_pretrained(path)
    parameters = list(encoder.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.0, fused=True)

    def encode(sequences: Sequence[Tokens]) -> Tensor:
        ((rows, layout),) = encoder.layouts(sequences, 1 << 40)
        return encoder(layout)[torch.tensor(rows).argsort()]

    def step(records: list[Record]) -> float:
        return update(optimizer, parameters, loss_of(batch_of(encoder, records), encode))

    return step, encoder


def padded(step: Step) -> Step:
    def without_packing(records: list[Record]) -> float:
        chosen, encoder_module.packing_pays = encoder_module.packing_pays, lambda *_: False
        try:
            return step(records)
        finally:
            encoder_module.packing_pays = chosen

    return without_packing


def deepspeed(
    path: str, directory: str, options: argparse.Namespace, pass_tokens: int | None
) -> tuple[Step, nn.Module]:
    """Make the step of `infembed train`'s engine with one worker."""
    from infembed_ray.training.engine import Engine

    settings = TrainSettings.from_mapping(
        {
            "records": path,
            "model": path,
            "output": directory,
            "objective": "uni{P}",
            "workers": 1,
            "records_per_step": options.records,
            "zero_stage": options.zero_stage,
            "grad_cache_tokens": pass_tokens,
        }
    )
    encoder = InstructionEncoder.from_pretrained(path)
    engine = Engine(encoder, settings)

    def step(records: list[Record]) -> float:
        loss = loss_of(batch_of(encoder, records), engine.encode)
        engine.backward(loss)
        engine.update(RATE)
        return float(loss.detach())

    return step, encoder


def sentence_transformers_step(path: str) -> tuple[Step, nn.Module]:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    model = SentenceTransformer(path, device="cpu")
    loss_function = MultipleNegativesRankingLoss(model, scale=1 / TEMPERATURE)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.0, fused=True)

    def step(records: list[Record]) -> float:
        tuples = [t for record in records for t in flatten(record)]
        texts = [[f"{t.instruction} {t.query}" for t in tuples], [t.passage for t in tuples]]
        features = [model.preprocess(side) for side in texts]
        return update(optimizer, parameters, loss_function(features, torch.empty(0)))

    return step, model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=32, help="records per step, three tuples each; 32: the paper's")
    parser.add_argument("--steps", type=int, default=1, help="of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--chunks", type=int, default=8, help="passes of a GradCache step")
    parser.add_argument("--zero-stage", type=int, choices=[0, 1, 2, 3], default=2, help="of the engine")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, help="variants to time")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    path = material.minilm()
    chosen, source = material.records(options.records * options.steps)
    batches = [chosen[first : first + options.records] for first in range(0, len(chosen), options.records)]

    made: dict[str, tuple[Step, nn.Module]] = {"ours": plain(path)}
    absent: dict[str, str] = {}
    try:
        made["sentence_transformers"] = sentence_transformers_step(path)
    except ImportError as error:
        absent["sentence_transformers"] = str(error)
    encoder = made["ours"][1]
    assert isinstance(encoder, InstructionEncoder)
    sizes = [[sum(map(len, b.queries)), sum(map(len, b.passages))] for b in (batch_of(encoder, r) for r in batches)]
    tokens = statistics.mean(map(sum, sizes))
    with tempfile.TemporaryDirectory() as directory:
        made["engine"] = deepspeed(path, directory, options, None)
        made["grad_cache"] = deepspeed(path, directory, options, round(tokens / options.chunks * 1.1))
        first = {}
        for name, (step, module) in made.items():
            module.eval()
            first[name] = step(batches[0])
            module.train()
        spread = max(first.values()) - min(first.values())
        assert spread <= 1e-4, first
        steps = {name: step for name, (step, _) in made.items()}
        steps["padded"] = padded(steps["ours"])
        steps = {name: step for name, step in steps.items() if name in options.only}
        for step in steps.values():  # warm-up, with dropout
            step(batches[0])
        taken: dict[str, list[float]] = {name: [] for name in steps}
        for number in range(options.rounds):
            for name, step in steps.items():
                began = time.perf_counter()
                for batch in batches:
                    step(batch)
                taken[name].append((time.perf_counter() - began) / len(batches))
            print(f"round {number + 1}", {name: round(v[-1], 3) for name, v in taken.items()}, flush=True)
    medians = {name: statistics.median(values) for name, values in taken.items()}

    def ratio(above: str, below: str) -> float | None:
        return round(medians[above] / medians[below], 3) if {above, below} <= set(medians) else None

    print(
        json.dumps(
            {
                "vs_sentence_transformers": ratio("sentence_transformers", "ours"),
                "engine_vs_sentence_transformers": ratio("sentence_transformers", "engine"),
                "padded_vs_packed": ratio("padded", "ours"),
                "grad_cache_overhead": ratio("grad_cache", "engine"),
                "seconds": {name: round(value, 3) for name, value in medians.items()},
                "loss_spread_without_dropout": spread,
                "tuples": 3 * options.records,
                "tokens": round(tokens),
                "of": source,
                "absent": absent,
                "zero_stage": options.zero_stage,
                "threads": options.threads,
                "machine": f"{os.cpu_count()} vCPU, {platform.system()}, Python {platform.python_version()}, "
                f"torch {torch.__version__}",
                "date": date.today().isoformat(),
            }
        )
    )


if __name__ == "__main__":
    main()
