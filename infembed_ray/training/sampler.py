"""Which records each worker sees at each step: a pure function of seed, epoch and step, so that a run resumes exactly."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from infembed_ray.config import TrainSettings


@dataclass(frozen=True)
class Sampler:
    """Deals a shuffled epoch out to steps and workers, every record once.

    Steps are as equal as can be (they differ by one record), rather than full but for a small last one, in which a row
    would have few negatives; and so are the workers' shares of a step. What a step holds, and in which order, depends
    on the global batch alone, not on how many workers share it. The exception is `per_worker` = 1: where the records
    are no multiple of the workers, some workers take two in a step, so that none is ever without.

    Attributes:
        records: how many there are, at least one a worker.
        workers: data-parallel workers.
        per_worker: most records per worker and step.
        epochs: passes over the records.
        seed: of the order.
    """

    records: int
    workers: int
    per_worker: int
    epochs: int
    seed: int

    @classmethod
    def of(cls, settings: TrainSettings, records: int) -> Sampler:
        """The data order of a run over so many records."""
        return cls(records, settings.workers, settings.records_per_worker, settings.epochs, settings.seed)

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one epoch: as many as its batches need, but no more than every worker has records for."""
        return min(-(-self.records // (self.per_worker * self.workers)), self.records // self.workers)

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return self.steps_per_epoch * self.epochs

    def rows(self, start: int = 0) -> Iterator[list[list[int]]]:
        """Row numbers of the steps from `start` to the end of the run: a list a worker, in rank order."""
        first_epoch, within = divmod(start, self.steps_per_epoch)
        for epoch in range(first_epoch, self.epochs):
            order = list(range(self.records))
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
            for step in _shares(order, self.steps_per_epoch)[within:]:
                yield _shares(step, self.workers)
            within = 0


def _shares(rows: Sequence[int], parts: int) -> list[list[int]]:
    """`parts` consecutive pieces; the first ones are one longer where they cannot be equal."""
    size, longer = divmod(len(rows), parts)
    ends = [size * n + min(n, longer) for n in range(parts + 1)]
    return [list(rows[a:b]) for a, b in pairwise(ends)]
