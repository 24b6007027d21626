"""The rankings of the playground, in a real browser against the real API over a small search."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.serving.http.playground.pages import (
    DOCUMENTS,
    LEAVE_OUT,
    MARKUP,
    PREFER,
    Server,
    ids,
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


def test_moves_are_drawn_from_one_ranking_to_the_other(server: Server, open_page: Any) -> None:
    page = open_page(server.address(q="drag", a=LEAVE_OUT, b=PREFER, k=8))
    before, after = shown(page, "a"), shown(page, "b")
    assert before == ids(server.search("drag", LEAVE_OUT, 8))
    assert after == ids(server.search("drag", PREFER, 8))

    def mark(id: str) -> str:
        if id not in before or id not in after:
            return "new" if id in after else "left"
        by = before.index(id) - after.index(id)
        return f"▲ {by}" if by > 0 else f"▼ {-by}" if by < 0 else "="

    for side, ranking in (("a", before), ("b", after)):
        assert page.locator(f"#hits-{side} .move").all_inner_texts() == [mark(id) for id in ranking]
    lines = page.locator("#moves g").evaluate_all(
        "lines => lines.map(line => [line.dataset.id, line.classList[0], line.querySelectorAll('circle').length])"
    )
    kinds = {"n": "up", "l": "down", "▲": "up", "▼": "down", "=": "same"}
    assert {(id, kind, ends) for id, kind, ends in lines} == {
        (id, kinds[mark(id)[0]], (id in before) + (id in after)) for id in {*before, *after}
    }
    # A line ends at the head of the passage it belongs to.
    id = next(id for id in before if id in after)
    ends = page.locator(f"#moves g[data-id='{id}'] circle").evaluate_all(
        "circles => circles.map(circle => { const box = circle.getBoundingClientRect(); return box.y + box.height / 2 })"
    )
    for side, end in zip("ab", ends, strict=True):
        head = page.locator(f"#hits-{side} li[data-id='{id}'] .head").bounding_box()
        assert abs(head["y"] + head["height"] / 2 - end) < 2


def test_a_passage_pointed_at_stands_out_in_both_rankings(server: Server, open_page: Any) -> None:
    page = open_page(server.address(q="drag", b=PREFER, k=12))
    page.locator("#hits-a li[data-id=p1] .text").hover()
    lit = page.locator("#rankings .lit").evaluate_all("parts => parts.map(part => part.dataset.id)")
    assert lit == ["p1"] * 3


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


def test_long_passages_are_cut_until_asked_for_and_languages_run_their_own_way(server: Server, open_page: Any) -> None:
    page = open_page(server.address(q="drag", b=PREFER, k=12, view="full"))
    passage = page.locator("#hits-b li[data-id='table/3']")
    short = passage.bounding_box()["height"]
    passage.get_by_role("button", name="Show all").click()
    assert passage.bounding_box()["height"] > 2 * short
    assert passage.locator(".text").inner_text() == DOCUMENTS[0].text.strip()
    passage.get_by_role("button", name="Show less").click()
    assert passage.bounding_box()["height"] == short
    assert page.locator("#hits-b li[data-id=p1] .more").is_hidden()
    direction = "text => getComputedStyle(text).direction"
    assert page.locator("#hits-b li[data-id=rtl] .text").evaluate(direction) == "rtl"
    assert page.locator("#hits-b li[data-id=ja] .text").evaluate(direction) == "ltr"


def test_a_search_without_passages_says_so(server: Server, open_page: Any) -> None:
    page = open_page(server.address(q="drag", filter='{"year": {"gt": 3000}}'))
    page.get_by_role("status").get_by_text("Nothing found.").wait_for()
    assert page.locator(".ranking li").all_inner_texts() == ["No passages."] * 2


def test_on_a_narrow_screen_one_ranking_is_shown_at_a_time(server: Server, open_page: Any) -> None:
    page = open_page(server.address(q="drag", b=PREFER, k=12), width=390)
    shown(page, "b")
    seen = lambda: [page.locator(f".ranking.{side}").is_visible() for side in "ab"]  # noqa: E731
    assert seen() == [False, True]
    for width in (390, 700, 832, 833, 1024, 1440):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert seen() == [True, True]
    page.set_viewport_size({"width": 390, "height": 900})
    page.locator("#show").get_by_text("Off").click()
    assert seen() == [True, False]
    page.set_viewport_size({"width": 1440, "height": 900})
    assert seen() == [True, False]  # a choice stays


@pytest.mark.parametrize("width", [390, 1440])
def test_an_address_shows_the_ranking_that_was_chosen(server: Server, open_page: Any, width: int) -> None:
    plain = server.address(q="drag", b=PREFER, k=8)
    page = open_page(plain, width=width)
    shown(page, "b")
    page.locator("#show").get_by_text("Off").click()
    assert page.url == server.address(q="drag", b=PREFER, k=8, show="a")
    copy = open_page(page.url, width=width)
    assert shown(copy, "a") == visible(copy) == visible(page)
    copy.locator("#search").click()
    assert shown(copy, "a") == visible(copy)
    copy.locator("#show").get_by_text("On" if width == 390 else "Both", exact=True).click()
    assert copy.url == plain


def sentence(page: Any) -> str:
    shown(page, "b")
    return " ".join(page.get_by_role("status").inner_text().split())


@pytest.mark.parametrize("k", [1, 3, 8, 12])
@pytest.mark.parametrize(("a", "b"), [(None, PREFER), (PREFER, LEAVE_OUT), (LEAVE_OUT, "")])
def test_a_sentence_counts_the_results_that_moved(
    server: Server, open_page: Any, k: int, a: str | None, b: str
) -> None:
    page = open_page(server.address(q="drag", b=b, k=k, **({"a": a} if a else {})))
    before, after = ids(server.search("drag", a, k)), ids(server.search("drag", b, k))
    changed = sum(id in before and before.index(id) != rank for rank, id in enumerate(after))
    entered, left = len({*after} - {*before}), len({*before} - {*after})
    kinds = {"stayed": k - changed - entered, "changed rank": changed, "entered": entered, "left": left}
    subject = "The instruction" if not a else "The second instruction" if b else "Leaving the instruction out"
    assert sentence(page) == (
        f"{subject} moved {changed + entered or 'none'} of {k} result{'s'[: k > 1]}. "
        + ", ".join(f"{count} {kind}" for kind, count in kinds.items() if count)
    )
    assert page.get_by_role("status").get_attribute("title").startswith("Moved: ")


def test_results_that_only_left_are_not_counted_as_moved(server: Server, open_page: Any) -> None:
    def answer(route: Any) -> None:
        found = route.fetch().json()
        found["results"][1]["hits"] = found["results"][0]["hits"][:2]
        route.fulfill(json=found)

    page = open_page(server.url)
    page.route("**/v1/search", answer)
    page.goto(server.address(q="drag", b=PREFER, k=3))
    assert sentence(page) == "The instruction moved none of 2 results. 2 stayed, 1 left"
    assert page.locator("#hits-a .move").all_inner_texts() == ["=", "=", "left"]


def test_equal_instructions_and_none_say_why_nothing_moved(server: Server, open_page: Any) -> None:
    page = open_page(server.address(q="drag"))
    assert sentence(page) == "Both rankings are the same: there is no instruction."
    page = open_page(server.address(q="drag", a=PREFER, b=PREFER))
    assert sentence(page) == "Both rankings are the same: the instructions are."


@pytest.mark.parametrize("width", [1440, 390])
def test_a_mark_beside_each_rank_says_in_words_how_far_the_passage_moved(
    server: Server, open_page: Any, width: int
) -> None:
    page = open_page(server.address(q="drag", b=PREFER, k=8), width=width)
    before, after = ids(server.search("drag", None, 8)), shown(page, "b")

    def words(id: str) -> str:
        if id not in before:
            return "entered: not in the other ranking"
        old, new = before.index(id) + 1, after.index(id) + 1
        by = f"{abs(old - new)} place{'s'[: abs(old - new) > 1]} {'up' if new < old else 'down'}"
        return "same place in both" if old == new else f"{by}, from {old} to {new}"

    marks = page.locator("#hits-b .move")
    assert marks.evaluate_all("marks => marks.map(mark => mark.ariaLabel)") == [words(id) for id in after]
    for number in range(8):
        assert marks.nth(number).is_visible()
        rank = page.locator("#hits-b .rank").nth(number).bounding_box()
        assert 0 < marks.nth(number).bounding_box()["x"] - rank["x"] < 60


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
    assert requests == []


def test_the_switch_moves_nothing_for_those_who_prefer_that(server: Server, open_page: Any) -> None:
    page = open_page(server.address(q="drag", b=PREFER, k=8), reduced_motion="reduce")
    shown(page, "b")
    for name in ("Off", "On"):
        page.locator("#show").get_by_text(name, exact=True).click()
        assert page.evaluate("document.getAnimations().length") == 0


def test_a_moving_passage_starts_where_it_was(server: Server, open_page: Any) -> None:
    page = open_page(server.address(q="drag", b=PREFER, k=12))
    before, after = shown(page, "a"), shown(page, "b")
    id = next(id for id in after if abs(before.index(id) - after.index(id)) > 2)
    place = f"document.querySelector('#hits-{{}} li[data-id={json.dumps(id)}]').getBoundingClientRect().y"
    page.locator("#show").get_by_text("Off").click()
    until(page, "document.getAnimations().length === 0")
    old = page.evaluate(place.format("a"))
    start = f"""() => {{
        document.querySelector('#show-b').click();
        for (const animation of document.getAnimations()) {{ animation.pause(); animation.currentTime = 0 }}
        return {place.format("b")}
    }}"""
    assert page.evaluate(start) == pytest.approx(old, abs=1)
    page.evaluate("document.getAnimations().forEach(animation => animation.finish())")
    assert abs(page.evaluate(place.format("b")) - old) > 50


def test_ten_compact_ranks_fit_on_a_screen_and_the_address_remembers_the_full_ones(
    server: Server, open_page: Any
) -> None:
    page = open_page(server.address(q="drag", b=PREFER))
    shown(page, "b")
    bottom = "Math.max(...[...document.querySelectorAll('.ranking li')].map(li => li.getBoundingClientRect().bottom))"
    assert page.locator("#try").is_visible()
    assert page.evaluate(bottom) <= 900
    assert page.locator(".metadata:visible").count() == 0
    page.get_by_role("radiogroup", name="Passages").get_by_text("Full").click()
    assert page.evaluate(bottom) > 900
    assert page.locator(".metadata:visible").count() > 0
    assert page.url == server.address(q="drag", b=PREFER, view="full")
    copy = open_page(page.url)
    shown(copy, "b")
    assert copy.evaluate(bottom) > 900
    copy.locator("#search").click()
    assert copy.url == server.address(q="drag", b=PREFER, k=10, view="full")
    copy.get_by_text("Compact").click()
    assert copy.url == server.address(q="drag", b=PREFER, k=10)


def test_a_passage_is_named_by_its_title_and_not_by_its_id(server: Server, open_page: Any) -> None:
    page = open_page(server.address(q="drag", b=PREFER, k=12))
    titled = page.locator("#hits-b li[data-id=ja]")
    assert titled.locator(".title").inner_text() == "Induced <b>drag</b>"
    assert titled.locator(".text").is_hidden()
    titled.get_by_role("button", name="Show all").click()
    assert titled.locator(".text").inner_text() == DOCUMENTS[5].text
    assert titled.locator(".metadata").text_content() == "language jarating 0.5"
    plain = page.locator("#hits-b li[data-id=p1]")
    assert plain.locator(".title").is_hidden()
    assert plain.locator(".id").is_hidden()
    assert plain.locator(".text").bounding_box()["y"] < plain.locator(".rank").bounding_box()["y"] + 10
