"""The API as a Serve application, and its supervisor, which replaces one release by another (blue/green).

A command or a config file only sets the release that the ingress should serve. The supervisor, a deployment with one replica,
starts the parts, probes them, deletes what is unused, compacts, and follows the index directories. So `infembed serve`,
`serve deploy` and a RayService behave alike.
"""

import asyncio
import contextvars
import logging
import pkgutil
import re
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from statistics import fmean
from typing import Any, NamedTuple

import ray
from prometheus_client import Metric
from ray import serve
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, LoggingConfig

from infembed_ray import ray_compat
from infembed_ray.config.retrieval import CompactSettings
from infembed_ray.config.serving import DEFAULT_COLLECTION, ServeSettings
from infembed_ray.errors import KNOWN, InputError, StartError, explained, in_one_line, quoted_input_error
from infembed_ray.progress import counted, say
from infembed_ray.ray_failures import memory_report
from infembed_ray.retrieval.index import Index
from infembed_ray.retrieval.milvus import is_address
from infembed_ray.serving import startup
from infembed_ray.serving.deployments import deployment, environment, require_room
from infembed_ray.serving.encoder.batching import QueueFull
from infembed_ray.serving.metrics import MetricsPage
from infembed_ray.serving.plan import Plan
from infembed_ray.serving.release import (
    APPLICATION,
    INGRESS,
    INGRESS_CPUS,
    LOGGING,
    SUPERVISOR,
    ApiArguments,
    Probe,
    ReleaseSpec,
)
from infembed_ray.serving.replicas import Ingress
from infembed_ray.serving.routing.blue_green import open_release
from infembed_ray.serving.routing.remote import RemoteDeployment
from infembed_ray.serving.routing.retries import RetriedCalls
from infembed_ray.serving.schema import SearchRequest, SearchResponse
from infembed_ray.serving.service import ReplicaLost
from infembed_ray.storage.places import address, place_of
from infembed_ray.storage.steps import find_input

START_TIMEOUT_S = 3600.0
"""Time for replicas to start: a node may have to be added, and it may copy a large index and a model first."""
READY_TIMEOUT_S = 120.0
"""Time for started replicas to answer."""
LOOK_S = 10.0
"""Seconds between two comparisons of what is served with what the settings name, and two counts of the changed documents."""
RETRY_S = 600.0
"""Seconds until the next attempt to follow an index or to compact a collection after one that failed."""
SWITCH_S = 30.0
"""Least time for which parts that no release uses are kept: a command may be about to switch to them."""
OTHERS_S = 5.0
"""Time for another ingress replica to tell what it serves, if there is one."""
KEPT_VERSIONS = 2
"""Versions of an index that a compaction leaves: the one that was served until then, and the next."""
POLL_S = 1.0
"""Seconds between two status queries to Serve's controller; each takes 0.1 s of CPU, which starting replicas need."""
PROGRESS_S = 30.0
"""Seconds between two lines about a starting application."""
PROBE_TOP_K = 100
"""Hits per probe; a passage that is not among them has rank PROBE_TOP_K + 1."""
QUERIES_AT_ONCE = 32

log = logging.getLogger(__name__)


# ------------------------------------------------------------------------------------------------- the application


def api_application(given: Mapping[str, Any]) -> serve.Application:
    """Build the API; the config of its application sets the `user_config`."""
    arguments = ApiArguments.model_validate(given)
    settings = arguments.settings
    supervisor = serve.deployment(
        Supervisor,
        name=SUPERVISOR,
        ray_actor_options={"num_cpus": 0, "runtime_env": {"env_vars": environment(startup.import_modules, 0)}},
        max_ongoing_requests=1000,  # an admission takes long, and metrics arrive meanwhile
        graceful_shutdown_timeout_s=2,  # all calls are made again
    )
    ingress = deployment(
        Ingress,
        INGRESS,
        settings,
        startup.import_modules,
        {"CPU": INGRESS_CPUS},
        settings.ingress_replicas,
        variables=ray_compat.SINGLE_EVENT_LOOP,
        room=settings.ingress_replicas + 1,
        max_surge_percent=100,  # old replicas serve until the new ones do, which needs room for one more
    )
    return ingress.bind(arguments, supervisor.bind(arguments))


