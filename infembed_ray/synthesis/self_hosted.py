"""Self-hosted models: vLLM on the run's own cluster, started through Ray Serve LLM for the time of a run."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import ray
from ray import serve
from ray.serve.schema import ApplicationStatus, LoggingConfig

from infembed_ray import ray_compat
from infembed_ray.config.llm import Endpoint, SelfHosted
from infembed_ray.errors import InputError, StartError, in_one_line
from infembed_ray.llm.chat import RunFailure
from infembed_ray.llm.endpoint import list_models
from infembed_ray.progress import counted, say
from infembed_ray.ray_cluster import connect

POLL_S = 1.0
FASTAPI_BELOW = (0, 137)
"""First version of FastAPI whose routes, pickled by Ray Serve LLM, demand `self` of every request."""
_LOGGING = LoggingConfig(log_level="WARNING", enable_access_log=False)


@dataclass
class Hosted:
    """A running self-hosted model."""

    served: SelfHosted
    endpoint: Endpoint
    """With the address of the model."""
    started: float = field(default_factory=time.monotonic)
    ended: float | None = None
    """Once its GPUs are free again."""

    def figures(self, tokens: int) -> dict[str, Any]:
        """Return the manifest's figures: GPU hours from the request for the GPUs to their release, and what they cost."""
        served, seconds = self.served, (self.ended or time.monotonic()) - self.started
        hours = served.gpus * seconds / 3600
        usd = None if served.usd_per_gpu_hour is None else served.usd_per_gpu_hour * hours
        rate = tokens / hours if hours else None
        return {"model": served.model, "gpus": served.gpus, "gpu_hours": hours, "tokens_per_gpu_hour": rate, "usd": usd}


@contextlib.contextmanager
def hosting(endpoint: Endpoint, run: str) -> Iterator[Hosted]:
    """Serve the model of `endpoint.serve` while the block runs.

    Args:
        run: identity of the run. A repeated run takes over the model that a killed one left on the cluster.

    Raises:
        InputError: Ray Serve LLM or vLLM is not installed, refuses the settings, or this machine has too few GPUs.
        StartError: the model did not start in time.
    """
    served, name = endpoint.serve, f"infembed-llm-{run}"
    assert served is not None
    connect()
    _require_gpus(served)
    application = _application(served)
    hosted = Hosted(served, endpoint)
    try:
        host, port = _start_serve(served)
        ray_compat.start_application(application, name, f"/{name}", _LOGGING)
        address = {
            "base_url": f"http://{host}:{port}/{name}/v1",
            "api_key_env": None,
            "api_version": None,
            "serve": None,
        }
        hosted.endpoint = endpoint.model_copy(update=address)
        say(f"synthesize: starting {served.model} on {counted(served.gpus, 'GPU')}")
        _wait_until_healthy(name, hosted)
        say(f"synthesize: {served.model} answers at {hosted.endpoint.base_url}")
        yield hosted
    finally:
        _stop(name)
        hosted.ended = time.monotonic()


def configuration(served: SelfHosted) -> dict[str, Any]:
    """Return the arguments of Ray Serve LLM's `LLMConfig`."""
    hardware: dict[str, Any] = {"accelerator_type": served.accelerator}
    if served.accelerator == "cpu":
        hardware = {"accelerator_config": {"kind": "cpu"}}
    return {
        "model_loading_config": {"model_id": served.model, "model_source": served.source or served.model},
        "engine_kwargs": {"tensor_parallel_size": served.tensor_parallel, **served.engine},
        "deployment_config": {"num_replicas": served.replicas},
        **hardware,
    }


def _application(served: SelfHosted) -> serve.Application:
    try:
        from ray.serve.llm import LLMConfig, build_openai_app
    except ImportError as error:
        raise InputError(
            f"endpoint.serve.model={served.model}: Ray Serve LLM needs vLLM ({in_one_line(error)}); install it on every "
            f"node: pip install 'ray[llm]=={ray.__version__}'"
        ) from error
    if tuple(map(int, version("fastapi").split(".")[:2])) >= FASTAPI_BELOW:
        raise InputError(
            f"endpoint.serve.model={served.model}: Ray Serve LLM of Ray {ray.__version__} cannot answer with fastapi "
            f"{version('fastapi')}; on every node: pip install 'fastapi<{'.'.join(map(str, FASTAPI_BELOW))}'"
        )
    try:
        return build_openai_app({"llm_configs": [LLMConfig(**configuration(served))]})
    except (ValueError, TypeError) as error:  # pydantic's errors are ValueErrors
        raise InputError(f"endpoint.serve: Ray Serve LLM refuses it ({in_one_line(error)}); correct it") from error


def _require_gpus(served: SelfHosted) -> None:
    """Check that this machine has them; a cluster may still grow."""
    found = ray.cluster_resources().get("GPU", 0)
    if not os.environ.get("RAY_ADDRESS") and served.gpus > found:
        raise InputError(
            f"endpoint.serve.model={served.model}: it needs {counted(served.gpus, 'GPU')} (replicas x tensor_parallel), and "
            f"this machine has {found:g}; lower them, or run on a cluster with GPUs"
        )


def _start_serve(served: SelfHosted) -> tuple[str, int]:
    """Start Ray Serve on the head node unless it runs; return its address."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    head = next(node["NodeManagerAddress"] for node in ray.nodes() if "node:__internal_head__" in node["Resources"])
    serve.start(http_options={"host": head, "port": served.port}, logging_config=_LOGGING)
    host, port = ray_compat.listening_address()
    return (head if host in ("0.0.0.0", "127.0.0.1", "localhost", "") else host), port


def _wait_until_healthy(name: str, hosted: Hosted) -> None:
    served = hosted.served
    deadline, said = time.monotonic() + served.start_timeout_s, "it has no status yet"
    while time.monotonic() < deadline:
        application = serve.status().applications.get(name)
        if application is not None:
            details = [application.message, *(each.message for each in application.deployments.values())]
            said = " ".join(f"{application.status}: {' '.join(filter(None, details))}".split())
            said = said if len(said) < 600 else f"{said[:200]} ... {said[-350:]}"  # an exception's reason is at its end
            if application.status == ApplicationStatus.DEPLOY_FAILED:
                raise StartError(f"endpoint.serve.model={served.model}: it does not start ({said})")
            if application.status == ApplicationStatus.RUNNING:
                try:
                    if served.model in (list_models(hosted.endpoint) or ()):
                        return
                    said = f"{hosted.endpoint.base_url}/models does not list it"
                except RunFailure as failure:
                    said = str(failure)
        time.sleep(POLL_S)
    raise StartError(
        f"endpoint.serve.start_timeout_s={served.start_timeout_s:g}: {served.model} did not start in this time ({said}); raise "
        "it if the weights are still being loaded, or see that the cluster has the GPUs"
    )


def _stop(name: str) -> None:
    """Delete the model, and Serve as well if it serves nothing else."""
    with contextlib.suppress(ray.exceptions.RayError, TimeoutError):  # the cluster is gone, or its replicas end slowly
        if name in serve.status().applications:
            serve.delete(name)
        if not serve.status().applications:
            serve.shutdown()
