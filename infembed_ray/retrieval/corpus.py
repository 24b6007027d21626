"""What a passage of a corpus must be: the checks of its columns and of its rows."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from infembed_ray.config.base import nearest
from infembed_ray.config.retrieval import FieldType
from infembed_ray.errors import InputError
from infembed_ray.records import tables
from infembed_ray.records.tables import Passage
from infembed_ray.retrieval.passages import as_typed
from infembed_ray.storage.places import Place
from infembed_ray.storage.steps import resolve_input

_OWN = ("id", "text")


class BadRow(InputError):
    """A row that an index cannot hold; the message names the file, the row, the column and the remedy."""


def require_columns(columns: Mapping[str, str], metadata: Mapping[str, FieldType]) -> None:
    """Raise InputError if the settings `columns` or `metadata` name an impossible column."""
    for name in metadata:
        if name in _OWN or name.startswith("_") or not name:
            raise InputError(
                f"metadata.{name}: this name is reserved; choose another name and set columns.<that name>={name}"
            )
    for name in columns:
        known = [*_OWN, *metadata]
        if name not in known:
            raise InputError(f"columns.{name}: neither id, text nor a metadata column: {nearest(name, known)}")


def require_passages(
    corpus: Place, sizes: Sequence[int], columns: Mapping[str, str], metadata: Mapping[str, FieldType], seen: set[str]
) -> None:
    """InputError if a corpus has no rows, or a metadata column is in none of them; `seen` has the columns of all rows."""
    if not sum(sizes):
        raise InputError(f"corpus={corpus}: empty, it has no rows; give a file with at least one")
    for name in metadata:
        theirs = columns.get(name, name)
        if theirs not in seen:
            raise InputError(
                f"metadata.{name}: no row of corpus={corpus} has a column {theirs}: {nearest(theirs, sorted(seen))}; "
                f"set columns.{name}=<its name>, or drop it"
            )


def names_in(
    first: Mapping[str, Any], file: Place, columns: Mapping[str, str], metadata: Mapping[str, FieldType]
) -> dict[str, str]:
    """Map the columns of passages (id, text, metadata) to those of a file.

    Args:
        columns: column name of the index -> column name in the corpus.

    Raises:
        InputError: the file has no ids or no texts.
    """
    own = tables.mapping(first, Passage, file, "corpus", {n: theirs for n, theirs in columns.items() if n in _OWN})
    return {name: own[name] for name in _OWN} | {name: columns.get(name, name) for name in metadata}


def passage(
    values: Mapping[str, Any], names: Mapping[str, str], metadata: Mapping[str, FieldType], file: Place, number: int
) -> list[Any]:
    """Return id, text and metadata of a row.

    Args:
        number: of the row in the file, for error messages.

    Raises:
        BadRow: an id or a text is empty, or a value has another type.
    """
    column = ""
    try:
        row: list[Any] = []
        for ours, column in names.items():
            value = values.get(column)
            row.append(as_typed(value, metadata[ours]) if ours in metadata else _text(value))
        return row
    except ValueError as error:
        fault, shown = str(error), repr(values.get(column))
        if not fault.startswith("is "):  # then the value itself explains the fault
            fault += f", not {shown if len(shown) <= 60 else f'{shown[:57]}...'}; correct it or drop the row"
        raise BadRow(f"corpus={file}: row {number}: column {column} {fault}") from None


def rows(
    file: Place, columns: Mapping[str, str], metadata: Mapping[str, FieldType], seen: set[str]
) -> Iterator[list[Any]]:
    """Yield id, text and metadata of each row; adds the column names of the file to `seen`."""
    names: dict[str, str] = {}
    for number, values in enumerate(tables.raw_rows(file, "corpus"), start=1):
        names = names or names_in(values, file, columns, metadata)
        seen.update(values)
        yield passage(values, names, metadata, file, number)


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else "" if value is None or value != value else str(value)  # NaN is none
    if not text.strip():
        raise ValueError("is empty; fill it or drop the row")
    if isinstance(value, (list, dict, bytes)):
        raise ValueError("must be text")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("must be text without lone surrogates") from None
    return text


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
