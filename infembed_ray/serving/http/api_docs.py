"""API documentation at `/docs`: renders the OpenAPI document as one HTML page without scripts and without a CDN."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup, escape
from starlette.responses import HTMLResponse, Response


def api_docs_page(document: Mapping[str, Any]) -> Response:
    """Render an OpenAPI document."""
    environment = Environment(
        loader=PackageLoader("infembed_ray.serving.http", ""), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"type": type_of, "prose": _prose, "json": _json}
    page = environment.get_template("api_docs.html").render(document=document)
    style = re.search(r"<style>(.*?)</style>", page, re.S)
    assert style
    digest = base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'sha256-{digest}'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return HTMLResponse(page, headers={"Content-Security-Policy": policy})


def type_of(schema: Mapping[str, Any]) -> Markup:
    """Describe the type of a JSON schema in a few words of HTML; a named schema becomes a link."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return Markup('<a href="#{0}">{0}</a>').format(name)
    for choice in ("anyOf", "oneOf"):
        if choice in schema:
            return Markup(" or ").join(type_of(one) for one in schema[choice])
    if "const" in schema or "enum" in schema:
        return Markup(" or ").join(_json(value) for value in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type", "anything")
    if isinstance(kind, list):
        return Markup(" or ").join(kind)
    bounds = [
        f"{schema[low]:,g} to {schema[high]:,g}"
        if low in schema and high in schema
        else f"at least {schema[low]:,g}"
        if low in schema
        else f"at most {schema[high]:,g}"
        for low, high in (("minimum", "maximum"), ("minItems", "maxItems"), ("minLength", "maxLength"))
        if low in schema or high in schema
    ]
    unit = {"string": " characters", "array": " items"}.get(kind, "")
    within = escape(f" ({bounds[0]}{unit})" if bounds else "")
    if kind == "array":
        return Markup("list of ") + type_of(schema["items"]) + within
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return Markup("object of ") + type_of(schema["additionalProperties"])
    return escape(kind) + within


def _json(value: Any) -> Markup:
    return Markup("<code>{}</code>").format(json.dumps(value))


def _prose(text: str) -> Markup:
    """Return a description as HTML paragraphs, with its code marked up."""
    code = re.sub("`(.+?)`", r"<code>\1</code>", str(escape(text.strip())))
    return Markup("".join(f"<p>{paragraph}</p>" for paragraph in code.split("\n\n")))
