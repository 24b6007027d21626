import operator
import pickle
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infembed_ray.config.retrieval import FieldType
from infembed_ray.retrieval.filters import MAX_CONDITIONS, MAX_DEPTH, MAX_VALUES, FilterError, parse, typed
from infembed_ray.retrieval.passages import COLUMN_TYPES

SCHEMA: dict[str, FieldType] = {
    "lang": "string",
    "year": "integer",
    "score": "number",
    "draft": "boolean",
    "published": "date",
    "at": "datetime",
    "tags": "strings",
}
STRINGS = ["en", "de", "日本語", "\u00e9", "e\u0301", "", "EN", "😀", "z\u2028", 'a"\\\n']
FEW: Mapping[str, list[Any]] = {
    "lang": STRINGS,
    "year": [2018, 2020, 2024, -(2**63), 2**63 - 1],
    "score": [-1.5, -0.0, 0.0, 0, 0.5, 2, 1e300],
    "draft": [True, False],
    "published": ["2020-01-01", "2020-01-05", "0001-01-01"],
    "at": [
        "2024-05-31T14:30:00+02:00",  # the next two are the same time
        "2024-05-31T12:30:00Z",
        "2024-05-31 12:30",
        "2024-05-31T12:30:00.000001000",
        "2024-05-31",
        "1969-12-31T20:00:00.999999-05:30",
        "0001-01-01",
    ],
    "tags": STRINGS[-4:],
}
"""Values of each type in JSON, few enough that columns and filters meet; for lists, of an item."""
A_ROW = st.fixed_dictionaries(
    {
        f: st.none() | (st.lists(st.sampled_from(v), max_size=3) if f == "tags" else st.sampled_from(v))
        for f, v in FEW.items()
    }
)
COMPARE = {"gt": operator.gt, "gte": operator.ge, "lt": operator.lt, "lte": operator.le}
NEGATED = {"ne": "eq", "nin": "in"}


def conditions(field: str) -> st.SearchStrategy[dict[str, Any]]:
    value, nullable = st.sampled_from(FEW[field]), st.sampled_from([None, *FEW[field]])
    lists = st.lists(nullable, min_size=1, max_size=3)
    valid = {"eq": nullable, "ne": nullable, "in": lists, "nin": lists}
    if field == "tags":
        valid["all"] = st.lists(value, min_size=1, max_size=3)
    elif field != "draft":
        valid |= dict.fromkeys(COMPARE, value)
    written = [st.fixed_dictionaries({name: given}) for name, given in valid.items()]
    return st.fixed_dictionaries({field: st.one_of(nullable, *written)})


FILTERS: st.SearchStrategy[dict[str, Any]] = st.recursive(
    st.one_of([conditions(field) for field in [*SCHEMA, "tags"]]),  # tags have the most operators
    lambda inner: (
        st.dictionaries(st.sampled_from(["$and", "$or"]), st.lists(inner, min_size=1, max_size=3), min_size=1)
        | st.builds(operator.or_, inner, inner)
    ),
    max_leaves=6,
)


