"""Sampler: the records of each worker at each step, a pure function of seed, epoch and step, so that runs resume exactly."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np

from infembed_ray.config.base import nearest
from infembed_ray.config.training import TrainSettings
from infembed_ray.errors import InputError
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.records.tuples import TrainingRecord
from infembed_ray.training import no_duplicates
from infembed_ray.training.collate import token_counts
from infembed_ray.training.dataset import Dataset


@dataclass(frozen=True)
class Sampler:
    """Divides each shuffled epoch into batches, and each batch into one share per worker. A record is never divided.

    Batches differ in size by at most one record, instead of a small last batch, in which a row would have few negatives;
    so do the shares of a batch. The contents and order of the batches depend on `per_step` alone, not on the number of
    workers. The exception: if the batches of an epoch would have fewer records than there are workers, there are fewer
    batches, so that every worker always has a record.

    A step of this class is a batch; `accumulation` of them make a step of the optimizer.

    Attributes:
        records: Number of records, at least one per worker.
        workers: Data-parallel workers.
        per_step: Maximum number of records per step, over all workers.
        epochs: Passes over the records.
        seed: Seed of the order.
        mixture: Source -> weight. An epoch then has as many records as all sources together, in these proportions. It
            takes the next ones of each source's own order, which is shuffled again when the source is exhausted.
        sources: Source of every record, for `mixture`.
        texts: Numbers of every record's texts; no text occurs twice in a step, as far as possible.
        tokens: Tokens of every record, for `tokens_per_step`.
        tokens_per_step: Maximum number of tokens per step, instead of `per_step`. Steps and shares then differ as little
            in tokens as the lengths of the records allow.
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
    def from_settings(
        cls, settings: TrainSettings, records: Sequence[TrainingRecord], encoder: InstructionEncoder
    ) -> Sampler:
        """Return the sampler of a run.

        Args:
            settings: Settings of the run.
            records: All records.
            encoder: Counts tokens, if they matter and are not counted yet.

        Raises:
            InputError: too few records for the workers, a source without weight or a weight without source, or a token
                budget that is too small for the records.
        """
        tokens: Sequence[int] | np.ndarray = ()
        if settings.tokens_per_step is not None:
            counted = records.tokens if isinstance(records, Dataset) else None
            tokens = token_counts(encoder, records, settings.hard_negatives) if counted is None else counted
        sampler = cls(
            len(records),
            settings.workers,
            -(-settings.records_per_step // settings.accumulation),
            settings.epochs,
            settings.seed,
            settings.mixture,
            [record.source.partition("/")[0] if settings.sources else record.source for record in records]
            if settings.mixture
            else (),
            no_duplicates.shared_texts(records) if settings.unique_texts else (),
            tokens,
            None if settings.tokens_per_step is None else settings.tokens_per_step // settings.accumulation,
        )
        sampler._require_enough()
        return sampler

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one epoch; every worker has a record in each."""
        if self.tokens_per_step is not None:
            return self._steps_by_tokens
        return min(-(-self.epoch_size // self.per_step), self.epoch_size // self.workers)

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return self.steps_per_epoch * self.epochs

    @property
    def epoch_size(self) -> int:
        """Records of one epoch: all but those of sources with weight 0."""
        return sum(map(len, self._members.values())) if self.mixture else self.records

    @property
    def repeated(self) -> int:
        """Number of records of the first epoch whose step has another record with one of their texts."""
        return self._without_duplicates(self._order(0), 0)[1] if self.texts else 0

    def rows(self, start: int = 0) -> Iterator[list[list[int]]]:
        """Yield the row numbers of each step from `start` to the end of the run, one list per worker in rank order."""
        first_epoch, within = divmod(start, self.steps_per_epoch)
        for epoch in range(first_epoch, self.epochs):
            for step in self._steps_of(epoch)[within:]:
                if self.tokens_per_step is None:
                    yield _shares(step, self.workers)
                else:
                    yield _shares_by_tokens(step, [self.tokens[row] for row in step], self.workers)
            within = 0

    def _steps_of(self, epoch: int) -> list[list[int]]:
        """Return the records of each step of an epoch."""
        order = self._order(epoch)
        if self.tokens_per_step is not None:
            cuts = _cuts(np.asarray(self.tokens)[order].cumsum(), self.steps_per_epoch)
            return [order[a:b] for a, b in pairwise(cuts)]
        if self.texts:
            return self._without_duplicates(order, epoch)[0]
        return _shares(order, self.steps_per_epoch)

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

    def _without_duplicates(self, order: Sequence[int], epoch: int) -> tuple[list[list[int]], int]:
        """Return the steps of an epoch, and how many records share a step with one of the same text."""
        texts: no_duplicates.Texts = self.texts
        if self.mixture:  # a record that is drawn twice must not meet itself
            draws = Counter(order)
            texts = {row: [*self.texts[row], *([-1 - row] if n > 1 else [])] for row, n in draws.items()}
        return no_duplicates.assign(order, texts, self.steps_per_epoch, random.Random(f"{self.seed}/{epoch}/apart"))

    @cached_property
    def _steps_by_tokens(self) -> int:
        """Steps per epoch that keep every step within the token budget, less than 1 % above the minimum."""
        assert self.tokens_per_step is not None
        tokens = np.asarray(self.tokens)
        ends = [tokens[self._order(epoch)].cumsum() for epoch in range(self.epochs)]  # of each record, in tokens
        count = -(-int(max(end[-1] for end in ends)) // self.tokens_per_step)
        while True:
            cuts = [_cuts(end, count) for end in ends]
            if min(np.diff(cuts).min(axis=1)) < self.workers:
                break
            if _largest_step(ends, cuts) <= self.tokens_per_step:
                return count
            count += 1 + count // 128
        raise InputError(
            f"tokens_per_step={self.tokens_per_step}: too small for one record per worker in every step (the longest "
            f"record has {int(tokens.max())} tokens); set at least {2 * self.workers * int(tokens.max())}"
        )

    def _require_enough(self) -> None:
        """Check that the records fit the settings; InputError otherwise."""
        known = set(self.sources)
        for source in self.mixture:
            if source not in known:
                raise InputError(f"mixture.{source}: no record has this source: {nearest(source, known)}")
        for source in sorted(known - set(self.mixture)):
            raise InputError(
                f"mixture: records of source {source} have no weight; set mixture.{source} (0 to leave them out)"
            )
        if self.mixture and not any(self.mixture.values()):
            raise InputError("mixture: all weights are 0; set one above 0")
        if self.epoch_size < self.workers:
            raise InputError(
                f"workers={self.workers}: more than the {self.epoch_size} records; set workers={self.epoch_size}"
            )
        if self.texts and self.tokens_per_step is not None:
            raise InputError("unique_texts=true: does not apply to steps by tokens_per_step; set only one of the two")
        _ = self.steps_per_epoch  # raises if the token budget is too small


def _largest_step(ends: Sequence[np.ndarray], cuts: Sequence[np.ndarray]) -> int:
    """Return the tokens of the largest step of all epochs; arguments per epoch, see `_cuts`."""
    return int(np.max([np.diff(np.append(0, end)[cut]) for end, cut in zip(ends, cuts, strict=True)]))


def _cuts(ends: np.ndarray, parts: int) -> np.ndarray:
    """Cut a sequence of weighted items into consecutive parts of as equal weight as possible.

    Args:
        ends: (n) Cumulative weight up to and including each item.
        parts: Number of parts.

    Returns:
        (parts + 1) indices: part k holds the items from index k to index k + 1.
    """
    wanted = ends[-1] * np.arange(1, parts) / parts
    after = np.searchsorted(ends, wanted)  # the item within which the cut lies
    before = np.append(0, ends)[after]
    inner = after + (ends[after] - wanted < wanted - before)
    return np.concatenate([[0], inner, [len(ends)]])


def _shares(rows: Sequence[int], parts: int) -> list[list[int]]:
    """Cut into `parts` consecutive pieces; the first ones are one longer if they cannot be equal."""
    size, longer = divmod(len(rows), parts)
    ends = [size * n + min(n, longer) for n in range(parts + 1)]
    return [list(rows[a:b]) for a, b in pairwise(ends)]


def _shares_by_tokens(rows: Sequence[int], tokens: Sequence[int], parts: int) -> list[list[int]]:
    """Cut into `parts` consecutive pieces, none empty, of as equal token counts as possible."""
    cuts = _cuts(np.cumsum(tokens), parts).tolist()
    for n in range(1, parts):
        cuts[n] = min(max(cuts[n], cuts[n - 1] + 1), len(rows) - (parts - n))
    return [list(rows[a:b]) for a, b in pairwise(cuts)]
