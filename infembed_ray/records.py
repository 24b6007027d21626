"""Everything that passes between stages: Arrow schemas, typed rows, and their reading from Parquet and JSONL.

This is the one place that names columns. A record's columns are those of the published InF-IR data set, so that set
trains as it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from infembed_ray.config import nearest
from infembed_ray.errors import InputError

SCENARIOS = ("positive", "negative_instruction", "negative_query")
"""The judge's three scenarios; also the names of the three candidates, each the right answer of its own scenario."""


@dataclass(frozen=True)
class Seed:
    """A (query, relevant passage) pair to make a record from. `topic` and `split` travel along, for grouping."""

    id: str
    query: str
    passage: str
    source: str = "unknown"
    topic: str | None = None
    split: str | None = None


@dataclass(frozen=True)
class Record:
    """One InF-IR record: the positive triple and its two poisoned variants (paper, section 4)."""

    id: str
    query_positive: str
    instruction_positive: str
    instruction_negative: str
    query_negative: str
    document_positive: str
    hard_negative_document_1: str
    """Answers (instruction_negative, query_positive)."""
    hard_negative_document_2: str
    """Answers (instruction_positive, query_negative)."""
    source: str = "unknown"
    topic: str | None = None
    split: str | None = None


@dataclass(frozen=True)
class Passage:
    """One passage of a corpus."""

    id: str
    text: str


Row = TypeVar("Row", Seed, Record, Passage)

ALIASES: Mapping[str, tuple[str, ...]] = {
    "document_positive": ("document",),  # older copies of the published set
    "text": ("passage",),
}

_TEXT = pa.string()

PROVENANCE = pa.struct(
    [
        ("generator", _TEXT),
        ("judge", _TEXT),
        ("prompt_version", _TEXT),
        ("request_hashes", pa.list_(_TEXT)),
        ("prompt_tokens", pa.int64()),
        ("completion_tokens", pa.int64()),
        ("usd", pa.float64()),  # null where the price table does not know the model
        ("verdicts", pa.struct([(scenario, _TEXT) for scenario in SCENARIOS])),
    ]
)

_RECORD_FIELDS = [(f.name, _TEXT) for f in fields(Record)]

RECORD = pa.schema([*_RECORD_FIELDS, ("provenance", PROVENANCE)])
REJECTED = pa.schema([*_RECORD_FIELDS, ("step", _TEXT), ("reason", _TEXT), ("provenance", PROVENANCE)])
DEAD_LETTER = pa.schema(
    [
        ("id", _TEXT),
        ("source", _TEXT),
        ("step", _TEXT),
        ("error", _TEXT),
        ("request_hash", _TEXT),
        ("provenance", PROVENANCE),
    ]
)
PASSAGE = pa.schema([(f.name, _TEXT) for f in fields(Passage)])

KEPT_FILE = "records.parquet"
REJECTED_FILE = "rejected.parquet"
DEAD_LETTER_FILE = "dead_letter.parquet"


def read(
    path: Path, row: type[Row], name: str, columns: Mapping[str, str] | None = None, split: str | None = None
) -> list[Row]:
    """Read and check rows of a Parquet or JSONL file, or of a published synthesis output.

    Args:
        path: file, or directory holding `records.parquet`.
        row: `Seed`, `Record` or `Passage`.
        name: the setting the path came from, for error messages.
        columns: our column name -> the name in the file.
        split: keep only rows whose `split` is this.

    Raises:
        InputError: no such file, unknown format, a missing column, no rows, an empty field (row and column named), a
            duplicate id.
    """
    if path.is_dir():
        if not (path / KEPT_FILE).is_file():
            raise InputError(f"{name}={path}: no {KEPT_FILE} in this directory; give a file or a synthesis output")
        path = path / KEPT_FILE
    raw = list(_raw_rows(path, name))
    if not raw:
        raise InputError(f"{name}={path}: empty, it has no rows; give a file with at least one")
    mapping = _mapping(raw[0], row, path, name, columns or {})
    rows: list[Row] = []
    seen: set[str] = set()
    required = _required(row)
    for number, values in enumerate(raw, start=1):
        taken = {ours: _text(values.get(theirs)) for ours, theirs in mapping.items()}
        if "id" not in mapping:
            taken["id"] = f"row-{number}"
        for column in required:
            if not (taken[column] or "").strip():
                theirs = mapping.get(column, column)
                raise InputError(f"{name}={path}: row {number}: column {theirs} is empty; fill it or drop the row")
        if taken["id"] in seen:
            raise InputError(f"{name}={path}: row {number}: id {taken['id']} stands twice; ids must be unique")
        seen.add(str(taken["id"]))
        rows.append(row(**{k: v for k, v in taken.items() if v is not None}))
    if split is not None:
        rows = [r for r in rows if getattr(r, "split", None) == split]
        if not rows:
            raise InputError(f"{name}={path}: no row has split={split}; leave split unset to take all rows")
    return rows


def columns_of(row: Seed | Record | Passage) -> dict[str, Any]:
    """A row as a dict of its columns."""
    return {f.name: getattr(row, f.name) for f in fields(row)}


def write(path: Path, schema: pa.Schema, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as one Parquet file of exactly this schema; columns a row lacks are null."""
    pq.write_table(pa.Table.from_pylist([dict(r) for r in rows], schema=schema), path)


def read_raw(path: Path) -> list[dict[str, Any]]:
    """All rows of a Parquet file of ours, as dicts (with provenance, reasons, errors)."""
    rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    return rows


def _required(row: type[Seed | Record | Passage]) -> list[str]:
    """Columns a file must have. A record's id is made where it is missing: the published InF-IR set has none."""
    optional = {"source", "topic", "split"} | ({"id"} if row is Record else set())
    return [f.name for f in fields(row) if f.name not in optional]


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _raw_rows(path: Path, name: str) -> Iterator[dict[str, Any]]:
    if path.suffix == ".parquet":
        try:
            for batch in pq.ParquetFile(path).iter_batches():
                yield from batch.to_pylist()
        except pa.ArrowException as error:
            raise InputError(f"{name}={path}: not readable as Parquet ({error}); is the file whole?") from error
        return
    if path.suffix not in (".jsonl", ".json"):
        raise InputError(f"{name}={path}: unknown format {path.suffix or 'without a suffix'}; give .jsonl or .parquet")
    with path.open(encoding="utf-8") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            try:
                values = json.loads(line)
            except json.JSONDecodeError as error:
                raise InputError(f"{name}={path}: line {number} is not JSON ({error.msg}); mend the line") from error
            if not isinstance(values, dict):
                raise InputError(f"{name}={path}: line {number} is no JSON object; write one object a line")
            yield values


def _mapping(
    first: Mapping[str, Any], row: type[Seed | Record | Passage], path: Path, name: str, columns: Mapping[str, str]
) -> dict[str, str]:
    ours: list[str] = [f.name for f in fields(row)]
    for key in columns:
        if key not in ours:
            raise InputError(f"columns.{key}: no column of a {row.__name__.lower()}: {nearest(key, ours)}")
    mapping: dict[str, str] = {}
    for own in ours:
        candidates = (columns[own],) if own in columns else (own, *ALIASES.get(own, ()))
        found = [candidate for candidate in candidates if candidate in first]
        if found:
            mapping[own] = found[0]
        elif own in columns or own in _required(row):
            raise InputError(
                f"{name}={path}: column {candidates[0]} is missing (found: {', '.join(map(str, first))}); "
                f"rename it or set columns.{own}=<its name>"
            )
    return mapping
