"""A pipeline as a file of a workflow engine: one task per stage, which submits a Ray job and ends with its status."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import yaml

from infembed_ray.config.pipeline import PipelineSettings
from infembed_ray.pipeline.stages import section

TEMPLATE = re.compile(r"\{(?=[{%#])")
"""Start of a tag that Airflow (Jinja) or Argo would render. In JSON it only occurs within texts."""

IMAGE = "infembed-ray:latest"
"""Default image of a task: it needs the command `ray`, and the jobs need `infembed` on the cluster."""
CLUSTER = "http://infembed-head-svc:8265"
"""Default address of the cluster's job API."""
AUTH = "token"
"""Default RAY_AUTH_MODE of a task; `disabled` for a cluster without a token."""
TOKEN_SECRET = "ray-auth-token"
"""Kubernetes secret whose key `auth_token` is the cluster's token."""

AIRFLOW = '''"""The stages of an InF-IR pipeline as Ray jobs. Airflow's workers need RAY_API_SERVER_ADDRESS, RAY_AUTH_MODE and RAY_AUTH_TOKEN."""

import pendulum
from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG

JOBS = {jobs}

with DAG("infembed", start_date=pendulum.datetime(2026, 1, 1), schedule=None, catchup=False, max_active_runs=1):
    before = None
    for stage, command in JOBS.items():
        task = BashOperator(task_id=stage, bash_command=command, append_env=True, retries=0)
        if before:
            before >> task
        before = task
'''


def commands(settings: PipelineSettings) -> dict[str, str]:
    """Return stage -> shell command that runs it as a Ray job and waits for its end.

    A stage reads the newest output of an earlier one, because no address is known before that one has run. The task `upload`
    is the finished training once more, which then uploads its model.
    """
    tasks = [(stage, stage, section(settings, stage, {})) for stage in settings.stages]
    if settings.train is not None and (repository := settings.train.push_to_hub):
        trained = section(settings, "train", {}).model_copy(update={"push_to_hub": repository})
        tasks.insert(len(tasks) - (settings.serve is not None), ("upload", "train", trained))
    found = {}
    for task, verb, own in tasks:
        values = own.model_dump(mode="json", include=own.model_fields_set)
        words = [f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in values.items()]
        command = shlex.join(["ray", "job", "submit", "--", "infembed", verb, *words])
        found[task] = TEMPLATE.sub(r"\\u007b", command)
    return found


def as_airflow(settings: PipelineSettings) -> str:
    """Return the file of an Airflow DAG (Airflow 3)."""
    return AIRFLOW.format(jobs=json.dumps(commands(settings), indent=4, ensure_ascii=False))


def as_argo(settings: PipelineSettings) -> str:
    """Return an Argo Workflow. Its parameters `image`, `cluster` and `auth` can be set when it is submitted."""
    steps = [
        [
            {
                "name": stage,
                "template": "job",
                "arguments": {"parameters": [{"name": "command", "value": command}]},
            }
        ]
        for stage, command in commands(settings).items()
    ]
    token = {"secretKeyRef": {"name": TOKEN_SECRET, "key": "auth_token", "optional": True}}
    container = {
        "image": "{{workflow.parameters.image}}",
        "command": ["sh", "-c"],
        "args": ["{{inputs.parameters.command}}"],
        "env": [
            {"name": "RAY_API_SERVER_ADDRESS", "value": "{{workflow.parameters.cluster}}"},
            {"name": "RAY_AUTH_MODE", "value": "{{workflow.parameters.auth}}"},
            {"name": "RAY_AUTH_TOKEN", "valueFrom": token},
        ],
    }
    job = {"name": "job", "inputs": {"parameters": [{"name": "command"}]}, "container": container}
    defaults = {"image": IMAGE, "cluster": CLUSTER, "auth": AUTH}
    parameters = [{"name": name, "value": value} for name, value in defaults.items()]
    workflow: dict[str, Any] = {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Workflow",
        "metadata": {"generateName": "infembed-"},
        "spec": {
            "entrypoint": "pipeline",
            "arguments": {"parameters": parameters},
            "templates": [{"name": "pipeline", "steps": steps}, job],
        },
    }
    return yaml.safe_dump(workflow, sort_keys=False, allow_unicode=True, width=120)
