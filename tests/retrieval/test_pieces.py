"""Pieces of a corpus against the rows of its files."""

from __future__ import annotations

import csv
import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infembed_ray.config.retrieval import FieldType
from infembed_ray.errors import InputError
from infembed_ray.retrieval import pieces
from infembed_ray.retrieval.corpus import rows
from infembed_ray.retrieval.pieces import Piece, parts_of, tables

METADATA: dict[str, FieldType] = {
    "word": "string",
    "count": "integer",
    "share": "number",
    "draft": "boolean",
    "day": "date",
}


def read(corpus: Path, metadata: dict[str, FieldType]) -> list[tuple[Any, ...]]:
    """(number of the row in the file, id, text, metadata ...) of all rows, in order."""
    found = []
    for _, piece in sorted((number, piece) for part in parts_of(corpus) for number, piece in part.items()):
        before = piece.rows_before()
        for table in tables(piece, {}, metadata, set()):
            found += [(before + row.pop("_row"), *row.values()) for row in table.to_pylist()]
    return found


def one_by_one(corpus: Path, metadata: dict[str, FieldType]) -> list[tuple[Any, ...]]:
    """The same, by the reader of single rows."""
    return [(number, *row) for number, row in enumerate(rows(corpus, {}, metadata, set()), start=1)]


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PART_BYTES", 150)
    monkeypatch.setattr(pieces, "_FILE_BYTES", 1)
    monkeypatch.setattr(pieces, "_BLOCK", 100)
    monkeypatch.setattr(pieces, "_ROWS_AT_ONCE", 3)


TEXTS = st.one_of(
    st.text(max_size=8),
    st.sampled_from(["日本語", "\u00a0", "\x1c", " \t", "\u2003x", "plain", "007", "true", "2024-02-29"]),
)
VALUES = {
    "id": st.one_of(TEXTS, st.integers(-(2**65), 2**65), st.floats(), st.none()),
    "text": st.one_of(TEXTS, st.lists(st.integers(), max_size=2)),
    "word": st.one_of(TEXTS, st.none(), st.integers()),
    "count": st.one_of(st.integers(-(2**64), 2**64), TEXTS, st.booleans(), st.floats(), st.none()),
    "share": st.one_of(st.floats(), st.integers(-(2**60), 2**60), TEXTS, st.booleans(), st.none()),
    "draft": st.one_of(st.booleans(), TEXTS, st.sampled_from(["TRUE", "1", ""]), st.integers(0, 1), st.none()),
    "day": st.one_of(st.dates().map(str), TEXTS, st.sampled_from(["20240229", "2024-2-9"]), st.integers(), st.none()),
}
GOOD = {"id": "a", "text": "b", "word": "c", "count": 1, "share": 0.5, "draft": True, "day": "2024-02-29"}
ROWS = st.lists(
    st.tuples(st.fixed_dictionaries({}, optional=VALUES), st.booleans()).map(
        lambda drawn: {**(GOOD if drawn[1] else {"id": "i", "text": "t"}), **drawn[0]}
    ),
    max_size=9,
)


@pytest.mark.integration
@settings(max_examples=300, deadline=None)
@given(made=ROWS, blank=st.booleans())
def test_lines_of_pieces_are_the_rows_read_one_by_one(
    tmp_path_factory: pytest.TempPathFactory, made: list[dict[str, Any]], blank: bool
) -> None:
    corpus = tmp_path_factory.mktemp("lines") / "corpus.jsonl"
    corpus.write_text(("\n \n" if blank else "\n").join(map(json.dumps, made)) + "\n")
    compare(corpus, numbered=not blank)  # empty lines are counted


def outcome(reading: Callable[..., list[tuple[Any, ...]]], corpus: Path) -> list[tuple[Any, ...]] | str:
    """The rows, or the error message."""
    try:
        return reading(corpus, METADATA)
    except InputError as error:
        return str(error)


def compare(corpus: Path, numbered: bool = True) -> None:
    """Both readings give the same passages or the same error; `numbered`: with the same numbers of rows."""
    found, expected = outcome(read, corpus), outcome(one_by_one, corpus)
    if numbered:
        assert found == expected
    elif isinstance(expected, str):
        assert isinstance(found, str)
    else:
        assert [row[1:] for row in found] == [row[1:] for row in expected]


COLUMNS = {
    "id": [pa.string(), pa.large_string(), pa.int32(), pa.uint64(), pa.dictionary(pa.int8(), pa.string())],
    "text": [pa.string(), pa.string_view()],
    "word": [pa.string(), pa.null()],
    "count": [pa.int8(), pa.uint64(), pa.string(), pa.bool_(), pa.float64(), pa.null()],
    "share": [pa.float32(), pa.float64(), pa.int64(), pa.string(), pa.bool_()],
    "draft": [pa.bool_(), pa.string(), pa.int8()],
    "day": [pa.date32(), pa.timestamp("us"), pa.timestamp("s", "Europe/Berlin"), pa.string()],
}


