"""`infembed manifests`: the settings files of the verbs -> Kubernetes manifests.

A stage becomes a RayJob with its settings in a ConfigMap, `serve` a RayService. Everything that does not depend on them is plain
YAML in jobs/kubernetes and is copied once. Nothing is sent to a cluster.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from infembed_ray.config.base import Settings, nearest
from infembed_ray.config.manifests import ManifestsSettings, StagePods
from infembed_ray.config.verbs import VERBS, project_files
from infembed_ray.errors import InputError, check_all
from infembed_ray.progress import say

BASE = "kubernetes"
"""Directory of the plain manifests, below `jobs` and below the output."""
SERVE = "serve"
TEMPLATES = Environment(
    loader=PackageLoader("infembed_ray.manifests", "templates"), undefined=StrictUndefined, autoescape=False
)
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,28}[a-z0-9])?")
"""Names that KubeRay accepts for a node group, with room for the pods' suffixes."""


def run(settings: ManifestsSettings) -> None:
    """Write the manifests to `output`.

    Raises:
        InputError: a stage, group, image or settings file is missing or invalid, the pods have too few CPUs or GPUs for a
            stage, or `serve` has no index yet. Nothing is written then.
    """
    stages = {name: stage for name, stage in settings.stages.items() if stage is not None}
    check_all(*(partial(_require_valid, settings, name, stage) for name, stage in stages.items()))
    loaded = {name: VERBS[name].settings.load(stage.config) for name, stage in stages.items()}
    check_all(*(partial(_require_room, settings, name, stage, loaded[name]) for name, stage in stages.items()))
    plan = _plan_of_serve(loaded[SERVE]) if SERVE in loaded else None

    output = Path(settings.output)
    if not (output / "base").exists():  # afterwards it is the user's to edit
        shutil.copytree(project_files() / "jobs" / BASE, output / "base")
    (output / "jobs").mkdir(parents=True, exist_ok=True)
    render = partial(_render, settings)
    for name in (name for name in stages if name != SERVE):
        text = Path(stages[name].config).read_text(encoding="utf-8").strip()
        content = render("rayjob.yaml", name, stages[name], content=text, name="")
        digest = hashlib.sha256(content.encode()).hexdigest()[:8]
        content = render("rayjob.yaml", name, stages[name], content=text, name=f"infembed-{name}-{digest}")
        (output / "jobs" / f"{name}.yaml").write_text(content, encoding="utf-8")
    if plan is not None:
        config = output / "serve-config.yaml"
        plan.write_config(config)
        text = config.read_text(encoding="utf-8").strip()
        content = render("rayservice.yaml", SERVE, stages[SERVE], content=text)
        (output / "rayservice.yaml").write_text(content, encoding="utf-8")
    template = TEMPLATES.get_template("kustomization.yaml")
    content = template.render(namespace=settings.namespace, serve=plan is not None) + "\n"
    (output / "kustomization.yaml").write_text(content, encoding="utf-8")
    say(f"manifests: wrote {', '.join(loaded)} to {output.resolve()}")


def _render(settings: ManifestsSettings, template: str, verb: str, stage: StagePods, **values: Any) -> str:
    content = TEMPLATES.get_template(template).render(
        **settings.model_dump(include={"image", "gpu_image", "namespace", "claim", "redis", "queue"}),
        head=settings.head,
        all_groups=settings.groups,
        stage=verb,
        stage_nodes=stage.nodes,
        max_nodes=stage.max_nodes,
        secrets=stage.secrets,
        ray_version=version("ray"),
        **values,
    )
    return content + "\n"


def _require_valid(settings: ManifestsSettings, name: str, stage: StagePods) -> None:
    """InputError if a stage names something that does not exist, or its settings file cannot be loaded."""
    where = f"stages.{name}"
    if name not in VERBS:
        raise InputError.of(where, None, f"no such verb: {nearest(name, VERBS)}")
    for group in {**stage.nodes, **stage.max_nodes}:
        if group not in settings.groups:
            raise InputError.of(f"{where}.nodes", None, f"no group {group}: {nearest(group, settings.groups)}")
        if not _NAME.fullmatch(group) or group == "head":
            raise InputError.of(
                f"groups.{group}", None, "give it a name of up to 30 lower-case letters, digits and hyphens, not `head`"
            )
        if settings.groups[group].gpus and settings.gpu_image is None:
            raise InputError.of(
                f"groups.{group}", None, "has GPUs", "set gpu_image to an image with faiss-gpu and torch for CUDA"
            )
    if stage.max_nodes and name != SERVE:
        raise InputError.of(
            f"{where}.max_nodes", None, "only `serve` is autoscaled", "a job has as many pods as nodes says"
        )
    for group, most in stage.max_nodes.items():
        if most < stage.nodes.get(group, 0) or group not in stage.nodes:
            raise InputError.of(f"{where}.max_nodes.{group}", most, f"set nodes.{group}, to at most {most}")
    VERBS[name].settings.load(stage.config)


def _require_room(settings: ManifestsSettings, name: str, stage: StagePods, verb: Settings) -> None:
    """InputError if the largest number of pods has too few CPUs or GPUs for a stage; its tasks would wait without end."""
    pods = stage.nodes | stage.max_nodes
    for setting, number, needs in _demands(name, verb):
        fitting = sum(
            count
            * min((int(_of(settings, group, resource) / amount) for resource, amount in needs.items()), default=number)
            for group, count in pods.items()
        )
        if fitting < number:
            asked = ", ".join(f"{amount:g} {resource}" for resource, amount in needs.items())
            raise InputError.of(
                f"stages.{name}.nodes",
                None,
                f"room for {fitting} of {setting}={number} ({asked} each)",
                "give it more nodes or another group",
            )


def _of(settings: ManifestsSettings, group: str, resource: str) -> float:
    """Return how much of a resource a pod of a group has."""
    found = settings.groups[group]
    return found.gpus if resource == "GPU" else _cpus(found.resources.get("cpu", 0))


def _cpus(quantity: str | int) -> float:
    """Return a Kubernetes quantity of CPUs as a number: `500m` is 0.5."""
    text = str(quantity)
    return float(text[:-1]) / 1000 if text.endswith("m") else float(text)


def _demands(name: str, verb: Settings) -> Iterator[tuple[str, int, dict[str, float]]]:
    """Yield (setting, number of tasks, resource -> amount of each) of the verbs whose settings say it."""
    values = dict(verb)
    for setting, cpus, gpus in (
        ("workers", "cpus_per_worker", "gpus_per_worker"),
        ("actors", "cpus_per_actor", "gpus_per_actor"),
        ("encoder_replicas", "cpus_per_encoder", "gpus_per_encoder"),
    ):
        if setting in values:
            amounts = {"CPU": values.get(cpus, 0.0), "GPU": values.get(gpus, 0.0)}
            yield setting, values[setting], {resource: amount for resource, amount in amounts.items() if amount}
    if name == SERVE and (rerank := values["rerank"]):
        yield "rerank.replicas", rerank.replicas, {"CPU": rerank.cpus} | ({"GPU": rerank.gpus} if rerank.gpus else {})


def _plan_of_serve(settings: Any) -> Any:
    """Return the plan of the API with the address that pods need; its keys are in a Secret."""
    from infembed_ray.serving.plan import Plan

    if not (settings.api_keys_env or settings.api_keys_file):
        raise InputError.of(
            "api_keys_env", "null", "the pods' API is open to the cluster", "name the variable of its keys"
        )
    return Plan.resolve(settings.model_copy(update={"host": "0.0.0.0", "config_file": None}), locked=True)
