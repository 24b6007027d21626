"""The quality report's page and its rows."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from infembed_ray.analysis import report as module
from infembed_ray.analysis.agreement import study
from infembed_ray.analysis.clean import Removal
from infembed_ray.analysis.diversity import TextSet, compare, from_records
from infembed_ray.analysis.overlap import EvaluationTexts, contamination
from infembed_ray.analysis.report import as_html, shown_rows, summarise
from tests.analysis.samples import ROWS, Rows, kept, output
from tests.support.pages import Page


def page(tmp_path, rows=ROWS, **changes):
    records = output(tmp_path, rows, **changes)
    html = as_html(summarise(records), shown_rows(records, {}), "the <source>")
    return html, Page(html)


def test_page_has_the_numbers_of_the_summary(tmp_path):
    text = page(tmp_path)[1].text
    for expected in (
        "the <source>",
        "Seeds 7 100.0 %",
        "Kept 3 42.9 %",
        "Dead letters 1 14.3 %",
        "judge positive the judge picked none 2",
        "refused: <b>no</b> 1",
        "positive 5 3 60.0",
        "tea 2",
        "$23.33 per 1,000 kept records",
        "query negative 6 1 0 5 83.3",
        "7,000 600 0.0700",
    ):
        assert expected in text
    assert "damaged" not in text
    assert "Complements" not in text
    assert "Cheap judge" not in text


def test_what_is_not_in_every_report_is_shown_if_it_is_there(tmp_path):
    assert "2 seeds are neither kept, rejected nor dead letters" in page(tmp_path / "damaged", seeds=9)[1].text
    rows = replace(ROWS, complements=({"id": "a", "fault": None}, {"id": "b", "fault": "the judge picked none"}))
    assert (
        "Asked for 2 Fit 1 50.0 % Rejected 1 50.0 % reason rows the judge picked none 1" in page(tmp_path, rows)[1].text
    )
    facts = {
        "settled": {"kept": 90, "rejected": 0},
        "in_doubt": {"kept": 7, "rejected": 3},
        "audited": 20,
        "agreement": [0.85, 0.64, 0.948],
        "wrongly_kept": [0.15, 0.05, 0.36],
        "wrongly_rejected": None,
    }
    records = output(tmp_path / "judged")
    judged = replace(records, manifest={**records.manifest, "cheap_judge": facts})
    text = Page(as_html(summarise(judged), [], "x")).text
    for expected in ("settled 90 0", "in doubt 7 3", "20 of the settled ones", "agreement 85.0 64.0 to 94.8"):
        assert expected in text
    assert "wrongly rejected" not in text


def test_the_page_has_comparisons_and_one_dot_per_text(tmp_path):
    records = output(tmp_path)
    sets = [
        from_records("ours", records.kept),
        TextSet("<theirs>", {"instruction": ["for cooks", "for bakers", "for all"]}),
    ]
    vectors = np.random.default_rng(0)
    diversities, coverages = compare(sets, lambda texts: vectors.normal(size=(len(texts), 4)))
    references = {
        "ann": dict(zip("abcd", "1201", strict=True)),
        "ben": dict(zip("abcd", "1202", strict=True)),
    }
    html = as_html(
        summarise(
            records,
            diversities=diversities,
            coverages=coverages,
            contaminations=contamination("bench", EvaluationTexts.of(["Query of a"]), records.kept)[0],
            agreement=study(references, {"new": {"a": "1"}}, {"new": "<a model>"}),
            removed={"near-duplicate": 1},
        ),
        [],
        "source",
    )
    text = Page(html).text
    for expected in (
        "<theirs>",
        "ann – ben 4 75.0 0.636",
        "new <a model> 1",
        "bench 1 query 6 1 16.67 query of a",
        "nothing",
        "near-duplicate 1",
    ):
        assert expected in text
    dots = re.findall(r'class="dots" [^>]*d="([^"]*)"', html)
    assert [path.count("h0") for path in dots] == [3, 3, 6, 9]
    others = re.findall(r'class="others" [^>]*d="([^"]*)"', html)
    assert (others[0], others[1]) == (dots[1], dots[0])
    assert "None" not in text
    assert "nan" not in html


@pytest.mark.parametrize(
    "rows",
    [
        Rows([], ROWS.rejected, []),
        Rows(ROWS.kept, [], []),
        Rows([{**row, "provenance": None} for row in ROWS.kept], [], []),
        Rows([kept("a", usd=None)], [], []),
    ],
    ids=["nothing kept", "nothing lost", "no provenance", "no price"],
)
def test_the_page_omits_unknown_values(tmp_path, rows):
    assert "None" not in page(tmp_path, rows)[1].text


def embedded(html):
    """The rows of a page's script."""
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    return {row["id"]: row for row in json.loads(text)}


def test_every_row_can_be_browsed_with_its_end_texts_and_verdicts(tmp_path):
    rows = replace(ROWS, complements=({"id": "a", "instruction": "the other way", "fault": None},))
    row = embedded(page(tmp_path, rows)[0])
    assert {name: row[name]["kind"] for name in "abcdefg"} == {
        **dict.fromkeys("abc", "kept"),
        **dict.fromkeys("def", "rejected"),
        "g": "dead letter",
    }
    assert (row["d"]["step"], row["d"]["reason"]) == ("judge_positive", "the judge picked none")
    assert row["d"]["picks"] == {"negative_query": "negative_query", "positive": "none"}
    assert (row["g"]["step"], row["g"]["reason"]) == ("instruction_positive", "refused: <b>no</b>")
    assert row["a"]["texts"]["Query"] == "query of a"
    assert row["a"]["texts"]["Complement instruction"] == "the other way"
    assert (row["a"]["source"], row["a"]["topic"]) == ("sample", "tea")


def test_markup_in_a_text_does_not_end_the_script(tmp_path):
    text = "</script><script>window.hacked = 1</script><!--"
    html, _ = page(tmp_path, Rows([kept("a", document_positive=text)], [], []))
    assert "hacked = 1</script>" not in html
    assert embedded(html)["a"]["texts"]["Passage (positive)"] == text


def test_a_large_set_is_sampled_by_kind(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SHOWN", 4)
    rows = Rows([kept(f"r{n}") for n in range(30)], ROWS.rejected, ROWS.dead_letter)
    records = output(tmp_path, rows)
    removed = {n: Removal("near-duplicate", "r0") for n in range(20, 30)}
    chosen = shown_rows(records, removed)
    assert [sum(row["kind"] == kind for row in chosen) for kind in ("kept", "removed", "rejected", "dead letter")] == [
        4, 4, 3, 1
    ]  # fmt: skip
    assert {row["detail"] for row in chosen if row["kind"] == "removed"} == {"r0"}
    assert chosen == shown_rows(records, removed)
