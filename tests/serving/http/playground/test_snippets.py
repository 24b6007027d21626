"""The requests that the playground copies."""

import contextlib
import io
import json
import re
import subprocess
from typing import Any

import pytest

from tests.serving.http.playground.pages import LEAVE_OUT, PREFER, Server, copied, ids, shown

pytestmark = [pytest.mark.integration, pytest.mark.slow]


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
