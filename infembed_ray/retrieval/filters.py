"""Metadata filters: parse a request's JSON, and compute the mask of the rows that pass.

    {"lang": "en", "year": {"gte": 2020, "lt": 2024}, "source": {"in": ["who", "nice"]}, "tags": {"all": ["flu", "asthma"]}}
    {"$or": [{"year": null}, {"year": {"gte": 2020}, "draft": {"ne": true}}]}

All conditions must hold. `$or` and `$and` take a list of filters: at least one must pass, or all. A bare value means `eq`.
`gt gte lt lte` compare numbers, dates, and strings by code points; `in`, `nin` and `all` take a list. Values must have the
column's type: "2020" is no integer, 2020.5 no integer, true no number. Strings are compared by code points, without folding or
normalisation. A list of strings meets `eq` if it contains the value, `in` if it contains any of the values, `all` if it
contains all of them.

`eq` and `in` of null match passages without a value; an empty list is a value. `ne` and `nin` are the negations of `eq` and
`in`, so {"draft": {"ne": true}} keeps passages without a draft flag. A null matches no other condition.
"""

import contextlib
import json
import math
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping
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
_COMBINATIONS = ("$and", "$or")
MAX_DEPTH = 5
"""Levels of `$and` and `$or`."""
MAX_CONDITIONS = 100
"""Conditions of a filter: each scans a column of every shard. Each value of `all` counts as one."""
MAX_VALUES = 10_000
"""Values of all conditions of a filter."""
_FINER = re.compile(r"[.,]\d{6}0*[1-9]")
"""Digits of a time below the microsecond, which Python 3.11 ignores."""

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
    """One comparison: `in`, its negation `nin`, or a bound, which has one value. None is null."""

    field: str
    kind: FieldType
    operator: str
    values: frozenset[Value | None]

    def mask(self, table: pa.Table) -> np.ndarray:
        """(rows,) bool mask of the rows that meet the condition."""
        column = table.column(self.field)
        if self.operator in _BOUNDS:
            met = _BOUNDS[self.operator](column, pa.scalar(*self.values, column.type))
            return np.asarray(pc.fill_null(met, False))
        here = _is_in(column, self.values)
        return ~here if self.operator == "nin" else here


@dataclass(frozen=True)
class Combination:
    """Filters of which all must pass, or any. Sets, so that equal filters compare equal and hash alike."""

    parts: frozenset["Filter"]
    any: bool

    def mask(self, table: pa.Table) -> np.ndarray:
        """(rows,) bool mask of the rows that pass."""
        combine = np.logical_or if self.any else np.logical_and
        return combine.reduce([part.mask(table) for part in self.parts])


Filter = Condition | Combination


def _is_in(column: pa.ChunkedArray, values: frozenset[Value | None]) -> np.ndarray:
    """(rows,) bool mask of the values in a set, and of the lists with an item in it."""
    if not pa.types.is_list(column.type):
        return np.asarray(pc.is_in(column, pa.array(list(values), column.type)))
    ends = np.cumsum(pc.fill_null(pc.list_value_length(column), 0))
    items = np.flatnonzero(_is_in(pc.list_flatten(column), values - {None}))
    here = np.zeros(len(column), bool)
    here[np.searchsorted(ends, items, side="right")] = True
    return here | np.asarray(pc.is_null(column)) if None in values else here


def parse(filter: Mapping[str, Any] | None, schema: Mapping[str, FieldType]) -> Filter | None:
    """Parse a filter and check it against the metadata columns of an index; None if it has no condition.

    Raises:
        FilterError: an unknown field or operator, a value of the wrong type, or more conditions, values or levels than allowed.
    """
    return None if filter is None or filter == {} else _filter("filter", filter, schema, [], 0)


