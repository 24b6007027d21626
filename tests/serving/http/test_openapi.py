"""The OpenAPI document, the page made from it, and requests generated from it (schemathesis)."""

import html
import re
from typing import Any

import pytest
from hypothesis import settings

from infembed_ray.serving.http.app import type_of
from infembed_ray.serving.http.errors import STATUSES
from infembed_ray.serving.http.middleware import OPEN_PATHS
from tests.serving.http.clients import client_of, make_app

pytestmark = pytest.mark.integration

schemathesis = pytest.importorskip("schemathesis")
from schemathesis.specs.openapi.checks import positive_data_acceptance  # noqa: E402

KEY = {"Authorization": "Bearer key"}

app = make_app(keys=("key",))
api = schemathesis.openapi.from_asgi("/openapi.json", app)


@pytest.mark.slow
@api.parametrize()
@settings(max_examples=100, deadline=None)
def test_generated_requests_get_the_documented_answers(case: Any) -> None:
    if isinstance(case.body, dict) and type(case.body.get("min_sequence")) is int:
        case.body["min_sequence"] = min(
            case.body["min_sequence"], 0
        )  # it would wait for a change in vain, and answer 503
    # The API rejects some requests that the schema allows, such as unknown fields of the index.
    case.call_and_validate(headers=KEY, excluded_checks=[positive_data_acceptance])


def operations() -> dict[str, dict[str, Any]]:
    document = app.openapi()
    return {
        f"{method.upper()} {path}": operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }


def test_every_route_is_documented() -> None:
    assert set(operations()) == {
        "POST /v1/embeddings",
        "POST /v1/rerank",
        "POST /v1/search",
        "PUT /v1/documents",
        "DELETE /v1/documents",
        "DELETE /v1/documents/{id}",
        "GET /v1/documents/{id}",
        "GET /v1/collections",
        "POST /v1/collections/{collection}/rerank",
        "POST /v1/collections/{collection}/search",
        "PUT /v1/collections/{collection}/documents",
        "DELETE /v1/collections/{collection}/documents",
        "DELETE /v1/collections/{collection}/documents/{id}",
        "GET /v1/collections/{collection}/documents/{id}",
        "GET /v1/models",
        "GET /v1/models/{model}",
        "GET /healthz",
        "GET /readyz",
        "GET /metrics",
    }


@pytest.mark.parametrize("name", operations())
def test_every_error_is_documented(name: str) -> None:
    operation = operations()[name]
    errors = {status: response for status, response in operation["responses"].items() if status != "200"}
    expected = {"403", "429", "500", "503", "504"}
    if "requestBody" in operation:
        expected |= {"400", "413", "415"}
    if name.split()[1] not in OPEN_PATHS:
        expected |= {"401"}
        assert operation["security"] == [{"bearer": []}]
    assert expected <= set(errors)
    assert "422" not in errors
    for status, response in errors.items():
        assert response["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/ErrorResponse"}
        assert response["description"] == STATUSES[int(status)]
        assert ("Retry-After" in response.get("headers", {})) == (status in ("429", "503", "504"))
    assert operation["description"]


def test_without_keys_no_security_is_documented() -> None:
    document = make_app().openapi()
    assert "securitySchemes" not in document["components"]
    assert not any("security" in operation for methods in document["paths"].values() for operation in methods.values())


def test_the_page_has_all_of_the_document_and_its_links_lead_somewhere_on_this_server() -> None:
    client = client_of(app)
    page = client.get("/docs").text
    assert "<script" not in page
    text = html.unescape(re.sub(r"<[^>]+>", "", page))
    for name, operation in operations().items():
        assert name in text
        assert operation["description"] in text
    for name, shape in app.openapi()["components"]["schemas"].items():
        section = page.partition(f'<section id="{name}">')[2].partition("</section>")[0]
        assert all(f"<code>{field}</code>" in section for field in shape.get("properties", {}))
    for target in re.findall(r'(?:href|src)="([^"]+)"', page):
        if target.startswith("#"):
            assert f'id="{target[1:]}"' in page
        else:
            assert client.get(f"/{target.removeprefix('./')}").status_code == 200


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "array", "items": {"$ref": "#/components/schemas/Hit"}}, 'list of <a href="#Hit">Hit</a>'),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "string or null"),
        ({"type": ["string", "null"]}, "string or null"),
        ({"enum": ["float", "base64"]}, "<code>&#34;float&#34;</code> or <code>&#34;base64&#34;</code>"),
        ({"const": "<b>"}, "<code>&#34;&lt;b&gt;&#34;</code>"),
    ],
)
def test_types_in_words(schema: dict[str, Any], words: str) -> None:
    assert type_of(schema) == words
