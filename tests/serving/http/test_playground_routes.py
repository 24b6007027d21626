"""The playground in a real browser, headless Chromium, against the real API over a small search."""

from __future__ import annotations

import contextlib
import io
import json
import re
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from datetime import datetime
from importlib import resources
from typing import Any
from urllib.parse import urlencode

import pytest
import uvicorn

from infembed_ray.serving.encoder.batching import QueueFull
from infembed_ray.serving.http import playground_routes
from infembed_ray.serving.http.app import create_app
from infembed_ray.serving.http.auth import ApiKeys
from infembed_ray.serving.service import Document, Found, ReplicaLost
from tests.serving.debug import DebugService

pytestmark = pytest.mark.integration

KEY = "sk-only-for-this-test"
MARKUP = '<img src=x onerror="window.hacked = 1"><script>window.hacked = 1</script><b id="bold">bold</b>'
DOCUMENTS = [
    Document("table/3", "Lift and drag at six angles, measured twice. " * 40, {"year": 1958, "language": "en"}),
    Document("definition", "Aspect ratio is the square of the span over the area.", {"year": 1946, "draft": True}),
    Document("<b>markup</b>", MARKUP, {"language": MARKUP}),
    Document("rtl", "زيادة نسبة العرض إلى الارتفاع تقلل من السحب المستحث.", {"language": "ar"}),
    Document("unbroken-" * 20, "W" * 700, {"language": "V" * 200}),
    Document("ja", "翼の誘導抗力 🛩 e\u0301", {"language": "ja", "rating": 0.5}),
    *(Document(f"p{i}", f"passage {i}", {"year": 1960 + i}) for i in range(6)),
]
PREFER, LEAVE_OUT = (
    "Prefer what was measured.",
    'Leave out "definitions" & it\'s <b>introductions</b>\n100 % $HOME \\n é 翼',
)


class Search(DebugService):
    """Rankings that depend on the instruction; of the next searches, `faults` fail."""

    def __init__(self) -> None:
        super().__init__()
        self.documents = {document.id: document for document in DOCUMENTS}
        self.faults: list[Exception] = []

    async def search(self, *question: Any) -> Found:
        if self.faults:
            raise self.faults.pop(0)
        return await super().search(*question)


class Server:
    """The API at a free port of this machine."""

    def __init__(self, service: Search, *keys: str) -> None:
        self.service = service
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/"
        app = create_app(service, "playground", ApiKeys(keys))
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True)

    def __enter__(self) -> Server:
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()

    def get(self, path: str, **headers: str) -> tuple[int, Mapping[str, str], bytes]:
        """Status, headers and body of a path."""
        try:
            with urllib.request.urlopen(urllib.request.Request(self.url + path, headers=headers)) as answer:
                return answer.status, answer.headers, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.headers, error.read()

    def search(self, query: str, instruction: str | None, top_k: int = 10, **more: Any) -> list[dict[str, Any]]:
        """Hits, by the API itself: what the page should show."""
        body = {"query": query, "instruction": instruction, "top_k": top_k, **more}
        request = urllib.request.Request(
            self.url + "v1/search", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)["hits"]

    def address(self, **question: object) -> str:
        """The page's, with a question in it."""
        return f"{self.url}#{urlencode(question)}"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(Search()) as running:
        yield running


class Complaints(list[str]):
    """What the browser complains about: errors of scripts, violations of the content security policy, warnings."""

    def of(self, page: Any) -> Complaints:
        page.on("console", lambda message: message.type in ("error", "warning") and self.append(message.text))
        page.on("pageerror", lambda error: self.append(str(error)))
        return self


