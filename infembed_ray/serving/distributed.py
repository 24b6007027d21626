"""`infembed serve`: starts the missing applications of a release, checks them, and switches the API to it (blue/green).

Applications that the current release shares with the new one keep running. If a step fails, the current release keeps
serving. After the switch, its other applications are deleted once no request can be using them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import ray
from ray import serve
from ray.serve.config import ControllerOptions
from ray.serve.schema import ApplicationStatus, LoggingConfig, ServeStatus

from infembed_ray import ray_compat
from infembed_ray.config.serving import ServeSettings
from infembed_ray.errors import InputError, StartError, in_one_line
from infembed_ray.progress import counted, say
from infembed_ray.ray_cluster import connect, on_a_cluster
from infembed_ray.retrieval.answers import ShardQuery
from infembed_ray.serving import canary as canaries
from infembed_ray.serving import startup
from infembed_ray.serving.address import (
    address_file,
    free_haproxy_ports,
    other_cluster,
    require_free_port,
    served_fingerprint,
    wait_until_served,
)
from infembed_ray.serving.arguments import APPLICATION, ENCODER, INGRESS, METRICS, RERANKER, ApiArguments
from infembed_ray.serving.auto_compaction import AutoCompaction, wait_for_interrupt
from infembed_ray.serving.deployments import (
    api_over,
    encoder_application,
    index_application,
    require_resources,
    reranker_application,
)
from infembed_ray.serving.plan import LOGGING, Plan
from infembed_ray.serving.probes import Probe, ProbeFigures, probe
from infembed_ray.serving.routing.blue_green import Canary, ReleaseSpec
from infembed_ray.serving.routing.remote import RemoteDeployment
from infembed_ray.serving.served import open_encoder, open_release
from infembed_ray.serving.service import Query
from infembed_ray.serving.starting import START_TIMEOUT_S, wait_until_running

READY_TIMEOUT_S = 120.0
"""Time for started replicas to answer."""
PORT_TIMEOUT_S = 15.0
"""Time for the proxies of an API that was just shut down to free the port."""
CANARY_MARGIN_S = 60.0
"""Seconds after the end of a canary in which the driver switches or rolls back; then the ingress ends the canary by itself."""
CHECK_QUERY = "Is anybody there?"


def run(settings: ServeSettings, ready: Callable[[], None] = lambda: None) -> None:
    """Serve until interrupted; with `wait=False` leave the API running on the cluster and return.

    If the same index is already served with the same settings, nothing happens. If the cluster serves another index at
    this address, that one serves until the new one has started, and keeps serving if the new one fails. An API that
    another command of this machine started is upgraded in place: this command returns, and the API ends with the other.

    Args:
        ready: called once the API answers with the index and the settings, or the file of `config_file` is written.

    Raises:
        InputError: a setting, the index, the model or the port is wrong; nothing was started.
        StartError: Ray or an application did not start.
    """
    plan = startup.in_background(lambda: Plan.resolve(settings))
    if settings.config_file is not None:
        plan.write_config(Path(settings.config_file))
        say(f"serve: wrote {settings.config_file}; start it with: serve deploy {settings.config_file}")
        return ready()
    served = served_fingerprint(plan.url)
    if served == plan.release.fingerprint:
        say(f"serve: nothing to do: same index and settings, already served at {plan.url}")
        return ready()
    upgrades = served is not None and not on_a_cluster()
    require_cluster(settings, upgrades)
    _deploy(plan)
    ready()
    say(plan.startup_message())
    if upgrades:
        say("serve: upgraded the running API; it still ends with the command or the cluster that started it")
    elif settings.wait:
        compaction = AutoCompaction(plan, _changed_documents, _deploy)
        try:
            say("serve: press Ctrl-C to stop")
            wait_for_interrupt(compaction.look)
        finally:
            _stop_if_current(compaction.plan)


@contextmanager
def serving(settings: ServeSettings) -> Iterator[str]:
    """Serve while the block runs; gives the API's base URL. `settings.wait` has no effect.

    Raises:
        InputError, StartError: as `run`.
    """
    plan = Plan.resolve(settings)
    _deploy(plan)
    try:
        yield plan.url
    finally:
        _stop_if_current(plan)


def stop() -> None:
    """Stop the API of this cluster, and Serve as well if it serves nothing else."""
    ours = [name for name in serve.status().applications if name == APPLICATION or name.startswith(f"{APPLICATION}-")]
    for name in sorted(ours):  # the API sorts first, so it stops before its parts
        serve.delete(name)
    if not serve.status().applications:
        serve.shutdown()


def _stop_if_current(plan: Plan) -> None:
    """Stop what this plan deployed, unless another command has replaced it."""
    if served_fingerprint(plan.url) in (plan.release.fingerprint, None):
        stop()


# ---------------------------------------------------------------------------------------------------------- deploy


def _deploy(plan: Plan) -> None:
    """Switch the API to the plan's release. After a failure, everything is as before."""
    _connect(plan)
    require_resources(plan)
    _start_serve(plan)
    previous = _served()
    specs = plan.release.by_name
    models = dict.fromkeys(spec.card.id for spec in specs.values())
    say(
        f"serve: starting {counted(sum(len(spec.shards) for spec in specs.values()), 'shard')}, "
        f"{'encoder' if len(models) == 1 else 'encoders'} {', '.join(models)}"
        f"{f', reranker {plan.release.card.reranker}' if plan.reranker else ''} and the HTTP API"
    )
    missing = plan.release.applications - _running_applications()
    try:
        if previous is None:  # the API starts beside its parts, and answers 503 until it has a release
            ray_compat.start_application(api_over(plan.api, None), APPLICATION, "/", LoggingConfig(**LOGGING))
        _start_applications(plan, missing)
        _check_with_query(plan)
        say("serve: checked: encoder and shards answer")
        if previous is not None:
            _try_as_canary(plan, *previous)
            _require_unswitched(previous[1])
        _switch_to(plan.api, plan.release)
        wait_until_served(plan.url, plan.release.fingerprint, 2 * plan.settings.ingress_replicas, READY_TIMEOUT_S)
    except BaseException:
        _roll_back(plan, previous, missing)
        raise
    if previous is not None:
        versions = [
            f"{'index' if spec is plan.release else f'{name}: index'} {spec.card.index_version}"
            for name, spec in specs.items()
        ]
        say(f"serve: switched: every answer now comes from {', '.join(versions)}")
        unused = previous[1].applications - plan.release.applications
        _delete_after_drain(unused, plan.settings.request_timeout_s)


