"""Why a passage is there, in a real browser against the real API."""

from typing import Any

import pytest

from tests.serving.debug import debug_embed
from tests.serving.http.playground.pages import DOCUMENTS, Server, ids, shown

pytestmark = [pytest.mark.integration, pytest.mark.slow]

INSTRUCTION = "Prefer <b>measured</b> 🛩 values, e\u0301 and no introductions."
PHRASES = ["Prefer <b>measured</b> 🛩 values,", "e\u0301", "and no introductions."]
LEFT_OUT = [  # spelt out
    "e\u0301 and no introductions.",
    "Prefer <b>measured</b> 🛩 values, and no introductions.",
    "Prefer <b>measured</b> 🛩 values, e\u0301",
]


def score(id: str, instruction: str | None, query: str = "drag") -> float:
    text = next(document.text for document in DOCUMENTS if document.id == id)
    asked, passage = debug_embed([list(f"query: {instruction} {query}".encode()), list(text.encode())])
    return float(asked @ passage)


def number(value: float) -> str:
    return f"{value:.3f}".replace("-", "−")


def why(page: Any, side: str, id: str) -> Any:
    """The explanation of a hit, after a click on its button."""
    li = page.locator(f"#hits-{side} > li[data-id]").nth(shown(page, side).index(id))
    li.locator(".ask-why").click()
    li.locator(".phrases").wait_for()
    return li.locator(".why")


def test_a_click_shows_ranks_scores_and_what_each_phrase_added(server: Server, open_page: Any) -> None:
    page = open_page(server.address(q="drag", b=INSTRUCTION, k=5))
    requests: list[str] = []
    page.on("request", lambda request: "explain" in (request.post_data or "") and requests.append(request.url))
    plain, instructed = shown(page, "a"), shown(page, "b")
    every = ids(server.search("drag", None, 20))
    left = next(id for id in plain if id not in instructed)
    stayed = next(id for id in plain if id in instructed)
    strongest = max(
        abs(score(id, INSTRUCTION) - score(id, without)) for id in {*plain, *instructed} for without in LEFT_OUT
    )
    for side, id in (("b", instructed[0]), ("b", instructed[4]), ("a", left), ("a", stayed)):
        panel = why(page, side, id)
        place = f"rank {instructed.index(id) + 1}" if id in instructed else "not among the first 5"
        assert panel.locator("dt").all_inner_texts() == ["Without the instruction:", "With it:"]
        assert panel.locator("dd").all_inner_texts() == [
            f"rank {every.index(id) + 1}, score {number(score(id, None))}",
            f"{place}, score {number(score(id, INSTRUCTION))}",
        ]
        effects = [score(id, INSTRUCTION) - score(id, without) for without in LEFT_OUT]
        marks = panel.locator("mark")
        assert marks.locator("small").all_inner_texts() == [
            ("+" if effect >= 0 else "") + number(effect) for effect in effects
        ]
        texts = [text.rsplit("\u00a0", 1)[0] for text in marks.all_text_contents()]
        assert texts == PHRASES
        assert [kind == "up" for kind in marks.evaluate_all("all => all.map(mark => mark.className)")] == [
            effect >= 0 for effect in effects
        ]
        shades = marks.evaluate_all("all => all.map(mark => Number(mark.style.getPropertyValue('--effect')))")
        assert shades == pytest.approx([abs(effect) / strongest for effect in effects], abs=1e-5)
    assert len(requests) == 1  # for all passages of both rankings
    whole = page.locator("#hits-b .phrases").first.evaluate("p => p.textContent")
    for effect in page.locator("#hits-b .phrases").first.locator("small").all_inner_texts():
        whole = whole.replace(f"\u00a0{effect}", "", 1)
    assert whole == INSTRUCTION
