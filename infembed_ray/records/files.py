"""Files of rows: the data files of a path, read as mappings in bounded memory, whatever their format and compression.

A row that cannot be used is a bad row: `BadRows` collects all of them, so that one error lists them, or a stage leaves them out.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, TextIO, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from infembed_ray.errors import Fault, InputError
from infembed_ray.progress import counted, say
from infembed_ray.storage.places import Place, errors_at, expanded, has_pattern, open_binary

BAD_ROWS_FILE = "bad_rows.jsonl"
"""Rows that `on_bad_row=reject` left out of an output, each with its file, its place there and what is wrong."""
_SHOWN = 20
"""Bad rows that an error lists; it counts the others."""
_WITHOUT_COLUMNS = 1000
"""First rows of a file of JSON that together may lack a required column: a row need not have all columns."""
_CODECS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bz2"}
"""First bytes of a compressed file -> its codec."""
_COMPRESSED = (".gz", ".zst", ".bz2")
_FORMATS = {
    ".parquet": "Parquet",
    ".jsonl": "JSON Lines",
    ".ndjson": "JSON Lines",
    ".arrow": "Arrow",
    ".feather": "Arrow",
    ".json": "JSON",
    ".csv": "CSV",
    ".tsv": "TSV",
}
SUFFIXES = f"{', '.join(_FORMATS)}, perhaps with {', '.join(_COMPRESSED)}"
"""Suffixes of readable files, in any case."""
_UNREADABLE = (".xz", ".lz4", ".zip", ".tar", ".tgz", ".7z", ".xlsx", ".xls", ".orc", ".avro", ".tab", ".pkl")
"""Suffixes of data that cannot be read, so that a directory is not read in part."""
_SHARD = re.compile(r"(?P<split>\w+)-\d{5}-of-\d{5}")
"""File names on the Hugging Face hub: `train-00000-of-00007`."""
_ABOUT = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "cache-*.arrow", BAD_ROWS_FILE)
"""Files that `datasets` and this package write beside the data."""
_ROWS_AT_ONCE = 1024
_ARROW_FILE = b"ARROW1"
"""First bytes of Arrow's file format. Its streaming format, which `datasets` writes, begins differently."""
_BLOCK = 1 << 20
_LONGEST_ROW = 1 << 26
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_DECODER = json.JSONDecoder(strict=False)

Names = TypeVar("Names")


class BadRow(InputError):
    """A row cannot be used; the message names the column, the value and what is wrong."""


def wrong(column: str, fault: str, value: Any) -> BadRow:
    """Return the error of a cell."""
    return BadRow(f"column {column} {fault}, not {repr(value)[:60]}")


@dataclass
class BadRows:
    """The bad rows of the files that the setting `name` names.

    Attributes:
        reject: leave them out; None: the stage cannot.
        value: of the setting, in errors; None: the file.
    """

    name: str
    reject: bool | None = None
    value: object = None
    count: int = 0
    faults: list[Fault] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    """The rows that are left out."""

    def add(self, file: object, number: int, fault: object, values: Any) -> None:
        """Record a row, by its number in a file, from 1."""
        where, self.count = f"row {number}", self.count + 1
        if self.count <= _SHOWN:
            self.faults.append(self.fault(file, f"{where}: {fault}", "correct it or drop the row"))
        if self.reject:
            self.rows.append({"file": str(file), "where": where, "fault": str(fault), "row": values})

    def fault(self, file: object, fault: str, remedy: str) -> Fault:
        """Return a fault of a file."""
        if self.value is None:
            return Fault(self.name, file, fault, remedy)
        return Fault(self.name, self.value, f"{file}: {fault}", remedy)

    def check(self) -> None:
        """Raise the InputError of all bad rows, unless they are left out."""
        if self.count and not self.reject:
            rest = f"{counted(self.count, 'bad row')}{f', of which {_SHOWN} are listed' * (self.count > _SHOWN)}"
            remedy = "correct them, or set on_bad_row=reject to leave them out" if self.reject is not None else ""
            summary = [Fault(self.name, None, rest, remedy)] if self.count > 1 or remedy else []
            raise InputError(*self.faults, *summary)

    def merge(self, other: BadRows) -> None:
        """Take the bad rows of another process."""
        self.count += other.count
        self.faults = [*self.faults, *other.faults][:_SHOWN]
        self.rows += other.rows