def _start_applications(plan: Plan, missing: set[str]) -> None:
    """Start the missing parts of the release, and wait until they run."""
    rerankers = {plan.reranker.application: plan.reranker} if plan.reranker else {}
    names = [name for name in (*plan.encoders, *plan.indexes, *rerankers) if name in missing]
    for name in names:
        if name in plan.encoders:
            application = encoder_application(plan.encoders[name])
        elif name in plan.indexes:
            application = index_application(plan.indexes[name])
        else:
            application = reranker_application(rerankers[name])
        ray_compat.start_application(application, name, None, LoggingConfig(**LOGGING))
    for name in names:
        wait_until_running(name, START_TIMEOUT_S + plan.reading_s)


def _try_as_canary(plan: Plan, arguments: ApiArguments, current: ReleaseSpec) -> None:
    """Compare the default collection of the plan's release with the current one: on the probe set and a share of the queries.

    Raises:
        StartError: the new release failed a check.
    """
    settings, new = plan.settings.canary, plan.release
    try:
        if plan.probes:
            before, after = (_probe(plan.settings, spec, plan.probes) for spec in (current, new))
            canaries.require_good_probes(before, after, settings)
            say(
                f"serve: canary: nDCG@10 on {counted(len(plan.probes), 'probe')} {after.ndcg:.1f}, before {before.ndcg:.1f}"
            )
        if settings.share:
            until = time.time() + settings.seconds + CANARY_MARGIN_S
            split = current.model_copy(update={"canary": Canary(release=new, share=settings.share, until=until)})
            _switch_to(arguments, split)
            say(f"serve: canary: {settings.share:.1%} of the searches go to the new release for {settings.seconds:g} s")
            page = serve.get_deployment_handle(METRICS, app_name=APPLICATION).options(method_name="page")
            canaries.watch(
                lambda: page.remote().result(timeout_s=READY_TIMEOUT_S).decode(),
                current.fingerprint,
                new.fingerprint,
                settings,
            )
    except canaries.Rejected as fault:
        raise StartError(
            f"canary: the new release is rolled back, index {current.card.index_version} serves on: {fault}"
        ) from fault


