"""The form of the playground, its address and its errors, in a real browser against the real API."""

import json
import subprocess
import sys
import urllib.error
from typing import Any

import pytest

from infembed_ray.serving.encoder.batching import QueueFull
from infembed_ray.serving.schema import SearchResponse
from infembed_ray.serving.service import Document
from tests.serving.debug import CARD
from tests.serving.http.playground.pages import (
    DOCUMENTS,
    KEY,
    LEAVE_OUT,
    PREFER,
    Search,
    Server,
    copied,
    ids,
    served,
    shown,
    until,
)

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def test_everything_is_reached_and_run_by_keyboard(server: Server, open_page: Any) -> None:
    page = open_page(server.url)
    focused = "document.activeElement.id || document.activeElement.name || document.activeElement.textContent"
    shown(page, "b")
    until(page, "document.activeElement.id === 'query'")
    page.keyboard.type("drag")  # in place of the question that the page begins with
    page.keyboard.press("Tab")
    assert page.evaluate(focused) == "search"
    page.keyboard.press("Tab")
    assert page.evaluate(focused) == "instruction-b"
    page.keyboard.press("Control+A")
    page.keyboard.press("Delete")
    page.keyboard.press("Enter")
    page.get_by_role("status").get_by_text("Both rankings are the same").wait_for()
    assert shown(page, "b") == shown(page, "a") == ids(server.search("drag", None))
    suggestions = page.locator("#suggestions button").all_text_contents()
    for part in (*suggestions, "compare"):
        page.keyboard.press("Tab")
        assert page.evaluate(focused) == part
    page.keyboard.press("ArrowRight")
    for _ in (*suggestions, "instruction-b", "instruction-a"):
        page.keyboard.press("Shift+Tab")
    assert page.evaluate(focused) == "instruction-a"
    page.keyboard.type("first line")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("second line")
    page.keyboard.press("Tab")
    assert page.evaluate(focused) == "instruction-b"
    page.keyboard.type(PREFER)
    page.keyboard.press("Enter")
    page.locator("h2", has_text=PREFER).wait_for()
    assert shown(page, "a") == ids(server.search("drag", "first line\nsecond line"))
    assert shown(page, "b") == ids(server.search("drag", PREFER))
    assert page.evaluate(focused) == "instruction-b"
    for part in (*page.locator("#suggestions button").all_text_contents(), "compare", "top-k", "Filter"):
        page.keyboard.press("Tab")
        assert page.evaluate(focused) == part
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.keyboard.type('{"draft": true}')
    page.keyboard.press("Control+Enter")
    until(page, "document.querySelectorAll('#hits-b > li').length === 1")
    assert shown(page, "b") == ["definition"]


def test_the_page_begins_with_a_question_from_the_index_and_suggests_instructions(
    server: Server, open_page: Any
) -> None:
    page = open_page(server.url)
    shown(page, "b")
    query, instruction = page.locator("#query").input_value(), page.locator("#instruction-b").input_value()
    assert query in [document.metadata.get("Title") for document in DOCUMENTS]
    chips = page.locator("#suggestions button")
    without = ids(server.search(query, None))
    for text in (instruction, chips.last.inner_text()):
        page.locator("h2", has_text=text).wait_for()
        assert (shown(page, "a"), shown(page, "b")) == (without, ids(server.search(query, text)))
        assert text in chips.all_inner_texts()
        chips.last.click()
    assert page.locator("#query").input_value() == query


def test_both_rankings_are_of_one_version_of_the_index(open_page: Any) -> None:
    class Switched(Search):
        versions = iter(["v1"])

        async def search(self, *question: Any) -> SearchResponse:
            answer = await super().search(*question)
            return answer.model_copy(update={"index_version": next(self.versions, "v2")})

    with served(Switched()) as switching:
        page = open_page(switching.address(q="drag", b=PREFER))
        page.get_by_text("The index changed between the two rankings.").wait_for()
        shown(page, "b")
        assert page.locator("#facts").inner_text().endswith("v2")


def test_the_address_holds_the_question_and_gives_it_again(server: Server, open_page: Any) -> None:
    page = open_page(server.url)
    page.locator("#query").fill("drag & lift = 1+1 #翼")
    page.get_by_text("Two instructions").click()
    page.locator("#instruction-a").fill(LEAVE_OUT)
    page.locator("#instruction-b").fill(PREFER)
    page.get_by_text("Filter").click()
    page.locator("#filter").fill('{"year": {"gte": 1958}}')
    page.locator("#top-k").fill("3")
    page.locator("#search").click()
    first = (shown(page, "a"), shown(page, "b"))
    copy = open_page(page.url)
    assert (shown(copy, "a"), shown(copy, "b")) == first
    assert copy.locator("#instruction-a").input_value() == LEAVE_OUT
    page.locator("#query").fill("another")
    page.keyboard.press("Enter")
    until(page, "location.hash.startsWith('#q=another')")
    page.go_back()
    until(page, "document.getElementById('query').value.startsWith('drag')")
    until(page, "document.getElementById('results').getAttribute('aria-busy') === 'false'")
    assert (shown(page, "a"), shown(page, "b")) == first


