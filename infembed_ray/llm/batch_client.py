"""Client of an endpoint's Batch API: upload, submit, poll, download, each with retries.

A run makes only a few of these calls, so the `openai` client carries them (compare `client`).
"""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import openai
from openai.types import Batch

from infembed_ray.config.llm import Endpoint
from infembed_ray.llm.chat import RunFailure
from infembed_ray.llm.client import pause_s
from infembed_ray.llm.endpoint import api_key, error_message, one_line, proxy_of, with_proxy

T = TypeVar("T")

EXCEEDED = "token_limit_exceeded"
"""Error code of a batch, or of its submission, that exceeds the quota."""
_TAG = "infembed_ray"


class QuotaExceeded(Exception):
    """The endpoint refused a batch because of its quota of enqueued tokens. The batch costs nothing and may come again."""


class BatchClient:
    """Files and batches of one endpoint; RunFailure if it refuses the key or a call, or gives no answer after all retries."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._client, self._where = openai_client(endpoint), with_proxy(endpoint.base_url)

    async def aclose(self) -> None:
        """Close all connections."""
        await self._client.close()

    async def upload(self, file: Path) -> str:
        """Upload a file of requests; return its id."""

        async def attempt() -> str:
            with file.open("rb") as stream:
                content = file.name, stream, "application/jsonl"
                return (await self._client.files.create(file=content, purpose="batch")).id

        return await self._retry("takes no file", attempt)

    async def submit(self, file_id: str, tag: str, doubtful: bool) -> str:
        """Submit an uploaded file as a batch; return the batch's id. QuotaExceeded if the quota of enqueued tokens is used up.

        Args:
            tag: stored in the batch's metadata.
            doubtful: an earlier submission may have succeeded. Then, and after any doubt that arises here, search for the
                tag first, and submit only if there is no such batch.
        """

        async def attempt() -> str:
            nonlocal doubtful
            if doubtful:
                async for batch in self._client.batches.list(limit=100):
                    if (batch.metadata or {}).get(_TAG) == tag:
                        return batch.id
            doubtful = True
            created = await self._client.batches.create(
                input_file_id=file_id, endpoint="/v1/chat/completions", completion_window="24h", metadata={_TAG: tag}
            )
            return created.id

        return await self._retry("takes no batch", attempt)

    async def describe(self, batch_id: str) -> Batch:
        """Return the state of a batch."""
        return await self._retry("no answer about batches", lambda: self._client.batches.retrieve(batch_id))

    async def download(self, file_id: str, to: Path) -> None:
        """Write a file of the endpoint to `to`."""

        async def attempt() -> None:
            async with self._client.files.with_streaming_response.content(file_id) as response:
                await response.stream_to_file(to)

        await self._retry(f"file {file_id} cannot be downloaded", attempt)

    async def _retry(self, trouble: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """Return the result of the first attempt that succeeds; batches wait for hours, so repeat it for `patience_s`."""
        ends = time.monotonic() + self._endpoint.patience_s
        for number in itertools.count():
            try:
                return await attempt()
            except RunFailure:
                raise
            except openai.APIStatusError as error:
                body = error.response.content.replace((api_key(self._endpoint) or "\0").encode(), b"***")
                reason = f"HTTP {error.status_code}: {error_message(body)[0]}"
                if error.code == EXCEEDED:
                    raise QuotaExceeded(reason) from error
                if error.status_code not in (408, 429) and error.status_code < 500:
                    raise RunFailure(self._refusal(error.status_code, reason)) from error
            except (openai.APIError, httpx2.HTTPError, ValueError, AttributeError) as error:  # also a body cut short
                reason = one_line(error.__cause__ or error) or "time-out"
            if time.monotonic() > ends:
                break
            await asyncio.sleep(pause_s(number, 0.0))
        raise RunFailure(f"endpoint.base_url={self._where}: {trouble} ({reason}); the same command resumes")

    def _refusal(self, status: int, said: str) -> str:
        url = self._where
        if status in (401, 403):
            return f"endpoint.api_key_env={self._endpoint.api_key_env}: {url} refuses its key ({said}); set a valid one"
        if status in (404, 405):
            return f"batches: {url} has no Batch API, or no longer has this batch or file ({said}); set batches=null"
        return f"batches: {url} refuses them ({said})"


def openai_client(endpoint: Endpoint) -> openai.AsyncOpenAI:
    """Return a client without retries, with the endpoint's key from this machine's environment."""
    key = api_key(endpoint)
    # Not from the environment: all requests go to one account.
    headers: dict[str, Any] = {"OpenAI-Organization": openai.Omit(), "OpenAI-Project": openai.Omit()}
    direct = {"http://": None, "https://": None} if proxy_of(endpoint.base_url) is None else None
    hooks: dict[str, Any] = {"request": [] if key else [_remove_key], "response": [_refuse_redirect]}
    return openai.AsyncOpenAI(
        base_url=endpoint.base_url,
        api_key=key or "none",  # the client insists on one
        http_client=openai.DefaultAsyncHttpxClient(event_hooks=hooks, mounts=direct),
        timeout=endpoint.timeout_s,
        max_retries=0,  # a submission must not be repeated blindly
        default_headers=headers,
    )


async def _remove_key(request: httpx2.Request) -> None:
    request.headers.pop("Authorization", None)


async def _refuse_redirect(response: httpx2.Response) -> None:
    if response.has_redirect_location and response.request.method == "POST":  # which would become a GET
        said = f"redirects to {one_line(response.headers['Location'])}; set its base_url to the address that answers"
        raise RunFailure(f"{one_line(str(response.request.url))} {said}")