def write_bad_rows(directory: Path, *several: BadRows) -> None:
    """Write the rows that were left out into an output, if there are any, and report their number."""
    with_rows = [bad for bad in several if bad.rows]
    lines = [json.dumps(row, ensure_ascii=False, default=str) for bad in with_rows for row in bad.rows]
    if lines:
        (directory / BAD_ROWS_FILE).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    for bad in with_rows:
        left_out = f"{counted(len(bad.rows), 'bad row')} of {bad.name} left out"
        say(f"warning: {left_out}, see {BAD_ROWS_FILE} in the output")


def raw_rows(path: Place, name: str) -> Iterator[dict[str, Any]]:
    """Stream the rows of a file; InputError at the end if some cannot be read, see `located_rows`."""
    bad = BadRows(name)
    yield from (values for _, values in located_rows(path, bad))
    bad.check()


def mapped_rows(
    file: Place, bad: BadRows, names_of: Callable[[Collection[str]], Names]
) -> Iterator[tuple[int, dict[str, Any], Names]]:
    """Stream the rows of a file with their numbers and the names of their columns.

    Args:
        names_of: finds our columns among those of the rows until now; InputError if a required one is missing.

    Raises:
        InputError: the first rows do not have the required columns.
    """
    present: dict[str, Any] = {}
    names: Names | None = None
    waiting: list[tuple[int, dict[str, Any]]] = []
    most = _WITHOUT_COLUMNS if format_of(file) in ("JSON", "JSON Lines") else 0
    for number, values in located_rows(file, bad):
        if names is None or not values.keys() <= present.keys():  # a row of JSON may have columns that others lack
            present |= values
            try:
                names = names_of(present)
            except InputError:
                waiting.append((number, values))
                if len(waiting) > most:
                    raise
                continue
            yield from ((*row, names) for row in waiting)
            waiting.clear()
        yield number, values, names
    if waiting:
        names_of(present)


def located_rows(path: Place, bad: BadRows) -> Iterator[tuple[int, dict[str, Any]]]:
    """Stream the rows of a file, each with its number there, from 1: in JSON Lines that of the line.

    Lone surrogates, which JSON can hold but UTF-8 cannot, are replaced by U+FFFD.

    Args:
        bad: takes lines and rows that cannot be read.

    Raises:
        InputError: unknown format, or the file is damaged.
    """
    kind = format_of(path)
    if kind is None:
        fault = f"unknown format {path.suffix or 'without a suffix'}"
        raise InputError(bad.fault(path, fault, f"give {SUFFIXES}"))
    with errors_at(path, bad.name):
        try:
            yield from _READERS[kind](path, bad)
        except UnicodeDecodeError as error:
            with open_text(path, "\n", "latin-1") as lines:
                line = next((number for number, line in enumerate(lines, start=1) if not _is_utf8(line)), 1)
            not_utf8 = bad.fault(path, f"line {line} is not UTF-8 ({error.reason})", "convert the file")
            raise InputError(not_utf8) from error
        except (pa.ArrowException, OSError, ValueError, OverflowError) as error:  # also dates that Python cannot hold
            if isinstance(error, InputError) or (isinstance(error, OSError) and not isinstance(path, Path)):
                raise
            fault, remedy = f"not readable as {kind} ({error})", "the file may be incomplete; copy it again"
            raise InputError(bad.fault(path, fault, remedy)) from error


# ------------------------------------------------------------------------------------------------- which files


