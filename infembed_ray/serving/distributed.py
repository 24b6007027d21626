"""`infembed serve`: starts what a generation lacks, checks it, and hands the API over to it.

The encoder and the index that serve already are left alone where the new generation has the same. What fails on the way
leaves the old generation serving; what succeeds has the old one deleted when nobody can be waiting for it any more.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import yaml
from ray import serve
from ray.serve.config import ControllerOptions
from ray.serve.context import _get_global_client
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, DeploymentStatus, LoggingConfig

from infembed_ray import __version__
from infembed_ray.config import ServeSettings
from infembed_ray.distributed import connect, on_a_cluster
from infembed_ray.errors import InputError, StartError, in_one_line
from infembed_ray.object_store import is_uri, scratch
from infembed_ray.progress import say
from infembed_ray.retrieval.factory import require_gpu_faiss
from infembed_ray.retrieval.index import Index
from infembed_ray.retrieval.live import ShardQuery
from infembed_ray.serving import schema, startup
from infembed_ray.serving.auth import ApiKeys, is_loopback
from infembed_ray.serving.body import LIMIT, READ_TIMEOUT_S
from infembed_ray.serving.deployments import (
    APPLICATION,
    ENCODER,
    INGRESS,
    SMALL_CPUS,
    ApiArguments,
    EncoderArguments,
    IndexArguments,
    api_over,
    encoder_application,
    index_application,
)
from infembed_ray.serving.generations import Blueprint
from infembed_ray.serving.service import Query
from infembed_ray.storage import located

START_TIMEOUT_S = 600.0
"""For replicas to start: a large model is read and warmed up, a node may have to be added first."""
READY_TIMEOUT_S = 120.0
FREE_TIMEOUT_S = 15.0
"""For the proxies of an API that has just been shut down to stop listening."""
PROBE_TIMEOUT_S = 2.0
POLL_S = 0.5
"""Between two questions to Serve's controller, which work for each."""
TELL_S = 10.0
"""Between two lines about what is waited for."""
NODE_GROUP = "ray.io/node-group"
"""Label of the nodes that KubeRay or the cluster launcher started, and may start more of."""
CANARY = "Is anybody there?"
QUIET = LoggingConfig(log_level="WARNING", enable_access_log=False)


