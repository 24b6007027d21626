"""The local server of `infembed view`: a page, its files, and one JSON route that returns a page of rows."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Awaitable, Callable, Sequence
from importlib import resources
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from infembed_ray.config.view import ViewSettings
from infembed_ray.errors import InputError
from infembed_ray.progress import say
from infembed_ray.records.tables import KEPT_FILE
from infembed_ray.serving.http import playground_routes
from infembed_ray.serving.http.auth import ApiKeys
from infembed_ray.serving.http.errors import EXCEPTION_HANDLERS, ApiError, invalid
from infembed_ray.serving.http.middleware import ApiMiddleware, HttpMetrics
from infembed_ray.storage.places import Place, errors_at
from infembed_ray.storage.steps import find_input
from infembed_ray.view.records import Records

HOST = "127.0.0.1"
GRACE_S = 1
"""Seconds that Ctrl-C leaves to the requests in progress."""


def run(directory: str, overrides: Sequence[str]) -> None:
    """Show an output in the browser until interrupted.

    Args:
        directory: output of `infembed synthesize`, or its URI in an object store.
        overrides: `key=value` settings of `ViewSettings`.

    Raises:
        InputError: it is no such output, or the port is in use.
    """
    settings = ViewSettings.load(None, overrides)
    app = create_app(open_view(find_input(directory, "DIR")))
    with _listen(settings.port) as listener:
        say(f"view: http://{HOST}:{listener.getsockname()[1]}/ shows {directory}; stop with Ctrl-C")
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=GRACE_S)
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listener])


def open_view(directory: Place) -> Records:
    """Open an output by the files that it holds.

    Raises:
        InputError: it holds no records, or they are damaged.
    """
    with errors_at(directory, "DIR"):
        if (directory / KEPT_FILE).is_file():
            return Records(directory)
    raise InputError(f"DIR={directory}: holds no {KEPT_FILE}; give an output of infembed synthesize")


def create_app(view: Records) -> Starlette:
    """Create the ASGI application, with the security headers, Host check and errors of the HTTP API."""
    pages = resources.files("infembed_ray.view") / "pages"
    name = "records"
    routes = {
        "/": playground_routes.page("infembed_ray.view", f"pages/{name}.html"),
        **playground_routes.assets((f"{name}.js", "shared.js", "view.css"), pages),
        **playground_routes.assets(playground_routes.SHARED_ASSETS),
    }

    def page(request: Request) -> Response:  # not a coroutine, so it runs on a thread
        try:
            asked = view.query.model_validate(dict(request.query_params))
            answer = view.page(asked)
        except ValidationError as error:
            raise invalid(error) from None
        except InputError as error:
            raise ApiError(400, str(error)) from None
        return JSONResponse(answer, headers={"Cache-Control": "no-store"})

    return Starlette(
        routes=[*(Route(path, endpoint) for path, endpoint in routes.items()), Route("/rows", page)],
        exception_handlers={error: _handler(as_api_error) for error, as_api_error in EXCEPTION_HANDLERS.items()},
        middleware=[
            Middleware(ApiMiddleware, keys=ApiKeys(), metrics=HttpMetrics(CollectorRegistry()), request_ids=False)
        ],
    )


def _handler(as_api_error: Callable[[Request, Any], ApiError]) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def handle(request: Request, error: Exception) -> Response:
        return as_api_error(request, error).response()

    return handle


def _listen(port: int) -> socket.socket:
    try:
        return socket.create_server((HOST, port))
    except OSError as error:
        raise InputError(
            f"port={port}: cannot be bound at {HOST} ({error.strerror}); set another port=..., or leave it out"
        ) from error
