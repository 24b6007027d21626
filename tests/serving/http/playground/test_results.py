"""The rankings of the playground, in a real browser against the real API over a small search."""

import re
from typing import Any

import pytest

from infembed_ray.serving.service import Document
from tests.serving.http.playground.pages import (
    LEAVE_OUT,
    MARKUP,
    PREFER,
    Search,
    Server,
    ids,
    served,
    shown,
    until,
)

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def test_a_ranking_without_and_one_with_the_instruction_stand_side_by_side(server: Server, open_page: Any) -> None:
    page = open_page(server.address(q="drag", b=PREFER, k=8))
    without, instructed = ids(server.search("drag", None, 8)), ids(server.search("drag", PREFER, 8))
    assert without != instructed
    assert (shown(page, "a"), shown(page, "b")) == (without, instructed)
    assert page.locator("h2").all_inner_texts() == ["Without an instruction", PREFER]
    facts = page.locator("#facts").inner_text().split("\n")
    assert facts[:4] == ["Encode", "1.0 ms", "Search", "2.0 ms"]
    assert facts[-4:] == ["Model", "debug", "Index", "v1"]
    assert re.fullmatch(r"[\d.]+ ms", facts[5])


def test_passages_ids_and_metadata_are_text_and_never_markup(server: Server, open_page: Any) -> None:
    page = open_page(server.address(q=MARKUP, a=MARKUP, b=LEAVE_OUT, k=12))
    for side in "ab":
        passage = page.locator(f"#hits-{side} > li").filter(has_text="window.hacked").first
        assert passage.locator(".text").inner_text() == MARKUP
        assert passage.locator(".id").inner_text() == "<b>markup</b>"
        assert passage.locator(".metadata").inner_text() == f"language {MARKUP}"
    assert page.locator("h2").first.inner_text() == MARKUP
    assert page.locator("#results :is(img, script, #bold)").count() == 0
    assert page.evaluate("window.hacked") is None


def visible(page: Any) -> list[str]:
    items = "items => items.filter(item => item.offsetParent).map(item => item.dataset.id)"
    return page.locator(".ranking li[data-id]").evaluate_all(items)


def test_the_instruction_is_switched_off_and_on_without_a_request(server: Server, open_page: Any) -> None:
    page = open_page(server.address(q="drag", b=PREFER, k=8))
    without, instructed = shown(page, "a"), shown(page, "b")
    requests: list[str] = []
    page.on("request", lambda request: "/v1/" in request.url and requests.append(request.url))
    switch = page.get_by_role("radiogroup", name="Instruction")
    assert visible(page) == without + instructed
    switch.get_by_text("Off").click()
    assert visible(page) == without
    until(page, "document.getAnimations().length === 0")
    page.keyboard.press("ArrowRight")
    assert visible(page) == instructed
    # Every passage moves or fades in, and comes to rest.
    moving = page.evaluate("document.getAnimations().map(({ effect }) => effect.target.dataset.id).filter(Boolean)")
    assert sorted(moving) == sorted(instructed)
    until(page, "document.getAnimations().length === 0")
    switch.get_by_text("Both").click()
    assert visible(page) == without + instructed
    page.set_viewport_size({"width": 390, "height": 844})  # a phone shows one ranking
    until(page, "document.getElementById('rankings').dataset.show === 'b'")
    assert visible(page) == instructed
    switch.get_by_text("Off").click()
    assert visible(page) == without
    assert requests == []


def test_ten_passages_of_whole_phrases_fit_on_one_screen(open_page: Any) -> None:
    search = Search()
    text = (
        "The mean weight loss of five kilograms, in adults; it lowers the pressure by 4.4 mmHg. No drug was given. " * 9
    )
    search.documents = {f"{n}": Document(f"{n}", f"{n} {text}") for n in range(12)}
    with served(search) as server:
        page = open_page(server.address(q="drag", b=PREFER))
        assert len(shown(page, "b")) == 10
        passages = page.locator(".ranking .text")
        assert all(re.search(r"[,.;]$", text) for text in passages.all_inner_texts())
        assert passages.evaluate_all("all => all.every(p => p.scrollHeight <= p.clientHeight + 1)")
        assert (
            page.locator(".ranking li").evaluate_all(
                "all => Math.max(...all.map(li => li.getBoundingClientRect().bottom))"
            )
            <= 900
        )
        page.locator(".more").first.click()
        first = passages.first.inner_text()
        assert first == search.documents[shown(page, "a")[0]].text.strip()
