from __future__ import annotations

import csv
import json
import random
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infembed_ray.config.retrieval import FieldType
from infembed_ray.errors import InputError
from infembed_ray.retrieval import corpus as corpus_module
from infembed_ray.retrieval.corpus import partition, sorted_passages, spool_file
from infembed_ray.retrieval.shards import shard_of

TYPES: dict[str, FieldType] = {"year": "integer", "lang": "string"}


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def rows_of(n: int) -> list[dict[str, Any]]:
    made = [{"id": f"p{i}", "text": f"text {i} " + "x" * (i % 300), "year": i, "lang": None} for i in range(n)]
    random.Random(0).shuffle(made)
    return made


def read(corpus: Path, shards: int, directory: Path, **settings: Any) -> list[list[dict[str, Any]]]:
    """The passages of each shard as they are written."""
    types = settings.setdefault("metadata", TYPES)
    sizes = partition(corpus, settings.pop("columns", {}), types, shards, directory / "spool")
    found = []
    for shard, size in enumerate(sizes):
        tables = list(sorted_passages([spool_file(directory / "spool", shard)], [corpus], types, rows_at_once=37))
        assert all(len(table) == 37 for table in tables[:-1])
        found.append([row for table in tables for row in table.to_pylist()])
        assert len(found[-1]) == size
    return found


@pytest.mark.parametrize("spool_bytes", [1, 20_000, 64 << 20])
def test_rows_in_any_order_are_sorted_by_id_in_their_shard(
    tmp_path: Path, spool_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_module, "SPOOL_BYTES", spool_bytes)
    rows = rows_of(500)
    shards = read(write_lines(tmp_path / "corpus.jsonl", rows), 3, tmp_path)
    for number, found in enumerate(shards):
        assert found == sorted((r for r in rows if shard_of(r["id"], 3) == number), key=lambda r: r["id"])


def test_jsonl_csv_and_parquet_give_the_same_passages(tmp_path: Path) -> None:
    rows = [{"id": f"p{i}", "passage": 'naïve, "é"\n日本', "jahr": i, "lang": "de"} for i in range(30)]
    write_lines(tmp_path / "a.jsonl", rows)
    pq.write_table(pa.Table.from_pylist(rows[:20]), tmp_path / "b.parquet")
    (tmp_path / "c").mkdir()
    for part in (0, 1):
        with (tmp_path / "c" / f"{part}.csv").open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, rows[0])
            writer.writeheader()
            writer.writerows(rows[part::2])
    columns = {"year": "jahr"}
    lines = read(tmp_path / "a.jsonl", 2, tmp_path, columns=columns)
    assert lines[0][0]["text"] == rows[0]["passage"]
    assert read(tmp_path / "c", 2, tmp_path, columns=columns) == lines
    parquet = read(tmp_path / "b.parquet", 1, tmp_path, columns=columns)[0]
    assert {row["id"] for row in parquet} == {f"p{i}" for i in range(20)}


def test_bad_rows_are_named_with_their_column(tmp_path: Path) -> None:
    good = {"id": "a", "text": "x", "year": 2020, "lang": "en"}

    def refuse(message: str, *rows: dict[str, Any], **settings: Any) -> None:
        corpus = write_lines(tmp_path / "corpus.jsonl", rows)
        with pytest.raises(InputError, match=message) as refusal:
            read(corpus, 2, tmp_path, **settings)
        assert "\n" not in str(refusal.value)

    refuse(r"corpus=\S+: row 2: column text is empty; fill it", good, {**good, "id": "b", "text": " "})
    refuse("row 2: column id is empty", good, {"text": "x"})
    refuse("row 2: column id is empty", good, {"id": float("nan"), "text": "x"})  # as json and pandas write it
    refuse(r"row 2: column text must be text, not \['x'\]; correct it", good, {**good, "id": "b", "text": ["x"]})
    refuse("row 1: column text must be text without lone surrogates", {**good, "text": "\ud800"})
    refuse(
        "row 2: column year must be a whole number of 64 bits, not 'soon'", good, {**good, "id": "b", "year": "soon"}
    )
    refuse("row 1: column y must be a date", {**good, "y": 5}, metadata={"d": "date"}, columns={"d": "y"})
    refuse("row 3: id a is a duplicate", good, {**good, "id": "b"}, good)
    refuse("no column text", {"id": "a", "body": "x"})
    refuse("empty, it has no rows")
    refuse(
        r"metadata.yaer: no row of corpus=\S+ has a column yaer: .*year.*set columns.yaer=",
        good,
        metadata={"yaer": "integer"},
    )
    refuse("columns.yeer: neither id, text nor a metadata column: .*year", good, columns={"yeer": "x"})
    for name in ("id", "text", "_op"):
        refuse(f"metadata.{name}: this name is reserved", good, metadata={name: "string"})


def test_values_and_columns_may_be_missing(tmp_path: Path) -> None:
    rows = [{"id": "a", "text": "x"}, {"id": "b", "text": "y", "year": 2020, "lang": None}]
    (found,) = read(write_lines(tmp_path / "corpus.jsonl", rows), 1, tmp_path)
    assert found == [{"id": "a", "text": "x", "year": None, "lang": None}, rows[1]]


MEASURE = """
import resource, sys
from pathlib import Path
from infembed_ray.retrieval import corpus
corpus.SPOOL_BYTES = 1 << 20
small, large, spool = map(Path, sys.argv[1:])
peaks = []
for file in (small, large):
    corpus.partition(file, {}, {}, 8, spool)
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
print(peaks[1] - peaks[0])
"""


@pytest.mark.integration
def test_reading_takes_no_more_memory_for_a_larger_corpus(tmp_path: Path) -> None:
    text = "word " * 120
    small = write_lines(tmp_path / "small.jsonl", ({"id": f"p{i}", "text": text} for i in range(5_000)))
    large = write_lines(tmp_path / "large.jsonl", ({"id": f"p{i}", "text": text} for i in range(40_000)))
    assert large.stat().st_size > 20 << 20
    command = [sys.executable, "-c", MEASURE, str(small), str(large), str(tmp_path / "spool")]
    grown = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    assert int(grown) < 12  # MiB
