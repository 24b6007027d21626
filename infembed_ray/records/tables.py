"""Data that stages exchange: typed rows, their Arrow schemas, and their reader.

Only this module and `tuples` name columns. The columns of a record are those of the published InF-IR data set, so
training reads that set unchanged.
"""

import contextlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

import pyarrow as pa
import pyarrow.parquet as pq

from infembed_ray.config.base import nearest
from infembed_ray.errors import InputError
from infembed_ray.records.files import BadRow, BadRows, data_files, mapped_rows, raw_rows, split_of, wrong
from infembed_ray.storage.places import Place
from infembed_ray.storage.steps import MANIFEST

SCENARIOS = ("positive", "negative_instruction", "negative_query")
"""Scenarios of the judge. They also name the three candidates: each is the correct answer of its scenario."""
UNKNOWN = "unknown"
"""Source of a row without one."""


@dataclass(frozen=True)
class Seed:
    """A (query, relevant passage) pair from which a record is made. `topic` and `split` are copied to the record."""

    id: str
    query: str
    passage: str
    source: str = UNKNOWN
    topic: str | None = None
    split: str | None = None
    language: str | None = None
    """Programming language of the passage; its negatives use the same one (appendix B.2)."""


@dataclass(frozen=True)
class Record:
    """An InF-IR record: the positive triple and its two poisoned variants (paper, section 4).

    ```python
    from infembed_ray import load_records

    record = load_records("runs/quickstart/records")[0]
    print(record.instruction_negative, record.query_positive, record.hard_negative_document_1, sep=" | ")
    ```

    Attributes:
        instruction_positive, query_positive, document_positive: the positive triple I+, Q+ and P+.
        instruction_negative, hard_negative_document_1: the poisoned instruction I-, and P1-, which answers Q+ under it.
        query_negative, hard_negative_document_2: the poisoned query Q-, and P2-, which answers it under I+.
        source, topic, split, language: those of the seed.
    """

    id: str
    query_positive: str
    instruction_positive: str
    instruction_negative: str
    query_negative: str
    document_positive: str
    hard_negative_document_1: str
    hard_negative_document_2: str
    source: str = UNKNOWN
    topic: str | None = None
    split: str | None = None
    language: str | None = None
    instruction_kind: str | None = None
    """Kind of condition, such as audience or exclusion. An evaluation breaks p-MRR down by it; no stage writes it."""


@dataclass(frozen=True)
class Passage:
    """A passage of a corpus, for `Index.build`.

    >>> Passage("dose", "Adults: 500 mg twice a day.")
    Passage(id='dose', text='Adults: 500 mg twice a day.')
    """

    id: str
    text: str


T = TypeVar("T")
Row = TypeVar("Row", Seed, Record, Passage)

ALIASES: Mapping[str, tuple[str, ...]] = {
    "document_positive": ("document",),  # older copies of the published set
    "text": ("passage",),
    "id": ("_id",),
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
        ("usd", pa.float64()),  # null if the price table does not have the model
        ("verdicts", pa.struct([(scenario, _TEXT) for scenario in SCENARIOS])),
        # With a cheap judge: `cheap_judge` or `judge`, whichever gave the verdict.
        ("judged_by", pa.struct([(scenario, _TEXT) for scenario in SCENARIOS])),
        ("audit", _TEXT),  # `kept` or `rejected` by the cheap judge, if the judge was then asked in its place
    ]
)

_RECORD_FIELDS = [(f.name, _TEXT) for f in fields(Record) if f.name != "instruction_kind"]

RECORD = pa.schema([*_RECORD_FIELDS, ("provenance", PROVENANCE)])
REJECTED = pa.schema([*_RECORD_FIELDS, ("step", _TEXT), ("reason", _TEXT), ("provenance", PROVENANCE)])
_DEAD_LETTER = ("id", "source", "step", "error", "request_hash")
DEAD_LETTER = pa.schema([*((name, _TEXT) for name in _DEAD_LETTER), ("provenance", PROVENANCE)])
COMPLEMENT = pa.schema(
    [
        ("id", _TEXT),  # the record's
        ("source", _TEXT),
        ("query", _TEXT),
        ("instruction", _TEXT),  # null if none could be generated
        ("positives", _TEXT),  # the record's first hard negative, which is right under this instruction
        ("negatives", _TEXT),  # the record's positive, which is wrong under it
        ("fault", _TEXT),  # why the instruction is unusable; null if it is usable
    ]
)
"""The dual view of a kept record as a training tuple: an instruction under which the hard negative becomes the positive."""

