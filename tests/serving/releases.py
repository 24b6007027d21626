"""What tests of upgrades share: the replicas."""

from typing import Any

from ray.serve.context import _get_global_client


def replica(deployment: str) -> dict[str, Any]:
    """Return Serve's details of a replica of a deployment."""
    for application in _get_global_client().get_serve_details()["applications"].values():
        if deployment in application["deployments"]:
            details: dict[str, Any] = application["deployments"][deployment]["replicas"][0]
            return details
    raise LookupError(deployment)
