"""Data that stages exchange: typed rows, their Arrow schemas, and readers of all file formats.

Only this module and `tuples` name columns. The columns of a record are those of the published InF-IR data set, so
training reads that set unchanged.
"""

import csv
import io
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, TextIO, TypeVar, overload

import pyarrow as pa
import pyarrow.parquet as pq

from infembed_ray.config.base import nearest
from infembed_ray.errors import InputError
from infembed_ray.storage.places import Place, errors_at, listing, open_binary
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
    """An InF-IR record: the positive triple and its two poisoned variants (paper, section 4)."""

    id: str
    query_positive: str
    instruction_positive: str
    instruction_negative: str
    query_negative: str
    document_positive: str
    hard_negative_document_1: str
    """The answer to (instruction_negative, query_positive)."""
    hard_negative_document_2: str
    """The answer to (instruction_positive, query_negative)."""
    source: str = UNKNOWN
    topic: str | None = None
    split: str | None = None
    language: str | None = None
    instruction_kind: str | None = None
    """What the instruction asks for, such as audience or exclusion: an evaluation breaks p-MRR down by it. Only read."""


@dataclass(frozen=True)
class Passage:
    """A passage of a corpus."""

    id: str
    text: str


T = TypeVar("T")
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
_DEAD_LETTER_FIELDS = [(name, _TEXT) for name in ("id", "source", "step", "error", "request_hash")]
DEAD_LETTER = pa.schema([*_DEAD_LETTER_FIELDS, ("provenance", PROVENANCE)])
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

_SHARD = re.compile(r"(?P<split>\w+)-\d{5}-of-\d{5}")
"""File names on the Hugging Face hub: `train-00000-of-00007`."""

_CACHED = "cache-*.arrow"
"""Results that `datasets` caches beside the data of a saved data set."""
_ROWS_AT_ONCE = 1024
ROW_GROUP = 10_000
"""Most rows of a row group that `write` makes: a reader of one row holds one group of each column."""
_ARROW_FILE = b"ARROW1"
"""First bytes of Arrow's file format. Its streaming format, which `datasets` writes, begins differently."""
_BLOCK = 1 << 20
_LONGEST_ROW = 1 << 26

KEPT_FILE = "records.parquet"
REJECTED_FILE = "rejected.parquet"
DEAD_LETTER_FILE = "dead_letter.parquet"
COMPLEMENTS_FILE = "complements.parquet"
REJECTED_COMPLEMENTS_FILE = "rejected_complements.parquet"


def read(
    path: Place, row: type[Row], name: str, columns: Mapping[str, str] | None = None, split: str | None = None
) -> list[Row]:
    """Read all rows of a file, a directory of files or a published synthesis output; see `stream`."""
    return list(stream(path, row, name, columns, split))


def stream(
    path: Place, row: type[Row], name: str, columns: Mapping[str, str] | None = None, split: str | None = None
) -> Iterator[Row]:
    """Stream validated rows; only their ids stay in memory.

    Args:
        path: a file, a directory with `records.parquet`, or a directory of data files in the layout of `datasets` and
            the Hugging Face hub; in an object store they are read in place.
        row: `Seed`, `Record` or `Passage`.
        columns: our column name -> the name in the file.
        split: keep only rows of this split; a row without one has the split in its file's name.

    Raises:
        InputError: no such file, unknown format, missing column, no rows, empty field or duplicate id.
    """
    return stream_files(path, name, split, partial(_checked, row=row, name=name, columns=columns or {}))


def stream_files(
    path: Place, name: str, split: str | None, rows_of: Callable[[Place, set[str]], Iterator[T]]
) -> Iterator[T]:
    """Stream the rows of a path's files as `stream` does.

    `rows_of` reads the rows of one file, given the ids of the rows before, to which it adds theirs.
    """
    kept = path / KEPT_FILE
    if (path / MANIFEST).is_file() and not kept.is_file():
        raise InputError(
            f"{name}={path}: no {KEPT_FILE} in this published output; give the output of `infembed synthesize`"
        )
    files = [kept] if kept.is_file() else data_files(path, name, split)
    seen: set[str] = set()
    taken = False
    for file in files:
        for read_row in rows_of(file, seen):
            if split is None or getattr(read_row, "split", None) == split:
                taken = True
                yield read_row
    if not seen:
        raise InputError(f"{name}={path}: has no rows; give a file with at least one")
    if not taken:
        raise InputError(f"{name}={path}: no row has split={split}; leave split unset to take all rows")


