"""The playground at `/`: serves the static files of a search page that uses the API."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Iterable
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response

from infembed_ray.reporting.page import render

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

Endpoint = Callable[[Request], Awaitable[Response]]

FILES = resources.files("infembed_ray.serving.http") / "playground"
ASSETS = ("playground.css", "mark.svg", "page.js", "explanation.js", "playground.js", "results.js", "snippets.js")
"""Files below `/playground/`. They hold no data and need no API key; the page's requests to the API do."""
MEDIA_TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}

HEADERS = {
    # No other origins, no inline code, no HTML from strings (Trusted Types): a passage cannot become a script.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "Referrer-Policy": "no-referrer",  # the URL contains the query
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


def router() -> APIRouter:
    """Return the routes of the page and its files."""
    routes = APIRouter(include_in_schema=False)
    for path, endpoint in {"/": page("infembed_ray.serving.http", "playground/index.html"), **assets(ASSETS)}.items():
        routes.add_api_route(path, endpoint, methods=["GET", "HEAD"])
    return routes


def page(package: str, template: str) -> Endpoint:
    """Return the route of a page that extends `reporting/shell.html`."""
    return _endpoint(render(package, template).encode(), "text/html; charset=utf-8")


def assets(names: Iterable[str], files: Traversable = FILES) -> dict[str, Endpoint]:
    """Return path -> route of files of a page, below the name of their directory."""
    return {
        f"/{files.name}/{name}": _endpoint((files / name).read_bytes(), MEDIA_TYPES[Path(name).suffix])
        for name in names
    }


def _endpoint(content: bytes, media_type: str) -> Endpoint:
    """Return the route of a file: with the pages' security headers and an ETag."""
    headers = {**HEADERS, "ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}

    async def answer(request: Request) -> Response:
        if headers["ETag"] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=media_type, headers=headers)

    return answer