def test_a_fault_of_the_question_is_told_at_its_field(server: Server, open_page: Any) -> None:
    page = open_page(server.url)
    page.locator("#query").fill("drag")
    page.get_by_text("Filter").click()
    field, fault = page.locator("#filter"), page.locator("#filter-fault")
    field.fill('{"year": ')
    page.keyboard.press("Enter")
    assert fault.inner_text().startswith("This is not JSON")
    field.fill('{"yeer": 1958}')
    page.keyboard.press("Enter")
    fault.get_by_text("yeer").wait_for()
    with pytest.raises(urllib.error.HTTPError) as refused:
        server.search("drag", None, filter={"yeer": 1958})
    assert fault.inner_text() == json.load(refused.value)["error"]["message"]
    assert field.get_attribute("aria-invalid") == "true"
    assert page.evaluate("document.activeElement.id") == "filter"
    field.fill("")
    page.locator("#top-k").fill("100000")
    page.keyboard.press("Enter")
    page.locator("#top-k-fault").get_by_text("top_k").wait_for()
    assert not fault.inner_text()
    page.locator("#top-k").fill("2")
    page.get_by_text("Two instructions").click()
    for side in "ab":
        page.locator(f"#instruction-{side}").evaluate("field => { field.value = 'i'.repeat(100001) }")
        page.locator("#search").click()
        page.locator(f"#instruction-{side}-fault").get_by_text("100000").wait_for()
        page.locator(f"#instruction-{side}").fill("")
    page.locator("#search").click()
    assert len(shown(page, "b")) == 2
    assert page.locator("[aria-invalid]").count() == 0


def test_a_key_is_asked_for_and_kept_nowhere_but_in_the_page(open_page: Any) -> None:
    with served(Search(), KEY) as locked:
        page = open_page(locked.address(q="drag", b=PREFER))
        key = page.get_by_label("API key", exact=True)
        key.wait_for()
        until(page, "document.activeElement.id === 'key'")
        assert page.evaluate("document.getElementById('ask').inert")
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        page.get_by_text("send a valid API key").wait_for()
        assert page.evaluate("document.activeElement.id") == "key"
        page.keyboard.type(KEY)
        page.keyboard.press("Enter")
        assert len(shown(page, "b")) == 10
        assert not page.evaluate("document.getElementById('ask').inert")
        for language in ("curl", "python"):
            request = copied(page, "b", language)
            assert KEY not in request
            assert "INFEMBED_API_KEY" in request
        state = page.evaluate(
            "[location.href, document.documentElement.outerHTML, {...localStorage}, {...sessionStorage}]"
        )
        assert KEY not in json.dumps(state)
        assert page.evaluate("[...document.querySelectorAll('input')].map(input => input.value)").count(KEY) == 0
        assert page.context.cookies() == []
        page.reload()
        key.wait_for()


def test_axe_finds_no_fault(server: Server, open_page: Any) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-core is not installed").Axe()
    page = open_page(server.url)
    page.emulate_media(reduced_motion="reduce")  # nothing is half faded

    def faults(*looks: tuple[str, int]) -> list[tuple[str, int, str, list[str]]]:
        found = []
        for scheme, width in looks:
            page.emulate_media(color_scheme=scheme)
            page.set_viewport_size({"width": width, "height": 900})
            violations = axe.run(page).response["violations"]
            found += [(scheme, width, v["id"], [node["html"] for node in v["nodes"]]) for v in violations]
        return found

    until(page, "document.getElementById('served').textContent")
    assert faults(("light", 390), ("dark", 1440)) == []
    page.locator("#query").fill("drag")
    page.locator("#instruction-b").fill(PREFER)
    page.locator("#top-k").fill("4")
    page.keyboard.press("Enter")
    assert len(shown(page, "b")) == 4
    assert faults(("light", 390), ("light", 1440), ("dark", 390), ("dark", 1440)) == []
    page.get_by_text("Full").click()
    page.get_by_text("Filter").click()
    page.locator("#filter").fill("{")
    page.keyboard.press("Enter")
    page.get_by_text("This is not JSON").wait_for()
    assert faults(("light", 390), ("light", 1440), ("dark", 390), ("dark", 1440)) == []
    server.service.faults = [QueueFull(60)]
    page.locator("#filter").fill("")
    page.keyboard.press("Enter")
    page.get_by_text("Trying again").wait_for()
    assert faults(("light", 1440), ("dark", 390)) == []


def other_collection() -> Search:
    other = Search()
    other.card = CARD.model_copy(update={"passages": 2, "metadata": {"court": "string"}})
    other.documents = {id: Document(id, f"text of {id}", {"court": "high"}) for id in ("law/1", "law/2")}
    return other


def test_a_collection_is_chosen_and_stays_in_the_address_and_in_copied_requests(open_page: Any) -> None:
    with served(Search(), law=other_collection()) as both:
        page = open_page(both.address(q="drag", b=PREFER))
        assert shown(page, "b") == ids(both.search("drag", PREFER))
        page.get_by_label("Collection").select_option("law")
        until(page, "document.querySelectorAll('#hits-b > li[data-id]').length === 2")
        assert set(shown(page, "a")) == set(shown(page, "b")) == {"law/1", "law/2"}
        assert page.locator("#served").inner_text() == "debug · 2 passages"
        assert page.locator("#fields button").all_text_contents() == ["court string"]
        assert "c=law" in page.url
        ranking = shown(page, "b")
        for language, run in (("curl", ["bash", "-c"]), ("python", [sys.executable, "-c"])):
            printed = subprocess.run([*run, copied(page, "b", language)], capture_output=True, check=True, timeout=60)
            positions = [printed.stdout.decode().index(id) for id in ranking]
            assert positions == sorted(positions)
        page.reload()
        assert shown(page, "b") == ranking
        page.locator("#served", has_text="2 passages").wait_for()
        assert page.get_by_label("Collection").input_value() == "law"
        page.get_by_label("Collection").select_option("index")
        until(page, "document.querySelectorAll('#hits-b > li[data-id]').length > 2")
        assert "c=" not in page.url
        page.go_back()
        until(page, "document.querySelectorAll('#hits-b > li[data-id]').length === 2")
        assert page.get_by_label("Collection").input_value() == "law"
