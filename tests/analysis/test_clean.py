"""`clean=true`: which records go, and what is written."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infembed_ray.analysis.analyze import run
from infembed_ray.analysis.clean import Removal, removals
from infembed_ray.analysis.figures import read
from infembed_ray.config.analysis import AnalyzeSettings
from infembed_ray.errors import InputError
from infembed_ray.records import tables
from tests.analysis.samples import Rows, kept, publish, record
from tests.support.files import write_jsonl

ALIKE = {"instruction_positive": "alike", "query_positive": "alike", "document_positive": "alike"}


def test_contaminated_records_go_first_and_stay_for_no_other():
    rows = [record("a", **ALIKE), record("b"), record("c", **ALIKE), record("d", **ALIKE)]
    assert removals(rows, {}) == {2: Removal("near-duplicate", "a"), 3: Removal("near-duplicate", "a")}
    contaminated = {"dev": {0: "these words"}, "other": {0: "others", 1: "more"}}
    assert removals(rows, contaminated) == {
        0: Removal("contaminated by dev", "these words"),
        1: Removal("contaminated by other", "more"),
        3: Removal("near-duplicate", "c"),
    }


def test_near_duplicates_are_compared_by_their_three_positive_texts():
    rows = [record("a", **ALIKE), record("b", **{**ALIKE, "document_positive": "something else"})]
    assert removals(rows, {}) == {}


def test_the_records_that_stay_keep_their_order_and_provenance(tmp_path, capsys):
    rows = [kept("a", **ALIKE), kept("b"), kept("c", **ALIKE), kept("d")]
    source = publish(tmp_path / "synthesis", Rows(kept=rows, rejected=[], dead_letter=[]))
    dev = write_jsonl(tmp_path / "dev.jsonl", [{"text": "Answer of D!"}])
    settings = AnalyzeSettings(
        records=str(source), output=str(tmp_path / "clean"), clean=True, evaluations={"dev": str(dev)}
    )
    published = run(settings)
    counts = {"kept": 2, "rejected": 0, "dead_letter": 0, "contaminated by dev": 1, "near-duplicate": 1}
    assert published.manifest["counts"] == counts
    expected = pa.Table.from_pylist(rows[:2], tables.RECORD).to_pylist()
    assert pq.read_table(published.path / "records.parquet").to_pylist() == expected
    assert len(read(published.path, "records").provenance["kept"]) == 2
    removed = pq.read_table(published.path / "removed.parquet").to_pylist()
    assert [(row["id"], row["reason"], row["detail"]) for row in removed] == [
        ("c", "near-duplicate", "a"),
        ("d", "contaminated by dev", "answer of d"),
    ]
    report = json.loads((published.path / "report.json").read_text())
    assert report["removed"] == {"contaminated by dev": 1, "near-duplicate": 1}
    assert "1  records removed: near-duplicate" in capsys.readouterr().out


def test_nothing_left_is_refused(tmp_path):
    source = publish(tmp_path / "synthesis")
    everything = write_jsonl(tmp_path / "eval.jsonl", [{"text": f"Query of {name}"} for name in "abc"])
    settings = AnalyzeSettings(
        records=str(source), output=str(tmp_path / "none"), clean=True, evaluations={"e": str(everything)}
    )
    with pytest.raises(InputError) as error:
        run(settings)
    assert error.value.faults[0].setting == "clean"
