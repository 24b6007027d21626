import random
from dataclasses import replace
from hashlib import sha256

from infembed_ray.analysis.examples import KEPT, REASONS, examples
from infembed_ray.analysis.funnel import funnel
from infembed_ray.analysis.inputs import read
from infembed_ray.analysis.page import render, summarise
from infembed_ray.storage.steps import resolve
from tests.analysis.samples import Rows, kept, publish, rejected
from tests.support.pages import Page


def found(root, rows):
    return read(resolve(publish(root / "out", rows)), "records")


def many():
    reasons = ["none", "distractor", "positive", "negative_query", "negative_instruction"]
    lost = [rejected(f"{why}-{n}", "judge_positive", f"the judge picked {why}") for why in reasons for n in range(5)]
    lost.append(rejected("again", "judge_positive", "the judge picked none"))
    return Rows([kept(f"k{n}") for n in range(20)], lost, [])


def test_examples_are_the_smallest_hashes_of_the_kept_and_of_each_frequent_reason(tmp_path):
    records = found(tmp_path, many())
    losses = funnel(records).rejections
    chosen = examples(records, losses)
    smallest = sorted((f"k{n}" for n in range(20)), key=lambda name: sha256(name.encode()).hexdigest())[:KEPT]
    assert [example.id for example in chosen[:KEPT]] == smallest
    assert [example.loss for example in chosen[KEPT:]] == losses[:REASONS]
    assert chosen[KEPT].loss.why == "the judge picked none"  # the most frequent
    ids = [row["id"] for row in records.rejected if row["reason"] == "the judge picked none"]
    assert chosen[KEPT].id == min(ids, key=lambda name: sha256(name.encode()).hexdigest())


def test_the_order_of_the_records_does_not_matter(tmp_path):
    records = found(tmp_path, many())
    mixed = replace(records, kept=records.kept[::-1], rejected=random.Random(0).sample(records.rejected, 26))
    assert examples(mixed, funnel(mixed).rejections) == examples(records, funnel(records).rejections)


def test_texts_that_a_rejected_record_does_not_have_are_left_out(tmp_path):
    row = rejected("a", "query_negative", "too long") | {"query_negative": None, "hard_negative_document_2": None}
    (example,) = examples(records := found(tmp_path, Rows([], [row], [])), funnel(records).rejections)
    assert list(example.texts) == [
        *("Query", "Instruction", "Passage (positive)"),
        *("Poisoned instruction", "Its passage (negative instruction)"),
    ]


def test_the_page_shortens_long_texts_keeps_them_whole_and_escapes_them(tmp_path):
    hostile = "<script>alert('x')</script> & \"quoted\" " + "word " * 100 + "<end>"
    rows = Rows([kept("<i>a</i>", document_positive=hostile)], many().rejected, [])
    html = render(summarise(found(tmp_path, rows)), "source")
    page = Page(html)  # fails on a script and on tags that are not closed
    assert "<i>a</i>" in page.text
    assert " ".join(hostile.split()) in page.text
    assert len(page.attributes("details")) == 1
    shortened = html.split('<details class="excerpt"><summary><span>')[1].split("</span>")[0]
    assert "&lt;end&gt;" not in shortened
    assert shortened.endswith("...")
    assert "Rejected: the judge picked none" in page.text
    assert "at the step judge positive (6 records)" in page.text
