"""What there is to analyse: a published synthesis output, or InF-IR records from anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from infembed_ray import records
from infembed_ray.records import Record
from infembed_ray.storage import MANIFEST, read_manifest

Rows = list[dict[str, Any]]

KINDS: Mapping[str, tuple[str, ...]] = {
    "instruction": ("instruction_positive", "instruction_negative"),
    "query": ("query_positive", "query_negative"),
    "passage": ("document_positive", "hard_negative_document_1", "hard_negative_document_2"),
}
"""Kind of text -> the columns of a record that hold it."""


@dataclass(frozen=True)
class Material:
    """Records, and where synthesis made them, what it threw away and what it spent."""

    kept: list[Record]
    rejected: Rows
    """Of `records.REJECTED`."""
    dead_letter: Rows
    """Of `records.DEAD_LETTER`."""
    complements: Rows
    """Of `records.COMPLEMENT`; empty where none were asked for."""
    provenance: Mapping[str, Rows]
    """`kept`, `rejected`, `dead_letter` -> their rows' provenance, of `records.PROVENANCE`; rows without are left out."""
    manifest: Mapping[str, Any]
    """Of the synthesis; empty for records from elsewhere."""

    @property
    def counts(self) -> Mapping[str, int]:
        """The counts of the manifest."""
        counts: Mapping[str, int] = self.manifest.get("counts", {})
        return counts


def read(path: Path, name: str) -> Material:
    """Read a synthesis output (a directory) or a file of records.

    Args:
        path: the directory or the file.
        name: the setting it came from, for error messages.

    Raises:
        InputError: as `records.read`. A synthesis output that kept no record is fine if it says where the rows went.
    """
    rejected, dead_letter = _rows(path / records.REJECTED_FILE), _rows(path / records.DEAD_LETTER_FILE)
    file = path / records.KEPT_FILE if path.is_dir() else path
    nothing_kept = (rejected or dead_letter) and file.is_file() and pq.read_metadata(file).num_rows == 0
    return Material(
        kept=[] if nothing_kept else records.read(path, Record, name),
        rejected=rejected,
        dead_letter=dead_letter,
        complements=_rows(path / records.COMPLEMENTS_FILE),
        provenance={
            "kept": _provenance(_rows(file) if _is_ours(file) else []),
            "rejected": _provenance(rejected),
            "dead_letter": _provenance(dead_letter),
        },
        manifest=read_manifest(path, name) if (path / MANIFEST).is_file() else {},
    )


def _rows(file: Path) -> Rows:
    return records.read_raw(file) if file.is_file() else []


def _is_ours(file: Path) -> bool:
    """Is this a file of synthesis? Other people's records may have a `provenance` of another shape."""
    return file.suffix == ".parquet" and pq.read_schema(file).equals(records.RECORD)


def _provenance(rows: Rows) -> Rows:
    return [row["provenance"] for row in rows if row["provenance"]]
