"""ASGI middleware of Ray Serve's HTTP proxy. With HAProxy in front, the server of every ingress replica is built with the same.

Serve's proxy answers a request that was in flight in a lost ingress replica with a bare 500, and its own rejections with plain
text. They get OpenAI's shape and a status that asks the client to try again: every operation of the API can be repeated.
"""

from __future__ import annotations

import logging

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from infembed_ray.errors import in_one_line
from infembed_ray.serving.http.body import BodyReader
from infembed_ray.serving.http.errors import HttpError, too_many_requests
from infembed_ray.serving.routing.admission import AdmissionControl, has_header

log = logging.getLogger(__name__)

API_HEADER = b"x-content-type-options"
"""A header on every answer of the API and on none of Serve's own."""
SERVE_PREFIX = "/-/"
"""Prefix of Serve's own paths."""


def middlewares() -> list[Middleware]:
    """Return the proxy's middleware, the innermost first. Serve's proxy imports this function by its path."""
    return [Middleware(ApiErrors), Middleware(AdmissionControl), Middleware(BodyReader)]


class ApiErrors:
    """ASGI middleware around Serve's proxy, which replaces errors of Serve's own."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on; pass an answer of the API on, or answer an error of Serve's own as the API reports it."""
        if scope["type"] != "http" or scope["path"].startswith(SERVE_PREFIX):
            return await self._app(scope, receive, send)
        begun = gone = False
        status = 500

        async def receive_until_gone() -> Message:
            nonlocal gone
            message = await receive()
            gone = gone or message["type"] == "http.disconnect"
            return message

        async def send_if_ours(message: Message) -> None:
            nonlocal begun, status
            if message["type"] == "http.response.start" and not begun:
                status = message["status"]
                begun = status < 400 or has_header(message["headers"], API_HEADER)
            if begun:
                await send(message)

        try:
            await self._app(scope, receive_until_gone, send_if_ours)
        except Exception as error:
            if begun:
                raise  # part of an answer has been sent: only the connection can be broken
            log.warning("a request did not reach a replica: %s", in_one_line(error))
        if not begun and not gone:
            await _api_error(status).response()(scope, receive, send)


def _api_error(serve_status: int) -> HttpError:
    """Return an error of Serve's own as the API reports it."""
    if serve_status == 404:
        return HttpError("not_ready", "nothing is served here yet")
    if serve_status == 429:
        return too_many_requests()
    return HttpError("replica_lost", "a part of the service is not available")
