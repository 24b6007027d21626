"""Calls to the replicas of a Serve deployment, with Ray's errors translated to those of `service.Service`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from ray.exceptions import RayActorError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from infembed_ray import ray_compat
from infembed_ray.serving.service import ReplicaLost

POLL_S = 0.25
"""Seconds between two checks whether a deployment that is waited for still has replicas."""


class RemoteDeployment:
    """Calls methods of a deployment's replicas; a `fan_out.Deployment`.

    Raises `ReplicaLost` instead of waiting for a deployment without replicas, as Serve would.
    """

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle
        self._methods: dict[str, DeploymentHandle] = {}  # creating a handle costs more than a call

    @classmethod
    def named(cls, deployment: str, application: str) -> RemoteDeployment:
        """Return a deployment by name, which need not exist yet."""
        return cls(ray_compat.unchecked_handle(deployment, application))

    async def __call__(self, method: str, *arguments: Any) -> Any:
        """Call a method of one replica.

        Raises:
            ReplicaLost: the replica was lost, or there is none.
            Exception: what the method raised.
        """
        handle = self._methods.get(method)
        if handle is None:
            handle = self._methods[method] = self._handle.options(method_name=method)
        else:
            self._require_replicas(handle)
        answer = asyncio.ensure_future(self._call(handle, arguments))
        try:
            while not (await asyncio.wait({answer}, timeout=POLL_S))[0]:
                self._require_replicas(handle)
            if answer.cancelled():  # by the replica: our own cancellation is raised by the wait
                raise ReplicaLost
            return answer.result()
        finally:
            answer.cancel()

    def _require_replicas(self, handle: DeploymentHandle) -> None:
        if ray_compat.has_no_replicas(handle):
            raise ReplicaLost

    async def _call(self, handle: DeploymentHandle, arguments: Sequence[Any]) -> Any:
        try:
            response = handle.remote(*arguments)
            try:
                return await response
            except asyncio.CancelledError:
                response.cancel()  # otherwise the replica would go on
                raise
        except RayTaskError as error:
            raise error.cause from error
        except (RayActorError, DeploymentUnavailableError, TaskCancelledError) as error:
            raise ReplicaLost from error
