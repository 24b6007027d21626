"""The playground at `/`: serves the static files of a search page that uses the API."""

from __future__ import annotations

import hashlib
from importlib import resources
from pathlib import Path

from fastapi import APIRouter, Request, Response

from infembed_ray.reporting.page import render

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
    """Return the routes of the page and its files: with security headers and an ETag."""
    routes = APIRouter(include_in_schema=False)
    page = render("infembed_ray.serving.http", "playground/index.html").encode()
    contents = {"/": (page, "text/html; charset=utf-8")}
    contents |= {f"/playground/{n}": ((FILES / n).read_bytes(), MEDIA_TYPES[Path(n).suffix]) for n in ASSETS}

    for path, (content, media_type) in contents.items():

        async def answer(request: Request, content: bytes = content, media_type: str = media_type) -> Response:
            headers = {**HEADERS, "ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}
            if headers["ETag"] in request.headers.get("if-none-match", ""):
                return Response(status_code=304, headers=headers)
            return Response(content, media_type=media_type, headers=headers)

        routes.add_api_route(path, answer, methods=["GET", "HEAD"])
    return routes
