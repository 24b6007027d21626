"""In Ray Serve's HTTP proxy: a request whose replica is lost is sent to another, and every error has OpenAI's shape.

Behind HAProxy the same is done by the server of every replica of the ingress, which Serve builds likewise.

Serve's proxy answers a request that was under way in a lost replica with a bare 500, and its own refusals with plain text.
Everything that the API does may be done twice, so the request is simply made again from the body that `BodyReader` has
read, and only if nothing of an answer has gone out.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from infembed_ray.config import ServeSettings
from infembed_ray.errors import in_one_line
from infembed_ray.serving.body import LIMIT, BodyReader
from infembed_ray.serving.refusals import ApiError
from infembed_ray.serving.throttle import Throttle, refusal

log = logging.getLogger(__name__)

ATTEMPTS = 3
MARK = b"x-content-type-options"
"""A header that the API puts on all its answers, and Serve on none of its own."""
PREFIX = "/-/"
"""Of Serve's own paths."""


def middlewares() -> list[Middleware]:
    """What RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names. Serve puts each around the one before it."""
    limit = float(os.environ.get(LIMIT) or ServeSettings.model_fields["max_body_mib"].default)
    return [Middleware(AnotherReplica), Middleware(Throttle), Middleware(BodyReader, max_body_mib=limit)]


class AnotherReplica:
    """ASGI middleware around Serve's proxy; it expects each body whole, as `BodyReader` gives it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on until it has an answer of the API's own."""
        if scope["type"] != "http" or scope["path"].startswith(PREFIX):
            return await self._app(scope, receive, send)
        body = _Replayed(await receive(), receive)
        refused: int | None = None
        for _ in range(ATTEMPTS):
            answer = _Answer(send)
            try:
                await self._app(dict(scope), body.again(), answer)
            except Exception as error:
                if answer.begun:
                    raise  # half an answer has gone: breaking the connection is all that is left
                log.warning("a request did not reach a replica: %s", in_one_line(error))
            if answer.begun or body.gone:
                return None
            refused = answer.refused
            if refused is not None:
                break
        await _refusal(refused).response()(scope, receive, send)


class _Answer:
    """Lets an answer of the API through, and keeps one of Serve's own back."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False
        self.refused: int | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and not self.begun:
            if message["status"] < 400 or _is_marked(message["headers"]):
                self.begun = True
            else:
                self.refused = message["status"]
        if self.begun:
            await self._send(message)


class _Replayed:
    """A request's body, to be received several times.

    Attributes:
        gone: the client has closed the connection.
    """

    def __init__(self, body: Message, receive: Receive) -> None:
        self._body = body
        self._receive = receive
        self.gone = False

    def again(self) -> Receive:
        """A channel that gives the body and then what comes after it."""
        pending = [self._body]

        async def receive() -> Message:
            if pending:
                return pending.pop()
            message = await self._receive()
            self.gone = self.gone or message["type"] == "http.disconnect"
            return message

        return receive


def _is_marked(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    return any(name.lower() == MARK for name, _ in headers)


def _refusal(status: int | None) -> ApiError:
    """What Serve answered itself, as the API would say it; None: it gave up."""
    if status == 404:
        return ApiError.later(503, "nothing is served here yet", code="not_ready")
    if status == 429:
        return refusal()
    return ApiError.later(503, "a part of the service is not there", code="replica_lost")
