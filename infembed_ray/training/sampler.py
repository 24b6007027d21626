"""Which records each worker sees at each step: a pure function of seed, epoch and step, so that a run resumes exactly."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from infembed_ray.config import TrainSettings


@dataclass(frozen=True)
class Sampler:
    """Deals a shuffled epoch out to workers in equal shares.

    Every step takes `per_worker` records for each of `workers`; the last step of an epoch may be smaller, but is equal
    on all workers, so fewer than `workers` records are left out of an epoch (others each time).

    Attributes:
        records: how many there are.
        workers: data-parallel workers.
        per_worker: records per worker and step.
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
        """Steps of one epoch, the smaller last one included."""
        return -(-(self.records // self.workers) // self.per_worker)

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return self.steps_per_epoch * self.epochs

    def rows(self, rank: int, start: int = 0) -> Iterator[list[int]]:
        """Row numbers of worker `rank` for the steps from `start` to the end of the run."""
        first_epoch, within = divmod(start, self.steps_per_epoch)
        for epoch in range(first_epoch, self.epochs):
            order = list(range(self.records))
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
            share = order[: self.records - self.records % self.workers]
            size = self.per_worker * self.workers
            for first in range(within * size, len(share), size):
                taken = share[first : first + size]
                each = len(taken) // self.workers
                yield taken[rank * each : (rank + 1) * each]
            within = 0
