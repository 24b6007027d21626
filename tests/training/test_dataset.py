import json
import time
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infembed_ray.errors import InputError
from infembed_ray.records.tables import Record, stream
from infembed_ray.storage.object_store import Folder
from infembed_ray.training.dataset import Dataset
from tests.training.test_collate import record

MANY = 2500  # more than two batches of the file


def varied(n):
    return Record(**vars(record(n)) | {"source": f"s{n % 3}", "topic": None if n % 2 else "t"})


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return Dataset.write(tmp_path_factory.mktemp("dataset") / "records.arrow", map(varied, range(MANY)))


def test_dataset_is_the_sequence_of_written_records(dataset):
    assert len(dataset) == MANY
    assert list(dataset) == [varied(n) for n in range(MANY)]
    for n in (0, 1023, 1024, MANY - 1):
        assert dataset[n] == varied(n)
    assert dataset[-1] == varied(MANY - 1)
    assert dataset[1022:1026:2] == [varied(1022), varied(1024)]
    with pytest.raises(IndexError):
        dataset[MANY]


def test_fingerprint_does_not_depend_on_the_input_format(dataset, tmp_path):
    rows = [vars(varied(n)) for n in range(MANY)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("a.parquet", "a.jsonl"):
        written = Dataset.write(tmp_path / f"{name}.arrow", stream(tmp_path / name, Record, "records"))
        assert written.fingerprint == dataset.fingerprint
    fewer = Dataset.write(tmp_path / "fewer.arrow", map(varied, range(MANY - 1)))
    assert fewer.fingerprint != dataset.fingerprint


def test_an_upload_of_the_same_records_leaves_the_object_alone(bucket, dataset):
    folder = Folder.open(f"{bucket}/{uuid4()}", "output")
    assert list(dataset.uploaded(folder)) == list(dataset)
    [before] = folder.entries().values()
    time.sleep(1.1)  # the server's times are in seconds
    dataset.uploaded(folder)
    assert list(folder.entries().values()) == [before]


def test_bad_records_leave_no_file(tmp_path):
    rows = [vars(varied(n)) for n in range(5)]
    rows[3]["query_negative"] = " "
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(
        InputError, match=r"records=.*a.jsonl: row 4: column query_negative is empty; correct it or drop"
    ):
        Dataset.write(tmp_path / "records.arrow", stream(tmp_path / "a.jsonl", Record, "records"))
    assert not (tmp_path / "records.arrow").exists()