def _checked(file: Place, seen: set[str], row: type[Row], name: str, columns: Mapping[str, str]) -> Iterator[Row]:
    """Stream the rows of one file; add their ids to `seen`."""
    present: dict[str, Any] = {}
    required = _required(row)
    of_file = split_of(file) if "split" in {f.name for f in fields(row)} else None
    for number, values in enumerate(raw_rows(file, name), start=1):
        if not present or not values.keys() <= present.keys():  # a row of JSON may have columns that others lack
            present |= values
            names = mapping(present, row, file, name, columns)
        where = f"{name}={file}: row {number}"
        taken = {ours: text_of(values.get(theirs), f"{where}: column {theirs}") for ours, theirs in names.items()}
        if of_file is not None and taken.get("split") is None:
            taken["split"] = of_file
        if "id" not in names:
            taken["id"] = f"{MADE_ID}{len(seen) + 1}"
        if empty := [names.get(column, column) for column in required if not (taken[column] or "").strip()]:
            raise InputError(f"{where}: column {empty[0]} is empty; fill it or drop the row")
        if taken["id"] in seen:
            raise InputError(f"{where}: duplicate id {taken['id']}; ids must be unique")
        seen.add(str(taken["id"]))
        yield row(**{k: v for k, v in taken.items() if v is not None})


@overload
def data_files(path: Path, name: str, split: str | None = None) -> list[Path]: ...
@overload
def data_files(path: Place, name: str, split: str | None = None) -> list[Place]: ...
def data_files(path: Place, name: str, split: str | None = None) -> list[Path] | list[Place]:
    """List the data files of a path: the file itself, or all files of a directory in the first format of `FORMATS` present.

    Args:
        split: leave out files of another split, as named on the Hugging Face hub: `train-00000-of-00007`.

    Raises:
        InputError: no file is readable, or all belong to other splits.
    """
    if path.is_file():
        return [path]
    visible = [
        file for file in sorted(map(PurePosixPath, listing(path))) if not hidden(file) and not file.match(_CACHED)
    ]
    for suffix in FORMATS:
        files = [path / str(file) for file in visible if file.suffix == suffix]
        if files:
            taken = [file for file in files if split is None or split_of(file) in (None, split)]
            if not taken:
                splits = {of_file for of_file in map(split_of, files) if of_file is not None}
                raise InputError(f"split={split}: {name}={path} has none; found {', '.join(sorted(splits))}")
            return taken
    raise InputError(f"{name}={path}: no data files in this directory; give {', '.join(FORMATS)}")


def split_of(file: Place) -> str | None:
    """Return the split of a file: in its name, as on the Hugging Face hub, or its directory in a saved `DatasetDict`."""
    shard = _SHARD.fullmatch(file.stem)
    if shard and shard["split"] == "data":  # `save_to_disk` of datasets
        return file.parent.name if (file.parent.parent / "dataset_dict.json").is_file() else None
    return shard["split"] if shard else None


def hidden(path: PurePath) -> bool:
    """Whether a file or one of its directories begins with a dot."""
    return any(part.startswith(".") for part in path.parts)


