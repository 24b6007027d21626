"""Examples of kept and rejected records, chosen without chance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from heapq import nsmallest
from typing import Any

from infembed_ray.analysis.funnel import Loss
from infembed_ray.analysis.inputs import RecordSet

KEPT = 3
REASONS = 3
"""Rejected examples, one per reason."""
RULE = (
    f"{KEPT} kept records, and one record for each of the {REASONS} most frequent reasons of a rejection. Of each group, the page "
    "takes those whose id has the smallest SHA-256."
)
"""How examples are chosen."""
ROLES: Mapping[str, str] = {
    "query_positive": "Query",
    "instruction_positive": "Instruction",
    "document_positive": "Passage (positive)",
    "instruction_negative": "Poisoned instruction",
    "hard_negative_document_1": "Its passage (negative instruction)",
    "query_negative": "Poisoned query",
    "hard_negative_document_2": "Its passage (negative query)",
}
"""Column -> name of its text; in brackets is the judge's name of the passage."""


@dataclass(frozen=True)
class Example:
    """A record.

    Attributes:
        loss: step and reason of a rejection, and how many rows it has; None for a kept record.
        texts: name of each text that the record has -> the text, whole.
    """

    id: str
    loss: Loss | None
    texts: Mapping[str, str]


def examples(found: RecordSet, rejections: Sequence[Loss]) -> list[Example]:
    """Choose KEPT kept records and one rejected record for each of the first REASONS rejections (see RULE)."""
    kept = nsmallest(KEPT, found.kept, key=lambda record: _place(record.id))
    chosen = [_example(vars(record)) for record in kept]
    for loss in rejections[:REASONS]:
        of_loss = [row for row in found.rejected if (row["step"], row["reason"]) == (loss.step, loss.why)]
        chosen += [_example(row, loss) for row in nsmallest(1, of_loss, key=lambda row: _place(row["id"]))]
    return chosen


def _place(id_: str) -> bytes:
    """Return a record's place in the order of RULE."""
    return sha256(id_.encode()).digest()


def _example(row: Mapping[str, Any], loss: Loss | None = None) -> Example:
    return Example(row["id"], loss, {name: row[column] for column, name in ROLES.items() if row[column]})