@pytest.fixture
def open_page(browser: Any) -> Iterator[Any]:
    """Opens an address in a new browser profile. At the end nobody must have complained but of refused requests."""
    complaints, contexts = Complaints(), []

    def open_page(address: str, width: int = 1440, **options: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        contexts.append(context)
        context.set_default_timeout(30_000)
        page = context.new_page()
        complaints.of(page)
        page.goto(address)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert [c for c in complaints if not c.startswith("Failed to load resource: the server responded")] == []


def shown(page: Any, side: str) -> list[str]:
    """Ids of a ranking on the page, once it is there."""
    page.locator(f"#hits-{side} li").first.wait_for(state="attached")
    return page.locator(f"#hits-{side} > li[data-id]").evaluate_all("items => items.map(item => item.dataset.id)")


def until(page: Any, condition: str) -> None:
    """Wait until an expression is true. (Playwright's own wait_for_function is eval, which the page's policy forbids.)"""
    deadline = time.monotonic() + 30
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, condition
        page.wait_for_timeout(20)


def copied(page: Any, side: str, language: str) -> str:
    """What a ranking's button puts into the clipboard."""
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    button = page.locator(f".ranking.{side} [data-copy={language}]")
    button.click()
    button.get_by_text("Copied").wait_for()
    return page.evaluate("navigator.clipboard.readText()")


def ids(hits: list[dict[str, Any]]) -> list[str]:
    return [hit["id"] for hit in hits]


# --------------------------------------------------------------------------------------------------- over HTTP


def test_every_file_of_the_page_is_served_and_none_leads_elsewhere(server: Server) -> None:
    files = {f.name: f.read_bytes() for f in (resources.files("infembed_ray.serving.http") / "playground").iterdir()}
    assert {name for name, _ in playground_routes.ASSETS.values()} == set(files)
    for path, (name, media_type) in playground_routes.ASSETS.items():
        status, headers, body = server.get(path[1:])
        assert (status, headers["Content-Type"], body) == (200, media_type, files[name])
        assert server.get(path[1:], **{"If-None-Match": headers["ETag"]})[0] == 304
        assert set(re.findall(rb"https?://[^\"'\s]+", body)) <= {b"http://www.w3.org/2000/svg"}
    page = files["index.html"].decode()
    assert set(re.findall(r'(?:src|href)="([^"#]+)"', page)) <= {p[1:] for p in playground_routes.ASSETS} | {"docs"}
    assert not re.search(r"<style|<script(?![^>]*src=)|\sstyle=|\son\w+=", page)


def test_the_policy_allows_nothing_from_elsewhere_and_nothing_inline(server: Server) -> None:
    policy = server.get("")[1]["Content-Security-Policy"]
    sources = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert sources["default-src"] == sources["frame-ancestors"] == "'none'"
    assert sources["script-src"] == sources["style-src"] == sources["connect-src"] == "'self'"


def test_the_page_itself_needs_no_key() -> None:
    with Server(Search(), KEY) as locked:
        assert [locked.get(path[1:])[0] for path in playground_routes.ASSETS] == [200] * len(playground_routes.ASSETS)
        assert locked.get("v1/models")[0] == 401


# ---------------------------------------------------------------------------------------------------- rankings


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
            return "new" if id in after else "gone"
        by = before.index(id) - after.index(id)
        return f"▲ {by}" if by > 0 else f"▼ {-by}" if by < 0 else "="

    for side, ranking in (("a", before), ("b", after)):
        assert page.locator(f"#hits-{side} .move").all_inner_texts() == [mark(id) for id in ranking]
    lines = page.locator("#moves g").evaluate_all(
        "lines => lines.map(line => [line.dataset.id, line.classList[0], line.querySelectorAll('circle').length])"
    )
    kinds = {"n": "up", "g": "down", "▲": "up", "▼": "down", "=": "same"}
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
    page = open_page(server.address(q="drag", b=PREFER, k=12))
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


# ------------------------------------------------------------------------------------------- asking, by keyboard


def test_everything_is_reached_and_run_by_keyboard(server: Server, open_page: Any) -> None:
    page = open_page(server.url)
    focused = "document.activeElement.id || document.activeElement.name || document.activeElement.textContent"
    until(page, "document.activeElement.id === 'query'")
    page.keyboard.type("drag")
    page.keyboard.press("Enter")
    assert shown(page, "b") == shown(page, "a") == ids(server.search("drag", None))
    page.get_by_role("status").get_by_text("Both rankings are the same").wait_for()
    page.keyboard.press("Tab")
    assert page.evaluate(focused) == "search"
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Tab")
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
    page.keyboard.press("Tab")
    page.keyboard.type('{"draft": true}')
    page.keyboard.press("Control+Enter")
    until(page, "document.querySelectorAll('#hits-b > li').length === 1")
    assert shown(page, "b") == ["definition"]


def test_the_first_tab_skips_to_the_results_and_focus_is_seen(server: Server, open_page: Any) -> None:
    page = open_page(server.address(q="drag", b=PREFER))
    address = page.evaluate("location.hash")
    shown(page, "b")
    page.keyboard.press("Tab")
    skip = page.locator("#skip")
    assert skip.bounding_box()["y"] >= 0
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.dataset.copy") == "curl"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    assert page.evaluate("location.hash") == address


def test_the_address_holds_the_question_and_gives_it_again(server: Server, open_page: Any) -> None:
    page = open_page(server.url)
    page.locator("#query").fill("drag & lift = 1+1 #翼")
    page.get_by_text("Two instructions").click()
    page.locator("#instruction-a").fill(LEAVE_OUT)
    page.locator("#instruction-b").fill(PREFER)
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


def test_a_suggestion_and_a_field_of_the_index_start_a_question(server: Server, open_page: Any) -> None:
    page = open_page(server.url)
    page.locator("#suggestions button").first.click()
    assert page.locator("#instruction-b").input_value() == page.locator("#suggestions button").first.inner_text()
    assert page.locator("#fields button").all_inner_texts() == [
        f"{name} {kind}" for name, kind in server.service.card.metadata.items()
    ]
    page.get_by_role("button", name="year integer").click()
    page.keyboard.type("1958")
    page.get_by_role("button", name="language string").click()
    page.keyboard.type("en")
    assert json.loads(page.locator("#filter").input_value()) == {"year": 1958, "language": "en"}
    page.locator("#query").fill("drag")
    page.keyboard.press("Enter")
    assert shown(page, "b") == ["table/3"]


def test_copied_requests_run_and_give_the_ranking(server: Server, open_page: Any) -> None:
    page = open_page(server.address(q="it's drag", a=PREFER, b=LEAVE_OUT, k=4, filter='{"draft": {"ne": true}}'))
    for side in "ab":
        ranking = shown(page, side)
        answer = subprocess.run(["bash", "-c", copied(page, side, "curl")], capture_output=True, check=True, timeout=60)
        assert ids(json.loads(answer.stdout)["hits"]) == ranking
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(copied(page, side, "python"), {})
        found = [line.split("  ")[1] for line in printed.getvalue().splitlines() if re.match(r"-?\d\.\d{3}  ", line)]
        assert found == ranking
    # Pages that came over plain HTTP have no clipboard of their own.
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    button = page.locator(".ranking.a [data-copy=python]")
    button.get_by_text("Copy").wait_for()
    button.click()
    button.get_by_text("Copied").wait_for()
    page.locator("#instruction-b").fill("")
    page.keyboard.press("Control+V")
    assert page.locator("#instruction-b").input_value().startswith("from openai import OpenAI\n")


# ----------------------------------------------------------------------------------------------- what goes wrong


def test_a_fault_of_the_question_is_told_at_its_field(server: Server, open_page: Any) -> None:
    page = open_page(server.url)
    page.locator("#query").fill("drag")
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


def stop_the_clock(page: Any) -> None:
    """Time passes in the page only by `page.clock.run_for`."""
    page.clock.install(time=datetime(2030, 1, 1, 1))
    page.clock.pause_at(datetime(2030, 1, 1, 2))


def test_what_passes_is_counted_down_and_tried_again(server: Server, open_page: Any) -> None:
    page = open_page(server.url)
    stop_the_clock(page)
    server.service.faults = [QueueFull(1.2), ReplicaLost(1.0)]
    page.locator("#query").fill("drag")
    page.keyboard.press("Enter")
    page.get_by_role("alert").get_by_text("The server is busy. too many requests are waiting").wait_for()
    assert page.locator("#countdown").inner_text() == "Trying again in 2 s."
    page.clock.run_for(1000)
    assert page.locator("#countdown").inner_text() == "Trying again in 1 s."
    page.clock.run_for(1000)
    page.get_by_role("alert").get_by_text("The server cannot answer now.").wait_for()
    assert page.locator("#countdown").inner_text() == "Trying again in 1 s."
    page.clock.run_for(1000)
    assert shown(page, "b") == ids(server.search("drag", None))
    assert page.get_by_role("alert").is_hidden()


def test_no_other_question_is_asked_on_its_own(server: Server, open_page: Any) -> None:
    page = open_page(server.url)
    stop_the_clock(page)
    server.service.faults = [ReplicaLost(1.0)]
    page.locator("#query").fill("drag")
    page.keyboard.press("Enter")
    page.get_by_text("Trying again in 1 s.").wait_for()
    page.keyboard.type(" and")
    page.clock.run_for(60_000)
    assert page.locator("#trouble").is_visible()
    assert page.get_by_text("Trying again").count() == 0
    page.get_by_role("button", name="Try again").click()
    assert shown(page, "b") == ids(server.search("drag and", None))


def test_what_does_not_pass_is_not_tried_for_ever(server: Server, open_page: Any) -> None:
    page = open_page(server.url)
    stop_the_clock(page)
    server.service.faults = [QueueFull(1.0)] * 6 + [RuntimeError("one attempt too many")]
    page.locator("#query").fill("drag")
    page.keyboard.press("Enter")
    for left in range(5, 0, -1):
        page.get_by_text("Trying again in 1 s.").wait_for()
        assert len(server.service.faults) == left + 1
        page.clock.run_for(1000)
    page.get_by_role("button", name="Try again").wait_for()
    page.clock.run_for(60_000)
    assert len(server.service.faults) == 1
    server.service.faults = []


def test_a_server_that_is_not_there_or_fails_is_said(server: Server, open_page: Any) -> None:
    page = open_page(server.address(q="drag"))
    shown(page, "b")
    server.service.faults = [RuntimeError("a fault of the test")]
    page.locator("#search").click()
    page.get_by_role("alert").get_by_text("Something failed in the server. internal error").wait_for()
    page.route("**/v1/search", lambda route: route.fulfill(status=502, body="<html>Bad gateway</html>"))
    page.get_by_role("button", name="Try again").click()
    page.get_by_role("alert").get_by_text("502").wait_for()
    page.unroute("**/v1/search")
    page.get_by_role("button", name="Try again").click()
    assert shown(page, "b")


def test_a_key_is_asked_for_and_kept_nowhere_but_in_the_page(open_page: Any) -> None:
    with Server(Search(), KEY) as locked:
        page = open_page(locked.address(q="drag", b=PREFER))
        key = page.get_by_label("API key", exact=True)
        key.wait_for()
        until(page, "document.activeElement.id === 'key'")
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        page.get_by_text("send a valid API key").wait_for()
        assert page.evaluate("document.activeElement.id") == "key"
        page.keyboard.type(KEY)
        page.keyboard.press("Enter")
        assert len(shown(page, "b")) == 10
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


# ------------------------------------------------------------------------------------------------- how it looks


def test_on_a_narrow_screen_one_ranking_is_shown_at_a_time(server: Server, open_page: Any) -> None:
    page = open_page(server.address(q="drag", b=PREFER, k=12), width=390)
    shown(page, "b")
    seen = lambda: [page.locator(f".ranking.{side}").is_visible() for side in "ab"]  # noqa: E731
    assert seen() == [False, True]
    page.locator("#show").get_by_text("Without").click()
    assert seen() == [True, False]
    for width in (390, 700, 832, 833, 1024, 1440):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert seen() == [True, True]


def test_the_colours_follow_the_system_until_chosen(server: Server, open_page: Any) -> None:
    page = open_page(server.url, color_scheme="dark")
    background = lambda: page.evaluate("getComputedStyle(document.body).backgroundColor")  # noqa: E731
    dark = background()
    page.emulate_media(color_scheme="light")
    light = background()
    assert light != dark
    page.get_by_text("Dark").click()
    assert background() == dark
    page.reload()
    until(page, "document.documentElement.dataset.theme === 'dark'")
    assert background() == dark
    page.get_by_text("Auto").click()
    assert background() == light


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
    page.locator("#filter").fill("{")
    page.keyboard.press("Enter")
    page.get_by_text("This is not JSON").wait_for()
    assert faults(("light", 390), ("light", 1440), ("dark", 390), ("dark", 1440)) == []
    server.service.faults = [QueueFull(60)]
    page.locator("#filter").fill("")
    page.keyboard.press("Enter")
    page.get_by_text("Trying again").wait_for()
    assert faults(("light", 1440), ("dark", 390)) == []
