import bz2
import csv
import datetime
import gzip
import io
import json
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from datasets import Dataset, DatasetDict, load_from_disk
from hypothesis import given
from hypothesis import strategies as st

from infembed_ray.errors import InputError
from infembed_ray.records import tables, tuples
from infembed_ray.records.files import BAD_ROWS_FILE, BadRows, data_files, raw_rows, write_bad_rows
from infembed_ray.records.tables import Passage, Record, Seed
from tests.support.files import write_jsonl

COMPRESS = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".zst": zstandard.compress}
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
LINES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\t\n\r"))


def delimited(rows, delimiter):
    """Rows as CSV, or as TSV without quoting."""
    stream = io.StringIO(newline="")
    lines = csv.writer(stream) if delimiter == "," else None
    for cells in [list(rows[0]), *(list(row.values()) for row in rows)]:
        lines.writerow(cells) if lines else stream.write("\t".join(cells) + "\n")
    return stream.getvalue().encode()


def arrow(rows, new=pa.ipc.new_file, kind=None):
    sink = pa.BufferOutputStream()
    table = pa.Table.from_pylist(rows)
    table = table.cast(pa.schema([(name, kind) for name in table.column_names])) if kind else table
    with new(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def parquet(rows, kind=None):
    sink = pa.BufferOutputStream()
    table = pa.Table.from_pylist(rows)
    pq.write_table(table.cast(pa.schema([(name, kind) for name in table.column_names])) if kind else table, sink)
    return sink.getvalue().to_pybytes()


FORMS = {
    ".jsonl": lambda rows: "".join(json.dumps(row) + "\n" for row in rows).encode(),
    ".ndjson": lambda rows: (
        "\ufeff".encode() + "\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode()
    ),
    ".json": lambda rows: json.dumps(rows, indent=1).encode(),
    ".csv": lambda rows: delimited(rows, ","),
    ".CSV": lambda rows: "\ufeff".encode() + delimited(rows, ","),
    ".tsv": lambda rows: delimited(rows, "\t"),
    ".parquet": parquet,
    ".Parquet": lambda rows: parquet(rows, pa.large_string()),
    ".feather": lambda rows: arrow(rows, kind=pa.dictionary(pa.int32(), pa.string())),
    ".arrow": lambda rows: arrow(rows, pa.ipc.new_stream),
}


@given(
    texts=st.lists(TEXT.filter(str.strip), min_size=1, max_size=4), lines=LINES, codec=st.sampled_from(list(COMPRESS))
)
def test_any_text_comes_back_from_every_format(tmp_path_factory, texts, lines, codec):
    directory = tmp_path_factory.mktemp("forms")
    for suffix, write in FORMS.items():
        some = [lines + "x"] if suffix == ".tsv" else texts
        rows = [{"id": str(n), "query": text, "passage": text} for n, text in enumerate(some)]
        file = directory / f"a{suffix}{codec.upper() if suffix.isupper() else codec}"
        file.write_bytes(COMPRESS[codec](write(rows)))
        assert [seed.query for seed in tables.stream(file, Seed, "seeds")] == some, suffix


@given(st.text(st.characters(categories=["Cs", "L"]), min_size=1, max_size=6))
def test_lone_surrogates_are_replaced_in_every_reader(tmp_path_factory, text):
    directory = tmp_path_factory.mktemp("surrogates")
    whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    row = {
        "id": "1",
        "query": "q" + text,
        "passage": "p" + text,
        "text": "t" + text,
        "positive": [{"text": "x" + text}],
    }
    for suffix in (".jsonl", ".json"):
        file = directory / f"a{suffix}"
        file.write_bytes(FORMS[suffix]([row]))
        assert tables.read(file, Seed, "seeds") == [Seed("1", "q" + whole, "p" + whole)]
        assert tables.read(file, Passage, "corpus", {"text": "text"})[0].text == ("t" + whole).strip()
        assert next(tuples.stream(file, "records")).positives == ("x" + whole,)


NESTED = {"id": "1", "text": {"title": "T", "text": "b"}}


@pytest.mark.parametrize(
    ("row", "passage"),
    [
        ({"id": "1", "text": "b"}, Passage("1", "b")),
        ({"_id": 1, "text": " b\n"}, Passage("1", "b")),
        ({"id": 7.0, "text": "b", "title": "T"}, Passage("7", "T b")),
        ({"id": "1", "passage": "b", "title": None}, Passage("1", "b")),
        ({"id": "1", "text": None, "title": "T"}, Passage("1", "T")),
        ({"id": "1", "text": float("nan"), "title": "T"}, Passage("1", "T")),
        ({"id": "1", "text": "b", "title": ""}, Passage("1", "b")),
        (NESTED, Passage("1", "T b")),
        ({"id": 2**60, "text": 3}, Passage(str(2**60), "3")),
    ],
)
def test_documents_are_read_by_one_rule(tmp_path, row, passage):
    for suffix in (".jsonl", ".parquet"):
        file = tmp_path / f"a{suffix}"
        file.write_bytes(FORMS[suffix]([row]))
        assert tables.read(file, Passage, "corpus") == [passage]


def test_decimal_ids_are_digits_and_no_other_value_is_text(tmp_path):
    pq.write_table(pa.table({"id": [Decimal("7.00")], "text": ["b"]}), tmp_path / "a.parquet")
    assert tables.read(tmp_path / "a.parquet", Passage, "corpus") == [Passage("7", "b")]
    for value in ([1], {"a": 1}, b"b", True, datetime.date(2020, 1, 1), float("inf")):
        pq.write_table(pa.table({"id": ["1"], "text": [value]}), tmp_path / "a.parquet")
        with pytest.raises(InputError, match=r"corpus=.*a.parquet: row 1: column text must be one text, or null, not "):
            tables.read(tmp_path / "a.parquet", Passage, "corpus")


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        (
            "a.jsonl",
            b'{"id": 1, "text": "x"}\n{oops\n[1]\n{"id": 1, "text": "y"}\n',
            ["row 2: is not JSON", "row 3: is not a JSON object", "row 4: duplicate id 1", "3 bad rows"],
        ),
        (
            "a.csv",
            b"id,text\n1\n2,\n3,a,b\n",
            ["row 1: has 1 fields, the header has 2", "row 2: column text is empty", "row 3: has 3 fields"],
        ),
        ("a.csv", b"id,text,text\n1,a,b\n", ["two columns have the name 'text'"]),
        ("a.tsv", b"id\ttext\ttext\n", ["two columns have the name 'text'"]),
        ("a.jsonl", b'{"id": 1, "body": "x"}\n', [r"no column text \(found: id, body\); set columns.text="]),
        ("a.csv", b"id,text\n1,\xc3\xa9\n2,\xff\n", ["a.csv: line 3 is not UTF-8"]),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"id": 1, "text": "x"}\n' * 999)[:-9],
            ["a.jsonl.gz: not readable as JSON Lines"],
        ),
        ("a.parquet", b"PAR1", ["not readable as Parquet"]),
        ("a.arrow", arrow([{"id": "1", "text": "x"}])[:-20], ["not readable as Arrow"]),
        ("a.jsonl", b"", ["has no rows"]),
        ("a.txt", b"x", ["unknown format .txt; give .parquet"]),
    ],
)
def test_faults_name_the_file_and_every_row(tmp_path, name, content, told):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=".*".join(told)) as error:
        tables.read(tmp_path / name, Passage, "corpus")
    assert all(fault.setting in ("corpus", "") for fault in error.value.faults)