@dataclass(frozen=True)
class Plan:
    """A validated wish to serve."""

    settings: ServeSettings
    encoder: EncoderArguments
    index: IndexArguments
    api: ApiArguments
    blueprint: Blueprint

    @classmethod
    def of(cls, settings: ServeSettings) -> Plan:
        """Check all that can be checked before anything starts; no weights are loaded.

        Raises:
            InputError: no such index or model, the index is damaged or another encoder built it, or the API would be
                open to other machines.
        """
        from infembed_ray.modeling.checkpoint import locate
        from infembed_ray.modeling.encoder import InstructionEncoder
        from infembed_ray.serving.runtime import require_runnable

        keys = ApiKeys.load(settings.api_keys_env, settings.api_keys_file)
        if not keys and not is_loopback(settings.host):
            raise InputError(
                f"host={settings.host}: open to other machines without API keys; "
                f"set {settings.api_keys_env or 'api_keys_env and its variable'} to key1,key2,... or host=127.0.0.1"
            )
        if settings.writable and is_uri(settings.index):
            raise InputError(
                f"writable=true: index={settings.index} is in an object store, which keeps no changes; copy it to a directory "
                "that all nodes share and serve that, or set writable=false"
            )
        if settings.gpus_per_shard and not on_a_cluster():  # there GPU nodes have their own FAISS; replicas check it
            require_gpu_faiss()
        # A replica copies its own shard from an object store and checks it, so no node needs room for all of them.
        remote = located(settings.index, "index").uri if is_uri(settings.index) else None
        index = Index.describe(remote) if remote else Index.open(settings.index)
        found = locate(settings.model or index.facts.model, "model")
        described = InstructionEncoder.from_pretrained(found.path, dimensions=index.facts.dimensions, device="meta")
        fingerprint = described.fingerprint()
        index.require_encoder(fingerprint)
        require_runnable(described, settings, found.path)
        card = schema.Model(
            id=settings.model_name or (Path(found.path).name if found.inputs else found.path),
            created=int(time.time()),
            dimension=index.facts.dimension,
            encoder=fingerprint,
            index_version=index.version,
            passages=index.facts.passages,
            vocabulary=len(described.tokenizer),
            metadata=dict(index.facts.metadata),
            writable=settings.writable,
        )
        model = settings.model if settings.model and is_uri(settings.model) else None
        encoder = EncoderArguments.of(
            located(model, "model").uri if model else found.path, fingerprint, settings, index.facts.dimensions
        )
        shards = IndexArguments.of(remote or str(index.path.resolve()), index.version, settings)
        api = ApiArguments.of(settings, bool(keys))
        decides = {
            "settings": settings.identity(),
            "card": card.model_dump(exclude={"created"}),
            "locked": api.locked,
            "code_version": __version__,
        }
        blueprint = Blueprint(
            fingerprint=hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16],
            encoder=encoder.application,
            index=shards.application,
            shards=tuple(facts.name for facts in index.facts.shards),
            changes=str(index.changes.resolve()),
            card=card,
        )
        return cls(settings, encoder, shards, api, blueprint)

    @property
    def url(self) -> str:
        """Where this machine reaches the API."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.settings.host, self.settings.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.settings.port}"

    def asks(self) -> Iterator[tuple[str, int, float]]:
        """(setting, replicas, CPUs of each) of what asks for CPUs, then the same of GPUs."""
        settings, shards = self.settings, len(self.blueprint.shards) * self.settings.shard_replicas
        yield f"cpus_per_encoder={settings.cpus_per_encoder:g}", settings.encoder_replicas, settings.cpus_per_encoder
        yield f"cpus_per_shard={settings.cpus_per_shard:g}", shards, settings.cpus_per_shard
        yield f"ingress_replicas={settings.ingress_replicas}", settings.ingress_replicas, SMALL_CPUS
        yield f"gpus_per_encoder={settings.gpus_per_encoder:g}", settings.encoder_replicas, settings.gpus_per_encoder
        yield f"gpus_per_shard={settings.gpus_per_shard:g}", shards, settings.gpus_per_shard

    @property
    def controller_environment(self) -> dict[str, str]:
        """Variables of Serve's controller, and so of its proxies and replicas; they count when Serve starts.

        Those that are set here, for this process, are handed on.
        """
        environment = {
            "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "infembed_ray.serving.proxy:middlewares",
            LIMIT: str(self.settings.max_body_mib),
        }
        if self.settings.ha_proxy:
            environment |= {
                "RAY_SERVE_ENABLE_HA_PROXY": "1",
                # What was under way in a lost replica is sent to another, as `proxy` does it.
                "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response junk-response",
                "RAY_SERVE_HAPROXY_RETRIES": "3",
                # A client that sends no more of its headers: uvicorn itself waits for them without end.
                "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": f"{2 * READ_TIMEOUT_S:.0f}",
                "RAY_SERVE_HAPROXY_OBSERVE_ERROR_LIMIT": "1",  # a lost replica is left out from its first error on
                # One that is busy is not: were no server left, HAProxy would answer Serve's bare 500 itself. A check
                # may take as long as there is between two.
                "RAY_SERVE_HAPROXY_HEALTH_CHECK_FALL": "5",
                "RAY_SERVE_HAPROXY_HEALTH_CHECK_FASTINTER": "1s",
                "RAY_SERVE_HAPROXY_HEALTH_CHECK_DOWNINTER": "1s",
                "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
            }
        return environment | {name: value for name, value in os.environ.items() if name.startswith("RAY_SERVE_")}

    def config(self) -> dict[str, Any]:
        """As `serve deploy` takes it."""
        builders = (
            (self.blueprint.encoder, "encoder_application", self.encoder),
            (self.blueprint.index, "index_application", self.index),
            (APPLICATION, "api_application", self.api),
        )
        applications: list[dict[str, Any]] = [
            {
                "name": name,
                "route_prefix": "/" if name == APPLICATION else None,
                "import_path": f"infembed_ray.serving.deployments:{builder}",
                "args": arguments.model_dump(mode="json", exclude_defaults=True),
            }
            for name, builder, arguments in builders
        ]
        applications[-1]["deployments"] = [
            {"name": INGRESS, "user_config": self.blueprint.model_dump(mode="json")},
        ]
        return {
            "proxy_location": "EveryNode",
            "http_options": {"host": self.settings.host, "port": self.settings.port},
            "controller_options": {"runtime_env": {"env_vars": self.controller_environment}},
            "logging_config": {"log_level": QUIET.log_level, "enable_access_log": QUIET.enable_access_log},
            "applications": applications,
        }

    def welcome(self) -> str:
        """Where the API is and how to ask it."""
        card = self.blueprint.card
        key = ' -H "Authorization: Bearer $KEY"' if self.api.locked else ""
        return (
            f"serve: {card.passages} passages, model {card.id}, at {self.url}\n"
            f"  playground: {self.url}/   reference: {self.url}/docs\n"
            f"  curl -s {self.url}/v1/search -H 'Content-Type: application/json' \\\n"
            """       -d '{"query": "...", "instruction": "...", "top_k": 3}'"""
            f"{key}"
        )


def run(settings: ServeSettings) -> None:
    """Serve until interrupted, or with `wait=False` leave the API up on the cluster and return.

    Nothing happens if the same index is already served with the same settings. If the cluster serves another one at
    this address, it serves on until this one can take over, and for good if this one cannot. An API that another
    command of this machine started is upgraded in place: this one returns, and the API ends with that command.

    Raises:
        InputError: before anything starts, for anything wrong with the settings, the index, the model or the port.
        StartError: it did not start.
    """
    plan = startup.in_background(lambda: Plan.of(settings))
    if settings.config_file is not None:
        _write_config(plan, Path(settings.config_file))
        say(f"serve: wrote {settings.config_file}; start it with: serve deploy {settings.config_file}")
        return
    served = _served_at(plan.url)
    if served == plan.blueprint.fingerprint:
        say(f"serve: nothing to do: same index and settings, already served at {plan.url}")
        return
    upgrades = served is not None and not on_a_cluster()
    if not (settings.wait or upgrades or on_a_cluster()):
        raise InputError("wait=false: there is no cluster to leave it on; start Ray and set RAY_ADDRESS, or wait=true")
    _deploy(plan)
    say(plan.welcome())
    if upgrades:
        say(
            "serve: upgraded the API that was running here; it still ends with the command or the cluster that started it"
        )
    elif settings.wait:
        try:
            say("Ctrl-C ends it.")
            _until_interrupted()
        finally:
            _stop_if_ours(plan)


@contextmanager
def serving(settings: ServeSettings) -> Iterator[str]:
    """The API, up while the block runs: gives its base URL. `settings.wait` plays no part.

    Raises:
        InputError, RuntimeError: as `run`.
    """
    plan = Plan.of(settings)
    _deploy(plan)
    try:
        yield plan.url
    finally:
        _stop_if_ours(plan)


def stop() -> None:
    """Take the API of this cluster down, and Serve with it where nothing else is served."""
    ours = [name for name in serve.status().applications if name == APPLICATION or name.startswith(f"{APPLICATION}-")]
    for name in sorted(ours):  # the API first: it is the name that the others begin with
        serve.delete(name)
    if not serve.status().applications:
        serve.shutdown()


def _stop_if_ours(plan: Plan) -> None:
    """Take down what this plan deployed; not what has replaced it since."""
    if _served_at(plan.url) in (plan.blueprint.fingerprint, None):
        stop()


def require_free_port(host: str, port: int, timeout_s: float = 0.0) -> None:
    """InputError unless `host:port` can be listened on, now or within a time."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    deadline = time.monotonic() + timeout_s
    while True:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
                return
            except OSError as error:
                if time.monotonic() >= deadline:
                    raise InputError(
                        f"port={port}: cannot be listened on at {host} ({error.strerror}); "
                        "stop what listens there, or set another port=..."
                    ) from error
        time.sleep(POLL_S)


