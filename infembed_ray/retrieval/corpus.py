"""The rows of a corpus: what a passage must be, and which files are read together."""

import contextlib
import json
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from infembed_ray.config.base import nearest
from infembed_ray.config.retrieval import FieldType, IndexSettings
from infembed_ray.errors import InputError
from infembed_ray.records import tables
from infembed_ray.records.files import BadRow, BadRows, data_files, mapped_rows, wrong
from infembed_ray.records.tables import Passage
from infembed_ray.retrieval.chunks import Cutter
from infembed_ray.retrieval.passages import as_typed
from infembed_ray.storage.places import Place, errors_at, listing, open_binary
from infembed_ray.storage.steps import resolve_input

PARTS = 64
"""Maximum number of parts of a corpus, which tasks read side by side."""
PART_BYTES = 64 << 20
"""Bytes of a corpus that one task reads."""
SAMPLE = 10_000
"""Maximum number of rows of a Parquet file that `count_passages` checks."""
_OWN = ("id", "text", "title")


def require_columns(columns: Mapping[str, str], metadata: Mapping[str, FieldType]) -> None:
    """Raise InputError if the settings `columns` or `metadata` name an impossible column."""
    for name in metadata:
        if name in ("id", "text") or name.startswith("_") or not name:
            remedy = f"choose another name and set columns.<that name>={name}"
            raise InputError.of(f"metadata.{name}", None, "this name is reserved", remedy)
    for name in columns:
        if name not in (own := [*_OWN, *metadata]):
            fault = f"neither id, text, title nor a metadata column: {nearest(name, own)}"
            raise InputError.of(f"columns.{name}", None, fault)


def require_passages(
    corpus: Place, count: int, columns: Mapping[str, str], metadata: Mapping[str, FieldType], seen: set[str]
) -> None:
    """InputError if a corpus has no rows, or a metadata column is in none of them; `seen` has the columns of all rows."""
    if not count:
        raise InputError.of("corpus", corpus, "empty, it has no rows", "give a file with at least one")
    for name in metadata:
        if (theirs := columns.get(name, name)) not in seen:
            fault = f"no row of corpus={corpus} has a column {theirs}: {nearest(theirs, sorted(seen))}"
            raise InputError.of(f"metadata.{name}", None, fault, f"set columns.{name}=<its name>, or drop it")


def parts_of(corpus: Place) -> list[list[Place]]:
    """Divide the files of a corpus into at most `PARTS` parts; a small corpus is one part."""
    files = data_files(corpus, "corpus")
    parts = min(PARTS, len(files)) if sum(listing(file)[""] for file in files) > PART_BYTES else 1
    return [files[part::parts] for part in range(parts)]


def rows(
    file: Place,
    columns: Mapping[str, str],
    metadata: Mapping[str, FieldType],
    seen: set[str],
    bad: BadRows,
    cutter: Cutter | None = None,
) -> Iterator[list[Any]]:
    """Yield id, text, metadata, and with a cutter the chunks, of each row of a file.

    Args:
        columns: column name of the index -> column name in the corpus.
        seen: takes the names of the columns of all rows.
        bad: takes the rows without an id or a text, and those with a value of another type.

    Raises:
        InputError: the file cannot be read, or it has no ids or no texts.
    """
    own = {name: theirs for name, theirs in columns.items() if name in _OWN}
    further = {name: columns.get(name, name) for name in metadata}
    names_of = partial(tables.mapping, row=Passage, path=file, name="corpus", columns=own)
    for number, values, names in mapped_rows(file, bad, names_of):
        seen.update(values)
        try:
            row: list[Any] = [*tables.document(values, names)]
            for name, column in further.items():
                try:
                    row.append(as_typed(values.get(column), metadata[name]))
                except ValueError as fault:
                    raise wrong(column, str(fault), values.get(column)) from None
        except BadRow as fault:
            bad.add(file, number, fault, values)
            continue
        if cutter is not None:
            row.append(cutter.cut(row[1]))
        yield row


def count_passages(settings: IndexSettings, corpus: Place) -> int:
    """Count the passages of a corpus, and check its rows, of Parquet files the first `SAMPLE`; InputError as of a build."""
    columns, metadata, total = settings.columns, settings.metadata, 0
    seen, bad = set[str](), BadRows("corpus", settings.on_bad_row == "reject")
    for file in data_files(corpus, "corpus"):
        checked = rows(file, columns, metadata, seen, bad)
        if file.suffix == ".parquet":
            deque(islice(checked, SAMPLE), maxlen=0)
            with errors_at(file, "corpus"), open_binary(file) as source:
                total += pq.read_metadata(source).num_rows
        else:
            total += sum(1 for _ in checked)
    bad.check()
    require_passages(corpus, total, columns, metadata, seen)
    return total


def _plain(value: Any) -> Any:
    """Convert a value of Python, NumPy or pandas for JSON: arrays and bytes to lists, what is missing to null, others to text."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (bytes, set)):
        return list(value)
    return None if str(value) in ("NaT", "<NA>") else str(value)


@contextlib.contextmanager
def corpus_file(corpus: str | Path | Iterable[str | Passage | Mapping[str, Any]]) -> Iterator[Path]:
    """The corpus as a file: passages in memory are written to a temporary one, a row each."""
    if isinstance(corpus, (str, Path)):
        yield resolve_input(str(corpus), "corpus")
        return
    with tempfile.TemporaryDirectory(prefix="infembed-corpus-") as directory:
        file = Path(directory) / "corpus.jsonl"
        with file.open("w", encoding="utf-8") as stream:
            for number, given in enumerate(corpus):
                row = {"id": str(number), "text": given} if isinstance(given, str) else given
                row = asdict(row) if isinstance(row, Passage) else dict(row)
                stream.write(json.dumps(row, default=_plain) + "\n")
        yield file
