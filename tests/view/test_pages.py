"""Both pages in a real browser, headless Chromium, over real files."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from infembed_ray.evaluation.rankings import DEPTH
from infembed_ray.view.differences import DifferencesQuery

from infembed_ray.view.records import ROWS
from tests.view.outputs import MARKUP, evaluation, followir, synthesis_rows, write_evaluation, write_synthesis
from tests.view.test_server import Server

pytestmark = pytest.mark.integration

LOOKS = [("light", 390), ("light", 1440), ("dark", 390), ("dark", 1440)]


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    rows = synthesis_rows()
    rows["kept"][0] |= dict.fromkeys(("query_positive", "instruction_positive", "document_positive", "topic"), MARKUP)
    rows["kept"][1] |= {"id": "W" * 300, "query_positive": "V" * 300, "document_positive": "long text " * 300}
    rows["rejected"][0] |= {"id": "markup", "reason": MARKUP}
    rows["dead letter"][0] |= {"error": MARKUP}
    with Server(write_synthesis(tmp_path_factory.mktemp("records"), rows)) as running:
        yield running


@pytest.fixture(scope="module")
def differences(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(write_evaluation(tmp_path_factory.mktemp("results"), *evaluation())) as running:
        yield running


@pytest.fixture
def open_page(browser: Any) -> Iterator[Any]:
    """Opens an address in a new browser profile. At the end the browser must not have complained."""
    complaints: list[str] = []
    contexts = []

    def open_page(server: Server, width: int = 1440, **state: object) -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900})
        contexts.append(context)
        context.set_default_timeout(30_000)
        page = context.new_page()
        page.on("console", lambda message: message.type in ("error", "warning") and complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(f"{server.url}#{urlencode(state)}")
        settled(page)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


def settled(page: Any) -> None:
    """Wait until the rows that the page asked for are there."""
    deadline = time.monotonic() + 30
    while page.locator("#results").get_attribute("aria-busy") != "false":
        assert time.monotonic() < deadline
        page.wait_for_timeout(20)


def ids(page: Any) -> list[str]:
    return page.locator(".card > .head .id").all_text_contents()


def expected_ids(server: Server, **state: object) -> list[str]:
    return [row["id"] for row in server.rows(**state)[1]["rows"]]


def test_markup_in_any_text_is_shown_as_text(records: Server, differences: Server, open_page: Any) -> None:
    page = open_page(records)
    first = page.locator(".card").first
    assert first.locator(".title").text_content() == MARKUP
    assert first.locator(".scenarios section").first.text_content().count(MARKUP) == 3
    for kind in ("rejected", "dead letter"):
        page = open_page(records, kind=kind)
        assert MARKUP in page.locator(".why").first.text_content()
        assert page.locator("#rows b, #rows img, #rows script").count() == 0
        assert page.evaluate("window.hacked") is None
    page = open_page(differences)
    assert MARKUP in page.locator(".asked .title").first.text_content()
    assert MARKUP in page.locator("td .text").first.text_content()
    assert page.locator("#rows td b, #rows img, #rows script").count() == 0
    assert page.evaluate("window.hacked") is None


def test_search_filters_and_pages_go_into_the_address_and_back(records: Server, open_page: Any) -> None:
    page = open_page(records)
    assert ids(page) == expected_ids(records)
    assert len(ids(page)) == ROWS
    page.locator("#q").fill("aspirin")
    page.keyboard.press("Enter")
    page.locator("mark").first.wait_for()
    settled(page)
    assert ids(page) == expected_ids(records, q="aspirin")
    page.locator("#next").click()
    page.get_by_text("Page 2 of").wait_for()
    assert ids(page) == expected_ids(records, q="aspirin", page=2)
    page.get_by_text("Rejected", exact=True).first.click()
    page.locator(".badge.kept").first.wait_for(state="detached")
    assert ids(page) == expected_ids(records, q="aspirin", kind="rejected")
    page.locator("#filter-step").select_option("judge_positive")
    page.locator("code:text-is('query_negative')").first.wait_for(state="detached")
    asked = {"q": "aspirin", "kind": "rejected", "step": "judge_positive"}
    assert ids(page) == expected_ids(records, **asked)
    again = open_page(records, **asked)
    assert page.url == again.url
    assert ids(again) == ids(page)
    assert again.locator("#q").input_value() == "aspirin"
    assert again.locator("#filter-step").input_value() == "judge_positive"
    page.go_back()
    page.locator("code:text-is('query_negative')").first.wait_for()
    assert ids(page) == expected_ids(records, q="aspirin", kind="rejected")


def test_a_row_shows_the_verdicts_and_why_it_ended(records: Server, open_page: Any) -> None:
    card = open_page(records).locator(".card").nth(2)
    assert card.locator(".badge").text_content() == "Kept"
    assert card.locator("h3").all_text_contents() == [
        "Positive",
        "Negative instruction",
        "Negative query",
        "Complement",
    ]
    assert card.get_by_text("The judge picked this passage.").count() == 3
    rejected = open_page(records, kind="rejected", step="query_negative").locator(".card").last
    assert rejected.get_by_text("a lead-in to a list, no request").is_visible()
    assert rejected.get_by_text("not reached").count() == 2
    assert rejected.get_by_text("empty").count() == 1
    dead = open_page(records, kind="dead letter").locator(".card").last
    assert "HTTP 500" in dead.locator(".why").text_content()
    assert dead.locator(".scenarios").count() == 0


def test_a_cut_text_opens_by_keyboard(records: Server, open_page: Any) -> None:
    card = open_page(records).locator(".card").nth(1)
    text = card.get_by_text("long text").first
    before = text.bounding_box()["height"]
    card.locator(".opener").focus()
    card.page.keyboard.press("Enter")
    assert text.bounding_box()["height"] > 3 * before
    assert card.locator(".opener").get_attribute("aria-expanded") == "true"


def test_an_error_of_the_server_is_shown(records: Server, open_page: Any, browser: Any) -> None:
    page = browser.new_page()
    page.goto(f"{records.url}#page=0")
    page.get_by_text("page: Input should be greater than or equal to 1").wait_for()
    assert page.locator(".card").count() == 0
    page.close()


def test_ranks_and_moves_are_those_of_the_data(differences: Server, open_page: Any) -> None:
    asked = {"a": "three", "b": "one", "figure": "MAP@1000", "order": "b"}
    page = open_page(differences, **asked)
    found = differences.view.page(DifferencesQuery(**asked))
    passages = found["rows"][0]["queries"][0]["passages"]
    table = page.locator(".card").first.locator("tbody tr")
    cells = table.evaluate_all("rows => rows.map(row => [...row.cells].slice(0, 3).map(cell => cell.textContent))")
    for (a, b, mark), passage in zip(cells, passages, strict=True):
        assert [a, b] == [str(passage[side] or f">{found['depth']}") for side in "ab"]
        if passage["a"] and passage["b"]:
            moved = passage["a"] - passage["b"]
            assert mark == ("=" if not moved else f"{'▲' if moved > 0 else '▼'} {abs(moved)}")
        else:
            assert mark == ("▲" if passage["b"] else "▼")
    relevant = [passage["id"] for passage in passages if passage["relevance"]]
    assert page.locator(".card").first.locator("tr.relevant .id").all_text_contents() == relevant


def test_a_move_below_the_published_ranks_is_not_known(tmp_path: Path, open_page: Any) -> None:
    with Server(write_evaluation(tmp_path, *followir())) as server:
        page = open_page(server)
        found = server.view.page(DifferencesQuery())["rows"]
        passages = [passage for row in found for query in row["queries"] for passage in query["passages"]]
        unknown = [p for p in passages if not (p["a"] and p["b"]) and (p["a"] or p["b"]) > DEPTH]
        assert unknown
        names = page.locator(f"[aria-label='not known: below rank {DEPTH} in both']").evaluate_all(
            "marks => marks.map(mark => [mark.textContent, mark.closest('tr').querySelector('.id').textContent])"
        )
        assert names == [["", p["id"]] for p in unknown]
        other = sum(p["changed"] and not p["relevance"] for p in passages)
        assert page.get_by_text("Relevant under the other instruction").count() == other > 0


def test_models_metric_and_direction_are_chosen(differences: Server, open_page: Any) -> None:
    page = open_page(differences)
    page.locator("#b").select_option("three")
    page.locator("#figure").select_option("MAP@1000")
    page.get_by_text("A is better", exact=True).first.click()
    page.get_by_text("MAP@1000: B is better").wait_for()
    settled(page)
    asked = {"b": "three", "figure": "MAP@1000", "order": "a"}
    keys = [row["key"] for row in differences.view.page(DifferencesQuery(**asked))["rows"]]
    assert page.locator(".asked > .id").all_text_contents() == keys
    assert open_page(differences, **asked).url == page.url


@pytest.mark.parametrize("width", [390, 700, 1440])
def test_nothing_is_wider_than_the_screen_or_hidden(
    records: Server, differences: Server, open_page: Any, width: int
) -> None:
    for server in (records, differences):
        page = open_page(server, width)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.locator("select:visible").count() == page.locator("select").count() == 4
        whole = "titles => titles.every(title => title.scrollWidth <= title.clientWidth)"
        assert page.locator(".card .title").evaluate_all(whole)


def test_axe_finds_no_fault(records: Server, differences: Server, open_page: Any) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-core is not installed").Axe()
    found = []
    for server, state in ((records, {"q": "aspirin"}), (records, {"kind": "dead letter"}), (differences, {})):
        page = open_page(server, **state)
        page.emulate_media(reduced_motion="reduce")
        for scheme, width in LOOKS:
            page.emulate_media(color_scheme=scheme)
            page.set_viewport_size({"width": width, "height": 900})
            violations = axe.run(page).response["violations"]
            found += [(scheme, width, v["id"], [node["html"] for node in v["nodes"]]) for v in violations]
    assert found == []
