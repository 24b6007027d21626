import csv
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infembed_ray.config.retrieval import FieldType, IndexSettings
from infembed_ray.errors import InputError
from infembed_ray.records.files import BadRows
from infembed_ray.retrieval import corpus as module
from infembed_ray.retrieval.corpus import count_passages, parts_of, require_columns, require_passages, rows
from tests.support.files import write_jsonl

TYPES: dict[str, FieldType] = {"year": "integer", "lang": "string"}


def read(corpus: Path, columns: dict[str, str] | None = None, metadata: dict[str, FieldType] = TYPES) -> list[Any]:
    """All rows, checked as a build checks them."""
    columns, seen, bad = columns or {}, set[str](), BadRows("corpus")
    require_columns(columns, metadata)
    every = [row for part in parts_of(corpus) for file in part for row in rows(file, columns, metadata, seen, bad)]
    bad.check()
    require_passages(corpus, len(every), columns, metadata, seen)
    return every


def test_jsonl_csv_and_parquet_give_the_same_passages(tmp_path: Path) -> None:
    made = [{"id": f"p{i}", "passage": 'naïve, "é"\n日本', "jahr": i, "lang": "de"} for i in range(30)]
    expected = [[row["id"], row["passage"], row["jahr"], "de"] for row in made]
    write_jsonl(tmp_path / "a.jsonl", made)
    pq.write_table(pa.Table.from_pylist(made), tmp_path / "b.parquet", row_group_size=7)
    (tmp_path / "c").mkdir()
    for part in (0, 1):
        with (tmp_path / "c" / f"{part}.csv").open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, made[0])
            writer.writeheader()
            writer.writerows(made[15 * part : 15 * part + 15])
    for corpus in ("a.jsonl", "b.parquet", "c"):
        assert read(tmp_path / corpus, {"year": "jahr"}) == expected
        given = {"corpus": corpus, "model": "m", "output": "o", "columns": {"year": "jahr"}, "metadata": TYPES}
        assert count_passages(IndexSettings.from_mapping(given), tmp_path / corpus) == 30


GOOD = {"id": "a", "text": "x", "year": 2020, "lang": "en"}


@pytest.mark.parametrize(
    ("number", "column", "made"),
    [
        (2, "text", [GOOD, {**GOOD, "id": "b", "text": " "}]),
        (2, "id", [GOOD, {"text": "x"}]),
        (2, "id", [GOOD, {"id": float("nan"), "text": "x"}]),  # as json and pandas write it
        (2, "text", [GOOD, {**GOOD, "id": "b", "text": ["x"]}]),
        (2, "year", [GOOD, {**GOOD, "id": "b", "year": "soon"}]),
        (1, "year", [{**GOOD, "year": True}]),
    ],
)
def test_a_bad_row_is_named_with_its_column(
    tmp_path: Path, number: int, column: str, made: Iterable[dict[str, Any]]
) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps(row) + "\n" for row in made))
    with pytest.raises(InputError) as refusal:
        read(corpus)
    (fault,) = refusal.value.faults
    assert (fault.setting, fault.value) == ("corpus", corpus)
    assert fault.fault.startswith((f"row {number}: column {column} must be", f"row {number}: column {column} is empty"))
    assert "\n" not in str(fault)


@pytest.mark.parametrize(
    ("setting", "columns", "metadata"),
    [
        ("metadata.yaer", {}, {"yaer": "integer"}),
        ("columns.yeer", {"yeer": "x"}, TYPES),
        ("metadata.id", {}, {"id": "string"}),
        ("metadata.text", {}, {"text": "string"}),
        ("metadata._op", {}, {"_op": "string"}),
    ],
)
def test_an_impossible_column_is_refused(
    tmp_path: Path, setting: str, columns: dict[str, str], metadata: dict[str, FieldType]
) -> None:
    corpus = write_jsonl(tmp_path / "corpus.jsonl", [GOOD])
    with pytest.raises(InputError) as refusal:
        read(corpus, columns, metadata)
    assert [fault.setting for fault in refusal.value.faults] == [setting]


def test_values_and_columns_may_be_missing(tmp_path: Path) -> None:
    made = [{"id": "a", "text": "x"}, {"id": "b", "text": "y", "year": 2020, "lang": None}]
    assert read(write_jsonl(tmp_path / "corpus.jsonl", made)) == [["a", "x", None, None], ["b", "y", 2020, None]]
    for made in ([], [{"id": "a", "body": "x"}]):
        with pytest.raises(InputError, match=r"no rows|no column text"):
            read(write_jsonl(tmp_path / "corpus.jsonl", made))


def test_a_small_corpus_is_one_part_and_a_large_one_at_most_so_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [write_jsonl(tmp_path / f"{n}.jsonl", [{"id": f"p{n}", "text": "x" * 80}]) for n in range(100)]
    assert parts_of(tmp_path) == [sorted(files)]
    monkeypatch.setattr(module, "PART_BYTES", 200)
    for most, parts in ((8, 8), (1000, 100)):
        monkeypatch.setattr(module, "PARTS", most)
        divided = parts_of(tmp_path)
        assert len(divided) == parts
        assert sorted(file for part in divided for file in part) == sorted(files)