def lets_through(written: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    """What the module's docstring says, in plain Python."""
    for name, value in written.items():
        if name in ("$and", "$or"):
            met = (all if name == "$and" else any)(lets_through(one, row) for one in value)
        else:
            stored, operators = comparable(name, row[name]), value if isinstance(value, dict) else {"eq": value}
            lists = {o: given if isinstance(given, list) else [given] for o, given in operators.items()}
            met = all(meets(stored, o, [comparable(name, v) for v in given]) for o, given in lists.items())
        if not met:
            return False
    return True


def meets(stored: Any, name: str, given: Sequence[Any]) -> bool:
    if name in NEGATED:
        return not meets(stored, NEGATED[name], given)
    if isinstance(stored, list):
        return (all if name == "all" else any)(value in stored for value in given)
    if name in ("eq", "in"):
        return stored in given
    return stored is not None and COMPARE[name](stored, given[0])


def comparable(field: str, value: Any) -> Any:
    """A value of `FEW` as Python compares it; ISO dates order as strings."""
    if field != "at" or value is None:
        return value
    at = datetime.fromisoformat(value.replace("Z", "+00:00"))
    return at if at.tzinfo else at.replace(tzinfo=timezone.utc)


def table_of(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    columns = {f: [None if row[f] is None else typed(row[f], kind) for row in rows] for f, kind in SCHEMA.items()}
    return pa.table({f: pa.array(values, COLUMN_TYPES[SCHEMA[f]]) for f, values in columns.items()})


def many_rows() -> list[dict[str, Any]]:
    """Rows with ids for the stores, many combinations of the few values."""
    rng = np.random.default_rng(0)

    def value(field: str) -> Any:
        some = [FEW[field][n] for n in rng.integers(len(FEW[field]), size=rng.integers(4))]
        return None if rng.random() < 0.15 else some if field == "tags" else FEW[field][rng.integers(len(FEW[field]))]

    return [{"id": f"d{n}", **{field: value(field) for field in SCHEMA}} for n in range(90)]


def answers(written: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Id and metadata of the hits that a search with a filter has among `many_rows`."""
    passing = [row for row in many_rows() if lets_through(written, row)]
    return {row["id"]: {f: row[f] if f != "at" or row[f] is None else _utc(row[f]) for f in SCHEMA} for row in passing}


def _utc(at: str) -> str:
    return str(comparable("at", at).astimezone(timezone.utc).isoformat())


def mirrored(written: Any) -> Any:
    """The same filter with its fields and lists in another order."""
    if isinstance(written, dict):
        return {name: mirrored(written[name]) for name in reversed(written)}
    return [mirrored(one) for one in reversed(written)] if isinstance(written, list) else written


@pytest.mark.integration
@given(st.lists(A_ROW, max_size=12), FILTERS)
def test_a_filter_lets_through_what_plain_python_does(rows: list[dict[str, Any]], written: dict[str, Any]) -> None:
    expected = [lets_through(written, row) for row in rows]
    parsed = parse(written, SCHEMA)
    assert parsed
    table = table_of(rows)
    halves = pa.concat_tables([table.slice(0, len(rows) // 2), table.slice(len(rows) // 2)])
    for part in (table, halves):
        mask = parsed.mask(part)
        assert mask.dtype == bool
        assert mask.tolist() == expected
    other = parse(mirrored(written), SCHEMA)
    assert len({parsed, other}) == 1
    assert pickle.loads(pickle.dumps(parsed)) == other


def test_no_filter_is_none() -> None:
    assert parse(None, SCHEMA) is None
    assert parse({}, SCHEMA) is None


EN, NEW = {"lang": "en"}, {"year": {"gte": 2020}}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            {"year": {"lt": 2024, "gte": 2020}, "lang": {"in": ["en", "de", "en"]}},
            {"$and": [{"lang": {"in": ["de", "en"]}}, NEW, {"year": {"lt": 2024}}]},
        ),
        (EN, {"lang": {"eq": "en"}}),
        (EN, {"$or": [{"$and": [{"lang": {"in": ["en"]}}]}]}),
        ({"$or": [EN, {"$or": [NEW, EN]}]}, {"$or": [NEW, EN]}),
        ({"tags": "a"}, {"tags": {"all": ["a"]}}),
        ({"tags": {"all": ["a", "b"]}}, {"$and": [{"tags": "b"}, {"tags": {"in": ["a"]}}]}),
        ({"year": None}, {"year": {"in": [None]}}),
        ({"score": 0}, {"score": -0.0}),
        ({"at": {"gt": "2024-05-31T14:30:00+02:00"}}, {"at": {"gt": "2024-05-31T12:30:00.000Z"}}),
    ],
)
def test_filters_that_say_the_same_are_equal_and_can_be_keys(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert len({parse(one, SCHEMA), parse(other, SCHEMA)}) == 1


def nested(levels: int) -> dict[str, Any]:
    return {"$or": [nested(levels - 1), EN]} if levels else NEW


def test_a_filter_may_be_as_large_as_documented() -> None:
    assert parse(nested(MAX_DEPTH), SCHEMA)
    assert parse({"$or": [{"year": n} for n in range(MAX_CONDITIONS)]}, SCHEMA)
    assert parse({"year": {"in": list(range(MAX_VALUES))}}, SCHEMA)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({"yaer": 2020}, r"filter\.yaer: unknown field; did you mean year\?"),
        (
            {"year": {"gte": 2020, "than": 1}},
            r"filter\.year\.than=1: no operator for year, of type integer; valid: eq, gt, gte, in",
        ),
        ({"year": {"get": 2020}}, r"; did you mean gt\?"),
        ({"year": "2020"}, r"filter\.year='2020': year is of type integer, its values must be a whole number"),
        ({"year": 2020.0}, "year is of type integer"),
        ({"year": {"ne": True}}, r"filter\.year\.ne=true: year is of type integer"),
        ({"year": 2**63}, "a whole number of 64 bits"),
        ({"year": {"gte": None}}, r"filter\.year\.gte=null: year is of type integer"),
        ({"year": [2020]}, r"filter\.year=\[2020\]: must be one value; in takes a list"),
        ({"year": {"in": [2020, [2021]]}}, "year is of type integer"),
        ({"year": {"in": 2020}}, "must be a list of at least one value; eq and ne take one value"),
        ({"year": {"nin": []}}, "must be a list of at least one value"),
        ({"year": {}}, r"filter\.year={}: year is of type integer"),
        ({"score": float("nan")}, "must be a finite number"),
        ({"score": {"lt": float("inf")}}, "must be a finite number"),
        ({"score": 10**400}, "must be a finite number"),
        ({"score": True}, "must be a finite number"),
        ({"draft": 1}, "must be true or false"),
        ({"draft": {"gt": True}}, "no operator for draft, of type boolean; valid: eq, in, ne, nin"),
        ({"tags": {"lt": "a"}}, "no operator for tags, of type strings; valid: all, eq, in, ne, nin"),
        ({"tags": {"all": ["a", None]}}, "tags is of type strings, its values must be a string of Unicode"),
        ({"lang": {"all": ["en"]}}, "no operator for lang, of type string; valid: eq, gt"),
        ({"at": "2024-05-31T14:30:00.0000001Z"}, "at is of type datetime, its values must be a time as in"),
        ({"at": "0001-01-01T00:00+00:01"}, "must be a time as in"),
        ({"$or": []}, r"filter\.\$or=\[\]: must be a list of filters"),
        ({"$and": EN}, r"filter\.\$and=.*: must be a list of filters"),
        ({"$or": [EN, {}]}, r"filter\.\$or\.1={}: must map fields to conditions"),
        ({"$or": [EN, {"yaer": 1}]}, r"filter\.\$or\.1\.yaer: unknown field; did you mean year\?"),
        ({"$nor": [EN]}, r"filter\.\$nor: unknown field; did you mean \$or\?"),
        (nested(MAX_DEPTH + 1), r"\$or\.0\.\$or: 5 levels of \$and and \$or are allowed"),
        (
            {"$or": [{"year": n} for n in range(101)]},
            r"filter\.\$or\.100\.year=100: a filter has at most 100 conditions",
        ),
        ({"tags": {"all": ["a"] * 101}}, "at most 100 conditions and 10,000 values; give the values"),
        ({"$or": [{"year": {"in": [0] * 5001}}, {"year": {"nin": [0] * 5000}}]}, "10,000 values"),
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
