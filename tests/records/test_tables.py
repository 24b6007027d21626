import csv
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infembed_ray.errors import InputError
from infembed_ray.records import tables
from infembed_ray.records.tables import Passage, Record, Seed
from infembed_ray.storage.object_store import Folder
from infembed_ray.storage.steps import find_input, fingerprint
from tests.support.files import write_jsonl

SEED = {"id": "1", "query": "q", "passage": "p"}


def published_record(**changes):
    """A row of the published InF-IR set: no id, no source."""
    names = ("query_positive", "instruction_positive", "instruction_negative", "query_negative", "document_positive")
    row = {n: n for n in (*names, "hard_negative_document_1", "hard_negative_document_2")}
    return {**row, **changes}


def test_the_published_data_set_is_read_unchanged(tmp_path):
    older = {("document" if k == "document_positive" else k): v for k, v in published_record().items()}
    for row in (published_record(), older):
        got = tables.read(write_jsonl(tmp_path / "r.jsonl", [row, row]), Record, "records")
        assert [r.id for r in got] == ["row-1", "row-2"]
        assert got[0].document_positive == "document_positive"


def test_columns_are_mapped(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"pid": 7, "body": "text"}])
    assert tables.read(path, Passage, "corpus", {"id": "pid", "text": "body"}) == [Passage("7", "text")]


def test_an_unknown_column_is_rejected_with_the_nearest_one(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [SEED])
    with pytest.raises(InputError, match=r"columns.pasage: unknown column of a seed: did you mean passage\?"):
        tables.read(path, Seed, "seeds", {"pasage": "p"})


def test_a_split_is_selected_and_an_empty_one_is_rejected(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{**SEED, "split": "train"}, {**SEED, "id": "2", "split": "test"}])
    assert [s.id for s in tables.read(path, Seed, "seeds", split="test")] == ["2"]
    with pytest.raises(InputError, match="no row has split=dev"):
        tables.read(path, Seed, "seeds", split="dev")


def test_a_directory_of_shards_is_one_data_set_with_splits_from_file_names(tmp_path):
    parts = {"train-00000-of-00002": (0, 2), "train-00001-of-00002": (2, 3), "dev-00000-of-00001": (3, 4)}
    for name, (first, end) in parts.items():  # as on the hub
        table = pa.Table.from_pylist([published_record(query_positive=f"q{n}") for n in range(first, end)])
        pq.write_table(table, tmp_path / f"{name}.parquet")
    (tmp_path / "dataset_info.json").write_text('{"splits": {}}')
    everything = tables.read(tmp_path / "*.parquet", Record, "records")
    assert [(r.id, r.query_positive, r.split) for r in everything] == [
        ("row-1", "q3", "dev"),
        ("row-2", "q0", "train"),
        ("row-3", "q1", "train"),
        ("row-4", "q2", "train"),
    ]
    assert [r.query_positive for r in tables.read(tmp_path, Record, "records", split="train")] == ["q0", "q1", "q2"]
    with pytest.raises(InputError, match=r"records=.*: no file of split=test, but of dev, train"):
        tables.read(tmp_path, Record, "records", split="test")


def test_an_output_of_another_stage_is_rejected(tmp_path):
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(InputError, match=r"no records.parquet in this published output"):
        tables.read(tmp_path, Record, "records")


@given(st.lists(st.text(min_size=1).filter(str.strip), min_size=1, max_size=5))
def test_written_records_read_back_equal(tmp_path_factory, texts):
    path = tmp_path_factory.mktemp("r") / "records.parquet"
    rows = [Record(id=str(n), **published_record(query_positive=t)) for n, t in enumerate(texts)]
    tables.write(path, tables.RECORD, [vars(r) for r in rows])
    assert tables.read(path, Record, "records") == rows
    assert tables.read(path.parent, Record, "records") == rows


def test_records_in_an_object_store_are_streamed_like_local_ones(bucket, tmp_path):
    rows = [published_record(id=str(number), query_positive="é" * 2000) for number in range(3000)]
    write_jsonl(tmp_path / "a.jsonl", rows)
    (tmp_path / "a.json").write_text(json.dumps(rows))
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=1000)
    for suffix, writer in ((".arrow", pa.ipc.new_file), (".stream.arrow", pa.ipc.new_stream)):
        with writer(tmp_path / f"a{suffix}", table.schema) as sink:
            sink.write_table(table)
    for suffix, delimiter in ((".csv", ","), (".tsv", "\t")):
        with (tmp_path / f"a{suffix}").open("w", newline="") as stream:
            lines = csv.DictWriter(stream, list(rows[0]), delimiter=delimiter)
            lines.writeheader()
            lines.writerows(rows)
    folder = Folder.open(f"{bucket}/{tmp_path.name}", "records")
    files = sorted(tmp_path.iterdir())
    assert len(files) == 7
    for file in files:
        folder.upload(file, f"files/{file.name}")
        assert tables.read(folder / "files" / file.name, Record, "records") == tables.read(file, Record, "records")


def test_a_folder_of_shards_in_an_object_store_is_one_data_set(bucket, tmp_path):
    folder = Folder.open(f"{bucket}/{tmp_path.name}", "records")
    for split in ("train", "test"):
        write_jsonl(tmp_path / "rows", [published_record(id=split)])
        folder.upload(tmp_path / "rows", f"data/{split}-00000-of-00001.jsonl")
    folder.upload(tmp_path / "rows", ".hidden/x.jsonl")
    with pytest.raises(InputError, match=r"has the splits test, train; .*records=s3://.*/data/test-\*"):
        tables.read(folder, Record, "records")
    assert [
        row.id
        for row in tables.read(find_input(f"{bucket}/{tmp_path.name}/data/*.jsonl", "records"), Record, "records")
    ] == ["test", "train"]
    assert fingerprint(find_input(f"{bucket}/{tmp_path.name}/data/t*.jsonl", "records")) != fingerprint(folder)
    assert [row.split for row in tables.read(folder, Record, "records", split="train")] == ["train"]
    with pytest.raises(InputError, match=r"records=s3://.*: no file of split=dev, but of test, train"):
        tables.read(folder, Record, "records", split="dev")


def test_faults_of_a_file_in_an_object_store_are_told_apart(bucket, tmp_path):
    folder = Folder.open(f"{bucket}/{tmp_path.name}", "records")
    folder.write("a.parquet", "not Parquet")
    with pytest.raises(InputError, match=r"records=s3://.*/a.parquet: not readable as Parquet"):
        tables.read(folder / "a.parquet", Record, "records")
    with pytest.raises(InputError, match=r"records=s3://.*/gone.jsonl: the object store failed"):
        list(tables.raw_rows(folder / "gone.jsonl", "records"))


def test_row_groups_are_bounded(tmp_path):
    tables.write(
        tmp_path / "p.parquet",
        pa.schema([("id", pa.string()), ("text", pa.string())]),
        [{"id": str(n), "text": "t"} for n in range(25_000)],
    )
    metadata = pq.read_metadata(tmp_path / "p.parquet")
    assert [metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)] == [10_000, 10_000, 5_000]
