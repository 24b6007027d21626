"""HTTP POST over aiohttp's connections, with the head of a request written once: a session costs 0.05 ms of CPU more.

aiohttp opens, encrypts, pools and checks the connections and parses the responses. Calls through a proxy use the session.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import NamedTuple

import aiohttp
from aiohttp.helpers import ceil_timeout
from aiohttp.http_exceptions import HttpProcessingError
from yarl import URL


class Response(NamedTuple):
    """A complete HTTP response."""

    status: int
    headers: Mapping[str, str]
    """Names in any case."""
    body: bytes


class Target:
    """Where requests of one kind go.

    Args:
        timeout_s: for one request, from connecting to the last byte of its response.
    """

    def __init__(self, url: str, headers: Mapping[str, str], proxy: str | None, timeout_s: float) -> None:
        self.url = URL(url)
        self.headers = headers
        self.proxy = proxy
        self.timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._prepared: tuple[aiohttp.ClientRequest, bytes] | None = None

    def prepare(self) -> tuple[aiohttp.ClientRequest, bytes]:
        """Return a request for aiohttp's connector, and the head of all requests but its last header."""
        if self._prepared is None:
            request = aiohttp.ClientRequest("POST", self.url, headers=self.headers, loop=asyncio.get_running_loop())
            lines = [f"{name}: {value}" for name, value in request.headers.items() if name != "Content-Length"]
            if any(mark in line for line in lines for mark in "\r\n\0"):
                raise ValueError("a header holds a line break")
            head = "\r\n".join((f"POST {self.url.raw_path_qs} HTTP/1.1", *lines, ""))
            self._prepared = request, head.encode()
        return self._prepared


class Transport:
    """Connections of one event loop, kept open between requests."""

    def __init__(self) -> None:
        self._connector = aiohttp.TCPConnector(limit=0)  # the rate limiter is the limit
        self._session = aiohttp.ClientSession(connector=self._connector, cookie_jar=aiohttp.DummyCookieJar())

    async def close(self) -> None:
        """Close all connections; requests in flight fail."""
        await self._session.close()

    async def post(self, target: Target, body: bytes) -> Response:
        """Send a request; return its complete response.

        Raises:
            asyncio.TimeoutError: `target.timeout` is over.
            aiohttp.ClientError, OSError: the connection failed, or the response is no HTTP or not complete.
        """
        if target.proxy is not None:
            return await self._post_by_session(target, body)
        try:
            async with ceil_timeout(target.timeout.total):
                return await self._post(target, body)
        except HttpProcessingError as error:
            raise aiohttp.ClientPayloadError(f"the response is no valid HTTP: {error.message}") from error

    async def _post(self, target: Target, body: bytes) -> Response:
        request, head = target.prepare()
        connection = await self._connector.connect(request, [], target.timeout)
        try:
            protocol, transport = connection.protocol, connection.transport
            if protocol is None or transport is None or protocol.should_close:  # after bytes that nothing asked for
                raise aiohttp.ServerDisconnectedError
            protocol.set_response_params(read_until_eof=True)
            transport.write(b"%bContent-Length: %d\r\n\r\n%b" % (head, len(body), body))
            while True:
                message, payload = await protocol.read()
                if message.code >= 200:  # below: informational, the response follows
                    break
            response = Response(message.code, message.headers, await payload.read())
        except BaseException:
            connection.close()
            raise
        connection.release()
        return response

    async def _post_by_session(self, target: Target, body: bytes) -> Response:
        async with self._session.post(
            target.url, data=body, headers=target.headers, proxy=target.proxy, timeout=target.timeout
        ) as response:
            return Response(response.status, response.headers, await response.read())
