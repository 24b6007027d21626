"""Memory of a training step with and without GradCache. training_step.py measures its time.

    python benchmarks/grad_cache.py [--tokens N]

The engine runs one step (encode, score, loss, backward, clip, AdamW) with one worker and MiniLM in fp32 on the CPU, on
growing batches of real records: up to 64 records with GradCache, up to 8 without it. Memory is the peak of the tensors that
autograd saves for the backward pass, without parameters.

The last line is one JSON object:
    grad_cache_mib, plain_mib   records in the batch -> peak MiB
    grad_cache_growth           peak of 64 records / of 1 record, with GradCache
"""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import material
import torch
from torch import Tensor

from infembed_ray.config.training import TrainSettings
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.records.tables import Record
from infembed_ray.training.collate import Batch, collate
from infembed_ray.training.engine import Engine
from infembed_ray.training.losses import Objective, marginal_loss
from infembed_ray.training.scores import score_batch

OBJECTIVE = Objective.parse("uni{P}")
MULTIPLES = (1, 8, 64)
MOST_KEPT = 8


def engine(tokens: int | None) -> Engine:
    """Make an engine whose passes have at most this many tokens; None for the plain step."""
    settings = TrainSettings(records="-", model="-", output="-", zero_stage=0, grad_cache_tokens=tokens)
    made = Engine(InstructionEncoder.from_pretrained(material.minilm()), settings)
    made.train()
    return made


def step(engine: Engine, batch: Batch) -> None:
    """Run one step."""
    queries, passages = engine.encode(batch.queries), engine.encode(batch.passages)
    scores = score_batch(OBJECTIVE, batch, queries, passages)
    engine.backward(marginal_loss(OBJECTIVE, scores.positive, scores.negatives, engine.temperature))
    engine.update(1e-5)


class SavedTensors(torch.autograd.graph.saved_tensors_hooks):
    """Count the bytes that autograd saves, and their peak; a storage saved by several nodes counts once."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self._free = {p.untyped_storage().data_ptr() for p in parameters}
        self._holders: Counter[int] = Counter()
        self._bytes = self.peak = 0
        super().__init__(self._pack, lambda held: held.tensor)

    def __enter__(self) -> SavedTensors:
        super().__enter__()
        return self

    def _pack(self, tensor: Tensor) -> Any:
        return _Held(tensor, self)

    def count(self, tensor: Tensor, change: int) -> None:
        storage = tensor.untyped_storage()
        place = storage.data_ptr()
        if place in self._free:
            return
        before = self._holders[place]
        self._holders[place] = after = before + change
        if (before == 0) != (after == 0):
            self._bytes += change * storage.nbytes()
            self.peak = max(self.peak, self._bytes)


class _Held:
    def __init__(self, tensor: Tensor, of: SavedTensors) -> None:
        self.tensor, self._of = tensor, of
        of.count(tensor, 1)

    def __del__(self) -> None:
        self._of.count(self.tensor, -1)


def peaks(tokens: int | None, records: Sequence[Record], multiples: Sequence[int]) -> dict[int, int]:
    """Return records in the batch -> peak MiB that autograd saved."""
    runs = engine(tokens)
    found = {}
    for multiple in multiples:
        batch = collate(runs.encoder, [records[:multiple]], 0, OBJECTIVE)
        with SavedTensors(list(runs.encoder.parameters())) as held:
            step(runs, batch)
        found[multiple] = round(held.peak / 2**20)
        print(
            f"{'plain' if tokens is None else 'GradCache'}, {multiple} records, {batch.tokens} tokens: {found[multiple]} MiB"
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512, help="tokens of one pass of GradCache")
    options = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    records, source = material.records(max(MULTIPLES))
    cached = peaks(options.tokens, records, MULTIPLES)
    plain = peaks(None, records, [m for m in MULTIPLES if m <= MOST_KEPT])
    figures = {"grad_cache_mib": cached, "plain_mib": plain, "grad_cache_growth": round(cached[64] / cached[1], 2)}
    print(json.dumps({**figures, "pass_tokens": options.tokens, "records": source, "torch": torch.__version__}))


if __name__ == "__main__":
    main()
