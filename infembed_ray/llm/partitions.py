"""Partitions of a run's rows: one actor processes the rows of a partition and reads only their answers in the journal.

A hash of a seed's texts routes a row, because they decide its requests: equal texts share answers, under any id.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

_IN_NAME = re.compile(r"-\d+-[0-9a-f]{8}-(\d+)of(\d+)\.(?:\d{15}\.)?jsonl$")  # as `journal.new_segment` names them


def route_of(query: str, passage: str) -> str:
    """Return the hash that routes a seed: 8 hex digits."""
    return hashlib.blake2b(f"{query}\0{passage}".encode(), digest_size=4).hexdigest()


@dataclass(frozen=True)
class Partition:
    """Partition `number` of `of`, counted from 1."""

    number: int
    of: int

    def __str__(self) -> str:
        return f"{self.number}of{self.of}"

    @classmethod
    def route(cls, route: str, of: int) -> Partition:
        """Return the partition of a route."""
        return cls(int(route, 16) % of + 1, of)

    @classmethod
    def in_name(cls, name: str) -> Partition | None:
        """Return the partition in the name of a segment or an object; None if rows of any partition may be in the file."""
        numbers = _IN_NAME.search(name)
        return None if numbers is None else cls(int(numbers[1]), int(numbers[2]))

    def owns(self, route: str) -> bool:
        """Return whether the rows of a route are in this partition. Entries without a route belong to every partition."""
        return not route or Partition.route(route, self.of) == self

    def reads(self, name: str) -> bool:
        """Return whether a journal's file may hold entries of this partition."""
        written = Partition.in_name(name)
        return written is None or written.of != self.of or written == self
