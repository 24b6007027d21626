import operator
import pickle
from collections.abc import Callable, Mapping
from datetime import date
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infembed_ray.config.retrieval import FieldType
from infembed_ray.retrieval.filters import FilterError, parse
from infembed_ray.retrieval.passages import COLUMN_TYPES

SCHEMA: dict[str, FieldType] = {
    "lang": "string",
    "year": "integer",
    "score": "number",
    "draft": "boolean",
    "published": "date",
}
FEW = {
    "lang": st.sampled_from(["en", "de", "日本語", "\u00e9", "e\u0301", "", "EN", "😀", "z\u2028"]),
    "year": st.integers(2018, 2024) | st.sampled_from([-(2**63), 2**63 - 1]),
    "score": st.sampled_from([-1.5, -0.0, 0.0, 0.5, 1e300]) | st.integers(-2, 2),
    "draft": st.booleans(),
    "published": st.dates(date(2020, 1, 1), date(2020, 1, 9)).map(date.isoformat) | st.just("0001-01-01"),
}
"""Values of each type, few enough that columns and filters meet."""
COMPARE: Mapping[str, Callable[[Any, Any], bool]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "gt": operator.gt,
    "gte": operator.ge,
    "lt": operator.lt,
    "lte": operator.le,
    "in": lambda value, values: value in values,
    "nin": lambda value, values: value not in values,
}


@st.composite
def conditions(draw: st.DrawFn) -> dict[str, Any]:
    written: dict[str, Any] = {}
    for field in draw(st.sets(st.sampled_from(list(SCHEMA)), max_size=3)):
        if draw(st.booleans()):
            written[field] = draw(FEW[field])
            continue
        allowed = [o for o in COMPARE if field != "draft" or o in ("eq", "ne", "in", "nin")]
        operators = draw(st.sets(st.sampled_from(allowed), min_size=1, max_size=2))
        lists = {o: draw(st.lists(FEW[field], min_size=1, max_size=3)) for o in operators}
        written[field] = {o: values if o in ("in", "nin") else values[0] for o, values in lists.items()}
    return written


def lets_through(written: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    """What the module's docstring says, in plain Python; ISO dates order as strings."""
    for field, condition in written.items():
        for name, value in condition.items() if isinstance(condition, dict) else [("eq", condition)]:
            met = name in ("ne", "nin") if row[field] is None else COMPARE[name](row[field], value)
            if not met:
                return False
    return True


@pytest.mark.integration
@given(st.lists(st.fixed_dictionaries({f: st.none() | values for f, values in FEW.items()}), max_size=12), conditions())
def test_a_filter_lets_through_what_plain_python_does(rows: list[dict[str, Any]], written: dict[str, Any]) -> None:
    expected = [lets_through(written, row) for row in rows]
    parsed = parse(written, SCHEMA)
    columns = {
        f: [row[f] if f != "published" or row[f] is None else date.fromisoformat(row[f]) for row in rows]
        for f in SCHEMA
    }
    table = pa.table({f: pa.array(values, COLUMN_TYPES[SCHEMA[f]]) for f, values in columns.items()})
    if parsed is None:
        assert not written
        return
    halves = pa.concat_tables([table.slice(0, len(rows) // 2), table.slice(len(rows) // 2)])
    for part in (table, halves):
        mask = parsed.mask(part)
        assert mask.dtype == bool
        assert mask.tolist() == expected


def test_no_filter_is_none() -> None:
    assert parse(None, SCHEMA) is None
    assert parse({}, SCHEMA) is None


def test_filters_that_say_the_same_are_equal_and_can_be_keys_and_sent() -> None:
    one = parse({"year": {"lt": 2024, "gte": 2020}, "lang": {"in": ["en", "de", "en"]}}, SCHEMA)
    other = parse({"lang": {"in": ["de", "en"]}, "year": {"gte": 2020, "lt": 2024}}, SCHEMA)
    assert one == other
    assert {one: 1}[other] == 1
    assert pickle.loads(pickle.dumps(one)) == other
    assert parse({"lang": "en"}, SCHEMA) == parse({"lang": {"eq": "en"}}, SCHEMA)


def test_strings_are_compared_by_code_points() -> None:
    composed, decomposed = "\u00e9", "e\u0301"
    table = pa.table({"lang": [composed, decomposed, "EN", "en"]})
    assert parse({"lang": composed}, SCHEMA).mask(table).tolist() == [True, False, False, False]
    assert parse({"lang": {"lt": "a"}}, SCHEMA).mask(table).tolist() == [False, False, True, False]


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({"yaer": 2020}, r"filter\.yaer: unknown field; did you mean year\?"),
        ({"year": {"gte": 2020, "than": 1}}, r"filter\.year\.than=1: unknown operator; valid: eq, gt"),
        ({"year": {"get": 2020}}, r"unknown operator; did you mean gte?"),
        ({"year": "2020"}, r"filter\.year='2020': year is of type integer, its values must be a whole number"),
        ({"year": 2020.0}, "year is of type integer"),
        ({"year": {"ne": True}}, r"filter\.year\.ne=true: year is of type integer"),
        ({"year": 2**63}, "a whole number of 64 bits"),
        ({"year": None}, r"filter\.year=null: year is of type integer"),
        ({"year": {"in": [2020, [2021]]}}, "year is of type integer"),
        ({"year": {"in": 2020}}, "must be a list of values; for one value use eq"),
        ({"year": {"nin": []}}, "an empty list; give at least one value"),
        ({"year": {}}, r"filter\.year={}: no condition"),
        ({"score": float("nan")}, "must be a finite number"),
        ({"score": {"lt": float("inf")}}, "must be a finite number"),
        ({"score": 10**400}, "must be a finite number"),
        ({"score": True}, "must be a finite number"),
        ({"draft": 1}, "must be true or false"),
        ({"draft": {"gt": True}}, "true and false have no order"),
        ({"published": "2020-13-01"}, "a date as in 2024-05-31"),
        ({"published": "20200101"}, "a date as in 2024-05-31"),
        ({"published": 20200101}, "a date as in 2024-05-31"),
        ({"lang": "\ud800"}, "must be a string of Unicode characters"),
        ({"lang": "x\n" * 100_000, "year": "x" * 100_000}, "must be a whole number"),
        ({"year\n": 1}, "unknown field"),
        (["year", 2020], "must map fields to conditions"),
        ("year=2020", "must map fields to conditions"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_one_short_line(written: Any, message: str) -> None:
    with pytest.raises(FilterError, match=message) as refusal:
        parse(written, SCHEMA)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 300
    assert str(pickle.loads(pickle.dumps(refusal.value))) == str(refusal.value)


def test_an_index_without_metadata_says_so() -> None:
    with pytest.raises(FilterError, match=r"filter\.year: unknown field; this index has no metadata columns"):
        parse({"year": 2020}, {})
