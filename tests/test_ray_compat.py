"""Contract tests: every private name in ray_compat exists in the installed Ray and means what ray_compat says."""

import importlib.util
import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from packaging.requirements import Requirement
from ray import serve
from ray._private import ray_constants, ray_logging
from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR
from ray.serve._private import client, constants, replica, router
from ray.serve._private.request_router.request_router import RequestRouter
from ray.serve.handle import DeploymentHandle
from ray.train.v2._internal import exceptions
from ray.train.v2._internal.execution import context

from infembed_ray import ray_compat
from infembed_ray.serving.replicas import Ingress

PACKAGE = Path(ray.__file__).parent


def source(*path: str) -> str:
    return PACKAGE.joinpath(*path).read_text(encoding="utf-8")


def test_the_requirement_admits_no_later_minor_version_of_ray() -> None:
    project = Path(__file__).parents[1] / "pyproject.toml"
    found = re.search(r'^  "(ray\[.*\].*)",$', project.read_text(encoding="utf-8"), re.M)
    assert found
    major, minor = map(int, ray.__version__.split(".")[:2])
    accepted = Requirement(found[1]).specifier
    assert accepted.contains(ray.__version__)
    assert not accepted.contains(f"{major}.{minor + 1}.0")


def test_names_of_the_core_and_of_train_exist() -> None:
    assert ray_compat.SETUP_HOOK_VARIABLE == ray_constants.WORKER_PROCESS_SETUP_HOOK_ENV_VAR
    assert "WORKER_PROCESS_SETUP_HOOK_ENV_VAR" in source("_private", "workers", "default_worker.py")
    assert ray_compat.JOB_CONFIG_VARIABLE == RAY_JOB_CONFIG_JSON_ENV_VAR
    settings = (
        ray_compat.START_LIMITS | ray_compat.NO_RETRY_LOG | ray_compat.NO_IDLE_WORKERS | ray_compat.MEMORY_RETRIES
    )
    settings |= ray_compat.raylet_death_check(1.5)
    core = (PACKAGE / "_raylet.so").read_bytes() + source("_private", "node.py").encode()
    assert [name for name in settings if name.removeprefix("RAY_").encode() not in core] == []
    assert list(ray_compat.raylet_death_check(1.5).values()) == ["1500"]  # milliseconds
    ray_compat.reload_core_config()
    assert all(issubclass(error, exceptions.RayTrainError) for error in ray_compat.placement_errors())


def test_lines_of_workers_are_changed_before_the_handler_that_prints_them() -> None:
    printed: list[str] = []
    dispatcher = ray_logging.global_worker_stdstream_dispatcher
    ray_compat.pass_worker_logs_through(str.upper)
    dispatcher.add_handler("prints", lambda batch: printed.extend(batch["lines"]))
    try:
        dispatcher.emit({"lines": ["one", "two"]})
    finally:
        dispatcher.remove_handler("prints")
        dispatcher.remove_handler(ray_compat.__name__)
    assert printed == ["ONE", "TWO"]
    text = source("_private", "worker.py")
    assert 'global_worker_stdstream_dispatcher.add_handler(\n                "ray_print_logs"' in text


def test_preemption_is_read_from_the_train_context(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "preemption_context" in context.TrainContext.__annotations__
    for announced in (None, "soon"):
        fake = SimpleNamespace(preemption_context=SimpleNamespace(preemption_info=announced))
        monkeypatch.setattr(context, "get_train_context", lambda fake=fake: fake)
        assert ray_compat.preemption_announced() == (announced is not None)


def test_names_of_serve_exist() -> None:
    text = source("serve", "_private", "utils.py")
    assert re.search(rf"try:\n    import {ray_compat.UNUSED_BY_REPLICAS} as pd\nexcept ImportError:", text)
    assert importlib.util.find_spec(ray_compat.REPLICA_MODULE)
    assert ray_compat.MAX_REPLICAS_PER_NODE == constants.MAX_REPLICAS_PER_NODE_MAX_VALUE
    variables = [ray_compat.PROXY_MIDDLEWARE_VARIABLE, *ray_compat.SINGLE_EVENT_LOOP, *ray_compat.haproxy_ports(1, 2)]
    read_by_serve = source("serve", "_private", "constants.py")
    variables += ray_compat.haproxy_environment(60.0)
    assert [name for name in variables if f'"{name}"' not in read_by_serve] == []
    functions = {serve._run: "_blocking", serve.delete: "_blocking", serve.get_deployment_handle: "_check_exists"}
    assert all(parameter in inspect.signature(function).parameters for function, parameter in functions.items())
    assert isinstance(client.ServeControllerClient.http_config, property)
    assert "_get_global_client" in source("serve", "context.py")
    assert hasattr(Ingress, replica.SERVE_BUILD_ASGI_APP_METHOD)


def test_the_router_knows_its_replicas() -> None:
    assert "self._router" in inspect.getsource(DeploymentHandle)
    assert "self._asyncio_router = AsyncioRouter(" in inspect.getsource(router.SingletonThreadRouter)
    assert "self._request_router" in inspect.getsource(router.AsyncioRouter)
    assert isinstance(RequestRouter.curr_replicas, property)