def _probe(settings: ServeSettings, spec: ReleaseSpec, probes: Sequence[Probe]) -> ProbeFigures:
    async def run() -> ProbeFigures:
        metrics = RemoteDeployment.named(METRICS, APPLICATION)
        return await probe(open_release(spec, open_encoder(spec.encoder, settings), settings, metrics), probes)

    try:
        return asyncio.run(run())
    except Exception as error:
        raise StartError(
            f"canary.probes: index {spec.card.index_version} does not answer them: {in_one_line(error)}"
        ) from error


def _switch_to(arguments: ApiArguments, spec: ReleaseSpec) -> None:
    ray_compat.start_application(api_over(arguments, spec), APPLICATION, "/", LoggingConfig(**LOGGING))
    wait_until_running(APPLICATION)


def _require_unswitched(previous: ReleaseSpec) -> None:
    """StartError if another command has switched the API while this one tried its release."""
    if (served := _served()) is None or served[1].fingerprint != previous.fingerprint:
        raise StartError("another command has switched the API meanwhile; it stays as it is: run this command again")


def _roll_back(plan: Plan, previous: tuple[ApiArguments, ReleaseSpec] | None, started: set[str]) -> None:
    """Restore the previous release after a failed deployment, unless another command has switched the API meanwhile."""
    if previous is None:
        stop()
        return
    arguments, release = previous
    if served_fingerprint(plan.url) in (plan.release.fingerprint, release.fingerprint, None):
        # Without effect if the API was not switched yet. A killed command may have left a canary in `release`.
        _switch_to(arguments, release.model_copy(update={"canary": None}))
        used = release.applications
    else:
        used = _used_applications()
    for name in started - used:
        ray_compat.delete_application(name)


def _start_serve(plan: Plan) -> None:
    """Start Ray Serve; wait once more if its proxies take longer than Serve's limit of 60 s."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    environment = free_haproxy_ports() | plan.controller_environment
    for last in (False, True):
        try:
            serve.start(
                http_options={"host": plan.settings.host, "port": plan.settings.port},
                logging_config=LoggingConfig(**LOGGING),
                controller_options=ControllerOptions(runtime_env={"env_vars": environment}),
            )
            return
        except TimeoutError as error:  # a second call attaches to the running controller
            if last:
                raise StartError(
                    f"Ray Serve's proxies did not start ({in_one_line(error)}); this was the second attempt: the machine "
                    "is probably overloaded, try again when it is less busy"
                ) from error


def _changed_documents() -> dict[str, float]:
    """Return how many documents differ from the served version of each collection, on average per shard."""
    ingress = serve.get_deployment_handle(INGRESS, app_name=APPLICATION)
    changed: dict[str, float] = ingress.changed_documents.remote().result(timeout_s=READY_TIMEOUT_S)
    return changed


# ---------------------------------------------------------------------------------------------------------- checks


def require_cluster(settings: ServeSettings, upgrades: bool) -> None:
    """InputError if the API has to outlive this command, and there is no cluster on which it can."""
    if not (settings.wait or upgrades or on_a_cluster()):
        raise InputError("wait=false: there is no cluster to leave it on; start Ray and set RAY_ADDRESS, or wait=true")


def _connect(plan: Plan) -> None:
    """Connect to the cluster; InputError unless the API can listen at its address or replaces an API there."""
    port = plan.settings.port
    replaces = served_fingerprint(plan.url) is not None
    if on_a_cluster():
        connect()
    elif replaces:
        _connect_to_local_api(port)
    else:
        require_free_port(plan.settings.host, port)  # before a cluster is started
        for name, value in ray_compat.NO_IDLE_WORKERS.items():
            os.environ.setdefault(name, value)
        connect()
    status = _status_without_leftovers()
    if replaces and APPLICATION not in status.applications:
        raise other_cluster(port)
    if status.proxies:  # perhaps of a killed command, whose API has no release yet
        # Serve keeps its address, whatever a later `serve.start` asks for. Without this check, an API meant for loopback,
        # and so without keys, could become reachable from other machines.
        address = ray_compat.listening_address()
        if address != (plan.settings.host, port):
            raise InputError(
                f"port={port}: Serve already runs on this cluster and listens at {address[0]}:{address[1]}; "
                "set that host and port, or stop it with `serve shutdown`"
            )
    elif not replaces:
        require_free_port(plan.settings.host, port, PORT_TIMEOUT_S)
    mode = os.environ.get("RAY_AUTH_MODE", "disabled")
    address_file(port).write_text(f"{ray.get_runtime_context().gcs_address} {mode}", encoding="utf-8")


def _connect_to_local_api(port: int) -> None:
    """Connect to the cluster of the API that another command of this machine serves at a port."""
    mode_before = os.environ.get("RAY_AUTH_MODE")
    try:
        address, mode = address_file(port).read_text(encoding="utf-8").split()
        os.environ.setdefault("RAY_AUTH_MODE", mode)
        connect(address)
    except (OSError, ValueError, StartError) as error:  # no such file, or its cluster has ended
        if mode_before is None:  # a cluster that this process starts later has its own mode
            os.environ.pop("RAY_AUTH_MODE", None)
        raise other_cluster(port) from error


def _status_without_leftovers() -> ServeStatus:
    """Return Serve's status; shut Serve down first if a killed job left it listening without applications."""
    status = serve.status()
    if status.proxies and not status.applications:
        serve.shutdown()
        status = serve.status()
    return status


