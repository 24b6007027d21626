"""A small search behind the real API, and what the tests read from the playground in a browser."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from email.message import Message
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from infembed_ray.serving.http.auth import ApiKeys
from infembed_ray.serving.schema import SearchResponse
from infembed_ray.serving.service import Document
from tests.serving.debug import CARD, DebugService, listening
from tests.serving.http.clients import make_app

KEY = "sk-only-for-this-test"
MARKUP = '<img src=x onerror="window.hacked = 1"><script>window.hacked = 1</script><b id="bold">bold</b>'
DOCUMENTS = [
    Document("table/3", "Lift and drag at six angles, measured twice. " * 40, {"year": 1958, "language": "en"}),
    Document("definition", "Aspect ratio is the square of the span over the area.", {"year": 1946, "draft": True}),
    Document("<b>markup</b>", MARKUP, {"language": MARKUP}),
    Document("rtl", "زيادة نسبة العرض إلى الارتفاع تقلل من السحب المستحث.", {"language": "ar"}),
    Document("unbroken-" * 20, "W" * 700, {"language": "V" * 200}),
    Document("ja", "翼の誘導抗力 🛩 e\u0301", {"language": "ja", "rating": 0.5, "Title": "Induced <b>drag</b>"}),
    *(Document(f"p{i}", f"passage {i}", {"year": 1960 + i}) for i in range(6)),
]
PREFER, LEAVE_OUT = (
    "Prefer what was measured.",
    'Leave out "definitions" & it\'s <b>introductions</b>\n100 % $HOME \\n é 翼',
)


class Search(DebugService):
    """Rankings that depend on the instruction; of the next searches, `faults` fail."""

    def __init__(self) -> None:
        super().__init__(card=CARD)
        self.documents = {document.id: document for document in DOCUMENTS}
        self.faults: list[Exception] = []

    async def search(self, *question: Any) -> SearchResponse:
        if self.faults:
            raise self.faults.pop(0)
        return await super().search(*question)


class Server:
    """The API over a search, at a base URL that ends with a slash."""

    def __init__(self, service: Search, url: str) -> None:
        self.service = service
        self.url = url

    def get(self, path: str, **headers: str) -> tuple[int, Message[str, str], bytes]:
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


@contextmanager
def served(
    service: Search,
    *keys: str,
    file: Path | None = None,
    **others: Search,
) -> Iterator[Server]:
    """The API at a free port of this machine while the block runs; `others` are further collections."""
    with listening(make_app(service, ApiKeys(keys, file), **others)) as url:
        yield Server(service, f"{url}/")


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
