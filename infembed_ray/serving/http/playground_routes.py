"""The playground at `/`: serves the static files of a search page that uses the API."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from importlib import resources

from fastapi import APIRouter, Request, Response

ASSETS = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/playground/playground.css": ("playground.css", "text/css; charset=utf-8"),
    **{
        f"/playground/{name}.js": (f"{name}.js", "text/javascript; charset=utf-8")
        for name in ("playground", "page", "results", "snippets")
    },
    "/playground/mark.svg": ("mark.svg", "image/svg+xml"),
}
"""Path -> file and media type. The files hold no data and need no API key; the page's requests to the API do."""

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
    files = resources.files("infembed_ray.serving.http") / "playground"
    for path, (name, media_type) in ASSETS.items():
        routes.add_api_route(path, static_file((files / name).read_bytes(), media_type), methods=["GET", "HEAD"])
    return routes


def static_file(content: bytes, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    """Return the route of a file of a page: with the page's security headers and an ETag."""
    headers = {**HEADERS, "ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}

    async def answer(request: Request) -> Response:
        if headers["ETag"] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=media_type, headers=headers)

    return answer
