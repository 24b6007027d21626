"""Metadata filters: parse a request's JSON, and compute the mask of the rows that pass.

    {"lang": "en", "year": {"gte": 2020, "lt": 2024}, "source": {"in": ["who", "nice"]}, "draft": {"ne": true}}

All conditions must hold. A bare value means `eq`. `gt gte lt lte` compare numbers, dates, and strings by code points; `in` and
`nin` take a list. Values must have the column's type: "2020" is no integer, 2020.5 no integer, true no number. Strings are
compared by code points, without folding or normalisation.

A null matches no condition except `ne` and `nin`, the negations of `eq` and `in`: {"draft": {"ne": true}} keeps passages
without a draft flag.
"""

import contextlib
import json
import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date, datetime, timezone
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from infembed_ray.config.base import nearest
from infembed_ray.config.retrieval import FieldType

Value = str | int | float | bool | date | list[str]

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
    "datetime": "a time as in 2024-05-31T14:30:00+02:00, without a zone in UTC",
    "strings": "a list of strings",
}


class FilterError(ValueError):
    """A filter is invalid; the message names the field, the value and the remedy."""


@dataclass(frozen=True)
class Condition:
    """One comparison with sorted `values`."""

    field: str
    operator: str
    values: tuple[Value, ...]

    def mask(self, column: pa.ChunkedArray) -> np.ndarray:
        """(rows,) bool mask of the values that meet the condition."""
        if self.operator in _BOUNDS:
            met = _BOUNDS[self.operator](column, pa.scalar(self.values[0], column.type))
        else:
            # is_in hashes, and -0.0 hashes differently from 0.0
            values = [*self.values, *(-v for v in self.values if isinstance(v, float) and v == 0)]
            met = pc.is_in(column, pa.array(values, column.type))
        here = np.asarray(pc.fill_null(met, False))
        return ~here if self.operator in _NEGATIONS else here


@dataclass(frozen=True)
class Filter:
    """Conditions that must all hold, in a canonical order: equal filters compare equal and hash alike."""

    conditions: tuple[Condition, ...]

    def mask(self, table: pa.Table) -> np.ndarray:
        """(rows,) bool mask of the rows that pass."""
        return np.logical_and.reduce([c.mask(table.column(c.field)) for c in self.conditions])


def parse(filter: Mapping[str, Any] | None, schema: Mapping[str, FieldType]) -> Filter | None:
    """Parse a filter and check it against the metadata columns of an index; None if it has no condition.

    Raises:
        FilterError: an unknown field or operator, or a value of the wrong type.
    """
    if filter is None:
        return None
    if not isinstance(filter, Mapping):
        raise FilterError(f"filter={_short(filter)}: must map fields to conditions, as in {{'year': {{'gte': 2020}}}}")
    conditions = []
    for field, written in filter.items():
        if field not in schema:
            valid = nearest(str(field), schema) if schema else "this index has no metadata columns"
            raise FilterError(f"filter.{_short_name(field)}: unknown field; {valid}")
        if written == {}:
            raise FilterError(f"filter.{field}={{}}: no condition; give a value, or one of {', '.join(OPERATORS)}")
        if not isinstance(written, Mapping):
            conditions.append(_condition(f"filter.{field}={_short(written)}", field, schema[field], "eq", written))
            continue
        for operator, value in written.items():
            where = f"filter.{field}.{_short_name(operator)}={_short(value)}"
            conditions.append(_condition(where, field, schema[field], operator, value))
    return Filter(tuple(sorted(conditions, key=lambda c: (c.field, c.operator)))) if conditions else None


def typed(value: Any, kind: FieldType) -> Value:
    """Convert a JSON value to the type of a metadata column.

    Raises:
        ValueError: the value has another type; the message says what the type takes.
    """
    converted = _converted(value, kind)
    if converted is None:
        raise ValueError(f"must be {_WANTED[kind]}")
    return converted


def _converted(value: Any, kind: FieldType) -> Value | None:
    if kind == "boolean":
        return value if isinstance(value, bool) else None
    if kind == "integer":
        return value if type(value) is int and -(2**63) <= value < 2**63 else None
    with contextlib.suppress(ValueError, OverflowError):  # an impossible date or character, or a number too large
        if kind == "number" and type(value) in (int, float):
            exact = math.isfinite(value) and float(value) == value  # a float cannot hold 2^53 + 1
            return float(value) if exact else None
        if kind == "date" and isinstance(value, str):
            day = date.fromisoformat(value)
            return day if day.isoformat() == value else None  # Python 3.11 accepts more formats than 3.10
        if kind == "datetime" and isinstance(value, str) and len(value) >= len("2024-05-31"):
            at = datetime.fromisoformat(value.replace("Z", "+00:00"))
            return at.astimezone(timezone.utc) if at.tzinfo else at.replace(tzinfo=timezone.utc)
        if kind == "strings" and isinstance(value, list) and all(isinstance(item, str) for item in value):
            "".join(value).encode()
            return value
        if kind == "string" and isinstance(value, str):
            value.encode()
            return value
    return None


def _condition(where: str, field: str, kind: FieldType, operator: Any, written: Any) -> Condition:
    if operator not in OPERATORS:
        raise FilterError(f"{where}: unknown operator; {nearest(str(operator), OPERATORS)}")
    if operator in _BOUNDS and kind == "boolean":
        raise FilterError(f"{where}: true and false have no order; use eq or ne")
    if kind == "strings":
        raise FilterError(f"{where}: {field} is a list of strings, which a filter cannot compare; leave it out")
    if operator in ("in", "nin"):
        if not isinstance(written, (list, tuple)):
            fault = f"{where}: must be a list of values; for one value use {'eq' if operator == 'in' else 'ne'}"
            raise FilterError(fault)
        if not written:
            raise FilterError(f"{where}: an empty list; give at least one value, or leave the condition out")
    else:
        written = [written]
    try:
        values = {typed(value, kind) for value in written}
    except ValueError as error:
        raise FilterError(f"{where}: {field} is of type {kind}, its values {error}") from None
    return Condition(field, operator, tuple(sorted(values)))


def _short(value: Any) -> str:
    """A value as one short line."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return reprlib.repr(str(value) if isinstance(value, date) else value)


def _short_name(name: Any) -> str:
    text = str(name)
    return text if len(text) <= 40 and text.isprintable() else reprlib.repr(text)
