"""Metadata filters of a search: what a request writes in JSON, and the rows of a table that it lets through.

    {"lang": "en", "year": {"gte": 2020, "lt": 2024}, "source": {"in": ["who", "nice"]}, "draft": {"ne": true}}

All conditions hold at once. A bare value means `eq`. `gt gte lt lte` order numbers by size, dates by time and strings by
code points; `in` and `nin` take a list. Values are of the column's type and never converted: 2020 is no string, 2020.5 no
integer, true no number. Strings are equal if their code points are: nothing is folded or normalised.

A row without a value (null) matches no condition but `ne` and `nin`, which are exactly what `eq` and `in` are not: whoever
leaves drafts out keeps what nobody called a draft.
"""

from __future__ import annotations

import contextlib
import json
import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from infembed_ray.config import FieldType, nearest

Value = str | int | float | bool | date

_BOUNDS: Mapping[str, Callable[..., Any]] = {
    "gt": pc.greater,
    "gte": pc.greater_equal,
    "lt": pc.less,
    "lte": pc.less_equal,
}
_NEGATIONS = {"ne": "eq", "nin": "in"}
OPERATORS = ("eq", "ne", "in", "nin", *_BOUNDS)

_WANTED: Mapping[FieldType, str] = {
    "string": "a string of Unicode characters",
    "integer": "a whole number of 64 bits",
    "number": "a finite number that a 64-bit float holds",
    "boolean": "true or false",
    "date": "a date as in 2024-05-31",
}


class FilterError(ValueError):
    """A filter that the index cannot answer: one line that names the field, the value and the remedy."""


@dataclass(frozen=True)
class Condition:
    """One comparison; `values` are sorted and as many as the operator takes."""

    field: str
    operator: str
    values: tuple[Value, ...]

    def mask(self, column: pa.ChunkedArray) -> np.ndarray:
        """(rows,) bool: the rows whose value meets it."""
        if self.operator in _BOUNDS:
            met = _BOUNDS[self.operator](column, pa.scalar(self.values[0], column.type))
        else:
            # Hashing tells -0.0 from 0.0, which are equal.
            values = [*self.values, *(-v for v in self.values if isinstance(v, float) and v == 0)]
            met = pc.is_in(column, pa.array(values, column.type))
        here = np.asarray(pc.fill_null(met, False))
        return ~here if self.operator in _NEGATIONS else here


@dataclass(frozen=True)
class Filter:
    """Conditions that hold at once, in a fixed order: equal filters are equal, and can be keys."""

    conditions: tuple[Condition, ...]

    def mask(self, table: pa.Table) -> np.ndarray:
        """(rows,) bool: the rows of `table` that may be found."""
        return np.logical_and.reduce([c.mask(table.column(c.field)) for c in self.conditions])


def parse(filter: Mapping[str, Any] | None, schema: Mapping[str, FieldType]) -> Filter | None:
    """A filter as it was written, checked against the metadata columns of an index; None if it leaves nothing out.

    Raises:
        FilterError: an unknown field or operator, a value of the wrong type, bounds that nothing is between.
    """
    if filter is None:
        return None
    if not isinstance(filter, Mapping):
        raise FilterError(f"filter={_short(filter)}: must map fields to conditions, as in {{'year': {{'gte': 2020}}}}")
    conditions = []
    for field, written in filter.items():
        if field not in schema:
            known = nearest(str(field), schema) if schema else "this index has no metadata columns"
            raise FilterError(f"filter.{_short_name(field)}: unknown field; {known}")
        if written == {}:
            raise FilterError(f"filter.{field}={{}}: no condition; give a value, or one of {', '.join(OPERATORS)}")
        if isinstance(written, Mapping):
            of_field = [
                _condition(
                    f"filter.{field}.{_short_name(operator)}={_short(value)}", field, schema[field], operator, value
                )
                for operator, value in written.items()
            ]
        else:
            of_field = [_condition(f"filter.{field}={_short(written)}", field, schema[field], "eq", written)]
        _require_room(field, of_field)
        conditions += of_field
    return Filter(tuple(sorted(conditions, key=lambda c: (c.field, c.operator)))) if conditions else None


def typed(value: Any, kind: FieldType) -> Value:
    """A JSON value as one of a metadata column's type.

    Raises:
        ValueError: it is of another type; the message says what the type takes.
    """
    taken = _taken(value, kind)
    if taken is None:
        raise ValueError(f"must be {_WANTED[kind]}")
    return taken


def _taken(value: Any, kind: FieldType) -> Value | None:
    if kind == "boolean":
        return value if isinstance(value, bool) else None
    if kind == "integer":
        return value if type(value) is int and -(2**63) <= value < 2**63 else None
    with contextlib.suppress(ValueError, OverflowError):  # no such day or character; beyond what a float holds
        if kind == "number" and type(value) in (int, float):
            return float(value) if math.isfinite(value) and float(value) == value else None  # 2^53 + 1 is no float
        if kind == "date" and isinstance(value, str):
            day = date.fromisoformat(value)
            return day if day.isoformat() == value else None  # Python 3.11 reads more than 3.10
        if kind == "string" and isinstance(value, str):
            value.encode()
            return value
    return None


def _condition(where: str, field: str, kind: FieldType, operator: Any, written: Any) -> Condition:
    if operator not in OPERATORS:
        raise FilterError(f"{where}: unknown operator; {nearest(str(operator), OPERATORS)}")
    if operator in _BOUNDS and kind == "boolean":
        raise FilterError(f"{where}: true and false have no order; use eq or ne")
    if operator in ("in", "nin"):
        if not isinstance(written, (list, tuple)):
            raise FilterError(
                f"{where}: must be a list of values; for one value use {'eq' if operator == 'in' else 'ne'}"
            )
        if not written:
            raise FilterError(f"{where}: an empty list; give at least one value, or leave the condition out")
    else:
        written = [written]
    try:
        values = {typed(value, kind) for value in written}
    except ValueError as error:
        raise FilterError(f"{where}: {field} is of type {kind}, its values {error}") from None
    return Condition(field, operator, tuple(sorted(values)))


def _require_room(field: str, conditions: list[Condition]) -> None:
    """FilterError if no value can be between the bounds of a field."""
    bounds = {c.operator: c.values[0] for c in conditions if c.operator in _BOUNDS}
    for low in ("gt", "gte"):
        for high in ("lt", "lte"):
            if low in bounds and high in bounds:
                above, below = bounds[low], bounds[high]
                if above > below or (above == below and (low, high) != ("gte", "lte")):  # type: ignore[operator]
                    raise FilterError(
                        f"filter.{field}: nothing is {low} {_short(above)} and {high} {_short(below)}; "
                        "give a range that holds a value"
                    )


def _short(value: Any) -> str:
    """A value in one line, however large it is."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return reprlib.repr(str(value) if isinstance(value, date) else value)


def _short_name(name: Any) -> str:
    text = str(name)
    return text if len(text) <= 40 and text.isprintable() else reprlib.repr(text)
