"""Sampler: the records of each worker at each step, a pure function of seed, epoch and step, so that runs resume exactly."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from infembed_ray.config.base import nearest
from infembed_ray.config.training import TrainSettings
from infembed_ray.errors import InputError
from infembed_ray.records.tuples import TrainingRecord


@dataclass(frozen=True)
class Sampler:
    """Divides each shuffled epoch into steps, and each step into one share per worker. A record is never divided.

    Steps differ in size by at most one record, instead of a small last step, in which a row would have few negatives; so
    do the shares of a step. The contents and order of the steps depend on `per_step` alone, not on the number of workers.
    The exception: if the steps of an epoch would have fewer records than there are workers, there are fewer steps, so that
    every worker always has a record.

    Attributes:
        records: Number of records, at least one per worker.
        workers: Data-parallel workers.
        per_step: Maximum number of records per step, over all workers.
        epochs: Passes over the records.
        seed: Seed of the order.
        mixture: Source -> weight. An epoch then has as many records as all sources together, in these proportions. It
            takes the next ones of each source's own order, which is shuffled again when the source is exhausted.
        sources: Source of every record, for `mixture`.
    """

    records: int
    workers: int
    per_step: int
    epochs: int
    seed: int
    mixture: Mapping[str, float] = field(default_factory=dict)
    sources: Sequence[str] = ()

    @classmethod
    def from_settings(cls, settings: TrainSettings, records: Sequence[TrainingRecord]) -> Sampler:
        """Return the sampler of a run.

        Raises:
            InputError: too few records for the workers, a source without weight, or a weight without source.
        """
        named: Sequence[str] = ()
        if settings.mixture:
            named = [r.source.partition("/")[0] if settings.sources else r.source for r in records]
        sampler = cls(
            len(records),
            settings.workers,
            settings.records_per_step,
            settings.epochs,
            settings.seed,
            settings.mixture,
            named,
        )
        sampler._require_enough()
        return sampler

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one epoch; every worker has a record in each."""
        return min(-(-self.epoch_size // self.per_step), self.epoch_size // self.workers)

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return self.steps_per_epoch * self.epochs

    @property
    def epoch_size(self) -> int:
        """Records of one epoch: all but those of sources with weight 0."""
        return sum(map(len, self._members.values())) if self.mixture else self.records

    def rows(self, start: int = 0) -> Iterator[list[list[int]]]:
        """Yield the row numbers of each step from `start` to the end of the run, one list per worker in rank order."""
        first_epoch, within = divmod(start, self.steps_per_epoch)
        for epoch in range(first_epoch, self.epochs):
            for step in _shares(self._order(epoch), self.steps_per_epoch)[within:]:
                yield _shares(step, self.workers)
            within = 0

    def _order(self, epoch: int) -> list[int]:
        """Return the records of an epoch, shuffled."""
        if not self.mixture:
            order = list(range(self.records))
        else:
            order = [row for source, quota in self._quotas.items() for row in self._draw(source, epoch, quota)]
        random.Random(f"{self.seed}/{epoch}").shuffle(order)
        return order

    def _draw(self, source: str, epoch: int, quota: int) -> Iterator[int]:
        """Yield the next `quota` records of a source, from where the epoch before stopped."""
        members = self._members[source]
        done = epoch * quota
        while done < (epoch + 1) * quota:
            turn, at = divmod(done, len(members))
            shuffled = list(members)
            random.Random(f"{self.seed}/{source}/{turn}").shuffle(shuffled)
            taken = shuffled[at : at + (epoch + 1) * quota - done]
            yield from taken
            done += len(taken)

    @cached_property
    def _members(self) -> dict[str, list[int]]:
        """Records of each source with a weight above 0."""
        members: dict[str, list[int]] = defaultdict(list)
        for row, source in enumerate(self.sources):
            if self.mixture[source]:
                members[source].append(row)
        return members

    @cached_property
    def _quotas(self) -> dict[str, int]:
        """Number of records of each source in an epoch, rounded by the largest remainder."""
        total = sum(self.mixture[source] for source in self._members)
        exact = {source: self.epoch_size * self.mixture[source] / total for source in sorted(self._members)}
        quotas = {source: int(share) for source, share in exact.items()}
        left = self.epoch_size - sum(quotas.values())
        for source in sorted(exact, key=lambda s: quotas[s] - exact[s])[:left]:
            quotas[source] += 1
        return quotas

    def _require_enough(self) -> None:
        """Check that the records fit the settings; InputError otherwise."""
        present = set(self.sources)
        for source in self.mixture:
            if source not in present:
                raise InputError(f"mixture.{source}: no record has this source: {nearest(source, present)}")
        for source in sorted(present - set(self.mixture)):
            fault = f"mixture: records of source {source} have no weight; set mixture.{source} (0 to leave them out)"
            raise InputError(fault)
        if self.mixture and not any(self.mixture.values()):
            raise InputError("mixture: all weights are 0; set one above 0")
        if self.epoch_size < self.workers:
            fault = f"workers={self.workers}: more than the {self.epoch_size} records; set workers={self.epoch_size}"
            raise InputError(fault)


def _shares(rows: Sequence[int], parts: int) -> list[list[int]]:
    """Cut into `parts` consecutive pieces; the first ones are one longer if they cannot be equal."""
    size, longer = divmod(len(rows), parts)
    ends = [size * n + min(n, longer) for n in range(parts + 1)]
    return [list(rows[a:b]) for a, b in pairwise(ends)]
