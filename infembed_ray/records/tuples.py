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
from infembed_ray.records.tables import (
    KEPT_FILE,
    MADE_ID,
    UNKNOWN,
    Record,
    data_files,
    raw_rows,
    split_of,
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
SCHEMA = pa.schema(
    [
        (
            name,
            pa.list_(pa.string()) if name in _PASSAGES else pa.list_(pa.float64()) if name in _SCORES else pa.string(),
        )
        for name in COLUMNS
    ]
)
ALIASES: Mapping[str, tuple[str, ...]] = {
    "id": ("query_id",),
    "query": ("anchor",),
    "positives": ("positive", "pos", "positive_passages"),
    "negatives": ("negative", "neg", "negative_passages"),
    "positive_scores": ("pos_scores",),
    "negative_scores": ("neg_scores",),
}
"""Names that sentence-transformers, FlagEmbedding and Tevatron give these columns."""


def stream(path: Place, name: str, columns: Columns | None = None, split: str | None = None) -> Iterator[Example]:
    """Stream validated training tuples; only their ids stay in memory.

    Args:
        path: a file, a directory of data files (as of `datasets` or the Hugging Face hub), or an output of `infembed mine`.
        columns: names of our columns in the files, where they differ from ours and from `ALIASES`.
        split: keep only rows of this split; a row without one has that of its file.

    Raises:
        InputError: no such file, a missing column, no rows, or a row that cannot be used; the message names it.
    """
    return stream_files(path, name, split, partial(_rows, name=name, columns=columns or {}))


def found_in(path: Place, name: str, columns: Columns, split: str | None = None) -> bool:
    """Whether files have training tuples, rather than InF-IR records: the first row has a query or positives of a tuple.

    Raises:
        InputError: no such file, or it cannot be read.
    """
    kept = path / KEPT_FILE
    if not kept.is_file() and (path / MANIFEST).is_file():
        return False  # the output of another stage, which `records.stream` refuses
    first = kept if kept.is_file() else data_files(path, name, split)[0]
    row: dict[str, Any] = next(raw_rows(first, name), {})
    if "query_positive" in {*columns, *row}:
        return False
    return any(key in columns or {key, *ALIASES[key]} & row.keys() for key in ("query", "positives"))


def single(columns: Columns) -> dict[str, str]:
    """Return a column map for InF-IR records; InputError if it names several columns for one of ours."""
    for own, theirs in columns.items():
        if not isinstance(theirs, str):
            raise InputError(f"columns.{own}={list(theirs)}: a column of InF-IR records is one text; give one column")
    return {own: str(theirs) for own, theirs in columns.items()}


def _rows(file: Place, seen: set[str], name: str, columns: Columns) -> Iterator[Example]:
    """Stream the examples of one file; add their ids to `seen`."""
    present: dict[str, Any] = {}
    of_file = split_of(file)
    for number, values in enumerate(raw_rows(file, name), start=1):
        if not present or not values.keys() <= present.keys():  # a row of JSON may have columns that others lack
            present |= values
            theirs = _columns_of(present, f"{name}={file}", columns)
        where = f"{name}={file}: row {number}"
        yield _example(values, theirs, where, of_file, seen)


def _columns_of(present: Collection[str], where: str, columns: Columns) -> dict[str, list[str]]:
    """Map our columns to those that a file has."""
    for key in columns:
        if key not in COLUMNS:
            raise InputError(f"columns.{key}: unknown column of a training tuple: {nearest(key, COLUMNS)}")
    theirs = {}
    for own in COLUMNS:
        given = columns.get(own)
        names = [given] if isinstance(given, str) else list(given or ())
        candidates = names or [name for name in (own, *ALIASES.get(own, ())) if name in present][:1]
        missing = [name for name in candidates if name not in present]
        if missing or (own in ("query", "positives") and not candidates):
            raise InputError(
                f"{where}: no column {', '.join(missing) or own} (found: {', '.join(map(str, present))}); "
                f"set columns.{own}=<its name>"
            )
        theirs[own] = candidates
    several = [own for own, names in theirs.items() if len(names) > 1 and own not in (*_PASSAGES, *_SCORES)]
    if several:
        raise InputError(f"columns.{several[0]}={theirs[several[0]]}: is one text; give one column")
    return theirs


def _example(
    values: Mapping[str, Any], theirs: Mapping[str, Sequence[str]], where: str, split: str | None, seen: set[str]
) -> Example:
    text = {}
    for own, names in theirs.items():
        if names and own not in (*_PASSAGES, *_SCORES):
            value = text_of(values.get(names[0]), f"{where}: column {names[0]}")
            if value is not None and value.strip():
                text[own] = value
    text.setdefault("id", f"{MADE_ID}{len(seen) + 1}")
    if text["id"] in seen:
        raise InputError(f"{where}: duplicate id {text['id']}; ids must be unique")
    seen.add(text["id"])
    if split is not None:
        text.setdefault("split", split)
    if "query" not in text:
        raise InputError(f"{where}: column {theirs['query'][0]} is empty; fill it or drop the row")
    lists: dict[str, tuple[Any, ...]] = {
        own: tuple(
            convert(value, f"{where}: column {column}")
            for column in theirs[own]
            for value in _listed(values.get(column))
        )
        for convert, owns in ((_passage, _PASSAGES), (_score, _SCORES))
        for own in owns
    }
    if not lists["positives"]:
        raise InputError(f"{where}: column {theirs['positives'][0]} has no passage; give a positive, or drop the row")
    if both := set(lists["positives"]) & set(lists["negatives"]):
        raise InputError(f"{where}: a negative is one of the positives: {min(both)[:60]!r}; drop it from the negatives")
    _require_scores(lists, where)
    given: dict[str, Any] = {**text, **lists}
    return Example(**given)


def _require_scores(lists: Mapping[str, tuple[Any, ...]], where: str) -> None:
    """Check that a row has a score of every passage, or none at all."""
    if any(lists[own] for own in _SCORES):
        for passages, scores in zip(_PASSAGES, _SCORES, strict=True):
            if len(lists[passages]) != len(lists[scores]):
                raise InputError(
                    f"{where}: {scores} has {len(lists[scores])} scores of {len(lists[passages])} {passages}; give one "
                    "per passage, of positives and negatives"
                )


def _listed(value: Any) -> Sequence[Any]:
    """Return the values of a cell, which may be null, one value or a list."""
    if value is None or value == "":
        return ()
    return value if isinstance(value, (list, tuple)) else (value,)


def _passage(value: Any, where: str) -> str:
    parts = [value.get("title"), value.get("text")] if isinstance(value, Mapping) else [value]
    texts = [part for part in parts if part]
    if not all(isinstance(text, str) for text in texts) or not " ".join(texts).strip():
        raise InputError(f"{where} has {value!r} as a passage; give texts, or mappings with `text`")
    return " ".join(texts)


def _score(value: Any, where: str) -> float:
    try:
        score = float(value)
    except (TypeError, ValueError):
        score = math.nan
    if not math.isfinite(score):
        raise InputError(f"{where} has {value!r} as a score; give finite numbers")
    return score