def _write_config(plan: Plan, file: Path) -> None:
    """Write the plan for `serve deploy`. A file that is there already is what serves until the new one does.

    `serve deploy` deletes at once what the file no longer names. So it goes on naming the encoder and the index that
    the API is still asking, until it is written once more.
    """
    config = plan.config()
    if file.is_file():
        before = yaml.safe_load(file.read_text(encoding="utf-8"))
        try:
            (api,) = (application for application in before["applications"] if application["name"] == APPLICATION)
            asked = Blueprint.model_validate(api["deployments"][0]["user_config"])
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"config_file={file}: is there and is none of `infembed serve`; give another name"
            ) from error
        named = {application["name"] for application in config["applications"]}
        config["applications"] += [
            application
            for application in before["applications"]
            if application["name"] in {asked.encoder, asked.index} - named
        ]
    file.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")


def _deploy(plan: Plan) -> None:
    """Hand the API over to the plan's generation. After a failure everything is as it was."""
    _join(plan)
    require_resources(plan)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # this process' own talk of what it starts
    _start_serve(plan)
    before = _served_before()
    wanted, card = plan.blueprint, plan.blueprint.card
    say(f"serve: starting {len(wanted.shards)} shards, encoder {card.id} and the HTTP API")
    running = _running()
    lacking = {
        name: application
        for name, application in (
            (wanted.encoder, lambda: encoder_application(plan.encoder)),
            (wanted.index, lambda: index_application(plan.index)),
        )
        if name not in running
    }
    try:
        for name, application in lacking.items():
            _start(name, application(), None)
        for name in lacking:
            _wait_for(name)
        _ask_canary(plan)
        say("serve: checked: encoder and shards answer")
        _start(APPLICATION, api_over(plan.api, wanted), "/")
        _wait_for(APPLICATION)
        _wait_until_handed_over(plan)
        if before is not None:
            say(f"serve: handed over: every answer comes from index {card.index_version} from now on")
    except BaseException:
        if before is None:
            stop()
        else:
            _start(APPLICATION, api_over(*before), "/")  # which changes nothing if it was not handed over
            for name in lacking:
                serve.delete(name, _blocking=False)
        raise
    if before is not None:
        _, blueprint = before
        _retire({blueprint.encoder, blueprint.index} - {wanted.encoder, wanted.index}, plan.settings.request_timeout_s)


