"""The `openai` client of an endpoint, for calls that are not the hot path (compare `client`)."""

from __future__ import annotations

from typing import Any

import httpx2
import openai

from infembed_ray.config.llm import Endpoint
from infembed_ray.llm.endpoint import api_key


def openai_client(endpoint: Endpoint) -> openai.AsyncOpenAI:
    """Return a client without retries, with the endpoint's key from this machine's environment.

    Raises:
        RunFailure: the key is not set.
    """
    key = api_key(endpoint)
    # Not from the environment: all requests go to one account.
    headers: dict[str, Any] = {"OpenAI-Organization": openai.Omit(), "OpenAI-Project": openai.Omit()}
    options: dict[str, Any] = {
        "api_key": key or "none",  # the client insists on one; `_without_key` removes it from the requests
        "timeout": endpoint.timeout_s,
        "max_retries": 0,  # a submission must not be repeated blindly
        "default_headers": headers,
        "http_client": None if key else openai.DefaultAsyncHttpx2Client(event_hooks={"request": [_without_key]}),
    }
    if endpoint.api_version is None:
        return openai.AsyncOpenAI(base_url=endpoint.base_url, **options)
    return openai.AsyncAzureOpenAI(azure_endpoint=endpoint.base_url, api_version=endpoint.api_version, **options)


async def _without_key(request: httpx2.Request) -> None:
    """Remove the key's headers from a request."""
    for name in ("Authorization", "api-key"):
        request.headers.pop(name, None)
