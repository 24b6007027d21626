"""What tests of upgrades share: releases, replicas, and what a command does to them."""

import time
from typing import Any

import pytest
from ray import serve
from ray.serve.context import _get_global_client

from infembed_ray.serving import supervisor
from infembed_ray.serving.plan import Plan
from infembed_ray.serving.release import ApiArguments, EncoderArguments, ReleaseSpec


def replica(deployment: str) -> dict[str, Any]:
    """Return Serve's details of a replica of a deployment."""
    for application in _get_global_client().get_serve_details()["applications"].values():
        if deployment in application["deployments"]:
            details: dict[str, Any] = application["deployments"][deployment]["replicas"][0]
            return details
    raise LookupError(deployment)


class Switches:
    """What `supervisor` does to the API and to the applications; another command may switch the API."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, plan: Plan) -> None:
        self.arguments, self.serves = plan.api, plan.release
        self.deleted: list[str] = []
        monkeypatch.setattr(supervisor, "served_release", lambda: (self.arguments, self.serves))
        monkeypatch.setattr(supervisor, "switch_to", self.switch)
        monkeypatch.setattr(serve, "delete", lambda name, _blocking=True: self.deleted.append(name))
        monkeypatch.setattr(time, "sleep", lambda seconds: None)

    def switch(self, arguments: ApiArguments, spec: ReleaseSpec) -> None:
        self.serves = spec


def other_release(plan: Plan, name: str) -> ReleaseSpec:
    """Return a release with another encoder and another index."""
    default = plan.release.default
    encoder = default.encoder.model_copy(update={"fingerprint": f"{name}-encoder"})
    index = default.index.model_copy(update={"version": f"{name}-index"})
    changed = default.model_copy(update={"encoder": encoder, "index": index})
    return plan.release.model_copy(update={"collections": {"index": changed}})


def with_encoder(release: ReleaseSpec, encoder: EncoderArguments) -> ReleaseSpec:
    """Return a release with another encoder."""
    changed = release.default.model_copy(update={"encoder": encoder})
    return release.model_copy(update={"collections": {"index": changed}})