def data_files(path: Place, name: str, split: str | None = None) -> list[Place]:
    """List the data files of a path: the file itself, the files that match a glob, or all files of a directory.

    Args:
        split: leave out files of another split, as named on the Hugging Face hub, or of a saved `DatasetDict`.

    Raises:
        InputError: no file is readable, they have several formats, all belong to other splits, or they belong to several
            splits and neither `split` nor a glob chooses among them.
    """
    if path.is_file():
        return [path]
    files = expanded(path)
    if unreadable := [file.name for file in files if file.name.lower().endswith(_UNREADABLE)]:
        fault = f"{unreadable[0]} has a format that cannot be read"
        raise InputError.of(name, path, fault, f"convert it, or choose other files by a glob; readable: {SUFFIXES}")
    data = [file for file in files if not any(fnmatchcase(file.name, name) for name in _ABOUT)]
    kinds = {file: kind for file in data if (kind := format_of(file))}
    if not kinds:
        raise InputError.of(name, path, "no data files in this directory", f"give {SUFFIXES}")
    if len(first := {kind: file.name for file, kind in reversed(kinds.items())}) > 1:
        both = " and ".join(f"{kind} ({first[kind]})" for kind in sorted(first))
        remedy = "give one file, or a glob such as DIR/*.jsonl"
        raise InputError.of(name, path, f"has data files of several formats, {both}", remedy)
    split_by_file = {file: split_of(file) for file in kinds}
    splits = sorted({own for own in split_by_file.values() if own})
    if split is None and len(splits) > 1 and not has_pattern(path):
        file = next(file for file, own in split_by_file.items() if own == splits[0])
        one = file.parent if _of_dict(file) else file.parent / f"{splits[0]}-*"
        remedy = f"set split={splits[0]} if there is this setting, or give one of them: {name}={one}"
        raise InputError.of(name, path, f"has the splits {', '.join(splits)}", remedy)
    taken = [file for file, own in split_by_file.items() if split is None or own in (None, split)]
    if not taken:
        fault = f"no file of split={split}, but of {', '.join(splits)}"
        raise InputError.of(name, path, fault, "set split to one of these")
    return taken


def format_of(file: PurePath | Place) -> str | None:
    """Return the format of a file by its name; None if it is none that can be read."""
    return _FORMATS.get(_plain(file.name).suffix.lower())


def stem_of(name: str) -> str:
    """Return the name of a data file without the suffixes of its compression and format."""
    plain = _plain(name)
    return plain.stem if plain.suffix.lower() in _FORMATS else name


def _plain(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    return path.with_suffix("") if path.suffix.lower() in _COMPRESSED else path


def split_of(file: Place) -> str | None:
    """Return the split of a file: in its name, as on the Hugging Face hub, or its directory in a saved `DatasetDict`."""
    shard = _SHARD.fullmatch(stem_of(file.name))
    if shard and shard["split"] == "data":  # `save_to_disk` of datasets
        return file.parent.name if _of_dict(file) else None
    return shard["split"] if shard else None


def _of_dict(file: Place) -> bool:
    return (file.parent.parent / "dataset_dict.json").is_file()


# --------------------------------------------------------------------------------------------------- formats


def open_data(path: Place) -> Any:
    """Open a file for reading in order, decompressed: a pyarrow file."""
    source = open_binary(path)
    head = source.read(10)
    source.seek(0)
    codec = next((codec for first, codec in _CODECS.items() if head.startswith(first)), None)
    if codec is None or (codec == "bz2" and head[4:] != b"1AY&SY"):  # a text may begin with BZh
        return source
    return pa.CompressedInputStream(source, codec)


def open_text(path: Place, newline: str | None = None, encoding: str = "utf-8-sig") -> TextIO:
    """Open a text file, perhaps compressed, without its byte order mark."""
    return io.TextIOWrapper(pa.BufferedInputStream(open_data(path), _BLOCK), encoding, newline=newline)


def _is_utf8(line: str) -> bool:
    try:
        return bool(line.encode("latin-1").decode())
    except UnicodeDecodeError:
        return False


def _seekable(path: Place) -> Any:
    source = open_data(path)
    return pa.BufferReader(source.read()) if isinstance(source, pa.CompressedInputStream) else source


def _unique(names: Sequence[str], path: Place, bad: BadRows) -> None:
    if twice := [column for number, column in enumerate(names) if column in names[:number]]:
        raise InputError(bad.fault(path, f"two columns have the name {twice[0]!r}", "rename or drop one"))


def _numbered(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, dict[str, Any]]]:
    rows = (values for batch in batches for values in batch.to_pylist())
    return enumerate(rows, start=1)


def _parquet_rows(path: Place, bad: BadRows) -> Iterator[tuple[int, dict[str, Any]]]:
    # By default the reader loads whole row groups ahead: all of a file that has only one.
    with _seekable(path) as source, pq.ParquetFile(source, buffer_size=_BLOCK, pre_buffer=False) as file:
        _unique(file.schema_arrow.names, path, bad)
        yield from _numbered(file.iter_batches(batch_size=_ROWS_AT_ONCE))


