"""The page `/docs`: the OpenAPI document as HTML, without scripts and without files of other servers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from markupsafe import Markup, escape

from infembed_ray.reporting.page import render


def api_docs_page(document: Mapping[str, Any]) -> str:
    """Render an OpenAPI document."""
    return render("infembed_ray.serving.http", "api_docs.html", document=document, type_of=type_of)


def type_of(schema: Mapping[str, Any]) -> Markup:
    """Describe the type of a JSON schema in a few words of HTML; a named schema becomes a link."""
    if "$ref" in schema:
        return Markup('<a href="#{0}">{0}</a>').format(schema["$ref"].rpartition("/")[2])
    kinds = schema.get("type", "anything")
    if choices := schema.get("anyOf", schema.get("oneOf")):
        words = [type_of(choice) for choice in choices]
    elif values := schema.get("enum", [schema["const"]] if "const" in schema else None):
        words = [Markup("<code>{}</code>").format(json.dumps(value)) for value in values]
    elif kinds == "array":
        words = [Markup("list of ") + type_of(schema["items"])]
    else:
        words = [escape(kind) for kind in ([kinds] if isinstance(kinds, str) else kinds)]
    return Markup(" or ").join(words)
