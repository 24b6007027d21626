"""What tests of upgrades share: releases, replicas, and what a command does to them."""

from __future__ import annotations

import time
from typing import Any

import pytest
from ray import serve
from ray.serve.context import _get_global_client

from infembed_ray.serving import distributed
from infembed_ray.serving.arguments import ApiArguments
from infembed_ray.serving.plan import Plan
from infembed_ray.serving.routing.blue_green import ReleaseSpec


def replica(deployment: str) -> dict[str, Any]:
    """Return Serve's details of a replica of a deployment."""
    for application in _get_global_client().get_serve_details()["applications"].values():
        if deployment in application["deployments"]:
            found: dict[str, Any] = application["deployments"][deployment]["replicas"][0]
            return found
    raise LookupError(deployment)


class Switches:
    """What `distributed` does to the API and to the applications; another command may switch the API."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, plan: Plan) -> None:
        self.arguments, self.serves = plan.api, plan.release
        self.deleted: list[str] = []
        monkeypatch.setattr(distributed, "_served", lambda: (self.arguments, self.serves))
        monkeypatch.setattr(distributed, "_switch_to", self.switch)
        monkeypatch.setattr(distributed, "served_fingerprint", lambda url: self.serves.fingerprint)
        monkeypatch.setattr(serve, "delete", lambda name, _blocking=True: self.deleted.append(name))
        monkeypatch.setattr(time, "sleep", lambda seconds: None)

    def switch(self, arguments: ApiArguments, spec: ReleaseSpec) -> None:
        self.serves = spec


def other_release(plan: Plan, name: str) -> ReleaseSpec:
    parts = {"fingerprint": name, "encoder": f"{name}-encoder", "index": f"{name}-index"}
    return plan.release.model_copy(update=parts)
