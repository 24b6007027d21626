import json
import re
from dataclasses import replace

import numpy as np
import pytest

from infembed_ray.analysis import rows as shown
from infembed_ray.analysis.agreement import study
from infembed_ray.analysis.clean import Removal
from infembed_ray.analysis.contamination import EvaluationTexts, contamination
from infembed_ray.analysis.inputs import read
from infembed_ray.analysis.page import LONGEST_LIST, render
from infembed_ray.analysis.rows import shown_rows
from infembed_ray.analysis.summary import summarise
from infembed_ray.analysis.texts import TextSet, compare, from_records
from infembed_ray.storage.steps import resolve
from tests.analysis.samples import ROWS, Rows, kept, publish
from tests.support.pages import Page


def page(tmp_path, rows=ROWS, **changes):
    found = read(resolve(publish(tmp_path / "out", rows, **changes)), "records")
    html = render(summarise(found), shown_rows(found, {}), "the <source>")
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
        "all passage texts",
        "55.2",
        "tea 2",
        "$23.33 per 1,000 kept records",
        "Latency: p50 0.50 s, p90 1.50 s",
        "query negative 6 1 0 5 83.3",
        "7,000 600 0.0700",
    ):
        assert expected in text
    assert "damaged" not in text


def test_an_output_with_unaccounted_seeds_is_reported_as_damaged(tmp_path):
    assert "2 seeds are neither kept, rejected nor dead letters" in page(tmp_path, seeds=9)[1].text


def test_complements_are_shown_if_there_are_any(tmp_path):
    assert "Complements" not in page(tmp_path)[1].text
    rows = replace(ROWS, complements=({"id": "a", "fault": None}, {"id": "b", "fault": "the judge picked none"}))
    text = page(tmp_path / "with", rows)[1].text
    assert "Asked for 2 Fit 1 50.0 % Rejected 1 50.0 % reason rows the judge picked none 1" in text


def test_a_long_list_is_cut_and_the_rest_counted(tmp_path):
    rows = [kept(f"r{n}", topic=f"topic-{n:02}") for n in range(LONGEST_LIST + 7)]
    text = page(tmp_path, Rows(rows, [], []))[1].text
    assert text.partition("Rows")[0].count("topic-") == LONGEST_LIST
    assert "and 7 more" in text


def test_the_page_has_comparisons_and_one_dot_per_text(tmp_path):
    found = read(resolve(publish(tmp_path / "out")), "records")
    sets = [
        from_records("ours", found.kept),
        TextSet("<theirs>", {"instruction": ["for cooks", "for bakers", "for all"]}),
    ]
    vectors = np.random.default_rng(0)
    diversities, coverages = compare(sets, 10, lambda texts: vectors.normal(size=(len(texts), 4)))
    references = {
        "ann": dict(zip("abcd", "1201", strict=True)),
        "ben": dict(zip("abcd", "1202", strict=True)),
    }
    agreement = study(references, {"new": {"a": "1"}}, {"new": "<a model>"})
    contaminations, _ = contamination("bench", EvaluationTexts.of(["Query of a"]), found.kept)
    summary = summarise(found, 0.7, diversities, coverages, contaminations, agreement, {"near-duplicate": 1})
    html = render(summary, [], "source")
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


def test_topics_and_sources_are_those_of_the_kept_records(tmp_path):
    rows = Rows([*ROWS.kept, kept("x", source="elsewhere")], ROWS.rejected, ROWS.dead_letter)
    summary = summarise(read(resolve(publish(tmp_path / "out", rows)), "records"))
    assert list(summary.topics.items()) == [("tea", 2), ("bread", 1)]
    assert list(summary.sources.items()) == [("sample", 3), ("elsewhere", 1)]


def test_the_page_shows_what_a_cheap_judge_settled_and_its_audit(tmp_path):
    found = read(resolve(publish(tmp_path / "out")), "records")
    assert "Cheap judge" not in Page(render(summarise(found), [], "x")).text
    facts = {
        "settled": {"kept": 90, "rejected": 0},
        "in_doubt": {"kept": 7, "rejected": 3},
        "audited": 20,
        "agreement": [0.85, 0.64, 0.948],
        "wrongly_kept": [0.15, 0.05, 0.36],
        "wrongly_rejected": None,
    }
    text = Page(render(summarise(replace(found, manifest={**found.manifest, "cheap_judge": facts})), [], "x")).text
    for expected in ("settled 90 0", "in doubt 7 3", "20 of the settled ones", "agreement 85.0 64.0 to 94.8"):
        assert expected in text
    assert "wrongly rejected" not in text


def test_the_page_shows_the_texts_of_each_source_beside_the_papers(tmp_path):
    text = page(tmp_path)[1].text
    assert re.search(r"all 6 6 9 [\d. ]+ ", text)
    assert "the paper's set 77,500 77,500 116,200 35.6 8.1 55.2" in text


def embedded(html):
    """The rows of a page's script."""
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    return json.loads(text)


def test_every_row_can_be_browsed_with_its_end_texts_and_verdicts(tmp_path):
    rows = replace(ROWS, complements=({"id": "a", "instruction_complement": "the other way", "fault": None},))
    html, _ = page(tmp_path, rows)
    found = {row["id"]: row for row in embedded(html)}
    assert {row: found[row]["kind"] for row in "abcdefg"} == {
        **dict.fromkeys("abc", "kept"),
        **dict.fromkeys("def", "rejected"),
        "g": "dead letter",
    }
    assert (found["d"]["step"], found["d"]["reason"]) == ("judge_positive", "the judge picked none")
    assert found["d"]["picks"] == {"negative_query": "negative_query", "positive": "none"}
    assert (found["g"]["step"], found["g"]["reason"]) == ("instruction_positive", "refused: <b>no</b>")
    assert found["a"]["texts"]["Query"] == "query of a"
    assert found["a"]["texts"]["Complement instruction"] == "the other way"
    assert (found["a"]["source"], found["a"]["topic"]) == ("sample", "tea")


def test_markup_in_a_text_does_not_end_the_script(tmp_path):
    text = "</script><script>window.hacked = 1</script><!--"
    html, _ = page(tmp_path, Rows([kept("a", document_positive=text)], [], []))
    assert "hacked = 1</script>" not in html
    assert embedded(html)[0]["texts"]["Passage (positive)"] == text


def test_a_large_set_is_sampled_by_kind_and_the_page_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(shown, "SHOWN", 4)
    rows = Rows([kept(f"r{n}") for n in range(30)], ROWS.rejected, ROWS.dead_letter)
    found = read(resolve(publish(tmp_path / "out", rows)), "records")
    removed = {n: Removal("near-duplicate", "r0") for n in range(20, 30)}
    chosen = shown_rows(found, removed)
    assert [sum(row.kind == kind for row in chosen) for kind in ("kept", "removed", "rejected", "dead letter")] == [
        4, 4, 3, 1
    ]  # fmt: skip
    assert {row.detail for row in chosen if row.kind == "removed"} == {"r0"}
    assert chosen == shown_rows(found, removed)
    assert "At most 500 rows of each kind are in this file" in page(tmp_path / "page")[1].text
