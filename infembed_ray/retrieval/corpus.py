"""The rows of a corpus: what a passage must be, and which files are read together."""

import contextlib
import json
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from infembed_ray.config.base import nearest
from infembed_ray.config.retrieval import FieldType
from infembed_ray.errors import InputError
from infembed_ray.records import tables
from infembed_ray.records.tables import Passage
from infembed_ray.retrieval.passages import as_typed
from infembed_ray.storage.places import Place, errors_at, listing, open_binary
from infembed_ray.storage.steps import resolve_input

PARTS = 64
"""Maximum number of parts of a corpus, which tasks read side by side."""
PART_BYTES = 64 << 20
"""Bytes of a corpus that one task reads."""
SAMPLE = 10_000
"""Maximum number of rows of a Parquet file that `count_passages` checks."""
_OWN = ("id", "text")


def require_columns(columns: Mapping[str, str], metadata: Mapping[str, FieldType]) -> None:
    """Raise InputError if the settings `columns` or `metadata` name an impossible column."""
    for name in metadata:
        if name in _OWN or name.startswith("_") or not name:
            remedy = f"choose another name and set columns.<that name>={name}"
            raise InputError.of(f"metadata.{name}", None, "this name is reserved", remedy)
    for name in columns:
        if name not in (own := [*_OWN, *metadata]):
            fault = f"neither id, text nor a metadata column: {nearest(name, own)}"
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
    files = tables.data_files(corpus, "corpus")
    parts = min(PARTS, len(files)) if sum(listing(corpus).values()) > PART_BYTES else 1
    return [files[part::parts] for part in range(parts)]


def rows(
    file: Place, columns: Mapping[str, str], metadata: Mapping[str, FieldType], seen: set[str]
) -> Iterator[list[Any]]:
    """Yield id, text and metadata of each row of a file.

    Args:
        columns: column name of the index -> column name in the corpus.
        seen: takes the names of the columns of all rows.

    Raises:
        InputError: the file cannot be read, it has no ids or no texts, an id or a text is empty, or a value has another type.
    """
    names: dict[str, str] = {}
    own = {name: theirs for name, theirs in columns.items() if name in _OWN}
    for number, values in enumerate(tables.raw_rows(file, "corpus"), start=1):
        if not names:
            mapped = tables.mapping(values, Passage, file, "corpus", own)
            names = {name: mapped[name] for name in _OWN} | {name: columns.get(name, name) for name in metadata}
        seen.update(values)
        row, column = [], ""
        try:
            for name, column in names.items():
                value = values.get(column)
                row.append(as_typed(value, metadata[name]) if name in metadata else _text(value))
        except ValueError as fault:
            shown = repr(values.get(column))[:60]
            wrong = f"row {number}: column {column} {fault}, not {shown}"
            raise InputError.of("corpus", file, wrong, "correct it or drop the row") from None
        yield row


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else "" if value is None or value != value else str(value)  # NaN is none
    if not text.strip() or isinstance(value, (list, dict, bytes)):
        raise ValueError("must be text that is not empty")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("must be text without lone surrogates") from None
    return text


def count_passages(corpus: Place, columns: Mapping[str, str], metadata: Mapping[str, FieldType]) -> int:
    """Count the passages of a corpus, and check its rows; of Parquet files, the first `SAMPLE` rows.

    Raises:
        InputError: a file cannot be read, a column is missing, or one of these rows is invalid.
    """
    total = 0
    seen: set[str] = set()
    for file in tables.data_files(corpus, "corpus"):
        checked = rows(file, columns, metadata, seen)
        if file.suffix == ".parquet":
            deque(islice(checked, SAMPLE), maxlen=0)
            with errors_at(file, "corpus"), open_binary(file) as source:
                total += pq.read_metadata(source).num_rows
        else:
            total += sum(1 for _ in checked)
    require_passages(corpus, total, columns, metadata, seen)
    return total


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
                stream.write(json.dumps(row, default=str) + "\n")
        yield file