def write(path: Path, schema: pa.Schema, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as one Parquet file of this schema; columns that a row lacks are null."""
    table = pa.Table.from_pylist([dict(r) for r in rows], schema=schema)
    pq.write_table(table, path, row_group_size=ROW_GROUP)


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as JSON, one a line."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def read_raw(path: Place) -> list[dict[str, Any]]:
    """Read all rows of a Parquet file that `write` wrote, as dicts."""
    return list(_parquet_rows(path, ""))


def _required(row: type[Seed | Record | Passage]) -> list[str]:
    """List the columns that a file must have. Ids of records are generated: the published InF-IR set has none."""
    optional = {"source", "topic", "split", "language", "instruction_kind"} | ({"id"} if row is Record else set())
    return [f.name for f in fields(row) if f.name not in optional]


def text_of(value: Any, where: str) -> str | None:
    """Return the text of a cell, None for null; InputError, which begins with `where`, for a list, a mapping or NaN."""
    if isinstance(value, list | dict) or value != value:
        raise InputError(f"{where} has {value!r}; give one text, or null")
    return None if value is None else str(value)


def raw_rows(path: Place, name: str, some: Iterable[bytes] | None = None, after: int = 0) -> Iterator[dict[str, Any]]:
    """Stream the rows of a Parquet, Arrow, JSONL, JSON (an array, or lines) or CSV/TSV file, in bounded memory.

    Args:
        some: lines of a JSONL file, after `after` others, to read in place of the file.

    Raises:
        InputError: unknown format, or the file is damaged; the message names the line or row.
    """
    reader = _READERS.get(path.suffix)
    if reader is None:
        raise InputError(
            f"{name}={path}: unknown format {path.suffix or 'without a suffix'}; give {', '.join(_READERS)}"
        )
    with errors_at(path, name):
        try:
            yield from (reader(path, name) if some is None else _json_lines(path, name, map(bytes.decode, some), after))
        except pa.ArrowException as error:
            kind = "Arrow" if path.suffix == ".arrow" else "Parquet"
            raise InputError(
                f"{name}={path}: not readable as {kind} ({error}); the file may be incomplete; copy it again"
            ) from error
        except UnicodeDecodeError as error:
            raise InputError(f"{name}={path}: not UTF-8 ({error.reason}); convert it") from error


def _parquet_rows(path: Place, name: str) -> Iterator[dict[str, Any]]:
    # By default the reader loads whole row groups ahead: all of a file that has only one.
    with open_binary(path) as source, pq.ParquetFile(source, buffer_size=_BLOCK, pre_buffer=False) as file:
        for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE):
            yield from batch.to_pylist()


def _arrow_rows(path: Place, name: str) -> Iterator[dict[str, Any]]:
    with pa.memory_map(str(path)) if isinstance(path, Path) else open_binary(path) as source:
        seekable = source.read(len(_ARROW_FILE)) == _ARROW_FILE
        source.seek(0)
        if seekable:
            reader = pa.ipc.open_file(source)
            batches: Iterable[pa.RecordBatch] = map(reader.get_batch, range(reader.num_record_batches))
        else:
            batches = pa.ipc.open_stream(source)
        for batch in batches:
            yield from batch.to_pylist()


def _open_text(path: Place, encoding: str = "utf-8", newline: str | None = None) -> TextIO:
    return io.TextIOWrapper(pa.BufferedInputStream(open_binary(path), _BLOCK), encoding, newline=newline)


def _json_rows(path: Place, name: str) -> Iterator[dict[str, Any]]:
    with _open_text(path) as stream:
        array = stream.read(_BLOCK).lstrip().startswith("[")
    yield from _json_array(path, name) if array else _json_lines(path, name)


def _json_lines(path: Place, name: str, some: Iterable[str] | None = None, after: int = 0) -> Iterator[dict[str, Any]]:
    with _open_text(path) if some is None else nullcontext(some) as stream:
        for number, line in enumerate(stream, start=after + 1):
            if not line.strip():
                continue
            try:
                values = json.loads(line)
            except json.JSONDecodeError as error:
                raise InputError(f"{name}={path}: line {number} is not JSON ({error.msg}); correct the line") from error
            if not isinstance(values, dict):
                raise InputError(f"{name}={path}: line {number} is not a JSON object; write one object per line")
            yield values


def _json_array(path: Place, name: str) -> Iterator[dict[str, Any]]:
    decoder = json.JSONDecoder()
    number, at = 1, 0
    with _open_text(path) as stream:
        text = stream.read(_BLOCK).lstrip()[1:]
        while True:
            while text[at : at + 1] in (" ", "\t", "\r", "\n", ","):
                at += 1
            if text.startswith("]", at):
                return
            try:
                values, at = decoder.raw_decode(text, at)
            except json.JSONDecodeError as error:
                # Double the text, so a long row is parsed few times; a row beyond _LONGEST_ROW counts as damaged.
                more = stream.read(max(_BLOCK, len(text))) if len(text) - at < _LONGEST_ROW else ""
                if not more:
                    raise InputError(f"{name}={path}: row {number} is not JSON ({error.msg}); correct it") from error
                text, at = text[at:] + more, 0
                continue
            if not isinstance(values, dict):
                raise InputError(f"{name}={path}: row {number} is not a JSON object; write an array of objects")
            yield values
            number += 1


def _csv_rows(path: Place, name: str) -> Iterator[dict[str, Any]]:
    csv.field_size_limit(2**31 - 1)  # passages are longer than the default
    with _open_text(path, "utf-8-sig", newline="") as stream:
        reader = csv.DictReader(stream, delimiter="\t" if path.suffix == ".tsv" else ",", strict=True)
        try:
            for values in reader:
                if None in values or None in values.values():
                    raise InputError(
                        f"{name}={path}: line {reader.line_num} has another number of fields than the header; correct it"
                    )
                yield values
        except csv.Error as error:
            raise InputError(f"{name}={path}: not CSV after line {reader.line_num} ({error}); correct it") from error


_READERS: Mapping[str, Callable[[Place, str], Iterator[dict[str, Any]]]] = {
    ".parquet": _parquet_rows,
    ".jsonl": _json_lines,
    ".arrow": _arrow_rows,
    ".json": _json_rows,
    ".csv": _csv_rows,
    ".tsv": _csv_rows,
}
FORMATS = tuple(_READERS)
"""Suffixes of readable files."""


def mapping(
    present: Collection[str], row: type[Seed | Record | Passage], path: Place, name: str, columns: Mapping[str, str]
) -> dict[str, str]:
    """Map our column names to those of a file, for all our columns that the file has.

    Args:
        columns: names that the user gives: our column name -> the name in the file.

    Raises:
        InputError: a required column is missing, or `columns` has an unknown column.
    """
    ours: list[str] = [f.name for f in fields(row)]
    for key in columns:
        if key not in ours:
            raise InputError(f"columns.{key}: unknown column of a {row.__name__.lower()}: {nearest(key, ours)}")
    column_of: dict[str, str] = {}
    missing: dict[str, str] = {}
    for own in ours:
        candidates = (columns[own],) if own in columns else (own, *ALIASES.get(own, ()))
        if theirs := next((name for name in candidates if name in present), None):
            column_of[own] = theirs
        elif own in columns or own in _required(row):
            missing[own] = candidates[0]
    if missing:
        raise InputError(
            f"{name}={path}: no column {', '.join(missing.values())} (found: {', '.join(map(str, present))}); set "
            + ", ".join(f"columns.{own}=<its name>" for own in missing)
        )
    return column_of
