from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from infembed_ray.serving.encoder.batching import QueueFull
from infembed_ray.serving.routing import remote
from infembed_ray.serving.routing.remote import RemoteDeployment
from infembed_ray.serving.service import ReplicaLost


class Handle:
    """A handle of Serve whose calls give this response."""

    def __init__(self, response: Any) -> None:
        self.response = response

    def options(self, method_name: str) -> Handle:
        return self

    def remote(self, *arguments: Any) -> Any:
        return self.response


async def test_cancelling_a_call_cancels_it_at_its_replica() -> None:
    class Response:
        cancelled = 0

        def __await__(self) -> Any:
            return asyncio.sleep(60).__await__()

        def cancel(self) -> None:
            self.cancelled += 1

    response = Response()
    call = asyncio.ensure_future(RemoteDeployment(Handle(response))("method"))
    await asyncio.sleep(0.01)
    call.cancel()
    await asyncio.wait([call])
    await asyncio.sleep(0)
    assert call.cancelled()
    assert response.cancelled == 1


@pytest.mark.parametrize("error", [None, ActorDiedError(), RayTaskError("embed", "traceback", QueueFull(3.0))])
async def test_errors_of_ray_become_those_of_the_service(error: Exception | None) -> None:
    response = asyncio.get_running_loop().create_future()
    if error is None:
        response.cancel()  # by the replica
    else:
        response.set_exception(error)
    with pytest.raises(QueueFull if isinstance(error, RayTaskError) else ReplicaLost) as raised:
        await RemoteDeployment(Handle(response))("method")
    assert getattr(raised.value, "retry_after_s", 3.0) == 3.0


async def test_a_call_to_a_deployment_without_replicas_fails_instead_of_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote, "POLL_S", 0.01)

    class Router:
        def __init__(self) -> None:
            self.curr_replicas = {"replica": object()}
            self._asyncio_router = self
            self._request_router = self

    class Handle:
        def __init__(self) -> None:
            self._router = Router()
            self.asked = 0

        def options(self, method_name: str) -> Handle:
            return self

        def running_replicas_populated(self) -> bool:
            return True

        def remote(self, *arguments: Any) -> asyncio.Future[None]:
            self.asked += 1
            return asyncio.ensure_future(asyncio.sleep(60))  # as Serve does while there is no replica

    handle = Handle()
    call = asyncio.ensure_future(RemoteDeployment(handle)("method"))
    await asyncio.sleep(0.05)
    assert not call.done()  # a replica is working
    handle._router.curr_replicas.clear()
    with pytest.raises(ReplicaLost):
        await call
    deployment, asked = RemoteDeployment(handle), handle.asked
    for _ in range(2):
        with pytest.raises(ReplicaLost):
            await deployment("method")
    assert handle.asked == asked + 1  # the second time it is known
