import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from infembed_ray.analysis.agreement import agreements
from infembed_ray.analysis.comparison import compare
from infembed_ray.analysis.contamination import contamination
from infembed_ray.analysis.material import read
from infembed_ray.analysis.page import LONGEST_LIST, render
from infembed_ray.analysis.summary import summarise
from infembed_ray.analysis.texts import TextSet, of_records
from infembed_ray.storage import resolve
from tests.analysis.samples import ROWS, Rows, kept, publish

VOID = {"meta", "line", "circle", "path", "br"}


class Page(HTMLParser):
    """Collects the text, and fails on tags that do not close one another."""

    def __init__(self, html):
        super().__init__()
        self.open, self.text, self.tags = [], "", []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        assert not {"src", "href"} & dict(attributes).keys()
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text += " " + " ".join(data.split())


def page(tmp_path, rows=ROWS, **changes):
    html = render(summarise(read(resolve(publish(tmp_path / "out", rows, **changes)), "records")), "the <source>")
    return html, Page(html)


def test_the_page_needs_nothing_else_and_knows_light_and_dark(tmp_path):
    html, parsed = page(tmp_path)
    assert not {"script", "link", "img", "iframe"} & set(parsed.tags)
    assert not re.search(r"url\(|@import|https?://", html)
    assert "prefers-color-scheme: dark" in html


def test_the_page_says_what_the_summary_says(tmp_path):
    text = re.sub(r"\s+", " ", page(tmp_path)[1].text)
    for said in (
        "the <source>",
        "Seeds 7 100.0 %",
        "Kept 3 42.9 %",
        "Dead letters 1 14.3 %",
        "judge_positive the judge picked none 2",
        "refused: <b>no</b> 1",
        "positive 5 3 60.0",
        "all passage texts",
        "55.2",
        "tea 2",
        "$23.33 per 1,000 kept records",
        "50 % were answered within 0.50 s, 90 % were answered within 1.50 s",
        "query_negative 6 1 0 5 83.3",
        "7,000 600 0.0700",
    ):
        assert said in text
    assert "damaged" not in text


def test_an_output_that_lost_seeds_is_called_damaged(tmp_path):
    assert "2 seeds are neither kept, rejected nor dead letters" in page(tmp_path, seeds=9)[1].text


def test_complements_are_shown_where_there_are_any(tmp_path):
    assert "Complements" not in page(tmp_path)[1].text
    rows = replace(ROWS, complements=({"id": "a", "fault": None}, {"id": "b", "fault": "the judge picked none"}))
    text = re.sub(r"\s+", " ", page(tmp_path / "with", rows)[1].text)
    assert "Asked for 2 Fit 1 50.0 % Of no use 1 50.0 % reason rows the judge picked none 1" in text


def test_a_long_list_is_cut_and_the_rest_counted(tmp_path):
    rows = [kept(f"r{n}", topic=f"topic-{n:02}") for n in range(LONGEST_LIST + 7)]
    text = page(tmp_path, Rows(rows, [], []))[1].text
    assert text.count("topic-") == LONGEST_LIST
    assert "and 7 more" in text


def test_findings_beside_the_records_are_shown_and_one_dot_is_drawn_for_each_text(tmp_path):
    found = read(resolve(publish(tmp_path / "out")), "records")
    sets = [
        of_records("ours", found.kept),
        TextSet("<theirs>", {"instruction": ["for cooks", "for bakers", "for all"]}),
    ]
    vectors = np.random.default_rng(0)
    diversities, coverages = compare(sets, 10, 0, lambda texts: vectors.normal(size=(len(texts), 4)))
    answers = {
        "ann": dict(zip("abcd", "1201", strict=True)),
        "ben": dict(zip("abcd", "1202", strict=True)),
        "zoe": {"a": "1"},
    }
    summary = summarise(
        found,
        diversities,
        coverages,
        agreements(answers, 100, 0),
        contamination("bench", ["Query of a"], sets[0].texts, 13),
    )
    html = render(summary, "source")
    text = re.sub(r"\s+", " ", Page(html).text)
    for said in ("<theirs>", "ann – ben 4 75.0 0.636", "bench 1 query 6 1 0 16.67 query of a", "nothing"):
        assert said in text
    dots = re.findall(r'class="dots" d="([^"]*)"', html)
    assert [path.count("h0") for path in dots] == [3, 3, 6, 9]
    others = re.findall(r'class="others" d="([^"]*)"', html)
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
def test_the_page_leaves_out_what_is_not_known(tmp_path, rows):
    assert "None" not in page(tmp_path, rows)[1].text
