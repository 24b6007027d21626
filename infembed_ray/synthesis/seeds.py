"""Seeds: (query, relevant passage) pairs, streamed from tables, and a bounded sample of passages as distractors."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from infembed_ray.config.synthesis import SynthesizeSettings
from infembed_ray.llm.chat import replace_surrogates
from infembed_ray.records import tables
from infembed_ray.records.tables import Seed
from infembed_ray.storage.steps import resolve_input

POOL_SIZE = 10_000
"""Most passages to draw distractors from."""


@dataclass(frozen=True)
class SeedSurvey:
    """What is known of the seeds before any request is sent."""

    seeds: int
    pool: tuple[str, ...]
    """Passages to draw distractors from: all distinct ones in seed order, or a sample of POOL_SIZE."""


class SeedReader:
    """The seeds of a run. Each iteration reads the files again, in the same order, up to `settings.limit`."""

    def __init__(self, settings: SynthesizeSettings) -> None:
        self._settings = settings
        self.path = resolve_input(settings.seeds, "seeds")

    def __iter__(self) -> Iterator[Seed]:
        return islice(self._all(), self._settings.limit)

    def survey(self) -> SeedSurvey:
        """Read all seeds once. Passages beyond the limit are in the pool too, so the judge's requests do not depend on it.

        Raises:
            InputError: as `tables.stream`.
        """
        count, pool = 0, _PassageSample(POOL_SIZE)
        for seed in self._all():
            count += 1
            pool.add(seed.passage)
        return SeedSurvey(min(count, self._settings.limit or count), pool.passages())

    def _all(self) -> Iterator[Seed]:
        settings = self._settings
        for seed in tables.stream(self.path, Seed, "seeds", settings.columns, settings.split):
            yield Seed(**{name: text and replace_surrogates(text) for name, text in vars(seed).items()})


class _PassageSample:
    """The distinct passages with the smallest hashes: a sample in bounded memory that does not depend on the order."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._kept: dict[bytes, str] = {}  # by hash, in the order in which they were first added

    def add(self, passage: str) -> None:
        self._kept.setdefault(hashlib.blake2b(passage.encode(), digest_size=8).digest(), passage)
        if len(self._kept) >= 2 * self._size:
            self._prune()

    def passages(self) -> tuple[str, ...]:
        """Return the sample in the order in which its passages were first added."""
        self._prune()
        return tuple(self._kept.values())

    def _prune(self) -> None:
        smallest = set(heapq.nsmallest(self._size, self._kept))
        self._kept = {digest: passage for digest, passage in self._kept.items() if digest in smallest}
