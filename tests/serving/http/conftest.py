"""The playground behind the real API, and pages of it in a browser."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.serving.http.playground.pages import Search, Server, served


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with served(Search()) as running:
        yield running


class Complaints(list[str]):
    """What the browser complains about: errors of scripts, violations of the content security policy, warnings."""

    def of(self, page: Any) -> Complaints:
        page.on("console", lambda message: self.extend([message.text] * (message.type in ("error", "warning"))))
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