MADE_ID = "row-"
"""Prefix of the ids that are generated for records without one."""

ROW_GROUP = 10_000
"""Most rows of a row group that `write` makes: a reader of one row holds one group of each column."""
KEPT_FILE = "records.parquet"
REJECTED_FILE = "rejected.parquet"
DEAD_LETTER_FILE = "dead_letter.parquet"
COMPLEMENTS_FILE = "complements.parquet"
REJECTED_COMPLEMENTS_FILE = "rejected_complements.parquet"


def read(
    path: Place, row: type[Row], name: str, columns: Mapping[str, str] | None = None, split: str | None = None
) -> list[Row]:
    """Read all rows of a file, a directory of files or a published synthesis output; arguments and errors as of `stream`."""
    return list(stream(path, row, name, columns, split))


def stream(
    path: Place,
    row: type[Row],
    name: str,
    columns: Mapping[str, str] | None = None,
    split: str | None = None,
    bad: BadRows | None = None,
) -> Iterator[Row]:
    """Stream validated rows; only their ids stay in memory.

    Args:
        path: a file, a glob, a directory with `records.parquet`, or a directory of data files in the layout of `datasets`
            and the Hugging Face hub; in an object store they are read in place.
        row: `Seed`, `Record` or `Passage`.
        columns: field of the row -> its name in the file.
        split: keep only rows of this split; a row without one has the split in its file's name.
        bad: collects the rows that cannot be used.

    Raises:
        InputError: no such file, unknown format, missing column, no rows; or after the last row, some cannot be used.
    """
    bad = bad or BadRows(name)
    return stream_files(path, split, bad, partial(_checked, row=row, bad=bad, columns=columns or {}))


def stream_files(
    path: Place, split: str | None, bad: BadRows, rows_of: Callable[[Place, set[str]], Iterator[T]]
) -> Iterator[T]:
    """Stream the rows of a path's files as `stream` does.

    `rows_of` reads the rows of one file, given the ids of the rows before, to which it adds theirs.
    """
    name, kept = bad.name, path / KEPT_FILE
    if (path / MANIFEST).is_file() and not kept.is_file():
        fault = f"no {KEPT_FILE} in this published output"
        raise InputError.of(name, path, fault, "give the output of `infembed synthesize`")
    files = [kept] if kept.is_file() else data_files(path, name, split)
    seen: set[str] = set()
    taken = False
    for file in files:
        for read_row in rows_of(file, seen):
            if split is None or getattr(read_row, "split", None) == split:
                taken = True
                yield read_row
    bad.check()
    if not seen:
        raise InputError.of(name, path, "has no rows", "give a file with at least one")
    if not taken:
        raise InputError.of(name, path, f"no row has split={split}", "leave split unset to take all rows")


def _checked(file: Place, seen: set[str], row: type[Row], bad: BadRows, columns: Mapping[str, str]) -> Iterator[Row]:
    """Stream the rows of one file; add their ids to `seen`."""
    needed = required(row)
    of_file = split_of(file) if "split" in {f.name for f in fields(row)} else None
    names_of = partial(mapping, row=row, path=file, name=bad.name, columns=columns)
    for number, values, names in mapped_rows(file, bad, names_of):
        try:
            if row is Passage:
                taken: dict[str, str | None] = dict(zip(("id", "text"), document(values, names), strict=True))
            else:
                taken = {ours: passage_text(values.get(theirs), theirs) for ours, theirs in names.items()}
            taken["id"] = taken.get("id") or (None if "id" in needed else f"{MADE_ID}{len(seen) + 1}")
            if empty := [names.get(column, column) for column in needed if not (taken[column] or "").strip()]:
                raise BadRow(f"column {empty[0]} is empty")
            if taken["id"] in seen:
                raise BadRow(f"duplicate id {taken['id']}; ids must be unique")
        except BadRow as fault:
            bad.add(file, number, fault, values)
            continue
        if of_file is not None and taken.get("split") is None:
            taken["split"] = of_file
        seen.add(str(taken["id"]))
        yield row(**{k: v for k, v in taken.items() if v is not None})