def test_bad_rows_are_counted_beyond_twenty_or_left_out_and_written(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [{"id": str(n), "text": "x" if n % 2 else ["x"]} for n in range(100)])
    with pytest.raises(InputError, match="50 bad rows, of which 20 are listed") as error:
        tables.read(file, Passage, "corpus")
    assert len(error.value.faults) == 21
    bad = BadRows("corpus", reject=True)
    assert len(list(tables.stream(file, Passage, "corpus", bad=bad))) == 50
    write_bad_rows(tmp_path, bad)
    left_out = list(raw_rows(tmp_path / BAD_ROWS_FILE, "corpus"))
    assert len(left_out) == 50
    assert left_out[0] | {"fault": ""} == {
        "file": str(file),
        "where": "row 1",
        "fault": "",
        "row": {"id": "0", "text": ["x"]},
    }


def test_a_time_that_python_cannot_hold_is_named(tmp_path):
    column = pa.array([10**17], pa.timestamp("ms"))
    pq.write_table(pa.table({"id": ["1"], "text": ["x"], "at": column}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"corpus=.*a.parquet: not readable as Parquet"):
        tables.read(tmp_path / "a.parquet", Passage, "corpus")


def test_a_tsv_has_no_quoting(tmp_path):
    (tmp_path / "a.tsv").write_text('id\ttext\n1\tthe 5" pipe\n2\t"a" b\n3\t"c\n')
    assert [p.text for p in tables.read(tmp_path / "a.tsv", Passage, "corpus")] == ['the 5" pipe', '"a" b', '"c']


@pytest.mark.parametrize("others", [("b.csv",), ("b.parquet", "c.csv"), ("b.JSON",), ("sub/b.tsv.gz",), ("b.arrow",)])
def test_a_directory_of_two_formats_is_refused_and_a_glob_chooses(tmp_path, others):
    write_jsonl(tmp_path / "a.jsonl", [{"id": "1", "text": "x"}])
    write_jsonl(tmp_path / "a2.ndjson", [{"id": "2", "text": "x"}])
    (tmp_path / "dataset_infos.json").write_text("{}")
    assert len(tables.read(tmp_path, Passage, "corpus")) == 2
    for other in others:
        (tmp_path / other).parent.mkdir(exist_ok=True)
        (tmp_path / other).touch()
    with pytest.raises(
        InputError, match=r"several formats, .* and .*JSON Lines \(a.jsonl\)|JSON Lines \(a.jsonl\) and"
    ):
        data_files(tmp_path, "corpus")
    assert [p.id for p in tables.read(tmp_path / "a*.*j*", Passage, "corpus")] == ["1", "2"]
    with pytest.raises(InputError, match="no data files"):
        data_files(tmp_path / "*.nothing", "corpus")
    for other in ("more.jsonl.xz", "more.XLSX"):
        (tmp_path / other).touch()
        with pytest.raises(InputError, match=f"corpus=.*: {other} has a format that cannot be read"):
            data_files(tmp_path, "corpus")
        (tmp_path / other).unlink()


def test_a_saved_data_set_is_read_and_its_splits_are_chosen(tmp_path):
    rows = Dataset.from_list([{"id": "1", "query": "q", "passage": "p"}])
    rows.save_to_disk(tmp_path / "one")
    assert tables.read(tmp_path / "one", Seed, "seeds") == [Seed("1", "q", "p")]
    load_from_disk(tmp_path / "one").map(lambda row: {"query": f"cached {row['query']}"})
    assert any(file.name.startswith("cache-") for file in (tmp_path / "one").iterdir())
    assert len(tables.read(tmp_path / "one", Seed, "seeds")) == 1
    DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "two")
    with pytest.raises(InputError, match=r"has the splits test, train; set split=test .*seeds=.*/two/test"):
        tables.read(tmp_path / "two", Seed, "seeds")
    assert tables.read(tmp_path / "two", Seed, "seeds", split="train") == [Seed("1", "q", "p", split="train")]
    assert tables.read(tmp_path / "two" / "test", Seed, "seeds")[0].split == "test"
    with pytest.raises(InputError, match="duplicate id 1"):  # a glob takes all
        tables.read(tmp_path / "two" / "*" / "*.arrow", Seed, "seeds")
    columns = {"positives": "passage"}
    assert [e.split for e in tuples.stream(tmp_path / "two", "records", columns, "test")] == ["test"]


def test_a_row_of_json_may_lack_columns_that_later_rows_have(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [{"id": "1", "title": "T"}, {"id": "2", "text": "x"}])
    assert tables.read(file, Passage, "corpus") == [Passage("1", "T"), Passage("2", "x")]
    write_jsonl(file, [{"id": str(n), "title": "T", "body": "b"} for n in range(1500)])
    with pytest.raises(InputError, match=r"no column text \(found: id, title, body\)"):
        tables.read(file, Passage, "corpus")


def test_records_without_an_id_in_some_rows_get_one(tmp_path):
    names = [f for f in tables.RECORD.names if f.split("_")[0] in ("query", "instruction", "document", "hard")]
    row = {name: name for name in names}
    file = write_jsonl(tmp_path / "a.jsonl", [row | {"id": "a"}, row | {"id": None}, row])
    assert [record.id for record in tables.read(file, Record, "records")] == ["a", "row-2", "row-3"]
