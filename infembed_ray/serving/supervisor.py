"""The API as a Serve application, its supervisor, and the replacement of one release by another (blue/green).

The supervisor is a deployment with one replica for what must go on without the command that started the API: the metrics page,
the verdict on a new release, and automatic compaction. So `infembed serve`, `serve deploy` and a RayService behave alike.
"""

import asyncio
import logging
import pkgutil
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import ray
from prometheus_client import Metric
from ray import serve
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, LoggingConfig

from infembed_ray import ray_compat
from infembed_ray.config.retrieval import CompactSettings
from infembed_ray.config.serving import DEFAULT_COLLECTION
from infembed_ray.errors import InputError, StartError, in_one_line, quoted_input_error
from infembed_ray.progress import counted, say
from infembed_ray.ray_failures import memory_report
from infembed_ray.retrieval.index import Index
from infembed_ray.serving import startup
from infembed_ray.serving.deployments import environment, limits_of, replicas_of, spread
from infembed_ray.serving.metrics import MetricsPage
from infembed_ray.serving.plan import LOGGING
from infembed_ray.serving.release import (
    APPLICATION,
    INGRESS,
    INGRESS_CPUS,
    SUPERVISOR,
    ApiArguments,
    Probe,
    ProbeSet,
    ReleaseSpec,
)
from infembed_ray.serving.replicas import Ingress
from infembed_ray.serving.routing.blue_green import open_release
from infembed_ray.serving.routing.remote import RemoteDeployment
from infembed_ray.serving.schema import SearchRequest, SearchResponse
from infembed_ray.storage.places import address, place_of
from infembed_ray.storage.steps import find_input

START_TIMEOUT_S = 3600.0
"""Time for replicas to start: a node may have to be added, and it may copy a large index and a model first."""
READY_TIMEOUT_S = 120.0
"""Time for started replicas to answer."""
LOOK_S = 10.0
"""Seconds between two counts of the changed documents."""
COMPACTION_RETRY_S = 600.0
"""Seconds until the next attempt to compact a collection after one that failed."""
KEPT_VERSIONS = 2
"""Versions of an index that a compaction leaves: the one that was served until then, and the next."""
POLL_S = 1.0
"""Seconds between two status queries to Serve's controller; each takes 0.1 s of CPU, which starting replicas need."""
PROGRESS_S = 10.0
"""Seconds between two lines about a starting application."""
PROBE_TOP_K = 100
"""Hits per probe; a passage that is not among them has rank PROBE_TOP_K + 1."""
QUERIES_AT_ONCE = 32

log = logging.getLogger(__name__)


# ------------------------------------------------------------------------------------------------- the application


def api_application(arguments: Mapping[str, Any]) -> serve.Application:
    """Build the API of `serve deploy`, whose config file sets the `user_config`."""
    return api_over(ApiArguments.model_validate(arguments), None)


def api_over(arguments: ApiArguments, release: ReleaseSpec | None) -> serve.Application:
    """Build the API over a release."""
    settings = arguments.settings
    supervisor = serve.deployment(
        Supervisor,
        name=SUPERVISOR,
        ray_actor_options={"num_cpus": 0, "runtime_env": {"env_vars": environment(startup.import_modules, 0)}},
        max_ongoing_requests=1000,  # a verdict takes long, and metrics arrive meanwhile
    )
    ingress = serve.deployment(
        Ingress,
        name=INGRESS,
        ray_actor_options={
            "num_cpus": INGRESS_CPUS,
            "runtime_env": {
                "env_vars": ray_compat.SINGLE_EVENT_LOOP | environment(startup.import_modules, INGRESS_CPUS)
            },
        },
        user_config=release and release.model_dump(mode="json"),
        max_surge_percent=100,  # old replicas serve until the new ones do, which needs room for one more
        max_replicas_per_node=spread(settings.ingress_replicas, room=settings.ingress_replicas + 1, CPU=INGRESS_CPUS),
        **replicas_of(settings.ingress_replicas),
        **limits_of(settings),
    )
    # The version does not depend on the release, so another release restarts nothing.
    ingress, supervisor = (ray_compat.with_version(part, arguments.digest()) for part in (ingress, supervisor))
    return ingress.bind(arguments, supervisor.bind(arguments))