def _arrow_rows(path: Place, bad: BadRows) -> Iterator[tuple[int, dict[str, Any]]]:
    with _seekable(path) as source:
        seekable = source.read(len(_ARROW_FILE)) == _ARROW_FILE
        source.seek(0)
        reader = pa.ipc.open_file(source) if seekable else pa.ipc.open_stream(source)
        _unique(reader.schema.names, path, bad)
        yield from _numbered(map(reader.get_batch, range(reader.num_record_batches)) if seekable else reader)


def _without_surrogates(values: Any) -> Any:
    written = json.dumps(values, ensure_ascii=False).encode("utf-16", "surrogatepass")
    return json.loads(written.decode("utf-16", "replace"))


def _json_rows(path: Place, bad: BadRows) -> Iterator[tuple[int, dict[str, Any]]]:
    with open_text(path) as stream:
        array = stream.read(_BLOCK).lstrip().startswith("[")
    return _json_array(path, bad) if array else _json_lines(path, bad)


def _json_lines(path: Place, bad: BadRows) -> Iterator[tuple[int, dict[str, Any]]]:
    with open_text(path) as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            try:
                values = _DECODER.decode(line)
                values = _without_surrogates(values) if "\\u" in line and _SURROGATE.search(line) else values
            except (json.JSONDecodeError, RecursionError) as error:
                bad.add(path, number, f"is not JSON ({getattr(error, 'msg', error)})", line)
                continue
            if isinstance(values, dict):
                yield number, values
            else:
                bad.add(path, number, "is not a JSON object; write one object per line", line)


def _json_array(path: Place, bad: BadRows) -> Iterator[tuple[int, dict[str, Any]]]:
    number, at = 1, 0
    with open_text(path) as stream:
        text = stream.read(_BLOCK).lstrip()[1:]
        while True:
            while text[at : at + 1] in (" ", "\t", "\r", "\n", ","):
                at += 1
            if text.startswith("]", at):
                return
            start = at
            try:
                values, at = _DECODER.raw_decode(text, at)
            except json.JSONDecodeError as error:
                # Double the text, so a long row is parsed few times; a row beyond _LONGEST_ROW counts as damaged.
                more = stream.read(max(_BLOCK, len(text))) if len(text) - at < _LONGEST_ROW else ""
                if not more:
                    fault = bad.fault(path, f"row {number} is not JSON ({error.msg})", "correct it")
                    raise InputError(fault) from error
                text, at = text[at:] + more, 0
                continue
            if isinstance(values, dict):
                surrogate = _SURROGATE.search(text, start, at)
                yield number, _without_surrogates(values) if surrogate else values
            else:
                bad.add(path, number, "is not a JSON object; write an array of objects", values)
            number += 1


def _delimited_rows(path: Place, bad: BadRows) -> Iterator[tuple[int, dict[str, Any]]]:
    """TSV has no quoting: a quotation mark is a character like any other."""
    csv.field_size_limit(2**31 - 1)  # passages are longer than the default
    quoted, header, number = format_of(path) == "CSV", list[str](), 0
    with open_text(path, "" if quoted else "\n") as stream:
        plain = (line.removesuffix("\n").removesuffix("\r").split("\t") for line in stream)
        lines = enumerate(csv.reader(stream, strict=True) if quoted else plain)
        try:
            for number, cells in lines:
                if cells in ([], [""]):
                    continue
                if not header:
                    _unique(header := cells, path, bad)
                elif len(cells) == len(header):
                    yield number, dict(zip(header, cells, strict=True))
                else:
                    fault = f"has {len(cells)} fields, the header has {len(header)}"
                    bad.add(path, number, fault, cells)
        except csv.Error as error:
            raise InputError(bad.fault(path, f"not CSV after row {number} ({error})", "correct it")) from error


_READERS: Mapping[str, Callable[[Place, BadRows], Iterator[tuple[int, dict[str, Any]]]]] = {
    "Parquet": _parquet_rows,
    "JSON Lines": _json_lines,
    "Arrow": _arrow_rows,
    "JSON": _json_rows,
    "CSV": _delimited_rows,
    "TSV": _delimited_rows,
}
