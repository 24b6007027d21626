"""The four reports in a real browser: a phone and a desktop, light and dark."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from infembed_ray.analysis.agreement import study
from infembed_ray.analysis.diversity import TextSet, compare, from_records
from infembed_ray.analysis.figures import read
from infembed_ray.analysis.overlap import EvaluationTexts, contamination
from infembed_ray.analysis.report import as_html, shown_rows, summarise
from infembed_ray.evaluation.paper.collection import collect
from infembed_ray.evaluation.paper.results_report import Report
from infembed_ray.storage.steps import resolve
from tests.analysis.samples import ROWS, kept, publish
from tests.evaluation.paper import made
from tests.quickstart import test_report as quickstart_samples

pytestmark = pytest.mark.integration

SMALLEST_TEXT_PX = 11

MEASURE = """() => {
  const text = [...document.querySelectorAll("body *")].filter(e => [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()));
  return {
    overflow: document.documentElement.scrollWidth - innerWidth,
    smallest: Math.min(...text.map(e => parseFloat(getComputedStyle(e).fontSize))),
    svg_text: document.querySelectorAll("svg text").length,
    flat: [...document.querySelectorAll("svg")].filter(e => e.getBoundingClientRect().width < 10 || e.getBoundingClientRect().height < 8).length,
  };
}"""


def analysis(root):
    long = kept("a", topic="tea", document_positive="word " * 100 + "the end of the text")
    rows = replace(ROWS, kept=[long, *ROWS.kept[1:]])
    rows = replace(rows, complements=({"id": "a", "fault": None}, {"id": "b", "fault": "the judge picked none"}))
    found = read(resolve(publish(root / "out", rows)), "records")
    random = np.random.default_rng(0)
    theirs = {
        kind: [f"a text of theirs, number {n}" for n in range(40)] for kind in ("instruction", "query", "passage")
    }
    sets = [from_records("ours", found.kept), TextSet("another data set", theirs)]
    diversities, coverages = compare(sets, lambda texts: random.normal(size=(len(texts), 4)), 40)
    answers = {name: {f"{n}": str(random.integers(3)) for n in range(30)} for name in ("annotator one", "judge")}
    leaks, _ = contamination("an evaluation set", EvaluationTexts.of(["Query of a"]), found.kept)
    summary = summarise(
        found,
        diversities=diversities,
        coverages=coverages,
        contaminations=leaks,
        agreement=study(answers, {}, {}),
        removed={"near-duplicate": 1},
    )
    return as_html(summary, shown_rows(found, {}), "runs/quickstart/records")


def evaluation(root):
    rows = {f"uni{{P}}, epochs={n}": (0.2 * n, {"objective": "uni{P}", "epochs": n}) for n in (1, 2)}
    models = {"e5-base-v2": ("intfloat/e5-base-v2", 0), "trained": ("runs/x", 0.3)}
    collection = collect(
        {
            "models": made.evaluation(made.benchmarks("followir"), models),
            "filtered": made.sweep(made.records(), ["MiniLM"], rows, [1, 2]),
            "raw": made.sweep(made.records(), ["MiniLM"], rows, [1, 2], salt="raw"),
        }
    )
    named = {"trained": "InF-Embed (e5-base-v2)"}
    return Report.from_collection({"models": "runs/evaluation"}, collection, named, ["raw"]).as_html()


def quickstart(root):
    return quickstart_samples.written(root, details={"evaluation": root / "evaluation.html"})


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    root = tmp_path_factory.mktemp("reports")
    paths = {}
    for make in (analysis, evaluation, quickstart):
        paths[make.__name__] = root / f"{make.__name__}.html"
        paths[make.__name__].write_text(make(root), encoding="utf-8")
    return paths


@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_reports_are_readable_on_a_phone_and_on_a_desktop(reports, browser, width, scheme):
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    for name, path in reports.items():
        page.goto(path.as_uri())
        found = page.evaluate(MEASURE)
        assert found["overflow"] <= 0, name
        assert found["smallest"] >= SMALLEST_TEXT_PX, name
        assert found["svg_text"] == 0, name  # text in an SVG would shrink with it
        assert found["flat"] == 0, name
        background, ink = page.evaluate("['backgroundColor', 'color'].map(n => getComputedStyle(document.body)[n])")
        assert (luminance(background) > luminance(ink)) == (scheme == "light")
        if pictures := os.environ.get("INFEMBED_PICTURES"):
            shutil.copy(path, pictures)
            page.screenshot(path=Path(pictures) / f"{name}-{width}-{scheme}.png", full_page=True)
    context.close()


@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_fault(reports, browser, width, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-core is not installed").Axe()
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    found = []
    for name, path in reports.items():
        page.goto(path.as_uri())
        page.evaluate("document.querySelectorAll('details').forEach(e => { e.open = true; })")
        violations = axe.run(page).response["violations"]
        found += [(name, v["id"], [node["html"] for node in v["nodes"]][:3]) for v in violations]
    page.close()
    assert found == []


def test_rows_can_be_filtered_and_searched(reports, browser):
    page = browser.new_page()
    page.goto(reports["analysis"].as_uri())
    rows = page.locator("#rows article")
    assert rows.count() == 7
    page.locator("#by-kind").select_option("rejected")
    assert rows.count() == 3
    page.locator("#by-reason").select_option("the judge picked none")
    assert rows.count() == 2
    page.locator("#words").fill("query OF")
    assert rows.count() == 2
    assert "judge_positive" in rows.first.inner_text()
    page.locator("#words").fill("nowhere")
    assert rows.count() == 0
    assert page.locator("#found").inner_text() == "No row matches."
    page.close()


def luminance(colour):
    return sum(int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(","))
