"""`infembed serve`: connects to a cluster, starts Serve, and lets the API answer from the release of a plan.

What goes on after that is the supervisor's: the command only waits, so that the API ends with it.
"""

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import ray
from ray import serve
from ray.serve.config import ControllerOptions
from ray.serve.schema import LoggingConfig

from infembed_ray import ray_compat
from infembed_ray.config.serving import ServeSettings
from infembed_ray.errors import InputError, StartError, in_one_line
from infembed_ray.progress import counted, say
from infembed_ray.ray_cluster import connect, on_a_cluster
from infembed_ray.serving import startup
from infembed_ray.serving.address import (
    address_file,
    free_haproxy_ports,
    other_cluster,
    require_free_port,
    served_fingerprint,
)
from infembed_ray.serving.deployments import require_room
from infembed_ray.serving.plan import Plan
from infembed_ray.serving.release import APPLICATION, LOGGING
from infembed_ray.serving.supervisor import roll_out, served_release, switch_to

PORT_TIMEOUT_S = 15.0
"""Time for the proxies of an API that was just shut down to free the port."""


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
        try:
            say("serve: press Ctrl-C to stop")
            _wait_for_interrupt()
        finally:
            _stop_if_current(plan)


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
    if all(f"{name}-".startswith(f"{APPLICATION}-") for name in serve.status().applications):
        return serve.shutdown()  # stops all applications side by side
    others = {name: config for name, config in ray_compat.applied_configs().items() if name != APPLICATION}
    ray_compat.apply_configs(others)  # so that another controller does not start the API again
    serve.delete(APPLICATION)  # before its parts, which it would start again
    for name in filter(lambda name: name.startswith(f"{APPLICATION}-"), serve.status().applications):
        serve.delete(name)


def _stop_if_current(plan: Plan) -> None:
    """Stop what this plan deployed, also if it was compacted since; unless another command has replaced it."""
    try:
        served = served_release()
    except Exception:  # the ingress is lost
        served = None
    if served is None or served.command == plan.release.command:
        say(f"serve: stopping; requests in flight have up to {plan.settings.request_timeout_s:g} s to end")
        stop()


def _wait_for_interrupt() -> None:
    """Wait for SIGINT or SIGTERM."""
    interrupted = threading.Event()
    numbers = (signal.SIGINT, signal.SIGTERM)
    previous = {number: signal.signal(number, lambda *_: interrupted.set()) for number in numbers}
    try:
        while not interrupted.wait(1):  # handlers run between two waits, also for a signal that another thread received
            pass
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


# ---------------------------------------------------------------------------------------------------------- deploy


def _deploy(plan: Plan) -> None:
    """Switch the API to the plan's release. After a failure, everything is as before."""
    _connect(plan)
    require_room(plan.release)
    _start_serve(plan)
    previous = served_release()
    cards = [spec.card for spec in plan.release.collections.values()]
    models = dict.fromkeys(card.id for card in cards)
    say(
        f"serve: starting {counted(sum(len(spec.shards) for spec in plan.release.collections.values()), 'shard')}, "
        f"{'encoder' if len(models) == 1 else 'encoders'} {', '.join(models)}"
        f"{f', reranker {cards[0].reranker}' if plan.release.reranker else ''} and the HTTP API"
    )
    try:
        if previous is None:  # the API starts beside its parts, and answers 503 until it has a release
            switch_to(plan.api, None)
        roll_out(plan.api, plan.release, previous)
    except BaseException:
        if previous is None:
            stop()
        raise
    if previous is not None:
        say(f"serve: switched: every answer now comes from {plan.release.versions}")


def _start_serve(plan: Plan) -> None:
    """Start Ray Serve; wait once more if its proxies take longer than Serve's limit of 60 s."""
    logging.getLogger("ray.serve").setLevel(logging.ERROR)  # warnings of calls that are made again
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
                fault = f"Ray Serve's proxies did not start ({in_one_line(error)})"
                advice = "the machine is probably overloaded, try again when it is less busy"
                raise StartError(f"{fault}; this was the second attempt: {advice}") from error


# ---------------------------------------------------------------------------------------------------------- checks


def require_cluster(settings: ServeSettings, upgrades: bool) -> None:
    """InputError if the API has to outlive this command, and there is no cluster on which it can."""
    if not (settings.wait or upgrades or on_a_cluster()):
        fault, remedy = "there is no cluster to leave it on", "start Ray and set RAY_ADDRESS, or wait=true"
        raise InputError.of("wait", "false", fault, remedy)


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
        say("serve: starting Ray on this machine")
        connect()
    status = serve.status()
    if status.proxies and not status.applications:  # a killed job left Serve listening
        serve.shutdown()
        status = serve.status()
    if replaces and APPLICATION not in status.applications:
        raise other_cluster(port)
    if status.proxies:  # perhaps of a killed command, whose API has no release yet
        # Serve keeps its address, whatever a later `serve.start` asks for. Without this check, an API meant for loopback,
        # and so without keys, could become reachable from other machines.
        address = ray_compat.listening_address()
        if address != (plan.settings.host, port):
            fault = f"Serve already runs on this cluster and listens at {address[0]}:{address[1]}"
            raise InputError.of("port", port, fault, "set that host and port, or stop it with `serve shutdown`")
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


def describe(settings: ServeSettings) -> Iterator[str]:
    """Yield what a start would do, line by line; InputError as the start."""
    plan = Plan.resolve(settings)
    for name, spec in plan.release.by_name.items():
        card, shards = spec.card, counted(len(spec.shards), "shard")
        what = "" if spec is plan.release.default else f"collection {name}: "
        yield f"{what}index {card.index_version}: {card.passages:,} passages in {shards}, model {card.id}"
    if len(plan.release.encoders) > 1:
        yield f"{len(plan.release.encoders)} encoders: the indexes were built by as many; each reserves resources of its own"
    for resource in ("CPU", "GPU"):
        needed = sum(one.replicas * one.each for one in plan.release.reservations if one.resource == resource)
        if needed:
            yield f"{resource}s: {needed:g} for all replicas together"
    if settings.config_file is not None:
        yield f"output {settings.config_file}: a config file for `serve deploy`; nothing would be started"
        return
    served = served_fingerprint(plan.url)
    if served == plan.release.fingerprint:
        yield f"API {plan.url}: serves this index with these settings, so there is nothing to do"
    else:
        require_cluster(settings, served is not None and not on_a_cluster())
        if served is None:
            require_free_port(settings.host, settings.port)
        yield f"API {plan.url}: {'new' if served is None else 'another release is served, and this one replaces it'}"