def _start_serve(plan: Plan) -> None:
    """Start Ray Serve, and wait once more if its proxies take longer than the 60 s that it gives them."""
    for last in (False, True):
        try:
            serve.start(
                http_options={"host": plan.settings.host, "port": plan.settings.port},
                logging_config=QUIET,
                controller_options=ControllerOptions(
                    runtime_env={"env_vars": _ports_of_haproxy() | plan.controller_environment}
                ),
            )
            return
        except TimeoutError as error:  # called again, Serve attaches to the controller that is there
            if last:
                raise StartError(
                    f"Ray Serve's proxies did not start ({in_one_line(error)}); this was the second attempt: the machine "
                    "is probably overloaded, try again when it is less busy"
                ) from error


def require_resources(plan: Plan) -> None:
    """InputError if this cluster, as it is and stays, cannot hold all replicas: they would be waited for in vain."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    if any(NODE_GROUP in node["Labels"] for node in nodes):
        return  # there may come more
    for resource in ("CPU", "GPU"):
        has = [node["Resources"].get(resource, 0.0) for node in nodes]
        asks = [ask for ask in plan.asks() if ask[0].startswith("gpus") == (resource == "GPU")]
        asked = sum(replicas * each for _, replicas, each in asks)
        largest = max(has)
        setting, replicas, each = max(asks, key=lambda ask: (ask[2] > largest, ask[1] * ask[2]))
        if each > largest or asked > sum(has) + 1e-6:
            raise InputError(
                f"{setting}: {replicas} replicas of it, and {asked:g} {resource} for all that is to be "
                f"served; the cluster has {sum(has):g}, its largest node {largest:g}; "
                "ask for less, or for fewer replicas, or add nodes"
            )


def _ports_of_haproxy() -> dict[str, str]:
    """Ports for its pages, so that several can be up on a machine. They listen on all interfaces."""
    with socket.socket() as metrics, socket.socket() as statistics:
        metrics.bind(("", 0))
        statistics.bind(("", 0))
        return {
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics.getsockname()[1]),
            "RAY_SERVE_HAPROXY_STATS_PORT": str(statistics.getsockname()[1]),
        }


def _join(plan: Plan) -> None:
    """Connect to the cluster; InputError unless the API can listen where it should, or is there to be replaced."""
    port = plan.settings.port
    replaces = _served_at(plan.url) is not None
    others = f"port={port}: another cluster's API is served there; stop it, set RAY_ADDRESS to its cluster, or set another port"
    address_file = scratch() / f"serve-{port}.address"
    if on_a_cluster():
        connect()
    elif replaces:
        before = os.environ.get("RAY_AUTH_MODE")
        try:
            address, mode = address_file.read_text(encoding="utf-8").split()
            os.environ.setdefault("RAY_AUTH_MODE", mode)
            connect(address)
        except (OSError, ValueError, StartError) as error:  # never written, or of a cluster that has ended
            if before is None:  # a cluster that this process starts later has its own mode
                os.environ.pop("RAY_AUTH_MODE", None)
            raise InputError(others) from error
    else:
        require_free_port(plan.settings.host, port)  # before a cluster is started for nothing
        connect()
    status = serve.status()
    if status.proxies and not status.applications:
        serve.shutdown()  # what a job that was stopped in a hurry left listening
        status = serve.status()
    if not replaces:
        require_free_port(plan.settings.host, port, FREE_TIMEOUT_S)
    if replaces and APPLICATION not in status.applications:
        raise InputError(others)
    if status.proxies:
        # Serve keeps the address it was started with, whatever it is asked later: an API meant for loopback, and so
        # without keys, must not come up on one that listens everywhere.
        listens = _get_global_client().http_config
        if (listens.host, listens.port) != (plan.settings.host, port):
            raise InputError(
                f"port={port}: Serve runs on this cluster already and listens at {listens.host}:{listens.port}; "
                "give its host and port, or end it with `serve shutdown`"
            )
    # So that the next `infembed serve` on this machine finds the cluster.
    mode = os.environ.get("RAY_AUTH_MODE", "disabled")
    address_file.write_text(f"{ray.get_runtime_context().gcs_address} {mode}", encoding="utf-8")


def _running() -> set[str]:
    applications = serve.status().applications
    return {name for name, found in applications.items() if found.status == ApplicationStatus.RUNNING}


def _served_before() -> tuple[ApiArguments, Blueprint] | None:
    """What the API of this cluster is and answers from; None: there is none."""
    if APPLICATION not in serve.status().applications:
        return None
    ingress = serve.get_deployment_handle(INGRESS, app_name=APPLICATION)
    served: tuple[ApiArguments, Blueprint] = ingress.served.remote().result(timeout_s=READY_TIMEOUT_S)
    return served


def _start(name: str, application: serve.Application, route: str | None) -> None:
    serve._run(application, _blocking=False, name=name, route_prefix=route, logging_config=QUIET)


def _wait_for(name: str) -> None:
    deadline, tell_at = time.monotonic() + START_TIMEOUT_S, time.monotonic() + TELL_S
    while (found := serve.status().applications[name]).status != ApplicationStatus.RUNNING:
        failed = found.status in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY)
        if time.monotonic() > tell_at and not failed:
            say(f"serve: waiting for {name}: {_pending(found)}")
            tell_at = time.monotonic() + TELL_S
        if failed or time.monotonic() > deadline:
            messages = [deployment.message for deployment in found.deployments.values() if deployment.message]
            reasons = [message.strip().splitlines()[-1] for message in messages]  # the ends of their tracebacks
            for reason in reasons:
                _, bad_input, told = reason.partition(f"{InputError.__qualname__}: ")
                if bad_input:
                    raise InputError(told)
            raise StartError(f"{name} did not start: {'; '.join(reasons) or found.message}")
        time.sleep(POLL_S)


def _pending(application: ApplicationStatusOverview) -> str:
    """What of an application is not there yet, and what the cluster has left for it."""
    waited_for = [
        f"{name} ({', '.join(f'{count} {state.lower()}' for state, count in deployment.replica_states.items())})"
        + (f": {' '.join(deployment.message.split())}" if deployment.message else "")
        for name, deployment in application.deployments.items()
        if deployment.status != DeploymentStatus.HEALTHY
    ]
    there, free = ray.cluster_resources(), ray.available_resources()
    left = [
        f"{free.get(resource, 0.0):g} of {there[resource]:g} {resource}"
        for resource in ("CPU", "GPU")
        if resource in there
    ]
    return f"{'; '.join(waited_for) or application.message}; free: {', '.join(left)}"


def _ask_canary(plan: Plan) -> None:
    """A query through the new encoder and every new shard, before anybody else asks one."""
    wanted, timeout_s = plan.blueprint, plan.settings.request_timeout_s
    encoder = serve.get_deployment_handle(ENCODER, app_name=wanted.encoder)
    (embedded,) = encoder.embed_many.remote([[Query(CANARY)]], timeout_s).result(timeout_s=READY_TIMEOUT_S)
    if isinstance(embedded, BaseException):
        raise RuntimeError(f"{wanted.encoder} does not answer: {in_one_line(embedded)}") from embedded
    asked = [
        serve.get_deployment_handle(shard, app_name=wanted.index).search_many.remote([ShardQuery(embedded.vectors, 1)])
        for shard in wanted.shards
    ]
    for shard, response in zip(wanted.shards, asked, strict=True):
        (answer,) = response.result(timeout_s=READY_TIMEOUT_S)
        if isinstance(answer, BaseException):
            raise RuntimeError(f"{wanted.index}: {shard} does not answer: {in_one_line(answer)}") from answer


def _wait_until_handed_over(plan: Plan) -> None:
    """Every replica of the ingress, which a proxy picks at random, is to answer from the new generation."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    in_a_row = 0
    while in_a_row < 2 * plan.settings.ingress_replicas:
        if _served_at(plan.url, "/readyz") == plan.blueprint.fingerprint:
            in_a_row += 1
            continue
        in_a_row = 0
        if time.monotonic() > deadline:
            raise StartError(f"{plan.url}/readyz did not answer within {READY_TIMEOUT_S:.0f} s")
        time.sleep(POLL_S)


def _retire(applications: set[str], after_s: float) -> None:
    """Delete what nobody asks any more, when the last request that began with it must have ended."""
    if applications:
        say(f"serve: draining what served before for {after_s:g} s: as long as a request lives")
        time.sleep(after_s)
        for name in sorted(applications):
            serve.delete(name)
            say(f"serve: retired {name}")


def _served_at(url: str, path: str = "/healthz") -> str | None:
    """The fingerprint of what this package serves at a URL of this machine; None if that is nothing."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(url + path, timeout=PROBE_TIMEOUT_S) as response:
            fingerprint = json.load(response)["deployment"]
    except (OSError, ValueError, KeyError, TypeError):  # nothing there, or something else; HTTPError is an OSError
        return None
    return str(fingerprint)


def _until_interrupted() -> None:
    interrupted = threading.Event()
    previous = {
        number: signal.signal(number, lambda *_: interrupted.set()) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        interrupted.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