class Supervisor:
    """The only replica of its deployment. It owns the release: it brings the API from what is served to what should be.

    Serve and the index directories hold its state, so a restarted replica continues from there. It works in threads, and
    answers meanwhile.
    """

    def __init__(self, arguments: ApiArguments) -> None:
        self._arguments = arguments
        self._page = MetricsPage()
        self._ingress = RemoteDeployment.named(INGRESS, APPLICATION)
        self._admissions: dict[tuple[str, str], tuple[ReleaseSpec, asyncio.Task[None]]] = {}
        self._passed: set[tuple[str, str]] = set()  # pairs of releases whose probes were compared
        self._not_before: dict[str, float] = {}  # step -> time of its next attempt, after one that failed
        self._unused_since: dict[str, float] = {}  # application -> time
        self._watch: asyncio.Task[None] | None = None

    async def keep(self, replica: str, metrics: list[Metric]) -> None:
        """Store the latest metrics of a replica."""
        self._page.update(replica, metrics)
        if self._watch is None:  # the constructor has no event loop
            self._watch = _detached(self._keep_looking())

    async def metrics(self) -> bytes:
        """As `MetricsPage.text`."""
        return self._page.text()

    # ------------------------------------------------------------------------------------------------- admission

    async def admit(self, current: ReleaseSpec | None, new: ReleaseSpec) -> None:
        """Start the parts of a release that do not run, and compare its rankings with the current one's; once for all who ask.

        After a failure the ingress goes back to the current release, so that a replica that starts later does not begin with
        the new one, whose parts are deleted as all that are unused.

        Raises:
            InputError: the cluster has no room for both releases, or a replica raised it.
            StartError: a part did not start, or the new release is worse on its probes.
        """
        pair = current.fingerprint if current else "", new.model_dump_json()
        if pair not in self._admissions:
            self._admissions[pair] = new, _detached(self._admit(current, new, pair))
            self._admissions[pair][1].add_done_callback(asyncio.Task.exception)  # who asked may be gone
        await asyncio.shield(self._admissions[pair][1])

    async def _admit(self, current: ReleaseSpec | None, new: ReleaseSpec, pair: tuple[str, str]) -> None:
        try:
            if current is None:  # a new ingress replica asks; the others may serve a release
                with suppress(ReplicaLost, QueueFull, asyncio.TimeoutError):
                    current = (await asyncio.wait_for(self._ingress("served"), OTHERS_S))[0]
            # Serve applies a config file again after the loss of its controller, and the API may have moved on since.
            moved = [] if current is None else await asyncio.to_thread(_moved, new)
            if current is not None and moved and not await asyncio.to_thread(_moved, current):
                raise StartError(f"{new.versions} is not the latest version; {current.versions} serves on")
            await asyncio.to_thread(_start, current, new)
            if current and new.probes and current.fingerprint != new.fingerprint and pair not in self._passed:
                await self._compare(current, new)
                self._passed.add(pair)
        except BaseException as error:
            del self._admissions[pair]
            log.error("%s is not served: %s", new.versions, in_one_line(error))
            wanted = [spec.fingerprint for spec in await self._specs()] if current else []
            if current and current.fingerprint != new.fingerprint in wanted:
                await asyncio.to_thread(switch_to, self._arguments, current)
            raise
        del self._admissions[pair]

    async def _compare(self, current: ReleaseSpec, new: ReleaseSpec) -> None:
        """StartError if the new release ranks the probes worse than the current one, or does not answer them."""
        figures = []
        for spec in (current, new):
            opened = open_release(spec, self._arguments.settings)
            try:
                figures.append(await probe(opened[DEFAULT_COLLECTION].search, new.probes))
            except Exception as error:
                raise StartError(f"the probes are not answered: {in_one_line(error)}") from error
        before, after = figures
        queries = counted(len(new.probes), "probe")
        log.warning("nDCG@10 on %s: %.1f, of the current release %.1f", queries, after.ndcg, before.ndcg)
        if fault := worse_rankings(before, after, new.settings):
            raise StartError(f"{fault}; {current.versions} serves on")

    async def _specs(self) -> list[ReleaseSpec]:
        """Return what ingress replicas serve and should serve; Serve picks them at random, so each is asked twice on average."""
        times = 2 * self._arguments.settings.ingress_replicas
        asked = (RetriedCalls()(lambda: self._ingress("served"), READY_TIMEOUT_S) for _ in range(times))
        answers = await asyncio.gather(*asked)
        return [spec for pair in answers for spec in pair if spec]

    # ----------------------------------------------------------------------------------------------------- watch

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.look()
            except Exception as error:  # any: the ingress may be restarting
                log.warning("the API's release is not compared with its settings: %s", in_one_line(error))

    async def look(self) -> None:
        """Delete what is unused, and take one step towards what the settings of the served release name, if one is due.

        A step that fails is logged and taken again later; the API goes on as it is.
        """
        specs = await self._specs()
        await self._delete_unused(specs)
        if self._admissions or len({spec.fingerprint for spec in specs}) != 1:
            return  # there is no release yet, or a switch is under way
        served, now = specs[0], time.monotonic()
        if moved := ", ".join(await asyncio.to_thread(_moved, served)):
            if now >= self._not_before.get(moved, 0.0):
                log.warning("the latest version is now %s: switching to it", moved)
                await self._attempt(moved, f"{moved} is not served", self._move(served, served.settings))
            return
        due_at = self._arguments.settings.compact_at
        if due_at is None:
            return
        counts: Mapping[str, float] = await self._ingress("changed_documents")
        due = [name for name, n in counts.items() if n >= due_at and now >= self._not_before.get(name, 0.0)]
        if due:
            name = max(due, key=counts.__getitem__)
            label = "the index" if name == DEFAULT_COLLECTION else f"the collection {name}"
            log.warning("%.0f documents per shard of %s have changed: compacting it", counts[name], label)
            await self._attempt(name, f"{label} is not compacted", self._compact(served, name))

    async def _attempt(self, step: str, failure: str, moved: Coroutine[Any, Any, ReleaseSpec]) -> None:
        """Take a step; after a failure, log it and when it is taken again."""
        try:
            new = await moved
        except Exception as error:  # any: the API goes on as it is
            self._not_before[step] = time.monotonic() + RETRY_S
            cause = explained(error)
            reason = str(cause) if isinstance(cause, KNOWN) else in_one_line(error)
            log.error("%s (%s); next attempt in %.0f s", failure, reason, RETRY_S)
        else:
            log.warning("switched: every answer now comes from %s", new.versions)

    async def _move(self, served: ReleaseSpec, settings: ServeSettings) -> ReleaseSpec:
        """Switch to what settings name now, and return it."""
        new: ReleaseSpec = await named_release.remote(served.model_copy(update={"settings": settings}))
        await self.admit(served, new)
        await asyncio.to_thread(switch, self._arguments, new, served)
        return new

    async def _compact(self, served: ReleaseSpec, name: str) -> ReleaseSpec:
        """Publish the next version of a collection's index, and switch to it.

        A version that a lost supervisor has published, but not switched to, is taken as it is.
        """
        spec, settings = served.collections[name], served.settings
        place = place_of(spec.index.index)
        latest = find_input(address(place.parent), "index")
        if latest.name == place.name:
            again = spec.model_copy(update={"index": spec.index.model_copy(update={"version": "next"})})
            both = served.model_copy(update={"collections": {**served.collections, name: again}})
            await asyncio.to_thread(require_room, both, served)  # before the work
            published = await compact_index.remote(
                CompactSettings(
                    index=spec.index.index,
                    cpus_per_shard=spec.index.settings.cpus_per_shard,
                    keep_versions=KEPT_VERSIONS if served.command else None,
                )
            )
        elif address(Index.describe(address(latest)).changes) == spec.changes:
            published = address(latest)
        else:  # publishing the next version would replace it
            fault = f"{latest.name} is the latest version, and has other documents"
            raise InputError.of("index", spec.index.index, fault, "serve that one, or the directory of the versions")
        if settings.indexes[name] == spec.index.index:  # they name a version
            named = {**settings.indexes, name: published}
            settings = settings.model_copy(update={"index": named.pop(DEFAULT_COLLECTION), "collections": named})
        return await self._move(served, settings)

    async def _delete_unused(self, specs: Sequence[ReleaseSpec]) -> None:
        """Delete the parts that no release has used for as long as a request may take, or a switch after an admission."""
        applications = await asyncio.to_thread(lambda: serve.status().applications)
        admitted = (new for new, _ in self._admissions.values())
        used = {name for spec in (*specs, *admitted) for name in spec.parts}
        unused = {name for name in applications if name.startswith(f"{APPLICATION}-")} - used
        now = time.monotonic()
        self._unused_since = {name: self._unused_since.get(name, now) for name in unused}
        for name, since in self._unused_since.items():
            if now >= since + max(self._arguments.settings.request_timeout_s, SWITCH_S):
                log.warning("deleting %s, which no release uses", name)
                ray_compat.delete_application(name)


