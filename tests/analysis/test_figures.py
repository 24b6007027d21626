"""Records are read with their rejected rows; funnel, verdicts, lengths and cost are counted by hand."""

import json
import statistics
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infembed_ray.analysis.figures import cost, funnel, lengths, read, verdicts
from infembed_ray.errors import InputError
from infembed_ray.records import tables
from tests.analysis.samples import ROWS, Rows, kept, output, record


def test_the_funnel_counts_every_seed(tmp_path):
    counts = funnel(output(tmp_path))
    assert [counts[name] for name in ("seeds", "kept", "rejected", "dead_letter", "unaccounted")] == [7, 3, 3, 1, 0]
    assert counts["rejections"] == [
        {"step": "judge_positive", "why": "the judge picked none", "rows": 2},
        {"step": "query_negative", "why": "equal to the positive it should poison", "rows": 1},
    ]
    assert counts["errors"] == [{"step": "instruction_positive", "why": "refused: <b>no</b>", "rows": 1}]
    assert (counts["complements"], counts["complement_faults"]) == (0, [])
    assert funnel(output(tmp_path / "damaged", seeds=9))["unaccounted"] == 2


def test_each_step_passes_on_the_rows_that_it_does_not_lose(tmp_path):
    flow = funnel(output(tmp_path))["steps"]
    numbers = {
        flow[n]["step"]: [flow[n][k] for k in ("reached", "rejected", "dead_letter", "passed")] for n in (0, 2, -1)
    }
    assert numbers == {
        "instruction_positive": [7, 0, 1, 6],
        "query_negative": [6, 1, 0, 5],
        "judge_positive": [5, 2, 0, 3],
    }
    assert [one["passed"] for one in flow[:-1]] == [other["reached"] for other in flow[1:]]


def test_verdicts_are_counted_by_scenario_over_kept_and_rejected_rows(tmp_path):
    assert verdicts(output(tmp_path)) == [
        {"scenario": "positive", "judged": 5, "right": 3, "picks": {"positive": 3, "none": 2}},
        {"scenario": "negative_instruction", "judged": 3, "right": 3, "picks": {"negative_instruction": 3}},
        {"scenario": "negative_query", "judged": 5, "right": 5, "picks": {"negative_query": 5}},
    ]


def test_complements_are_counted_with_the_reasons_of_rejections(tmp_path):
    faults = ["the judge picked none", None, "the judge picked none", None, None, "fewer than 3 words"]
    rows = replace(ROWS, complements=tuple({"id": f"r{n}", "fault": fault} for n, fault in enumerate(faults)))
    counts = funnel(output(tmp_path, rows))
    assert (counts["complements"], counts["complements_fit"]) == (6, 3)
    assert [loss["rows"] for loss in counts["complement_faults"]] == [2, 1]


def test_lengths_are_white_space_separated_words_by_kind():
    queries = [" ".join(["word"] * n) for n in (1, 2, 3, 4, 10)]
    rows = [record(f"r{n}", query_positive=q, query_negative="two\n words ") for n, q in enumerate(queries)]
    measured = {n["kind"]: n for n in lengths(rows)}
    words = [1, 2, 3, 4, 10, *[2] * 5]
    query = measured["query"]
    assert (query["mean"], query["p50"]) == (statistics.fmean(words), statistics.median(words))
    # numpy's default, between the order statistics
    assert (query["p5"], query["p95"]) == (pytest.approx(1.45), pytest.approx(7.3))
    assert {kind: n["paper_mean"] for kind, n in measured.items()} == {
        "instruction": 35.57, "query": 8.06, "passage": 55.2
    }  # fmt: skip
    assert lengths([]) == []


def test_the_cost_per_kept_record_includes_lost_rows(tmp_path):
    spent = cost(output(tmp_path))
    assert [spent["total"][name] for name in ("rows", "prompt_tokens", "completion_tokens")] == [7, 7000, 600]
    assert [spent[name]["usd"] for name in ("kept", "rejected", "dead_letter")] == pytest.approx([0.03, 0.03, 0.01])
    assert spent["usd_per_1000_kept"] == pytest.approx(1000 * 0.07 / 3)


def test_one_unknown_price_makes_the_sum_unknown(tmp_path):
    spent = cost(output(tmp_path, Rows([kept("a"), kept("b", usd=None)], ROWS.rejected, [])))
    assert (spent["kept"]["usd"], spent["total"]["usd"], spent["usd_per_1000_kept"]) == (None, None, None)
    assert spent["rejected"]["usd"] == pytest.approx(0.03)


def test_records_without_provenance_or_kept_rows_have_no_price(tmp_path):
    assert cost(output(tmp_path / "none", Rows([], ROWS.rejected, [])))["usd_per_1000_kept"] is None
    plain = [{**row, "provenance": None} for row in ROWS.kept]
    assert cost(output(tmp_path, Rows(plain, [], []))) is None


# ------------------------------------------------------------------------------------------------------------- inputs


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
        (
            '{"id": "a", "query_positive": "q"}',
            "no column instruction_positive, instruction_negative, .*; rename the columns of the file \\(mine: set columns",
        ),
        ("", "has no rows"),
    ],
)
def test_bad_records_are_refused(tmp_path, content, message):
    file = tmp_path / "records.jsonl"
    file.write_text(content)
    with pytest.raises(InputError, match=message):
        read(file, "records")
