"""The rows that a reader can browse in the report: a bounded sample of each kind, chosen without chance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from heapq import nsmallest
from typing import Any

from infembed_ray.analysis.clean import Removal
from infembed_ray.analysis.inputs import RecordSet

SHOWN = 500
"""Rows of each kind in the report: about 1 MB."""
TEXTS: Mapping[str, str] = {
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
class ShownRow:
    """A row of the report.

    Attributes:
        kind: kept, removed (by `clean`), rejected or dead letter.
        step, reason: where and why the row ended; the reason of a dead letter is its error.
        detail: of a removed record, the record that stays for it or the shared words.
        texts: name of each text that the row has -> the text, whole.
        picks: scenario -> the passage that the judge picked.
    """

    id: str
    kind: str
    step: str | None
    reason: str | None
    detail: str | None
    source: str | None
    topic: str | None
    texts: Mapping[str, str]
    picks: Mapping[str, str]


def shown_rows(records: RecordSet, removed: Mapping[int, Removal]) -> list[ShownRow]:
    """Choose the rows of each kind whose ids have the smallest SHA-256, at most SHOWN."""
    by_kind: dict[str, list[ShownRow]] = {}
    for row in _rows(records, removed):
        by_kind.setdefault(row.kind, []).append(row)
    return [row for rows in by_kind.values() for row in nsmallest(SHOWN, rows, key=_place)]


def _place(row: ShownRow) -> bytes:
    return sha256(row.id.encode()).digest()


def _rows(records: RecordSet, removed: Mapping[int, Removal]) -> Iterator[ShownRow]:
    complements = {row["id"]: row.get("instruction_complement") for row in records.complements}
    kept_provenance = records.provenance["kept"] if len(records.provenance["kept"]) == len(records.kept) else None
    for number, record in enumerate(records.kept):
        more = {
            "provenance": kept_provenance[number] if kept_provenance else None,
            "complement": complements.get(record.id),
        }
        if removal := removed.get(number):
            yield _row("removed", vars(record) | more, "clean", removal.reason, removal.detail)
        else:
            yield _row("kept", vars(record) | more)
    for row in records.rejected:
        yield _row("rejected", row, row["step"], row["reason"])
    for row in records.dead_letter:
        yield _row("dead letter", row, row["step"], row["error"])


def _row(
    kind: str, row: Mapping[str, Any], step: str | None = None, reason: str | None = None, detail: str | None = None
) -> ShownRow:
    texts = {name: row[column] for column, name in TEXTS.items() if row.get(column)}
    if row.get("complement"):
        texts["Complement instruction"] = row["complement"]
    verdicts = (row.get("provenance") or {}).get("verdicts") or {}
    picks = {scenario: pick for scenario, pick in verdicts.items() if pick is not None}
    return ShownRow(str(row["id"]), kind, step, reason, detail, row.get("source"), row.get("topic"), texts, picks)