def _detached(coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Start a task; in the context of a request, Serve would cancel its calls together with that."""
    return contextvars.Context().run(asyncio.get_running_loop().create_task, coroutine)


def _moved(release: ReleaseSpec) -> list[str]:
    """Return the index versions that the settings of a release name now and that are not its own."""
    named = {name: place for name, place in release.settings.indexes.items() if not is_address(place)}
    found = {name: address(find_input(place, "index")) for name, place in named.items()}
    return [place for name, place in found.items() if place != release.collections[name].index.index]


@ray.remote(num_cpus=0, max_retries=0)
def compact_index(settings: CompactSettings) -> str:
    """Publish the next version of an index and return its place. A task of its own, because it imports torch."""
    from infembed_ray.retrieval.distributed import compact

    startup.lower_priority()
    return compact(settings).address


@ray.remote(num_cpus=0, max_retries=0)
def named_release(release: ReleaseSpec) -> ReleaseSpec:
    """Return what the settings of a release name now. A task of its own, because it may import torch."""
    startup.lower_priority()
    named = Plan.resolve(release.settings).release
    return named.model_copy(update={"api": release.api, "probes": release.probes, "command": release.command})


# --------------------------------------------------------------------------------------------------------- probes


class ProbeFigures(NamedTuple):
    """Means over the probes, x100."""

    ndcg: float
    """nDCG@10 over all queries, those under the changed instruction too."""
    p_mrr: float | None
    """p-MRR over the probes whose changed instruction takes relevance away; None if there are none."""


def worse_rankings(current: ProbeFigures, new: ProbeFigures, limits: ServeSettings) -> str | None:
    """Return why the new release must not replace the current one; None if its rankings are good enough."""
    if current.ndcg == new.ndcg == 0:
        fault = "neither release finds a relevant passage of `probes` among its first ten"
        return f"{fault}; give the ids of indexed passages"
    drops = [("nDCG@10", current.ndcg, new.ndcg, limits.max_ndcg_drop, "max_ndcg_drop")]
    if current.p_mrr is not None and new.p_mrr is not None:
        drops.append(("p-MRR", current.p_mrr, new.p_mrr, limits.max_p_mrr_drop, "max_p_mrr_drop"))
    for measure, before, after, allowed, setting in drops:
        if after < before - allowed:
            fault = f"its {measure} on the probes is {after:.1f}, the current release's {before:.1f}"
            return f"{fault}; {setting}={allowed:g} less is allowed"
    return None


async def probe(search: Callable[[SearchRequest], Awaitable[SearchResponse]], probes: Sequence[Probe]) -> ProbeFigures:
    """Search all probes and measure the rankings."""
    from infembed_ray.evaluation.metrics import Change, p_mrr, trec_measures

    queries: dict[str, SearchRequest] = {}
    judged: dict[str, dict[str, int]] = {}
    changes = []
    for number, item in enumerate(probes):
        asked = {f"{number}": (item.instruction, item.relevant)}
        if item.changed_instruction is not None:
            asked[f"{number} changed"] = item.changed_instruction, item.changed_relevant
            lost = tuple(set(item.relevant) - set(item.changed_relevant))
            changes.append(Change(f"{number}", f"{number} changed", lost))
        for name, (instruction, relevant) in asked.items():
            queries[name] = SearchRequest(query=item.query, instruction=instruction, top_k=PROBE_TOP_K)
            judged[name] = dict.fromkeys(relevant, 1)
    run: dict[str, dict[str, float]] = {}
    names = list(queries)
    for start in range(0, len(names), QUERIES_AT_ONCE):
        some = names[start : start + QUERIES_AT_ONCE]
        answers = await asyncio.gather(*(search(queries[name]) for name in some))
        run |= {name: {hit.id: hit.score for hit in a.hits} for name, a in zip(some, answers, strict=True)}
    ndcg, moved = trec_measures(judged, run, ["nDCG@10"]), p_mrr(changes, run)
    mean = fmean(values["nDCG@10"] for values in ndcg.values())
    return ProbeFigures(100 * mean, 100 * fmean(moved.values()) if moved else None)


# -------------------------------------------------------------------------------------------- one release for another


def roll_out(arguments: ApiArguments, new: ReleaseSpec, current: ReleaseSpec | None) -> None:
    """Let the supervisor start a release and compare it with what is served (None: nothing is); then switch the API to it.

    Raises:
        InputError, StartError: as `Supervisor.admit` and `switch`.
    """
    if current is None:  # without a wait for the supervisor
        _start(None, new)
        return switch(arguments, new, None)
    supervisor = ray_compat.unchecked_handle(SUPERVISOR, APPLICATION)
    admission = supervisor.admit.remote(current, new)
    while True:
        try:
            admission.result(timeout_s=PROGRESS_S)
            return switch(arguments, new, current)
        except TimeoutError:
            states = serve.status().applications
            for name in states.keys() & new.parts.keys():
                _say_progress(name, states[name])
        except (RayActorError, DeploymentUnavailableError):  # Serve starts another supervisor, which continues
            time.sleep(POLL_S)
            admission = supervisor.admit.remote(current, new)
        except RayTaskError as error:
            raise explained(error) from error


def switch(arguments: ApiArguments, new: ReleaseSpec, current: ReleaseSpec | None) -> None:
    """Switch the API to an admitted release, and wait until it answers from it.

    Raises:
        StartError: it does not, or another command has switched the API meanwhile; the current release serves on.
    """
    known, before = {new.fingerprint, current and current.fingerprint}, ray_compat.applied_configs()
    if current and (served := served_release()) and served.fingerprint not in known:
        raise StartError("another command has switched the API meanwhile; it stays as it is: run this command again")
    try:
        switch_to(arguments, new)
        _wait_until_served(new, 2 * arguments.settings.ingress_replicas)
    except BaseException:
        if current and (served_release() or current).fingerprint in known:
            ray_compat.apply_configs(before)
        raise


def switch_to(arguments: ApiArguments, release: ReleaseSpec | None) -> None:
    """Let the API answer from a release; without effect if it does already.

    As for a config file, Serve keeps what was asked, so that a controller that it starts again returns to this release.
    """
    configs, application = ray_compat.applied_configs(), arguments.application(release)
    before = configs.get(APPLICATION, {})
    if before.get("args") == application["args"]:
        application = {**before, "deployments": application["deployments"]}
    else:
        environment = ray.get_runtime_context().runtime_env
        code = environment.keys() & {"working_dir", "py_modules"}
        application["runtime_env"] = {name: environment[name] for name in code}
    ray_compat.apply_configs({**configs, APPLICATION: application})
    if release is not None:
        wait_until_running(APPLICATION)


def served_release() -> ReleaseSpec | None:
    """Return the release of this cluster's API; None: there is no API, or it has no release."""
    application = serve.status().applications.get(APPLICATION)
    if application is None or INGRESS not in application.deployments:
        return None
    ingress = serve.get_deployment_handle(INGRESS, app_name=APPLICATION)
    return ingress.served.remote().result(timeout_s=READY_TIMEOUT_S)[0]


def _wait_until_served(release: ReleaseSpec, times: int) -> None:
    """Wait until the API answers from a release several times in a row: Serve picks an ingress replica at random."""
    deadline, in_a_row = time.monotonic() + READY_TIMEOUT_S, 0
    while in_a_row < times:
        if (served := served_release()) and served.fingerprint == release.fingerprint:
            in_a_row += 1
            continue
        in_a_row = 0
        if time.monotonic() > deadline:
            raise StartError(f"the API did not switch to {release.versions} within {READY_TIMEOUT_S:.0f} s")
        time.sleep(POLL_S)


# ----------------------------------------------------------------------------------------------------------- waiting


def _start(current: ReleaseSpec | None, new: ReleaseSpec) -> None:
    """Start the parts of a release that do not run, side by side, and wait until they do.

    Raises:
        InputError: the cluster cannot hold both releases.
        InputError, StartError: as `wait_until_running`.
    """
    states = {name: state.status for name, state in serve.status().applications.items()}
    over = (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.DELETING)
    ended = {name for name in new.parts if states.get(name) in over}
    missing = {name: part for name, part in new.parts.items() if name in ended or name not in states}
    if missing:
        require_room(new, current)
    for name, part in missing.items():
        if name in ended:
            serve.delete(name)
        application = pkgutil.resolve_name(part.builder)(part)
        ray_compat.start_application(application, name, None, LoggingConfig(**LOGGING))
    for name in new.parts:
        if name in missing or states[name] == ApplicationStatus.DEPLOYING:  # Serve repairs an unhealthy one
            wait_until_running(name)


def wait_until_running(name: str) -> None:
    """Wait for an application, with progress lines.

    Raises:
        InputError: a replica raised it.
        StartError: the application failed or did not start in time.
    """
    deadline, progress_at = time.monotonic() + START_TIMEOUT_S, time.monotonic() + PROGRESS_S
    while (application := serve.status().applications[name]).status != ApplicationStatus.RUNNING:
        failed = application.status in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY)
        if failed or time.monotonic() > deadline:
            raise _start_failure(name, application)
        if time.monotonic() > progress_at:
            _say_progress(name, application)
            progress_at = time.monotonic() + PROGRESS_S
        time.sleep(POLL_S)


def _say_progress(name: str, application: ApplicationStatusOverview) -> None:
    """Say what an application waits for, unless it runs."""
    if application.status != ApplicationStatus.RUNNING:
        reasons = {_reason(state.message) for state in application.deployments.values()} - {""}
        say(": ".join([f"serve: waiting for {name}", *sorted(reasons)]))


def _reason(message: str) -> str:
    """Return in a few words why a deployment does not run yet, if Serve's long message about it has a reason."""
    if needed := re.search(r"Resources required for each replica: (\{.*?\})", message):
        return f"a process, or room, for a replica with {needed[1]}"
    return f"it failed and starts again: {message.strip().splitlines()[-1]}" if "Traceback" in message else ""


def _start_failure(name: str, application: ApplicationStatusOverview) -> Exception:
    """Return why an application did not start: the last lines of its replicas' tracebacks."""
    messages = [deployment.message for deployment in application.deployments.values() if deployment.message]
    if mistake := next(filter(None, map(quoted_input_error, messages)), None):
        return mistake
    reasons = [memory_report(message) or message.strip().splitlines()[-1] for message in messages]
    return StartError(f"{name} did not start: {'; '.join(reasons) or application.message}")
