"""Which records each worker sees at each step: a pure function of seed, epoch and step, so that a run resumes exactly."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np

from infembed_ray.config import TrainSettings, nearest
from infembed_ray.errors import InputError
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.records import Record
from infembed_ray.training import apart
from infembed_ray.training.dataset import Dataset
from infembed_ray.training.tuples import token_counts


@dataclass(frozen=True)
class Sampler:
    """Deals a shuffled epoch out to steps and workers, every record once and never divided among workers.

    Steps are as equal as can be (they differ by one record), rather than full but for a small last one, in which a row
    would have few negatives; and so are the workers' shares of a step. What a step holds, and in which order, depends
    on `per_step` alone, not on how many workers share it. The exception: where the steps of an epoch would hold fewer
    records than there are workers, there are fewer steps, so that no worker is ever without.

    Attributes:
        records: how many there are, at least one a worker.
        workers: data-parallel workers.
        per_step: most records per step, over all workers.
        epochs: passes over the records.
        seed: of the order.
        mixture: source -> weight. An epoch then holds as many records as all sources together, in these proportions:
            the next ones of each source's own order, which begins anew, shuffled again, where the source is exhausted.
        sources: of every record, for `mixture`.
        texts: numbers of every record's texts; none stands twice in a step, as far as that is possible.
        tokens: of every record, for `tokens_per_step`.
        tokens_per_step: most tokens per step, instead of `per_step`. Steps and shares are then as equal in tokens as
            the lengths of the records allow.
    """

    records: int
    workers: int
    per_step: int
    epochs: int
    seed: int
    mixture: Mapping[str, float] = field(default_factory=dict)
    sources: Sequence[str] = ()
    texts: Sequence[Sequence[int]] = ()
    tokens: Sequence[int] | np.ndarray = ()
    tokens_per_step: int | None = None

    @classmethod
    def of(cls, settings: TrainSettings, records: Sequence[Record], encoder: InstructionEncoder) -> Sampler:
        """The data order of a run: its steps are the batches, of which `accumulation` make a step of the optimizer.

        Args:
            settings: of the run.
            records: all of them.
            encoder: counts tokens, where they matter and are not counted yet.

        Raises:
            InputError: too few records for the workers, a source without weight or a weight without source, a token
                budget that the records do not fit.
        """
        tokens: Sequence[int] | np.ndarray = ()
        if settings.tokens_per_step is not None:
            counted = records.tokens if isinstance(records, Dataset) else None
            tokens = token_counts(encoder, records) if counted is None else counted
        sampler = cls(
            len(records),
            settings.workers,
            -(-settings.records_per_step // settings.accumulation),
            settings.epochs,
            settings.seed,
            settings.mixture,
            [record.source for record in records] if settings.mixture else (),
            apart.shared_texts(records) if settings.unique_texts else (),
            tokens,
            None if settings.tokens_per_step is None else settings.tokens_per_step // settings.accumulation,
        )
        sampler._require_enough()
        return sampler

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one epoch: as many as its batches need, but no more than every worker has records for."""
        if self.tokens_per_step is not None:
            return self._steps_by_tokens
        return min(-(-self.epoch_size // self.per_step), self.epoch_size // self.workers)

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return self.steps_per_epoch * self.epochs

    @property
    def epoch_size(self) -> int:
        """Records of one epoch: all, less those of sources that the mixture leaves out."""
        return sum(map(len, self._members.values())) if self.mixture else self.records

    @property
    def repeated(self) -> int:
        """Records of the first epoch that stand in a step with another of the same text, because no step is left."""
        return self._apart(self._order(0), 0)[1] if self.texts else 0

    def rows(self, start: int = 0) -> Iterator[list[list[int]]]:
        """Row numbers of the steps from `start` to the end of the run: a list a worker, in rank order."""
        first_epoch, within = divmod(start, self.steps_per_epoch)
        for epoch in range(first_epoch, self.epochs):
            for step in self._divided(epoch)[within:]:
                if self.tokens_per_step is None:
                    yield _shares(step, self.workers)
                else:
                    yield _shares_by_tokens(step, [self.tokens[row] for row in step], self.workers)
            within = 0

    def _divided(self, epoch: int) -> list[list[int]]:
        """The steps of an epoch."""
        order = self._order(epoch)
        if self.tokens_per_step is not None:
            cuts = _cuts(np.asarray(self.tokens)[order].cumsum(), self.steps_per_epoch)
            return [order[a:b] for a, b in pairwise(cuts)]
        if self.texts:
            return self._apart(order, epoch)[0]
        return _shares(order, self.steps_per_epoch)

    def _order(self, epoch: int) -> list[int]:
        """The records of an epoch, shuffled."""
        if not self.mixture:
            order = list(range(self.records))
        else:
            order = [row for source, quota in self._quotas.items() for row in self._next_of(source, epoch, quota)]
        random.Random(f"{self.seed}/{epoch}").shuffle(order)
        return order

    def _next_of(self, source: str, epoch: int, quota: int) -> Iterator[int]:
        """The records that a source gives to an epoch: it goes on where the epoch before left off."""
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
        """The records of each source with a weight."""
        members: dict[str, list[int]] = defaultdict(list)
        for row, source in enumerate(self.sources):
            if self.mixture[source]:
                members[source].append(row)
        return members

    @cached_property
    def _quotas(self) -> dict[str, int]:
        """How many records of an epoch are of each source: its share, rounded so that the sum is right."""
        total = sum(self.mixture[source] for source in self._members)
        exact = {source: self.epoch_size * self.mixture[source] / total for source in sorted(self._members)}
        quotas = {source: int(share) for source, share in exact.items()}
        left = self.epoch_size - sum(quotas.values())
        for source in sorted(exact, key=lambda s: quotas[s] - exact[s])[:left]:
            quotas[source] += 1
        return quotas

    def _apart(self, order: Sequence[int], epoch: int) -> tuple[list[list[int]], int]:
        """The steps of an epoch; and how many records had to go where one of their texts stands already."""
        texts = self.texts if not self.mixture else self._with_repeated_draws(order)
        return apart.deal(order, texts, self.steps_per_epoch, random.Random(f"{self.seed}/{epoch}/apart"))

    def _with_repeated_draws(self, order: Sequence[int]) -> Mapping[int, Sequence[int]]:
        """The texts of the drawn records; one that is drawn again shares itself with itself."""
        draws = Counter(order)
        return {row: [*self.texts[row], *([-1 - row] if n > 1 else [])] for row, n in draws.items()}

    @cached_property
    def _steps_by_tokens(self) -> int:
        """A number of steps that keeps every step of every epoch within the budget, less than 1 % above the least."""
        assert self.tokens_per_step is not None
        tokens = np.asarray(self.tokens)
        ends = [tokens[self._order(epoch)].cumsum() for epoch in range(self.epochs)]
        count = -(-int(max(end[-1] for end in ends)) // self.tokens_per_step)
        while min(np.diff(cuts := [_cuts(end, count) for end in ends]).min(axis=1)) >= self.workers:
            loads = [np.diff(np.append(0, end)[cut]) for end, cut in zip(ends, cuts, strict=True)]
            if np.max(loads) <= self.tokens_per_step:
                return count
            count += 1 + count // 128
        raise InputError(
            f"tokens_per_step={self.tokens_per_step}: too few for a record a worker in every step, the longest of which "
            f"has {int(tokens.max())} tokens; set at least {2 * self.workers * int(tokens.max())}"
        )

    def _require_enough(self) -> None:
        known = set(self.sources)
        for source in self.mixture:
            if source not in known:
                raise InputError(f"mixture.{source}: no record is of this source: {nearest(source, known)}")
        for source in sorted(known - set(self.mixture)):
            raise InputError(
                f"mixture: records of source {source} have no weight; set mixture.{source}, 0 to leave them out"
            )
        if self.mixture and not any(self.mixture.values()):
            raise InputError("mixture: all weights are 0; set one above 0")
        if self.epoch_size < self.workers:
            raise InputError(
                f"workers={self.workers}: more than the {self.epoch_size} records; set workers={self.epoch_size}"
            )
        if self.texts and self.tokens_per_step is not None:
            raise InputError("unique_texts=true: steps by tokens_per_step do not keep texts apart; set one of the two")
        _ = self.steps_per_epoch  # is the budget enough?


def _cuts(ends: np.ndarray, parts: int) -> np.ndarray:
    """Where to cut a sequence so that its parts weigh as equally as its items allow: parts + 1 places.

    Args:
        ends: (n) the sum of the weights up to each item.
        parts: how many.
    """
    wanted = ends[-1] * np.arange(1, parts) / parts
    after = np.searchsorted(ends, wanted)  # the item that the cut would go through
    before = np.append(0, ends)[after]
    inner = after + (ends[after] - wanted < wanted - before)
    return np.concatenate([[0], inner, [len(ends)]])


def _shares(rows: Sequence[int], parts: int) -> list[list[int]]:
    """`parts` consecutive pieces; the first ones are one longer where they cannot be equal."""
    size, longer = divmod(len(rows), parts)
    ends = [size * n + min(n, longer) for n in range(parts + 1)]
    return [list(rows[a:b]) for a, b in pairwise(ends)]


def _shares_by_tokens(rows: Sequence[int], tokens: Sequence[int], parts: int) -> list[list[int]]:
    """`parts` consecutive pieces, none empty, as equal in tokens as the lengths allow."""
    cuts = _cuts(np.cumsum(tokens), parts).tolist()
    for n in range(1, parts):
        cuts[n] = min(max(cuts[n], cuts[n - 1] + 1), len(rows) - (parts - n))
    return [list(rows[a:b]) for a, b in pairwise(cuts)]
