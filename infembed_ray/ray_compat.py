"""Every private name of Ray that the package uses, one function or constant each. Written for Ray 2.60.

pyproject.toml pins the minor version of Ray, and tests/test_ray_compat.py checks each name. The functions import Ray when
they are called, so a module that needs a constant only does not load Ray.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve import Application
    from ray.serve.handle import DeploymentHandle
    from ray.serve.schema import LoggingConfig

# ------------------------------------------------------------------------------------------------------ Ray core

JOB_CONFIG_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Ray sets this variable in the driver of a submitted job. There is no public query for "am I a job?"."""
SETUP_HOOK_VARIABLE = "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR"
"""Import path of a function that a worker calls before it becomes an actor. The public field
`runtime_env["worker_process_setup_hook"]` has no effect for actors."""
START_LIMITS = {
    "RAY_gcs_server_port_wait_time_s": "90",
    "RAY_raylet_start_wait_time_s": "90",
    "RAY_agent_register_timeout_ms": "90000",
}
"""How long each process of a local cluster may take to start. Ray's own 30 s are too short on a busy machine."""
MEMORY_RETRIES = {"RAY_task_oom_retries": "3"}
"""How often Ray repeats a task that it killed because memory ran out; its own default is without end."""
NO_IDLE_WORKERS = {"RAY_enable_worker_prestart": "0", "RAY_prestart_worker_first_driver": "0"}
"""Starts no worker process before a task needs one. Those of `serve` have environments of their own, so idle ones are no use."""
NO_RETRY_LOG = {"RAY_enable_output_error_log_if_still_retry": "0"}
"""Stops the driver from printing that calls to Serve's controller are retried while Serve shuts down."""


def retries() -> dict[str, int]:
    """Return how often Ray restarts an actor and repeats its tasks. Actor pools of Ray Data do so without end, also for lack of memory."""
    return {"max_restarts": 8, "max_task_retries": 8}


def raylet_death_check(seconds: float) -> dict[str, str]:
    """Return the environment that makes a worker process check for a dead raylet at this interval."""
    return {"RAY_raylet_death_check_interval_milliseconds": str(int(seconds * 1000))}


def reload_core_config() -> None:
    """Make Ray's core read its environment variables again; it reads them once, when Ray is imported."""
    import ray

    ray._raylet.Config.initialize("")


def pass_worker_logs_through(redact: Callable[[str], str]) -> None:
    """Let a function change the lines of worker processes before this driver prints them; call it before `ray.init`."""
    from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

    def change(batch: dict[str, Any]) -> None:
        batch["lines"] = redact("\n".join(batch["lines"])).split("\n")

    dispatcher.remove_handler(__name__)
    dispatcher.add_handler(__name__, change)  # handlers share a batch, and the one that prints is added by `ray.init`


# ----------------------------------------------------------------------------------------------------- Ray Train


def placement_errors() -> tuple[type[Exception], ...]:
    """Return the errors with which Ray Train gives up waiting for resources; none of them is public."""
    from ray.train.v2._internal import exceptions

    return exceptions.WorkerGroupStartupTimeoutError, exceptions.InsufficientClusterResourcesError


def preemption_announced() -> bool:
    """Return whether Ray has told this training worker that one of the run's machines will be taken away.

    The public `ray.train.get_preemption_info` is a collective, which would cost time in every step.
    """
    from ray.train.v2._internal.execution.context import get_train_context

    return get_train_context().preemption_context.preemption_info is not None


# ----------------------------------------------------------------------------------------------------- Ray Serve