def _check_with_query(plan: Plan) -> None:
    """Send a query through every part of the new release before the API is switched."""
    vectors = {name: _check_encoder(plan, name) for name in plan.encoders}
    for spec in plan.release.by_name.values():
        handles = [serve.get_deployment_handle(shard, app_name=spec.index) for shard in spec.shards]
        calls = [handle.search_many.remote([ShardQuery(vectors[spec.encoder], 1)]) for handle in handles]
        for shard, call in zip(spec.shards, calls, strict=True):
            (answer,) = call.result(timeout_s=READY_TIMEOUT_S + plan.reading_s)
            if isinstance(answer, BaseException):
                raise StartError(f"{spec.index}: {shard} does not answer: {in_one_line(answer)}") from answer
    if rerank := plan.release.rerank:
        reranker = serve.get_deployment_handle(RERANKER, app_name=rerank.application)
        call = reranker.score_many.remote([(CHECK_QUERY, None, [CHECK_QUERY])], plan.settings.request_timeout_s)
        try:
            call.result(timeout_s=READY_TIMEOUT_S)
        except Exception as error:
            raise StartError(f"{rerank.application} does not answer: {in_one_line(error)}") from error


def _check_encoder(plan: Plan, name: str) -> np.ndarray:
    """Return the vector of a query; StartError if the encoder's application does not answer."""
    encoder = serve.get_deployment_handle(ENCODER, app_name=name)
    call = encoder.embed_many.remote([[Query(CHECK_QUERY)]], plan.settings.request_timeout_s)
    (embedded,) = call.result(timeout_s=READY_TIMEOUT_S)
    if isinstance(embedded, BaseException):
        raise StartError(f"{name} does not answer: {in_one_line(embedded)}") from embedded
    vectors: np.ndarray = embedded.vectors
    return vectors


# ---------------------------------------------------------------------------------------------------------- status


def _running_applications() -> set[str]:
    applications = serve.status().applications
    return {name for name, found in applications.items() if found.status == ApplicationStatus.RUNNING}


def _served() -> tuple[ApiArguments, ReleaseSpec] | None:
    """Return the arguments and the release of this cluster's API; None: there is no API, or it has no release."""
    if APPLICATION not in serve.status().applications:
        return None
    ingress = serve.get_deployment_handle(INGRESS, app_name=APPLICATION)
    arguments, spec = ingress.served.remote().result(timeout_s=READY_TIMEOUT_S)
    # An API of an earlier version answers without the fields that are newer.
    return spec and (arguments, ReleaseSpec.model_validate(spec.model_dump()))


def _used_applications() -> set[str]:
    """Return the applications that the API uses now; another command may have chosen them."""
    if (served := _served()) is None:
        return set()
    canary = served[1].canary
    return served[1].applications | (canary.release.applications if canary else set())


def _delete_after_drain(applications: set[str], drain_s: float) -> None:
    """Delete applications that no new request uses, after the last request that uses them has ended."""
    if applications:
        say(f"serve: draining the previous release for {drain_s:g} s (request_timeout_s)")
        time.sleep(drain_s)
        for name in sorted(applications - _used_applications()):
            serve.delete(name)
            say(f"serve: deleted {name}")
