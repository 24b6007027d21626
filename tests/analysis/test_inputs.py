import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infembed_ray.analysis.inputs import read
from infembed_ray.errors import InputError
from infembed_ray.records import tables
from infembed_ray.storage.steps import resolve
from tests.analysis.samples import ROWS, Rows, publish, record


def test_a_synthesis_output_gives_kept_rejected_and_failed_rows(tmp_path):
    material = read(resolve(publish(tmp_path / "out")), "records")
    assert [r.id for r in material.kept] == ["a", "b", "c"]
    assert [r["id"] for r in material.rejected] == ["d", "e", "f"]
    assert [r["id"] for r in material.dead_letter] == ["g"]
    assert {kind: len(rows) for kind, rows in material.provenance.items()} == {
        "kept": 3,
        "rejected": 3,
        "dead_letter": 1,
    }
    assert material.manifest["counts"]["seeds"] == 7


def test_an_output_that_kept_nothing_can_be_read(tmp_path):
    material = read(resolve(publish(tmp_path / "out", Rows([], ROWS.rejected, ROWS.dead_letter))), "records")
    assert material.kept == []
    assert len(material.rejected) == 3


def test_a_file_of_records_has_no_rejected_rows_and_no_manifest(tmp_path):
    file = tmp_path / "records.jsonl"
    file.write_text(json.dumps(vars(record("a"))))
    material = read(file, "records")
    assert [r.id for r in material.kept] == ["a"]
    assert (material.rejected, material.dead_letter, dict(material.manifest)) == ([], [], {})
    assert set(map(len, material.provenance.values())) == {0}


def test_only_the_provenance_that_synthesis_writes_is_read(tmp_path):
    file = tmp_path / "some.parquet"
    tables.write(file, tables.RECORD, ROWS.kept)
    assert len(read(file, "records").provenance["kept"]) == 3
    pq.write_table(pa.Table.from_pylist([vars(record("a")) | {"provenance": "by hand"}]), file)
    assert read(file, "records").provenance["kept"] == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"id": "a", "query_positive": "q"}', "no column instruction_positive, instruction_negative, "),
        ("", "has no rows"),
    ],
)
def test_bad_records_are_refused(tmp_path, content, message):
    file = tmp_path / "records.jsonl"
    file.write_text(content)
    with pytest.raises(InputError, match=message):
        read(file, "records")
