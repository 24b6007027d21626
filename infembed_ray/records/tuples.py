"""Training tuples in files: rows with a query, passages that answer it, and passages that do not.

A passage is a text, or a mapping with `text` and perhaps `title`, as Tevatron writes it. Positives and negatives are one
passage or a list; a column map may name several columns for them.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import pyarrow as pa

from infembed_ray.config.base import nearest
from infembed_ray.errors import InputError
from infembed_ray.records.files import BadRow, BadRows, data_files, mapped_rows, raw_rows, split_of, wrong
from infembed_ray.records.tables import (
    KEPT_FILE,
    MADE_ID,
    UNKNOWN,
    Record,
    no_columns,
    passage_text,
    required,
    stream_files,
    text_of,
)
from infembed_ray.storage.places import Place
from infembed_ray.storage.steps import MANIFEST


@dataclass(frozen=True)
class Example:
    """A training tuple: a query, passages that answer it, and passages that do not (its hard negatives)."""

    id: str
    query: str
    positives: tuple[str, ...]
    negatives: tuple[str, ...] = ()
    instruction: str | None = None
    negative_instruction: str | None = None
    """An instruction under which the positives do not answer the query."""
    positive_scores: tuple[float, ...] = ()
    """Scores of the positives by a teacher, for distillation; empty if there are none."""
    negative_scores: tuple[float, ...] = ()
    source: str = UNKNOWN
    split: str | None = None


TrainingRecord = Record | Example
"""What an encoder trains on; see `training.collate.flatten`."""

Columns = Mapping[str, str | Sequence[str]]
"""Our column -> its name in the files, or the names of several columns that together are ours."""

_PASSAGES = ("positives", "negatives")
_SCORES = ("positive_scores", "negative_scores")
COLUMNS = tuple(f.name for f in fields(Example))
_LISTS = dict.fromkeys(_PASSAGES, pa.list_(pa.string())) | dict.fromkeys(_SCORES, pa.list_(pa.float64()))
SCHEMA = pa.schema([(name, _LISTS.get(name, pa.string())) for name in COLUMNS])
ALIASES: Mapping[str, tuple[str, ...]] = {
    "id": ("_id", "query_id"),
    "query": ("anchor",),
    "positives": ("positive", "pos", "positive_passages"),
    "negatives": ("negative", "neg", "negative_passages"),
    "positive_scores": ("pos_scores",),
    "negative_scores": ("neg_scores",),
}
"""Names that sentence-transformers, FlagEmbedding and Tevatron give these columns."""


def stream(
    path: Place, name: str, columns: Columns | None = None, split: str | None = None, bad: BadRows | None = None
) -> Iterator[Example]:
    """Stream validated training tuples; only their ids stay in memory.

    Args:
        path: a file, a directory of data files (as of `datasets` or the Hugging Face hub), or an output of `infembed mine`.
        columns: names of our columns in the files, where they differ from ours and from `ALIASES`.
        split: keep only rows of this split; a row without one has that of its file.
        bad: takes the rows that cannot be used.

    Raises:
        InputError: no such file, a missing column, no rows; or after the last row, some cannot be used.
    """
    bad = bad or BadRows(name)
    return stream_files(path, split, bad, partial(_rows, bad=bad, columns=columns or {}))


def found_in(path: Place, name: str, columns: Columns, split: str | None = None) -> bool:
    """Whether files have training tuples, not InF-IR records: by the column map, else by the columns of the first row.

    Raises:
        InputError: no such file, or it cannot be read.
    """
    kept = path / KEPT_FILE
    if not kept.is_file() and (path / MANIFEST).is_file():
        return False  # the output of another stage, which `records.stream` refuses
    first = kept if kept.is_file() else data_files(path, name, split)[0]
    row: dict[str, Any] = next(raw_rows(first, name), {})
    if "query_positive" in columns or ("query_positive" in row and not {"query", "positives"} & columns.keys()):
        return False
    if row and not columns and not row.keys() & set(required(Record)):
        return True  # `stream` names the columns that are missing
    return any(key in columns or {key, *ALIASES[key]} & row.keys() for key in ("query", "positives"))


def single(columns: Columns) -> dict[str, str]:
    """Return a column map for InF-IR records; InputError if it names several columns for one of ours."""
    for own, theirs in columns.items():
        if not isinstance(theirs, str):
            raise InputError(f"columns.{own}={list(theirs)}: a column of InF-IR records is one text; give one column")
    return {own: str(theirs) for own, theirs in columns.items()}


def _rows(file: Place, seen: set[str], bad: BadRows, columns: Columns) -> Iterator[Example]:
    """Stream the examples of one file; add their ids to `seen`."""
    of_file = split_of(file)
    names_of = partial(_columns_of, path=file, name=bad.name, columns=columns)
    for number, values, theirs in mapped_rows(file, bad, names_of):
        try:
            yield _example(values, theirs, of_file, seen)
        except BadRow as fault:
            bad.add(file, number, fault, values)


def _columns_of(present: Collection[str], path: Place, name: str, columns: Columns) -> dict[str, list[str]]:
    """Map our columns to those that a file has."""
    for key in columns:
        if key not in COLUMNS:
            raise InputError(f"columns.{key}: unknown column of a training tuple: {nearest(key, COLUMNS)}")
    theirs = {}
    for own in COLUMNS:
        given = columns.get(own)
        names = [given] if isinstance(given, str) else list(given or ())
        candidates = names or [one for one in (own, *ALIASES.get(own, ())) if one in present][:1]
        missing = [one for one in candidates if one not in present]
        if missing or (own in ("query", "positives") and not candidates):
            neither = not columns and own == "query" and {"positives", *ALIASES["positives"]}.isdisjoint(present)
            lacking = ", ".join(missing) or own + ", nor those of InF-IR records" * neither
            raise no_columns(name, path, {own: lacking}, present, bool(columns))
        theirs[own] = candidates
    several = [own for own, names in theirs.items() if len(names) > 1 and own not in (*_PASSAGES, *_SCORES)]
    if several:
        raise InputError(f"columns.{several[0]}={theirs[several[0]]}: is one text; give one column")
    return theirs


def _example(
    values: Mapping[str, Any], theirs: Mapping[str, Sequence[str]], split: str | None, seen: set[str]
) -> Example:
    text = {}
    for own, names in theirs.items():
        if names and own not in (*_PASSAGES, *_SCORES):
            value = text_of(values.get(names[0]), names[0])
            if value is not None and value.strip():
                text[own] = value
    text.setdefault("id", f"{MADE_ID}{len(seen) + 1}")
    if text["id"] in seen:
        raise BadRow(f"duplicate id {text['id']}; ids must be unique")
    if split is not None:
        text.setdefault("split", split)
    if "query" not in text:
        raise BadRow(f"column {theirs['query'][0]} is empty")
    lists: dict[str, tuple[Any, ...]] = {
        own: tuple(convert(value, column) for column in theirs[own] for value in _listed(values.get(column)))
        for convert, owns in ((_passage, _PASSAGES), (_score, _SCORES))
        for own in owns
    }
    if not lists["positives"]:
        raise BadRow(f"column {theirs['positives'][0]} has no passage")
    if both := set(lists["positives"]) & set(lists["negatives"]):
        raise BadRow(f"a negative is one of the positives: {min(both)[:60]!r}; drop it from the negatives")
    if any(lists[own] for own in _SCORES):
        for passages, scores in zip(_PASSAGES, _SCORES, strict=True):
            if (given := len(lists[scores])) != (needed := len(lists[passages])):
                raise BadRow(f"{scores} has {given} scores of {needed} {passages}; give one per passage, or none")
    seen.add(text["id"])
    fields_of: dict[str, Any] = {**text, **lists}
    return Example(**fields_of)


def _listed(value: Any) -> Sequence[Any]:
    """Return the values of a cell, which may be null, one value or a list."""
    if value is None or value == "" or value != value:
        return ()
    return value if isinstance(value, (list, tuple)) else (value,)


def _passage(value: Any, column: str) -> str:
    text = passage_text(value, column) if isinstance(value, (str, Mapping)) else None
    if not (text or "").strip():
        raise wrong(column, "must have passages, texts or mappings with `text`", value)
    return text or ""


def _score(value: Any, column: str) -> float:
    try:
        score = float(value)
    except (TypeError, ValueError):
        score = math.nan
    if not math.isfinite(score):
        raise wrong(column, "must have finite numbers as scores", value)
    return score
