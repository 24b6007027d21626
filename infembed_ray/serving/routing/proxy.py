"""ASGI middleware for Ray Serve's HTTP proxy: retries a request whose replica is lost; gives errors OpenAI's shape.

Serve's proxy answers a request that was in flight in a lost replica with a bare 500, and its own rejections with plain text.
Every operation of the API can be repeated, so the middleware sends the request again, with the body that `BodyReader` has
read, unless part of an answer has been sent.

With HAProxy in front, the server of every ingress replica is built with the same middleware.
"""

from __future__ import annotations

import logging
import os

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from infembed_ray.config.serving import ServeSettings
from infembed_ray.errors import in_one_line
from infembed_ray.serving.http.body import LIMIT_VARIABLE, BodyReader
from infembed_ray.serving.http.errors import ApiError, too_many_requests
from infembed_ray.serving.routing.admission import AdmissionControl, has_header

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
"""Attempts of a request, including the first."""
API_HEADER = b"x-content-type-options"
"""A header on every answer of the API and on none of Serve's own."""
SERVE_PREFIX = "/-/"
"""Prefix of Serve's own paths."""


def middlewares() -> list[Middleware]:
    """Return the proxy's middleware, the innermost first. Serve's proxy imports this function by its path."""
    limit = float(os.environ.get(LIMIT_VARIABLE) or ServeSettings.model_fields["max_body_mib"].default)
    return [Middleware(Retry), Middleware(AdmissionControl), Middleware(BodyReader, max_body_mib=limit)]


class Retry:
    """ASGI middleware around Serve's proxy. It expects each body whole, as `BodyReader` passes it on."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send a request up to `MAX_ATTEMPTS` times, until the API itself has answered."""
        if scope["type"] != "http" or scope["path"].startswith(SERVE_PREFIX):
            return await self._app(scope, receive, send)
        body = _ReplayedBody(await receive(), receive)
        status: int | None = None
        for _ in range(MAX_ATTEMPTS):
            answer = _Answer(send)
            try:
                await self._app(dict(scope), body.replay(), answer)
            except Exception as error:
                if answer.begun:
                    raise  # part of an answer has been sent: only the connection can be broken
                log.warning("a request did not reach a replica: %s", in_one_line(error))
            if answer.begun or body.disconnected:
                return None
            status = answer.serve_status
            if status is not None:
                break
        await _api_error(status).response()(scope, receive, send)


class _Answer:
    """Passes an answer of the API on; holds back an error of Serve's own.

    Attributes:
        begun: an answer of the API has begun.
        serve_status: status of an error of Serve's own.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False
        self.serve_status: int | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and not self.begun:
            if message["status"] < 400 or has_header(message["headers"], API_HEADER):
                self.begun = True
            else:
                self.serve_status = message["status"]
        if self.begun:
            await self._send(message)


class _ReplayedBody:
    """A request's body, which can be received several times.

    Attributes:
        disconnected: the client has closed the connection.
    """

    def __init__(self, body: Message, receive: Receive) -> None:
        self._body = body
        self._receive = receive
        self.disconnected = False

    def replay(self) -> Receive:
        """Return a channel that gives the body first and then what the client sends next."""
        pending = [self._body]

        async def receive() -> Message:
            if pending:
                return pending.pop()
            message = await self._receive()
            self.disconnected = self.disconnected or message["type"] == "http.disconnect"
            return message

        return receive


def _api_error(serve_status: int | None) -> ApiError:
    """Return an error of Serve's own as the API reports it; None: all attempts failed."""
    if serve_status == 404:
        return ApiError.later(503, "nothing is served here yet", code="not_ready")
    if serve_status == 429:
        return too_many_requests()
    return ApiError.later(503, "a part of the service is not available", code="replica_lost")
