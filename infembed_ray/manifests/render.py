"""`infembed manifests`: the settings files of the verbs -> Kubernetes manifests.

A stage becomes a RayJob with its settings in a ConfigMap, `serve` a RayService. Everything that does not depend on them is plain
YAML in jobs/kubernetes and is copied once. Nothing is sent to a cluster.
"""

import hashlib
import os
import shutil
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from infembed_ray.config.base import Kind, Settings, nearest, with_texts
from infembed_ray.config.manifests import ManifestsSettings, NodeGroup
from infembed_ray.config.verbs import VERBS, project_files
from infembed_ray.errors import Fault, InputError, check_all
from infembed_ray.progress import say

BASE = "kubernetes"
"""Directory of the plain manifests, below `jobs` and below the output."""
CONFIGS = Path("jobs/configs")
"""Directory of the settings files, VERB.yaml, as `infembed init` writes them."""
SERVE = "serve"
NAMESPACE = "infembed"
REDIS = "infembed-redis:6379"
"""Address of the Redis of jobs/kubernetes/redis.yaml, which keeps the state of the API's GCS."""
MOUNT = "/mnt/infembed"
"""Where pods have the volume of `claim`."""
HEAD = NodeGroup(resources={"cpu": 4, "memory": "16Gi"})
"""The head's pod, unless `groups` has one."""
TEMPLATES = Environment(
    loader=PackageLoader("infembed_ray.manifests", "templates"), undefined=StrictUndefined, autoescape=False
)


def run(settings: ManifestsSettings) -> None:
    """Write the manifests to `output`.

    Raises:
        InputError: a stage, group, image or settings file is missing or invalid, or `serve` has no index yet. Nothing is
            written then.
    """
    loaded, plan = prepare(settings)
    output = Path(settings.output)
    if not (output / "base").exists():  # afterwards it is the user's to edit
        shutil.copytree(project_files() / "jobs" / BASE, output / "base")
    (output / "jobs").mkdir(parents=True, exist_ok=True)
    for name in (name for name in loaded if name != SERVE):
        text = _file(name).read_text(encoding="utf-8").strip()
        unnamed = _render(settings, "rayjob.yaml", name, content=text, name="")
        digest = hashlib.sha256(unnamed.encode()).hexdigest()[:8]
        content = _render(settings, "rayjob.yaml", name, content=text, name=f"infembed-{name}-{digest}")
        (output / "jobs" / f"{name}.yaml").write_text(content, encoding="utf-8")
    if plan is not None:
        config = output / "serve-config.yaml"
        plan.write_config(config)
        content = _render(settings, "rayservice.yaml", SERVE, content=config.read_text(encoding="utf-8").strip())
        (output / "rayservice.yaml").write_text(content, encoding="utf-8")
    content = TEMPLATES.get_template("kustomization.yaml").render(namespace=NAMESPACE, serve=plan is not None) + "\n"
    (output / "kustomization.yaml").write_text(content, encoding="utf-8")
    say(f"manifests: wrote {', '.join(loaded)} to {output.resolve()}")


def prepare(settings: ManifestsSettings) -> tuple[dict[str, Settings], Any]:
    """Return the settings of the stages, and the plan of the API if it is one of them; InputError as `run`."""
    stages = [name for name, nodes in settings.stages.items() if nodes is not None]
    loaded = dict(zip(stages, check_all(*(partial(_load, settings, name) for name in stages)), strict=True))
    return loaded, _plan_of_serve(loaded[SERVE]) if SERVE in loaded else None


def describe(settings: ManifestsSettings) -> Iterator[str]:
    """Yield what would be written; InputError as `run`."""
    loaded, plan = prepare(settings)
    for name in loaded:
        numbers = settings.pods(name).items()
        pods = ", ".join(f"{low}{f'-{high}' if high != low else ''} of {g}" for g, (low, high) in numbers)
        yield f"{'rayservice.yaml' if name == SERVE and plan else f'jobs/{name}.yaml'}: pods {pods}"
    yield f"output {Path(settings.output).resolve()}"


def _file(verb: str) -> Path:
    return CONFIGS / f"{verb}.yaml"


def _render(settings: ManifestsSettings, template: str, verb: str, **values: Any) -> str:
    pods = settings.pods(verb)
    groups = {name: settings.groups.get(name, HEAD) for name in (*pods, "head")}
    content = TEMPLATES.get_template(template).render(
        all_groups=groups,
        images={name: settings.images.get(name) or settings.images["default"] for name in groups},
        stage_pods=pods,
        claim=settings.claim,
        namespace=NAMESPACE,
        redis=REDIS,
        stage=verb,
        ray_version=version("ray"),
        **values,
    )
    return content + "\n"


def _load(settings: ManifestsSettings, name: str) -> Settings:
    """Load the settings file of a stage; InputError also if the stage names a group or an image that does not exist."""
    where = f"stages.{name}"
    if name not in VERBS:
        raise InputError.of(where, None, "no such verb", nearest(name, VERBS))
    for group, (low, high) in settings.pods(name).items():
        if group not in settings.groups:
            raise InputError.of(where, None, f"no group {group}", nearest(group, settings.groups))
        if settings.groups[group].gpus and group not in settings.images:
            remedy = f"set images.{group} to an image with faiss-gpu and torch for CUDA"
            raise InputError.of(f"groups.{group}", None, "has GPUs", remedy)
        if low > high or (low != high and name != SERVE):
            fault = "give one number of pods" if name != SERVE else "give 2-8, not 8-2"
            raise InputError.of(f"{where}.{group}", f"{low}-{high}", fault, "only `serve` is autoscaled")
    if "default" not in settings.images:
        raise InputError.of("images.default", None, "is missing", "set it to the image of CPU pods and of the head")
    loaded = VERBS[name].settings.load(str(_file(name)))
    _require_mounted(loaded, where, _file(name).read_text(encoding="utf-8"))
    return loaded


def _require_mounted(settings: Settings, where: str, written: str) -> None:
    """Check that pods have the paths that are written in a stage's settings file; InputError with all that they lack."""
    faults = []

    def check(setting: str, kind: Kind, value: str) -> str:
        local = value and value in written and "://" not in value and kind.names_path(value)
        if local and not Path(os.path.normpath(value)).is_relative_to(MOUNT):
            fault = f"pods have no such path: they share {MOUNT} only"
            faults.append(Fault(f"{where}.{setting}", value, fault, "give a path below it, or a URI"))
        return value

    check("output", Kind(is_path=True), getattr(settings, "output", ""))
    with_texts(settings, check)
    if faults:
        raise InputError(*faults)


def _plan_of_serve(settings: Any) -> Any:
    """Return the plan of the API with the address that pods need; its keys are in a Secret."""
    from infembed_ray.serving.plan import Plan

    if not (settings.api_keys_env or settings.api_keys_file):
        fault = "the pods' API is open to the cluster"
        raise InputError.of("api_keys_env", "null", fault, "name the variable of its keys")
    return Plan.resolve(settings.model_copy(update={"host": "0.0.0.0", "config_file": None}), locked=True)