REPLICA_MODULE = "ray.serve._private.replica"
"""The module of Serve that a replica imports first."""
UNUSED_BY_REPLICAS = "pandas"
"""A package that Serve imports if it is installed, for 0.2 s: to encode answers that hold data frames."""
MAX_REPLICAS_PER_NODE = 100
"""Largest value that Serve accepts for `max_replicas_per_node`."""
PROXY_MIDDLEWARE_VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
"""Import path of a function that returns ASGI middleware for Serve's HTTP proxies."""
SINGLE_EVENT_LOOP = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0", "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0"}
"""Environment with which a replica runs Serve's code and ours in one event loop: no thread hand-over per request."""
GRPC_CALLS = {"RAY_SERVE_USE_GRPC_BY_DEFAULT": "1", "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(2**31 - 1)}
"""Environment in which proxies and replicas call each other by gRPC instead of actor calls. A replica that answers an actor call
waits until the caller has the answer, and answers nobody else meanwhile. If the caller is lost with its node, that takes until Ray
declares the node dead: 10 s to a minute."""


def haproxy_environment(client_timeout_s: float) -> dict[str, str]:
    """Return the environment of a Serve controller that puts HAProxy before the ingress replicas."""
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        # Send a request that was in flight in a lost replica to another one.
        "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response junk-response",
        "RAY_SERVE_HAPROXY_RETRIES": "3",
        # For a client that never completes its headers: uvicorn itself waits without a limit.
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": f"{client_timeout_s:.0f}",
        # Leave out a lost replica at its first error, but a busy one late: with no server left, HAProxy would answer
        # Serve's bare 500. A health check may take as long as the interval between two of them.
        "RAY_SERVE_HAPROXY_OBSERVE_ERROR_LIMIT": "1",
        "RAY_SERVE_HAPROXY_HEALTH_CHECK_FALL": "5",
        "RAY_SERVE_HAPROXY_HEALTH_CHECK_FASTINTER": "1s",
        "RAY_SERVE_HAPROXY_HEALTH_CHECK_DOWNINTER": "1s",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
    }


def haproxy_ports(metrics: int, statistics: int) -> dict[str, str]:
    """Return the environment that sets the ports of HAProxy's own pages."""
    return {"RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics), "RAY_SERVE_HAPROXY_STATS_PORT": str(statistics)}


def start_application(application: Application, name: str, route: str | None, logging: LoggingConfig) -> None:
    """Deploy an application and return at once; the public `serve.run` waits and prints."""
    from ray import serve

    serve._run(application, _blocking=False, name=name, route_prefix=route, logging_config=logging)


def delete_application(name: str) -> None:
    """Delete an application without waiting for its replicas, as the public `serve.delete` does."""
    from ray import serve

    serve.delete(name, _blocking=False)


def applied_configs() -> dict[str, dict[str, Any]]:
    """Return the config of each application that was deployed by one; `serve.status` has none."""
    from ray.serve.context import _get_global_client

    applications = _get_global_client().get_serve_details()["applications"]
    return {name: found["deployed_app_config"] for name, found in applications.items() if found["deployed_app_config"]}


def apply_configs(configs: dict[str, dict[str, Any]]) -> None:
    """Deploy applications as `serve deploy` does, which needs a dashboard, and return at once; Serve deletes the other ones that
    were deployed so. With the same `args`, a new `user_config` reconfigures replicas and restarts none."""
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    client = _get_global_client()
    capacity = client.get_serve_details()["target_capacity"]
    config = {"applications": list(configs.values()), "target_capacity": capacity}
    client.deploy_apps(ServeDeploySchema.model_validate(config))


def listening_address() -> tuple[str, int]:
    """Return the host and port that Serve's proxies were started with; Serve keeps them whatever is asked later."""
    from ray.serve.context import _get_global_client

    http = _get_global_client().http_config
    return http.host, http.port


def unchecked_handle(deployment: str, application: str) -> DeploymentHandle:
    """Return a handle without asking the controller whether the deployment exists: that would block the event loop."""
    from ray import serve

    return serve.get_deployment_handle(deployment, app_name=application, _check_exists=False)


def has_no_replicas(handle: DeploymentHandle) -> bool:
    """Return whether the handle's router knows that its deployment has no replica left.

    Serve has no public query for it. A call would wait for a new replica for as long as it takes.
    """
    return handle.running_replicas_populated() and not handle._router._asyncio_router._request_router.curr_replicas
