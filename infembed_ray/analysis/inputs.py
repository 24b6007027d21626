"""Inputs of the analysis: a published synthesis output, or a file of InF-IR records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow.parquet as pq

from infembed_ray.records import tables
from infembed_ray.records.tables import Record
from infembed_ray.storage.places import Place, errors_at, open_binary
from infembed_ray.storage.steps import MANIFEST, read_manifest

Rows = list[dict[str, Any]]

KINDS: Mapping[str, tuple[str, ...]] = {
    "instruction": ("instruction_positive", "instruction_negative"),
    "query": ("query_positive", "query_negative"),
    "passage": ("document_positive", "hard_negative_document_1", "hard_negative_document_2"),
}
"""Kind of text -> its columns in a record."""


@dataclass(frozen=True)
class RecordSet:
    """Records, and for a synthesis output also its rejected rows and their costs.

    Attributes:
        rejected, dead_letter: rows of `tables.REJECTED` and `tables.DEAD_LETTER`.
        complements: rows of `tables.COMPLEMENT`; empty if none were asked for.
        provenance: `kept`, `rejected` or `dead_letter` -> provenance of its rows, if they have one.
        manifest: manifest of the synthesis; empty for other records.
    """

    kept: list[Record]
    rejected: Rows
    dead_letter: Rows
    complements: Rows
    provenance: Mapping[str, Rows]
    manifest: Mapping[str, Any]


def read(path: Place, name: str) -> RecordSet:
    """Read a synthesis output (a directory) or a file of records.

    Raises:
        InputError: as `tables.read`; but a synthesis output without kept records is valid if it has rejected rows.
    """
    with errors_at(path, name):
        rejected, dead_letter = _rows(path / tables.REJECTED_FILE), _rows(path / tables.DEAD_LETTER_FILE)
        file = path if path.is_file() else path / tables.KEPT_FILE
        nothing_kept = (rejected or dead_letter) and file.is_file() and _metadata(file).num_rows == 0
        return RecordSet(
            kept=[] if nothing_kept else tables.read(path, Record, name),
            rejected=rejected,
            dead_letter=dead_letter,
            complements=_rows(path / tables.COMPLEMENTS_FILE),
            provenance={
                "kept": _provenance(_rows(file) if is_ours(file) else []),
                "rejected": _provenance(rejected),
                "dead_letter": _provenance(dead_letter),
            },
            manifest=read_manifest(path, name) if (path / MANIFEST).is_file() else {},
        )


def _rows(file: Place) -> Rows:
    return tables.read_raw(file) if file.is_file() else []


def _metadata(file: Place) -> pq.FileMetaData:
    with open_binary(file) as source:
        return pq.read_metadata(source)


def is_ours(file: Place) -> bool:
    """Return whether synthesis wrote the file; other records may have a `provenance` of another type."""
    return file.suffix == ".parquet" and _metadata(file).schema.to_arrow_schema().equals(tables.RECORD)


def _provenance(rows: Rows) -> Rows:
    return [row["provenance"] for row in rows if row["provenance"]]