def value_of(kind: pa.DataType) -> st.SearchStrategy[Any]:
    """Values of an Arrow type."""
    if pa.types.is_dictionary(kind) or pa.types.is_string_view(kind) or kind in (pa.string(), pa.large_string()):
        return TEXTS
    if pa.types.is_integer(kind):
        return st.integers(0, 127) if kind.bit_width == 8 else st.integers(0, 2**31 - 1)
    if pa.types.is_floating(kind):
        return st.floats(width=kind.bit_width)
    if pa.types.is_boolean(kind):
        return st.booleans()
    if pa.types.is_null(kind):
        return st.none()
    days = st.dates(datetime.date(1700, 1, 1), datetime.date(2200, 1, 1))
    if pa.types.is_date(kind):
        return days
    clock = st.sampled_from([datetime.time(), datetime.time(13)])
    return st.builds(lambda day, at: datetime.datetime.combine(day, at), days, clock)


@st.composite
def parquet_tables(draw: st.DrawFn) -> pa.Table:
    count = draw(st.integers(1, 8))
    columns = {}
    for name, kinds in COLUMNS.items():
        kind = draw(st.sampled_from(kinds))
        value = value_of(kind) if name in ("id", "text") else st.one_of(st.none(), value_of(kind))
        values = draw(st.lists(value, min_size=count, max_size=count))
        columns[name] = (
            pa.array(values, pa.string()).cast(kind) if pa.types.is_dictionary(kind) else pa.array(values, kind)
        )
    return pa.table(columns)


@pytest.mark.integration
@settings(max_examples=200, deadline=None)
@given(table=parquet_tables())
def test_row_groups_of_pieces_are_the_rows_read_one_by_one(
    tmp_path_factory: pytest.TempPathFactory, table: pa.Table
) -> None:
    corpus = tmp_path_factory.mktemp("parquet") / "corpus.parquet"
    pq.write_table(table, corpus, row_group_size=3)
    compare(corpus)


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_pieces_of_a_file_of_lines_have_every_row_once_with_its_number(
    tmp_path: Path, small_parts: None, ending: str
) -> None:
    corpus = tmp_path / "corpus.jsonl"
    made = [{"id": f"p{n}", "text": "é" * (n * 7 % 90 + 1), "count": n} for n in range(200)]
    corpus.write_bytes("".join(json.dumps(row, ensure_ascii=False) + ending for row in made).encode())
    assert len([piece for part in parts_of(corpus) for piece in part]) == pieces.PARTS
    assert read(corpus, METADATA) == one_by_one(corpus, METADATA)


def test_pieces_of_a_parquet_file_are_its_row_groups(tmp_path: Path, small_parts: None) -> None:
    corpus = tmp_path / "corpus.parquet"
    made = [{"id": f"p{n}", "text": "x" * (n % 9 + 1), "count": n} for n in range(40)]
    pq.write_table(pa.Table.from_pylist(made), corpus, row_group_size=4)
    assert {piece.start for part in parts_of(corpus) for piece in part.values()} == set(range(10))
    assert read(corpus, METADATA) == one_by_one(corpus, METADATA)
    (tmp_path / "damaged.parquet").write_bytes(corpus.read_bytes()[:-30])
    with pytest.raises(InputError, match=r"damaged.parquet: not readable as Parquet"):
        parts_of(tmp_path / "damaged.parquet")


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_bad_row_of_any_piece_is_named_with_its_number_in_the_file(
    tmp_path: Path, small_parts: None, suffix: str
) -> None:
    corpus = tmp_path / f"corpus.{suffix}"
    for bad in (1, 77, 100):
        made = [{"id": f"p{n}", "text": " " if n == bad else "word " * 9} for n in range(1, 101)]
        if suffix == "jsonl":
            corpus.write_text("".join(json.dumps(row) + "\n" for row in made))
        else:
            pq.write_table(pa.Table.from_pylist(made), corpus, row_group_size=5)
        with pytest.raises(InputError, match=rf"^corpus={corpus}: row {bad}: column text is empty"):
            read(corpus, {})
    if suffix == "jsonl":
        lines = corpus.read_text().splitlines()
        lines[59] = "{"
        corpus.write_text("\n".join(lines))
        with pytest.raises(InputError, match=rf"^corpus={corpus}: line 60 is not JSON"):
            read(corpus, {})


def test_a_column_is_seen_if_a_row_has_it(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    for last, expected in (({}, set()), ({"count": None}, {"count"}), ({"count": 3}, {"count"})):
        corpus.write_text(f'{{"id": "a", "text": "b"}}\n{json.dumps({"id": "c", "text": "d", **last})}\n')
        seen: set[str] = set()
        deque = list(tables(Piece(corpus), {}, {"count": "integer"}, seen))
        assert sum(map(len, deque)) == 2
        assert seen == {"id", "text", *expected}


def test_small_files_are_read_together_and_other_formats_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b", "c"):
        with (tmp_path / f"{name}.csv").open("w", newline="") as stream:
            writer = csv.DictWriter(stream, ["id", "text"])
            writer.writeheader()
            writer.writerows({"id": f"{name}{n}", "text": "two\nlines"} for n in range(100))
    assert len(parts_of(tmp_path)) == 1
    monkeypatch.setattr(pieces, "PART_BYTES", 150)
    monkeypatch.setattr(pieces, "_FILE_BYTES", 1)
    assert parts_of(tmp_path) == [{n: Piece(tmp_path / f"{name}.csv")} for n, name in enumerate("abc")]
    assert len(read(tmp_path, {})) == 300
