import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from infembed_ray.config.llm import Endpoint
from infembed_ray.llm import client
from infembed_ray.llm.batch_client import BatchClient
from infembed_ray.llm.chat import RunFailure

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "BACKOFF_S", 0.01)


def test_a_download_has_address_and_key_of_its_endpoint_and_is_repeated_when_cut_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCH_KEY", "mine")
    monkeypatch.setenv("OPENAI_ORG_ID", "another account")
    seen: list[web.Request] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        seen.append(request)
        if len(seen) == 1:
            response = web.StreamResponse(headers={"Content-Length": "9"})
            await response.prepare(request)
            await response.write(b"whole")
            assert request.transport is not None
            request.transport.close()
            return response
        return web.Response(body=b"the whole")

    async def download() -> None:
        application = web.Application()
        application.router.add_get("/{any:.*}", handle)
        async with TestServer(application) as server:
            endpoint = Endpoint(base_url=f"http://127.0.0.1:{server.port}", api_key_env="BATCH_KEY")
            async with contextlib.aclosing(BatchClient(endpoint)) as batches:
                await batches.download("f", tmp_path / "file")

    asyncio.run(download())
    assert (tmp_path / "file").read_bytes() == b"the whole"
    assert [request.path for request in seen] == ["/files/f/content"] * 2
    assert seen[0].headers["Authorization"] == "Bearer mine"
    assert "OpenAI-Organization" not in seen[0].headers


async def status_of_a_batch(handle: Callable[[web.Request], Awaitable[web.Response]], **settings: Any) -> str:
    """Ask an endpoint without a key, which `handle` answers for, for the state of a batch."""
    application = web.Application()
    application.router.add_get("/{any:.*}", handle)
    async with TestServer(application) as server:
        given = Endpoint(base_url=f"http://127.0.0.1:{server.port}", api_key_env=None, **settings)
        async with contextlib.aclosing(BatchClient(given)) as batches:
            return (await batches.describe("b")).status


def test_without_a_key_no_header_carries_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "of another endpoint")
    seen: list[web.Request] = []

    async def handle(request: web.Request) -> web.Response:
        seen.append(request)
        return web.json_response({"id": "b", "object": "batch", "status": "completed"})

    asyncio.run(status_of_a_batch(handle))
    assert "Authorization" not in seen[0].headers


def test_a_missing_key_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BATCH_KEY", raising=False)
    with pytest.raises(RunFailure, match=r"endpoint\.api_key_env=BATCH_KEY: not set"):
        BatchClient(Endpoint(api_key_env="BATCH_KEY"))


@pytest.mark.parametrize(("patience_s", "answered"), [(60.0, True), (0.0, False)])
def test_a_failing_poll_is_repeated_for_the_endpoints_patience(patience_s: float, answered: bool) -> None:
    asked = 0

    async def handle(request: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        if asked <= 9:
            return web.Response(status=503)
        return web.json_response({"id": "b", "object": "batch", "status": "completed"})

    if answered:
        assert asyncio.run(status_of_a_batch(handle, patience_s=patience_s)) == "completed"
    else:
        with pytest.raises(RunFailure, match=r"no answer about batches \(HTTP 503: .*; the same command resumes"):
            asyncio.run(status_of_a_batch(handle, patience_s=patience_s))


def test_a_redirected_submission_is_refused_at_once_with_the_new_address() -> None:
    asked: list[str] = []

    async def handle(request: web.Request) -> web.Response:
        asked.append(request.method)
        raise web.HTTPMovedPermanently("https://elsewhere/v1/batches")

    async def submit() -> None:
        application = web.Application()
        application.router.add_route("*", "/{any:.*}", handle)
        async with TestServer(application) as server:
            given = Endpoint(base_url=f"http://127.0.0.1:{server.port}", api_key_env=None, patience_s=600)
            async with contextlib.aclosing(BatchClient(given)) as batches:
                await batches.submit("f", "tag", doubtful=False)

    with pytest.raises(RunFailure, match=r"/batches redirects to https://elsewhere/v1/batches; set"):
        asyncio.run(submit())
    assert asked == ["POST"]