def _filter(where: str, filter: Any, schema: Mapping[str, FieldType], sizes: list[int], depth: int) -> Filter:
    """Parse the filter at `where`. `sizes` collects the number of values of each condition."""
    if not isinstance(filter, Mapping) or not filter:
        raise FilterError(f"{where}={_short(filter)}: must map fields to conditions, as in {{'year': {{'gte': 2020}}}}")
    parts: list[Filter] = []
    for field, written in filter.items():
        at = f"{where}.{_short_name(field)}"
        if field in _COMBINATIONS:
            if depth == MAX_DEPTH:
                raise FilterError(f"{at}: {depth} levels of $and and $or are allowed; write it with fewer")
            if not isinstance(written, (list, tuple)) or not written:
                raise FilterError(f"{at}={_short(written)}: must be a list of filters, as in [{{'year': 2020}}, ...]")
            inner = [_filter(f"{at}.{n}", one, schema, sizes, depth + 1) for n, one in enumerate(written)]
            parts.append(_joined(inner, field == "$or"))
        elif field not in schema:
            valid = nearest(str(field), [*schema, *_COMBINATIONS]) if schema else "this index has no metadata columns"
            raise FilterError(f"{at}: unknown field; {valid}")
        elif not isinstance(written, Mapping) or not written:
            parts += _conditions(at, field, schema[field], "eq", written, sizes)
        else:
            for operator, value in written.items():
                parts += _conditions(f"{at}.{_short_name(operator)}", field, schema[field], operator, value, sizes)
    return _joined(parts, False)


def _joined(parts: Iterable[Filter], any: bool) -> Filter:
    """Combine filters in canonical form: no part combines in the same way, and one filter stays itself."""
    sets = [part.parts if isinstance(part, Combination) and part.any == any else {part} for part in parts]
    flat = frozenset[Filter]().union(*sets)
    return next(iter(flat)) if len(flat) == 1 else Combination(flat, any)


def typed(value: Any, kind: FieldType) -> Value:
    """Convert a JSON value to the type of a metadata column; ValueError that says what the type takes."""
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
            return float(value) + 0.0 if exact else None  # stores hash -0.0 differently from 0.0
        if kind == "date" and isinstance(value, str):
            day = date.fromisoformat(value)
            return day if day.isoformat() == value else None  # Python 3.11 accepts more formats than 3.10
        if kind == "datetime" and isinstance(value, str) and len(value) >= len("2024-05-31"):
            if _FINER.search(value):
                return None
            at = datetime.fromisoformat(value.replace("Z", "+00:00"))
            return at.astimezone(timezone.utc) if at.tzinfo else at.replace(tzinfo=timezone.utc)
        if kind == "strings" and isinstance(value, list) and all(isinstance(item, str) for item in value):
            "".join(value).encode()
            return value
        if kind == "string" and isinstance(value, str):
            value.encode()
            return value
    return None


def _conditions(
    where: str, field: str, kind: FieldType, operator: Any, written: Any, sizes: list[int]
) -> list[Condition]:
    """Parse one condition; each value of `all` becomes one."""
    where += f"={_short(written)}"
    valid = ["eq", "ne", "in", "nin", *(["all"] if kind == "strings" else [] if kind == "boolean" else _BOUNDS)]
    if operator not in valid:
        raise FilterError(f"{where}: no operator for {field}, of type {kind}; {nearest(str(operator), valid)}")
    is_list, takes_list = isinstance(written, (list, tuple)), operator in ("in", "nin", "all")
    if is_list != takes_list or (is_list and not written):
        one, several = "one value; in takes a list", "a list of at least one value; eq and ne take one value"
        raise FilterError(f"{where}: must be {several if takes_list else one}")
    given = written if takes_list else [written]
    sizes += [1] * len(given) if operator == "all" else [len(given)]
    if len(sizes) > MAX_CONDITIONS or sum(sizes) > MAX_VALUES:
        fault = f"a filter has at most {MAX_CONDITIONS} conditions and {MAX_VALUES:,} values"
        raise FilterError(f"{where}: {fault}; give the values of a field in one list, or search several times")
    item: FieldType = "string" if kind == "strings" else kind
    nullable = operator in ("eq", "ne", "in", "nin")
    try:
        values = {None if value is None and nullable else typed(value, item) for value in given}
    except ValueError as error:
        raise FilterError(f"{where}: {field} is of type {kind}, its values {error}") from None
    name = {"eq": "in", "all": "in", "ne": "nin"}.get(operator, operator)
    groups = [{value} for value in values] if operator == "all" else [values]
    return [Condition(field, kind, name, frozenset(group)) for group in groups]


def _short(value: Any) -> str:
    """A value as one short line."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return reprlib.repr(str(value) if isinstance(value, date) else value)


def _short_name(name: Any) -> str:
    text = str(name)
    return text if len(text) <= 40 and text.isprintable() else reprlib.repr(text)
