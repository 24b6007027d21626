"""`infembed promote`: an alias names a release, and settings name the alias in place of an output of its stages.

A release is what `infembed pipeline` publishes when all gates are passed: a manifest with the addresses of the stages' outputs.
An alias is a small JSON file, local or in an object store, which is replaced atomically.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import PurePosixPath
from typing import Any, TypeVar

from infembed_ray.config.base import Settings
from infembed_ray.errors import InputError, in_one_line
from infembed_ray.progress import say
from infembed_ray.storage.places import address, errors_at, read_json, write_json
from infembed_ray.storage.steps import find_input, open_place, read_manifest

S = TypeVar("S", bound=Settings)

RELEASE = "release"
"""Stage of a release, and folder of the releases in a pipeline's output."""
ALIAS = ".release"
"""Ending of an alias."""
STAGES = {
    "index": ("index",),
    "records": ("analyze", "synthesize"),
    **dict.fromkeys(("model", "models", "encoder", "teacher"), ("train",)),
}
"""Setting -> the stages of a release whose output it takes, the best first."""
REGISTRIES = ("MLFLOW_REGISTRY_URI", "MLFLOW_TRACKING_URI")
"""Environment variables of MLflow that name its model registry."""


def promote(release: str, alias: str, mlflow: str | None = None) -> None:
    """Let an alias name a release, in MLflow's model registry too if a model is named.

    Args:
        release: the release, the folder of the releases (then its latest), or another alias.
        alias: path or URI that ends in `.release`; created if missing.
        mlflow: model of MLflow's registry; the release's checkpoint becomes a version of it.

    Raises:
        InputError: there is no such release, the alias has another ending, or MLflow refused; then the alias is unchanged.
    """
    if not alias.endswith(ALIAS):
        raise InputError.of("ALIAS", alias, f"must end in {ALIAS}, so that settings know it from other files", "add it")
    place = find_input(followed(release, "RELEASE"), "RELEASE")
    manifest = read_manifest(place, "RELEASE")
    if (stage := manifest["stage"]) != RELEASE:
        raise InputError.of(
            "RELEASE", release, f"is an output of `{stage}`", f"give one in a pipeline's folder `{RELEASE}`"
        )
    target = open_place(alias, "ALIAS")
    if mlflow is not None:
        _register(mlflow, manifest, PurePosixPath(alias).name.removesuffix(ALIAS))
    with errors_at(target, "ALIAS"):
        before = (read_json(target) or {}).get("release")
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        write_json(target, {"release": address(place), "promoted": now})
    say(f"promote: {alias} names {address(place)}{f', before {before}' if before else ''}")


def _register(model: str, manifest: Mapping[str, Any], alias: str) -> None:
    """Make a release's checkpoint a version of a model in MLflow's registry, once, and let an alias of the model name it.

    Raises:
        InputError: MLflow is not installed or set up, refused, or the release has no checkpoint.
    """
    if find_spec("mlflow") is None:
        raise InputError.of(
            "--mlflow", model, "mlflow-skinny is not installed", "pip install mlflow-skinny, or leave it out"
        )
    if not any(map(os.environ.get, REGISTRIES)):
        raise InputError.of("--mlflow", model, "no registry is named", f"set {' or '.join(REGISTRIES)}")
    if "train" not in manifest["stages"]:
        raise InputError.of("--mlflow", model, "the release has no output of `train` to register", "leave --mlflow out")
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    client, release = MlflowClient(), str(manifest["identity"])
    try:
        try:
            client.create_registered_model(model)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        versions = client.search_model_versions(f"name = '{model}'")
        version = next((found for found in versions if found.tags.get(RELEASE) == release), None)
        if version is None:
            checkpoint = manifest["stages"]["train"]["address"]
            version = client.create_model_version(model, checkpoint, tags={RELEASE: release})
        client.set_registered_model_alias(model, alias, version.version)
    except MlflowException as error:
        raise InputError.of("--mlflow", model, in_one_line(error), "the alias is unchanged") from error
    say(f"promote: version {version.version} of {model} in MLflow is {alias}")


def resolved(settings: S) -> S:
    """Return settings in which the outputs of releases take the place of aliases.

    Raises:
        InputError: there is no such alias, or its release has no output of the stage that a setting needs.
    """
    values = {name: _resolved(name, value) for name, value in settings}
    changed = {name: value for name, value in values.items() if value != getattr(settings, name)}
    return settings.model_copy(update=changed) if changed else settings


def _resolved(name: str, value: Any) -> Any:
    if isinstance(value, Settings):
        return resolved(value)
    if isinstance(value, dict):
        return {key: _resolved(name, item) for key, item in value.items()}
    if not (name in STAGES and isinstance(value, str) and value.endswith(ALIAS)):
        return value
    stages = read_manifest(find_input(followed(value, name), name), name)["stages"]
    made = (stages[stage] for stage in STAGES[name] if stage in stages)
    found = next((output["address"] for output in made if not output.get("report_only")), None)
    if found is None:
        raise InputError.of(name, value, f"its release has no output of {' or '.join(STAGES[name])}", "name one itself")
    say(f"{name}: {value} is {found}")
    return found


def followed(value: str, setting: str) -> str:
    """Return the address of the release that an alias names; any other value itself.

    Raises:
        InputError: there is no such alias.
    """
    if not value.endswith(ALIAS):
        return value
    place = open_place(value, setting)
    with errors_at(place, setting):
        found = read_json(place)
    if found is None:
        raise InputError.of(setting, value, "no such alias", f"`infembed promote RELEASE {value}` makes it")
    return str(found["release"])
