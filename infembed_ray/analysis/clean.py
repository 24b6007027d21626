"""`clean=true`: the records that stay, without near-duplicates and without texts of evaluation sets."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from infembed_ray.analysis.figures import is_ours
from infembed_ray.analysis.overlap import near_duplicates
from infembed_ray.records import tables
from infembed_ray.records.files import raw_rows
from infembed_ray.records.tables import KEPT_FILE, Record
from infembed_ray.storage.places import Place

REMOVED_FILE = "removed.parquet"
REMOVED = pa.schema([*tables.RECORD, ("reason", pa.string()), ("detail", pa.string())])
COMPARED = ("instruction_positive", "query_positive", "document_positive")
"""Columns that are compared to find near-duplicates."""
NEAR_DUPLICATE = "near-duplicate"
_ROWS_AT_ONCE = 2048


@dataclass(frozen=True)
class Removal:
    """Why a record goes: `near-duplicate` with the id of the record that stays, or `contaminated by LABEL` with the shared words."""

    reason: str
    detail: str


def removals(records: Sequence[Record], contaminated: Mapping[str, Mapping[int, str]]) -> dict[int, Removal]:
    """Return row -> why the record goes. A contaminated record stays for no other one.

    Args:
        contaminated: label of an evaluation set -> row -> words that the record shares with it.
    """
    removed: dict[int, Removal] = {}
    for label, rows in contaminated.items():
        for row, words in rows.items():
            removed.setdefault(row, Removal(f"contaminated by {label}", words))
    rest = [row for row in range(len(records)) if row not in removed]
    texts = ["\n".join(getattr(records[row], column) for column in COMPARED) for row in rest]
    for duplicate in near_duplicates(texts):
        removed[rest[duplicate.row]] = Removal(NEAR_DUPLICATE, records[rest[duplicate.like]].id)
    return removed


def write(directory: Path, path: Place, removed: Mapping[int, Removal]) -> dict[str, int]:
    """Write the records that stay as KEPT_FILE, in their order, and the others as REMOVED_FILE; return reason -> number.

    Args:
        path: the records, as `removals` got them.
    """
    with (
        pq.ParquetWriter(directory / KEPT_FILE, tables.RECORD) as kept,
        pq.ParquetWriter(directory / REMOVED_FILE, REMOVED) as dropped,
    ):
        rows = enumerate(_rows(path))
        while group := list(islice(rows, _ROWS_AT_ONCE)):
            stays = [row for number, row in group if number not in removed]
            goes = [{**row, **vars(removed[number])} for number, row in group if number in removed]
            kept.write_table(pa.Table.from_pylist(stays, tables.RECORD))
            dropped.write_table(pa.Table.from_pylist(goes, REMOVED))
    return dict(Counter(removal.reason for removal in removed.values()).most_common())


def _rows(path: Place) -> Iterator[dict[str, Any]]:
    """Yield the columns of all records, with the provenance of those that synthesis wrote."""
    file = path if path.is_file() else path / KEPT_FILE
    ours = raw_rows(file, "records") if file.is_file() and is_ours(file) else None
    for record in tables.stream(path, Record, "records"):
        yield vars(record) | ({"provenance": next(ours)["provenance"]} if ours else {})
