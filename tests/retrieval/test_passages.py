import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infembed_ray.config.retrieval import FieldType
from infembed_ray.retrieval.passages import TEXT, as_typed, open_passages, row_of, schema, take, write_passages
from tests.support.shards import batches

TYPES: dict[str, FieldType] = {
    "lang": "string",
    "year": "integer",
    "score": "number",
    "draft": "boolean",
    "day": "date",
    "at": "datetime",
    "tags": "strings",
}
NOON = datetime.datetime(2024, 5, 31, 12, 30, tzinfo=datetime.timezone.utc)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "id": TEXTS,
            "text": TEXTS,
            "lang": TEXTS | st.none(),
            "year": st.integers(-(2**63), 2**63 - 1) | st.none(),
            "score": st.floats(allow_nan=False, allow_infinity=False) | st.none(),
            "draft": st.booleans() | st.none(),
            "day": st.dates() | st.none(),
            "at": st.datetimes(timezones=st.just(datetime.timezone.utc)) | st.none(),
            "tags": st.lists(TEXTS, max_size=3) | st.none(),
        }
    ),
    unique_by=lambda row: row["id"],
    max_size=40,
)


@pytest.mark.integration
@given(rows=ROWS, at_once=st.integers(1, 9))
def test_passages_round_trip_and_are_found_by_id(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], at_once: int
) -> None:
    file = tmp_path_factory.mktemp("passages") / "passages.arrow"
    rows = sorted(rows, key=lambda row: row["id"])
    table = pa.Table.from_pylist(rows, schema=schema(TYPES))
    assert write_passages(file, table.schema, batches(table, at_once)) == len(rows)
    written = open_passages(file)
    assert written.to_pylist() == rows
    assert written.schema == schema(TYPES)
    assert written.column("text").num_chunks <= 1  # so that a few rows are fetched without the others
    for number, row in enumerate(rows):
        assert row_of(written, row["id"]) == number
        assert row_of(written, row["id"] + "\0") in {None, number + 1}
    assert row_of(written, "\ud800") is None
    assert [path.name for path in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize("ids", [["b", "a"], ["a", "a"], ["é", "z"]])
def test_unsorted_or_duplicate_ids_are_refused(tmp_path: Path, ids: list[str]) -> None:
    table = pa.table({"id": ids, "text": ids}, schema=schema({}))
    with pytest.raises(ValueError, match="ids must be unique and ascend"):
        write_passages(tmp_path / "passages.arrow", table.schema, batches(table, 1))
    assert not (tmp_path / "passages.arrow").exists()


@pytest.mark.parametrize(
    ("value", "kind", "typed"),
    [
        ("", "string", ""),
        ("2020", "string", "2020"),
        (2020, "integer", 2020),
        ("2020", "integer", 2020),
        ("", "integer", None),
        (None, "date", None),
        (2, "number", 2.0),
        ("2.5", "number", 2.5),
        (True, "boolean", True),
        ("TRUE", "boolean", True),
        ("2020-02-29", "date", datetime.date(2020, 2, 29)),
        (datetime.date(2020, 2, 29), "date", datetime.date(2020, 2, 29)),
        (datetime.datetime(2020, 2, 29), "date", datetime.date(2020, 2, 29)),
        ("2020-02-29T00:00:00", "date", datetime.date(2020, 2, 29)),
        (pandas.Timestamp("2020-02-29"), "date", datetime.date(2020, 2, 29)),
        (float("nan"), "number", None),
        (float("nan"), "string", None),
        (2020.0, "integer", 2020),
        ("2020.0", "integer", 2020),
        (Decimal("2020.00"), "integer", 2020),
        (2020, "string", "2020"),
        (2020.0, "string", "2020"),
        (Decimal("0.1"), "number", 0.1),
        ("2024-05-31T14:30:00+02:00", "datetime", NOON),
        ("2024-05-31 12:30:00Z", "datetime", NOON),
        (datetime.datetime(2024, 5, 31, 12, 30), "datetime", NOON),
        (pandas.Timestamp("2024-05-31T14:30", tz="Europe/Berlin"), "datetime", NOON),
        (datetime.date(2024, 5, 31), "datetime", NOON.replace(hour=0, minute=0)),
        (["a", 7], "strings", ["a", "7"]),
        ("a", "strings", ["a"]),
        ('["a", "b"]', "strings", ["a", "b"]),
        ([], "strings", []),
    ],
)
def test_values_of_json_csv_and_parquet_are_converted(value: Any, kind: FieldType, typed: Any) -> None:
    assert as_typed(value, kind) == typed
    assert type(as_typed(value, kind)) is type(typed)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (True, "string"),
        (["a"], "string"),
        (["a", None], "strings"),
        ([["a"]], "strings"),
        ({"a": 1}, "strings"),
        (2020.5, "integer"),
        (2.0**60, "integer"),  # pandas may have rounded it
        ("1e400", "integer"),
        (Decimal("0.1234567890123456789"), "number"),
        ("soon", "datetime"),
        (pandas.Timestamp("2024-05-31T14:30:00.000000001"), "datetime"),
        ("x", "integer"),
        (True, "integer"),
        (2**63, "integer"),
        ("inf", "number"),
        (2**53 + 1, "number"),
        (False, "number"),
        (1, "boolean"),
        ("yes", "boolean"),
        ("2020-02-30", "date"),
        (20200229, "date"),
        (datetime.datetime(2020, 2, 29, 12), "date"),
        ("a\ud800", "string"),
        ("1_000", "integer"),
        ("\u0663", "integer"),
        ("1_0", "number"),
    ],
)
def test_values_of_another_type_are_refused(value: Any, kind: FieldType) -> None:
    with pytest.raises(ValueError, match="must be"):
        as_typed(value, kind)


@given(data=st.data(), chunks=st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_rows_are_taken_from_many_chunks_in_order(data: st.DataObject, chunks: list[int]) -> None:
    parts = [pa.table({"id": [f"{c}-{i}" for i in range(n)]}, pa.schema([("id", TEXT)])) for c, n in enumerate(chunks)]
    table = pa.concat_tables(parts)
    some = st.lists(st.integers(0, len(table) - 1)) if len(table) else st.just([])
    rows = np.array(data.draw(some), np.int64)
    taken = take(table, rows)
    assert taken.column("id").to_pylist() == [table.column("id")[row].as_py() for row in rows.tolist()]
    assert (taken.schema, taken.column("id").num_chunks <= 1) == (table.schema, True)
