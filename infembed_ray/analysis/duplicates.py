"""Texts that stand in the records more than once, or nearly so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from infembed_ray.analysis.material import KINDS
from infembed_ray.analysis.near_duplicates import NearDuplicate, near_duplicates
from infembed_ray.records import Record

EXAMPLES = 5


@dataclass(frozen=True)
class Repeated:
    """One text and how often it stands."""

    text: str
    times: int


@dataclass(frozen=True)
class Duplicates:
    """Repetition among all texts of a kind, positive and negative ones together."""

    kind: str
    texts: int
    distinct: int
    repeated: int
    """Distinct texts that stand more than once."""
    examples: list[Repeated]
    """The most frequent of them."""
    near: int
    """Distinct texts that are nearly equal to an earlier one."""
    near_examples: list[NearDuplicate]
    """The most similar of them."""


def duplicates(records: Sequence[Record]) -> list[Duplicates]:
    """Per kind of text; case and white space make no difference."""
    return [_of_kind(kind, [getattr(r, c) for r in records for c in columns]) for kind, columns in KINDS.items()]


def _of_kind(kind: str, texts: list[str]) -> Duplicates:
    counted = Counter(" ".join(text.casefold().split()) for text in texts)
    repeated = [Repeated(text, times) for text, times in counted.most_common() if times > 1]
    near = sorted(near_duplicates(list(counted)), key=lambda pair: -pair.similarity)
    return Duplicates(kind, len(texts), len(counted), len(repeated), repeated[:EXAMPLES], len(near), near[:EXAMPLES])
