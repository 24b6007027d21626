"""The texts of several sets, by kind: what is compared side by side."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infembed_ray import records
from infembed_ray.analysis.material import KINDS
from infembed_ray.config import nearest
from infembed_ray.errors import InputError
from infembed_ray.records import ALIASES, Record


@dataclass(frozen=True)
class TextSet:
    """A set of texts under the name that the report gives it."""

    label: str
    texts: Mapping[str, Sequence[str]]
    """Kind -> its texts, of all its columns; a kind without texts is absent."""


def of_records(label: str, rows: Sequence[Record]) -> TextSet:
    """The texts of InF-IR records, positive and negative ones."""
    texts = {kind: [getattr(row, column) for row in rows for column in columns] for kind, columns in KINDS.items()}
    return TextSet(label, {kind: found for kind, found in texts.items() if found})


def read(label: str, path: Path, name: str, columns: Mapping[str, str]) -> TextSet:
    """Read the texts of another set.

    Args:
        label: what the report calls it.
        path: InF-IR records, in part or whole, or a file with a column for each kind of text.
        name: the setting it came from, for error messages.
        columns: kind -> its column, where that is not called after the kind.

    Raises:
        InputError: as `records.raw_rows`; a kind that does not exist; no column with texts.
    """
    for kind in columns:
        if kind not in KINDS:
            raise InputError(f"compare_columns.{kind}: no kind of text: {nearest(kind, KINDS)}")
    file = path / records.KEPT_FILE if path.is_dir() else path
    if not file.is_file():
        raise InputError(f"{name}={path}: no {records.KEPT_FILE} in this directory; give a file or a synthesis output")
    texts: dict[str, list[str]] = {kind: [] for kind in KINDS}
    seen: dict[str, None] = {}
    for row in records.raw_rows(file, name):
        seen.update(dict.fromkeys(row))
        for kind in KINDS:
            texts[kind] += _of_kind(kind, row, columns)
    found = {kind: of_kind for kind, of_kind in texts.items() if of_kind}
    if not found:
        raise InputError(
            f"{name}={path}: no column with instructions, queries or passages (found: {', '.join(map(str, seen))}); "
            "set compare_columns.instruction=<its name>, or that of a query or passage"
        )
    return TextSet(label, found)


def _of_kind(kind: str, row: Mapping[str, Any], columns: Mapping[str, str]) -> list[str]:
    if kind in columns:
        names: Iterable[str] = [columns[kind]]
    else:
        # An older name counts only where the newer is absent.
        ours = (next((n for n in (c, *ALIASES.get(c, ())) if n in row), c) for c in KINDS[kind])
        names = [kind, *ours]
    values = (row.get(name) for name in dict.fromkeys(names))
    return [value for value in values if isinstance(value, str) and value.strip()]


def samples(sets: Sequence[TextSet], kind: str, most: int, seed: int) -> dict[str, list[str]]:
    """Label -> texts of a kind drawn without replacement, equally many from every set that has the kind.

    Figures of diversity depend on how many texts they are taken over: only equal samples compare.
    """
    having = [each for each in sets if kind in each.texts]
    size = min([most, *(len(each.texts[kind]) for each in having)])
    return {each.label: random.Random(f"{seed}/{kind}").sample(list(each.texts[kind]), size) for each in having}
