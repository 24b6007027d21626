from __future__ import annotations

import base64
import hashlib
import html
import re
from typing import Any

import pytest
from starlette.testclient import TestClient

from infembed_ray.serving.http.api_docs import type_of
from infembed_ray.serving.http.app import create_app
from infembed_ray.serving.http.auth import ApiKeys
from tests.serving.debug import DebugService

app = create_app(DebugService(), "f", ApiKeys(["key"]))
answer = TestClient(app).get("/docs")
page = answer.text
text = html.unescape(re.sub(r"<[^>]+>", "", page))


def test_the_page_has_all_that_the_document_has() -> None:
    document = app.openapi()
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert f"{method.upper()} {path}" in text
            assert operation["description"] in text
    for name, shape in document["components"]["schemas"].items():
        section = page.partition(f'<section id="{name}">')[2].partition("</section>")[0]
        assert all(f"<code>{field}</code>" in section for field in shape.get("properties", {}))
    assert "Authorization: Bearer KEY" in text


def test_its_links_lead_somewhere_on_this_server() -> None:
    for target in re.findall(r'(?:href|src)="([^"]+)"', page):
        if target.startswith("#"):
            assert f'id="{target[1:]}"' in page
        else:
            assert TestClient(app).get("/" + target.removeprefix("./")).status_code == 200


def test_it_has_no_script_and_its_policy_lets_its_own_style_through() -> None:
    assert "<script" not in page
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.S)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = answer.headers["content-security-policy"]
    assert f"style-src 'sha256-{digest}';" in policy
    assert policy.startswith("default-src 'none'")


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "string", "minLength": 1, "maxLength": 100000}, "string (1 to 100,000 characters)"),
        ({"type": "integer", "minimum": 1}, "integer (at least 1)"),
        ({"type": "array", "items": {"type": "number"}, "maxItems": 3}, "list of number (at most 3 items)"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "string or null"),
        ({"enum": ["float", "base64"]}, "<code>&#34;float&#34;</code> or <code>&#34;base64&#34;</code>"),
        ({"$ref": "#/components/schemas/Hit"}, '<a href="#Hit">Hit</a>'),
        ({"type": "object", "additionalProperties": {"type": ["string", "null"]}}, "object of string or null"),
        ({"const": "<b>"}, "<code>&#34;&lt;b&gt;&#34;</code>"),
    ],
)
def test_types_in_words(schema: dict[str, Any], words: str) -> None:
    assert type_of(schema) == words