def document(values: Mapping[str, Any], names: Mapping[str, str], empty: bool = False) -> tuple[str, str]:
    """Return the id and the text of a document, in which its title comes before the text, as in mteb.

    `index`, `evaluate` and `mine` read documents by this rule.

    Args:
        names: as `mapping` returns them for a `Passage`.
        empty: whether both title and text may be empty.

    Raises:
        BadRow: the id is empty, or there is neither a title nor a text.
    """
    id = text_of(values.get(names["id"]), names["id"])
    title = values.get(names["title"]) if "title" in names else None
    text = (passage_text(values.get(names["text"]), names["text"], title) or "").strip()
    if not (id or "").strip() or not (text or empty):
        raise BadRow(f"column {names['text' if (id or '').strip() else 'id']} is empty")
    return id or "", text


def passage_text(value: Any, column: str, title: Any = None) -> str | None:
    """Return the text of a passage, which a mapping may divide into `title` and `text`; with a title, they are joined.

    Raises:
        BadRow: the cell holds no text.
    """
    if isinstance(value, dict) and value.keys() & {"title", "text"}:
        title, value = value.get("title", title), value.get("text") or ""
    text = value if isinstance(value, str) else text_of(value, column)
    title = title if title is None else text_of(title, "title")
    return text if title is None else f"{title} {text or ''}".strip()


def text_of(value: Any, column: str) -> str | None:
    """Return the text of a cell, None for null and NaN. A whole number is its digits, as 7 and 7.0 are `7`.

    Raises:
        BadRow: it is a list, a mapping, bytes, or something else that is no text.
    """
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, (int, float, Decimal)) and not isinstance(value, bool):
        if value != value:
            return None
        with contextlib.suppress(OverflowError):  # infinite
            return str(int(value)) if value == int(value) else str(value)
    if isinstance(value, UUID):
        return str(value)
    raise wrong(column, "must be one text, or null", value)


def write(path: Path, schema: pa.Schema, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as one Parquet file of this schema; columns that a row lacks are null."""
    table = pa.Table.from_pylist([dict(r) for r in rows], schema=schema)
    pq.write_table(table, path, row_group_size=ROW_GROUP)


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as JSON, one a line."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def read_raw(path: Place) -> list[dict[str, Any]]:
    """Read all rows of a Parquet file that `write` wrote, as dicts."""
    return list(raw_rows(path, ""))


def required(row: type[Seed | Record | Passage]) -> list[str]:
    """List the columns that a file must have. Ids of records are generated: the published InF-IR set has none."""
    optional = {"source", "topic", "split", "language", "instruction_kind"} | ({"id"} if row is Record else set())
    return [f.name for f in fields(row) if f.name not in optional]


def mapping(
    present: Collection[str], row: type[Seed | Record | Passage], path: Place, name: str, columns: Mapping[str, str]
) -> dict[str, str]:
    """Map our column names to those of a file, for all our columns that the file has.

    Args:
        columns: names that the user gives: our column name -> the name in the file, "" leaves out an optional one.

    Raises:
        InputError: a required column is missing, or `columns` has an unknown column.
    """
    ours: list[str] = [*(f.name for f in fields(row)), *(["title"] if row is Passage else [])]
    for key in columns:
        if key not in ours:
            raise InputError(f"columns.{key}: unknown column of a {row.__name__.lower()}: {nearest(key, ours)}")
    needed = required(row)
    column_of: dict[str, str] = {}
    missing: dict[str, str] = {}
    for own in ours:
        candidates = (columns[own],) if own in columns else (own, *ALIASES.get(own, ()))
        if columns.get(own) == "" and own not in needed:
            continue
        if theirs := next((name for name in candidates if name in present), None):
            column_of[own] = theirs
        elif own in columns or own in needed:
            missing[own] = candidates[0]
    if missing:
        raise no_columns(name, path, missing, present, bool(columns))
    return column_of


def no_columns(
    name: str, path: Place, missing: Mapping[str, str], present: Collection[str], mapped: bool
) -> InputError:
    """The error that a file lacks columns, `missing`: ours -> theirs; `mapped`: whether the user maps any."""
    found = ", ".join(map(str, present))
    fault = f"no column {', '.join(missing.values())} (found: {found[:300]}{' ...' * (len(found) > 300)})"
    source = name.removesuffix("path") if name.startswith("sources.") else ""
    remedy = "set " + ", ".join(f"{source}columns.{own}=<its name>" for own in missing)
    if not (mapped or source or name in ("corpus", "seeds")):
        remedy = "rename the columns of the file" + f" (mine: {remedy}; train: in sources.NAME)" * (name == "records")
    return InputError.of(name, path, fault, remedy)