class Supervisor:
    """The only replica of its deployment. It works on releases in threads, and so answers meanwhile."""

    def __init__(self, arguments: ApiArguments) -> None:
        self._arguments = arguments
        self._page = MetricsPage()
        self._ingress = RemoteDeployment.named(INGRESS, APPLICATION)
        self._verdicts: dict[tuple[str, str], asyncio.Future[str | None]] = {}
        self._not_before: dict[str, float] = {}  # collection -> time of its next attempt, after a failed compaction
        self._watch: asyncio.Task[None] | None = None

    async def keep(self, replica: str, metrics: list[Metric]) -> None:
        """Store the latest metrics of a replica."""
        self._page.update(replica, metrics)
        if self._watch is None:  # the constructor has no event loop
            self._watch = asyncio.get_running_loop().create_task(self._compact_when_due())

    async def metrics(self) -> bytes:
        """As `MetricsPage.text`."""
        return self._page.text()

    async def verdict(self, current: ReleaseSpec, new: ReleaseSpec) -> str | None:
        """Return why the new release must not replace the current one; None: it may.

        Both answer the probe set of the new one, once for all who ask. If the new one is worse, the ingress goes back to
        the current one, so that a replica that starts later does not begin with it.
        """
        if new.probes is None:
            return None
        pair = current.fingerprint, new.model_dump_json()
        if pair not in self._verdicts:
            self._verdicts[pair] = asyncio.ensure_future(self._compare(current, new))
        verdict = self._verdicts[pair]
        try:
            fault = await asyncio.shield(verdict)
        except Exception as error:
            fault = f"the probes are not answered: {in_one_line(error)}"
        if fault and self._verdicts.pop(pair, None) is verdict:  # asked again, it is probed again
            await asyncio.to_thread(switch_to, self._arguments, current)
        return fault

    async def _compare(self, current: ReleaseSpec, new: ReleaseSpec) -> str | None:
        assert new.probes is not None
        figures = []
        for spec in (current, new):
            opened = open_release(spec, self._arguments.settings, self._ingress)
            figures.append(await probe(opened[DEFAULT_COLLECTION].search, new.probes.probes))
        before, after = figures
        queries = counted(len(new.probes.probes), "probe")
        log.warning("nDCG@10 on %s: %.1f, of the current release %.1f", queries, after.ndcg, before.ndcg)
        return worse_rankings(before, after, new.probes)

    # ------------------------------------------------------------------------------------------------- compaction

    async def _compact_when_due(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.compact_if_due()
            except Exception as error:  # any: the ingress may be restarting
                log.warning("changed documents are not counted: %s", in_one_line(error))

    async def compact_if_due(self) -> None:
        """Compact the collection with the most changes, if `compact_at` says so, and switch; log a failure.

        The API goes on meanwhile. A release that another command has switched to is left alone.
        """
        due_at = self._arguments.settings.compact_at
        if due_at is None or (release := await self._served()) is None:
            return
        now = time.monotonic()
        counts: Mapping[str, float] = await self._ingress("changed_documents")
        due = [name for name, n in counts.items() if n >= due_at and now >= self._not_before.get(name, 0.0)]
        if not due:
            return
        name = max(due, key=counts.__getitem__)
        label = "the index" if name == DEFAULT_COLLECTION else f"the collection {name}"
        log.warning("%.0f documents per shard of %s have changed: compacting it", counts[name], label)
        try:
            await self._compact_collection(release, name)
        except Exception as error:  # any: the API goes on as it is
            self._not_before[name] = time.monotonic() + COMPACTION_RETRY_S
            reason = str(error) if isinstance(error, InputError) else in_one_line(error)
            log.error("%s is not compacted (%s); next attempt in %.0f s", label, reason, COMPACTION_RETRY_S)

    async def _compact_collection(self, release: ReleaseSpec, name: str) -> None:
        index = release.collections[name].index
        place = place_of(index.index)
        latest = find_input(address(place.parent), "index")
        if latest.name != place.name:  # publishing the next version would replace it
            fault = f"{latest.name} is the latest version"
            raise InputError.of("index", index.index, fault, "run `infembed serve` to switch to it")
        kept = KEPT_VERSIONS if release.command else None
        cpus = index.settings.cpus_per_shard
        settings = CompactSettings(index=index.index, cpus_per_shard=cpus, keep_versions=kept)
        published = await compact_index.remote(settings)
        served = await self._served()
        if served is None or served.fingerprint != release.fingerprint:
            raise InputError.of("index", index.index, "another release is served meanwhile")
        new = successor(release, name, published)
        await asyncio.to_thread(roll_out, self._arguments, new, (self._arguments, release))
        log.warning("switched: every answer now comes from %s", new.versions)

    async def _served(self) -> ReleaseSpec | None:
        _, spec = await self._ingress("served")
        release: ReleaseSpec | None = spec
        return release


@ray.remote(num_cpus=0, max_retries=0)
def compact_index(settings: CompactSettings) -> str:
    """Publish the next version of an index and return its place. A task of its own, because it imports torch."""
    from infembed_ray.retrieval.distributed import compact

    startup.lower_priority()
    return compact(settings).address


def successor(release: ReleaseSpec, collection: str, place: str) -> ReleaseSpec:
    """Return a release with another version of one collection's index, which the same encoder built."""
    index, before = Index.describe(place), release.collections[collection]
    arguments = before.index.model_copy(update={"index": address(index.path), "version": index.version})
    card = before.card.model_copy(update={"index_version": index.version, "passages": index.facts.passages})
    after = before.model_copy(
        update={
            "index": arguments,
            "shards": tuple(shard.name for shard in index.facts.shards),
            "changes": address(index.changes),
            "card": card,
        }
    )
    return release.model_copy(update={"collections": {**release.collections, collection: after}})


# --------------------------------------------------------------------------------------------------------- probes


class ProbeFigures(NamedTuple):
    """Means over the probes, x100."""

    ndcg: float
    """nDCG@10 over all queries, those under the changed instruction too."""
    p_mrr: float | None
    """p-MRR over the probes whose changed instruction takes relevance away; None if there are none."""


def worse_rankings(current: ProbeFigures, new: ProbeFigures, limits: ProbeSet) -> str | None:
    """Return why the new release must not replace the current one; None if its rankings are good enough."""
    if current.ndcg == new.ndcg == 0:
        return (
            "neither release finds a relevant passage of `probes` among its first ten; give the ids of indexed passages"
        )
    drops = [("nDCG@10", current.ndcg, new.ndcg, limits.max_ndcg_drop, "max_ndcg_drop")]
    if current.p_mrr is not None and new.p_mrr is not None:
        drops.append(("p-MRR", current.p_mrr, new.p_mrr, limits.max_p_mrr_drop, "max_p_mrr_drop"))
    for measure, before, after, allowed, setting in drops:
        if after < before - allowed:
            return (
                f"its {measure} on the probes is {after:.1f}, the current release's {before:.1f}; "
                f"{setting}={allowed:g} less is allowed"
            )
    return None


async def probe(search: Callable[[SearchRequest], Awaitable[SearchResponse]], probes: Sequence[Probe]) -> ProbeFigures:
    """Search all probes and measure the rankings."""
    from infembed_ray.evaluation.metrics import Change, p_mrr, trec_measures

    queries = list(_queries(probes))
    run: dict[str, dict[str, float]] = {}
    for start in range(0, len(queries), QUERIES_AT_ONCE):
        some = queries[start : start + QUERIES_AT_ONCE]
        answers = await asyncio.gather(*(search(request) for _, request in some))
        run |= {name: {hit.id: hit.score for hit in a.hits} for (name, _), a in zip(some, answers, strict=True)}
    judged = {f"{n}": p.relevant for n, p in enumerate(probes)}
    judged |= {f"{n} changed": p.changed_relevant for n, p in enumerate(probes) if p.changed_relevant}
    ndcg = trec_measures({name: dict.fromkeys(ids, 1) for name, ids in judged.items()}, run, ["nDCG@10"])
    changes = [
        Change(f"{n}", f"{n} changed", tuple(set(p.relevant) - set(p.changed_relevant)))
        for n, p in enumerate(probes)
        if p.changed_instruction is not None
    ]
    moved = p_mrr(changes, run)
    return ProbeFigures(
        100 * fmean(values["nDCG@10"] for values in ndcg.values()), 100 * fmean(moved.values()) if moved else None
    )


def _queries(probes: Sequence[Probe]) -> Iterator[tuple[str, SearchRequest]]:
    """Yield a name and the search, for both instructions of each probe."""
    for number, item in enumerate(probes):
        changed = {} if item.changed_instruction is None else {f"{number} changed": item.changed_instruction}
        for name, instruction in {f"{number}": item.instruction, **changed}.items():
            yield name, SearchRequest(query=item.query, instruction=instruction, top_k=PROBE_TOP_K)


# -------------------------------------------------------------------------------------------- one release for another


Deployed = tuple[ApiArguments, ReleaseSpec]
"""The API of a cluster: its arguments and its release."""


def roll_out(arguments: ApiArguments, new: ReleaseSpec, current: Deployed | None) -> None:
    """Start the parts of a release that do not run, and switch the API to it once it answers; then delete what is unused.

    `current` is what is served (None: nothing is).

    Raises:
        InputError: a replica raised it.
        StartError: a part did not start or does not answer, the new release is worse on its probes, or another command
            has switched the API meanwhile. The current release serves on.
    """
    running = {n for n, state in serve.status().applications.items() if state.status == ApplicationStatus.RUNNING}
    missing = {name: arguments for name, arguments in new.parts.items() if name not in running}
    try:
        for name, part in missing.items():
            application = pkgutil.resolve_name(part.builder)(part)
            ray_compat.start_application(application, name, None, LoggingConfig(**LOGGING))
        for name in missing:
            wait_until_running(name)
        if current is not None:
            supervisor = serve.get_deployment_handle(SUPERVISOR, app_name=APPLICATION)
            if fault := supervisor.verdict.remote(current[1], new).result():
                raise StartError(f"the new release is not served, {current[1].versions} serves on: {fault}")
            if (served := served_release()) is None or served[1].fingerprint != current[1].fingerprint:
                raise StartError(
                    "another command has switched the API meanwhile; it stays as it is: run this command again"
                )
        switch_to(arguments, new)
        _wait_until_served(new, 2 * arguments.settings.ingress_replicas)
    except BaseException:
        if current is not None:
            _roll_back(new, current, set(missing))
        raise
    if current is not None:
        _delete_after_drain(set(current[1].parts) - set(new.parts), arguments.settings.request_timeout_s)


def switch_to(arguments: ApiArguments, release: ReleaseSpec | None) -> None:
    """Let the API answer from a release; without effect if it does already."""
    ray_compat.start_application(api_over(arguments, release), APPLICATION, "/", LoggingConfig(**LOGGING))
    if release is not None:
        wait_until_running(APPLICATION)


def served_release() -> Deployed | None:
    """Return the arguments and the release of this cluster's API; None: there is no API, or it has no release."""
    if APPLICATION not in serve.status().applications:
        return None
    ingress = serve.get_deployment_handle(INGRESS, app_name=APPLICATION)
    arguments, spec = ingress.served.remote().result(timeout_s=READY_TIMEOUT_S)
    return spec and (arguments, spec)


def _wait_until_served(release: ReleaseSpec, times: int) -> None:
    """Wait until the API answers from a release several times in a row: Serve picks an ingress replica at random."""
    deadline, in_a_row = time.monotonic() + READY_TIMEOUT_S, 0
    while in_a_row < times:
        if (served := served_release()) is not None and served[1].fingerprint == release.fingerprint:
            in_a_row += 1
            continue
        in_a_row = 0
        if time.monotonic() > deadline:
            raise StartError(f"the API did not switch to {release.versions} within {READY_TIMEOUT_S:.0f} s")
        time.sleep(POLL_S)


def _roll_back(new: ReleaseSpec, current: Deployed, started: set[str]) -> None:
    """Restore the current release after a failure, unless another command has switched the API meanwhile."""
    used = (served_release() or current)[1]
    if used.fingerprint in (new.fingerprint, current[1].fingerprint):
        switch_to(*current)
        used = current[1]
    for name in started - set(used.parts):
        ray_compat.delete_application(name)


def _delete_after_drain(applications: set[str], drain_s: float) -> None:
    """Delete applications that no new request uses, after the last request that uses them has ended."""
    if applications:
        say(f"serve: draining the previous release for {drain_s:g} s (request_timeout_s)")
        time.sleep(drain_s)
        served = served_release()  # another command may have chosen them
        for name in sorted(applications - (set(served[1].parts) if served else set())):
            serve.delete(name)
            say(f"serve: deleted {name}")


# ----------------------------------------------------------------------------------------------------------- waiting


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
            states = [f"{part}: {' '.join(state.message.split())}" for part, state in application.deployments.items()]
            say(f"serve: waiting for {name}: {'; '.join(states) or application.message}")
            progress_at = time.monotonic() + PROGRESS_S
        time.sleep(POLL_S)


def _start_failure(name: str, application: ApplicationStatusOverview) -> Exception:
    """Return why an application did not start: the last lines of its replicas' tracebacks."""
    messages = [deployment.message for deployment in application.deployments.values() if deployment.message]
    if mistake := next(filter(None, map(quoted_input_error, messages)), None):
        return mistake
    reasons = [memory_report(message) or message.strip().splitlines()[-1] for message in messages]
    return StartError(f"{name} did not start: {'; '.join(reasons) or application.message}")
