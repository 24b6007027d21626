"""Validate Kubernetes manifests without a cluster.

Kinds of Kubernetes itself and all pod templates are validated strictly against its schemas (package kubernetes-validate). No
package has the schemas of KubeRay and of the Prometheus operator. So their fields are checked against the lists below, which
were read off the CRDs of KubeRay 1.7 and of the operator 0.84; and against the CRDs themselves, where `make crds` has
downloaded them.
"""

from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

CRDS = Path(__file__).parents[2] / ".cache" / "crds"
VERSION = "1.34"
POD = "a pod template"

GROUP = {
    "replicas": int,
    "minReplicas": int,
    "maxReplicas": int,
    "groupName": str,
    "rayStartParams": dict,
    "template": POD,
}
CLUSTER = {
    "rayVersion": str,
    "authOptions": {"mode": str},
    "enableInTreeAutoscaling": bool,
    "autoscalerOptions": {"version": str, "idleTimeoutSeconds": int, "resources": dict, "securityContext": dict},
    "gcsFaultToleranceOptions": {
        "redisAddress": str,
        "redisPassword": {"valueFrom": {"secretKeyRef": {"name": str, "key": str}}},
    },
    "headGroupSpec": {"rayStartParams": dict, "template": POD},
    "workerGroupSpecs": [GROUP],
}
RELABELINGS = [{"action": str, "sourceLabels": list, "targetLabel": str, "regex": str}]
FIELDS: dict[str, Any] = {
    "RayJob": {
        "entrypoint": str,
        "shutdownAfterJobFinishes": bool,
        "ttlSecondsAfterFinished": int,
        "backoffLimit": int,
        "submitterPodTemplate": POD,
        "rayClusterSpec": CLUSTER,
    },
    "RayService": {
        "upgradeStrategy": {"type": str},
        "excludeHeadPodFromServeSvc": bool,
        "serveConfigV2": str,
        "rayClusterConfig": CLUSTER,
    },
    "ServiceMonitor": {
        "selector": {"matchLabels": dict},
        "endpoints": [
            {
                "port": str,
                "path": str,
                "interval": str,
                "authorization": {"credentials": {"name": str, "key": str}},
                "relabelings": RELABELINGS,
            }
        ],
    },
    "PodMonitor": {
        "selector": {"matchLabels": dict},
        "podMetricsEndpoints": [{"port": str, "interval": str, "relabelings": RELABELINGS}],
    },
}
"""Kind -> field of `spec` -> its type."""


def documents(text: str) -> list[dict[str, Any]]:
    """The objects of a YAML file."""
    return [document for document in yaml.safe_load_all(text) if document]


def validate(document: dict[str, Any]) -> None:
    """Raise an error if an object is not valid, or has a field that its kind does not have."""
    kind = document["kind"]
    if kind in FIELDS:
        _conform(document["spec"], FIELDS[kind], kind)
        if kind in custom_resources():
            jsonschema.validate(document, custom_resources()[kind])
    else:
        kubernetes_validate.validate(document, VERSION, strict=True)


def pods(document: dict[str, Any]) -> list[dict[str, Any]]:
    """All pod templates of an object."""
    found = []
    if isinstance(document, dict):
        found += [template for name, template in document.items() if name in ("template", "submitterPodTemplate")]
        for value in document.values():
            found += pods(value)
    elif isinstance(document, list):
        found += [pod for value in document for pod in pods(value)]
    return found


@cache
def custom_resources() -> dict[str, Any]:
    """Kind -> strict JSON Schema of the downloaded CRDs."""
    found = {}
    for file in CRDS.glob("*.yaml"):
        spec = yaml.load(file.read_text(encoding="utf-8"), yaml.CSafeLoader)["spec"]
        (stored,) = (version for version in spec["versions"] if version["storage"])
        found[spec["names"]["kind"]] = _strict(stored["schema"]["openAPIV3Schema"], root=True)
    return found


def _strict(schema: Any, root: bool = False) -> Any:
    """The schema without unknown fields, which Kubernetes drops in silence."""
    if isinstance(schema, list):
        return [_strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _strict(value) for name, value in schema.items()}
    if not root and isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        closed.setdefault("additionalProperties", False)
    return closed


def _conform(value: Any, expected: Any, where: str) -> None:
    if expected == POD:
        kubernetes_validate.validate({"apiVersion": "v1", "kind": "Pod", **value}, VERSION, strict=True)
    elif isinstance(expected, list):
        for item in value:
            _conform(item, expected[0], where)
    elif isinstance(expected, dict):
        assert value.keys() <= expected.keys(), f"{where}: unknown {value.keys() - expected.keys()}"
        for name, item in value.items():
            _conform(item, expected[name], f"{where}.{name}")
    else:
        assert isinstance(value, expected), f"{where}: {value!r} is no {expected.__name__}"
