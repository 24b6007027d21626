"""`infembed clean` on a Ray cluster."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infembed_ray.analysis import distributed
from infembed_ray.analysis.distributed import run
from infembed_ray.analysis.inputs import read
from infembed_ray.config.analysis import CleanSettings
from infembed_ray.errors import InputError
from infembed_ray.records import tables
from infembed_ray.records.tables import Record, stream
from tests.analysis.samples import Rows, kept, publish, record
from tests.analysis.test_cleaning import by_brute_force, some_texts
from tests.support.files import write_jsonl


def rows_of(texts):
    """Records whose compared texts are these and nothing else that repeats."""
    return [
        vars(record(f"r{n}", instruction_positive=f"a{n}", query_positive=f"b{n}", document_positive=text))
        for n, text in enumerate(texts)
    ]


@pytest.mark.slow
def test_partitions_of_any_number_give_what_a_comparison_of_all_pairs_gives(ray_cluster, tmp_path, monkeypatch, capsys):
    texts = some_texts(4)
    rows = rows_of(texts)
    expected = by_brute_force([f"a{n} b{n} {text}" for n, text in enumerate(texts)])
    shared = " ".join(texts[5].split()[:13])
    dev = write_jsonl(
        tmp_path / "dev.jsonl", [{"id": "d", "text": f"before {shared} after"}, {"id": "e", "text": "a7"}]
    )
    file = write_jsonl(tmp_path / "records.jsonl", rows)
    outputs = []
    for number, (per_block, per_partition) in enumerate([(2048, 1 << 16), (37, 50)]):
        monkeypatch.setattr(distributed, "ROWS_PER_BLOCK", per_block)
        monkeypatch.setattr(distributed, "ROWS_PER_PARTITION", per_partition)
        monkeypatch.setattr(distributed, "PAIRS_PER_PARTITION", per_partition)
        monkeypatch.setattr(distributed, "GRAMS_AT_ONCE", per_partition)
        settings = CleanSettings(
            records=str(file), output=str(tmp_path / f"out{number}"), evaluations={"dev": str(dev)}
        )
        published = run(settings)
        removed = pq.read_table(published.path / "removed.parquet").to_pylist()
        outputs.append([(row["id"], row["reason"], row["detail"]) for row in removed])
        ids = [row.id for row in stream(published.path, Record, "records")]
        assert ids == [row["id"] for row in rows if row["id"] not in {id for id, *_ in outputs[-1]}]
        assert sum(published.manifest["counts"].values()) == len(rows)
    assert outputs[0] == outputs[1]
    contaminated = {id: detail for id, reason, detail in outputs[0] if reason == "contaminated by dev"}
    assert contaminated["r7"] == "a7"
    assert contaminated["r5"] == shared
    without = {n for n in range(len(texts)) if f"r{n}" not in contaminated}
    assert without.issuperset(range(20, 300))
    late = {(f"r{n}", f"r{first}") for n, first in expected.items() if first >= 20}
    assert {
        (id, detail) for id, reason, detail in outputs[0] if reason == "near-duplicate" and int(id[1:]) >= 20
    } >= late
    assert "records kept" in capsys.readouterr().out


@pytest.mark.slow
def test_kept_records_of_a_synthesis_keep_their_provenance_and_nothing_left_is_refused(ray_cluster, tmp_path):
    same = {"instruction_positive": "alike", "query_positive": "alike", "document_positive": "alike"}
    rows = [kept("a", **same), kept("b"), kept("c", **same)]
    source = publish(tmp_path / "synthesis", Rows(kept=rows, rejected=[], dead_letter=[]))
    published = run(CleanSettings(records=str(source), output=str(tmp_path / "clean")))
    assert published.manifest["counts"] == {"kept": 2, "near-duplicate": 1}
    expected = pa.Table.from_pylist(rows[:2], tables.RECORD).to_pylist()
    assert pq.read_table(published.path / "records.parquet").to_pylist() == expected
    assert len(read(published.path, "records").provenance["kept"]) == 2
    everything = write_jsonl(
        tmp_path / "eval.jsonl", [{"text": json.loads(json.dumps(row["query_positive"]))} for row in rows]
    )
    with pytest.raises(InputError, match=r"records=.*: no record would be left"):
        run(CleanSettings(records=str(source), output=str(tmp_path / "none"), evaluations={"e": str(everything)}))
