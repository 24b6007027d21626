"""Automatic compaction: `infembed serve` compacts an index that it serves when many of its documents have changed.

The compaction runs in the background, as tasks of the cluster, while the API serves: one collection at a time, the one with the
most changes first. Then the API switches to the next version (blue/green). Two versions are kept: the one that was served until then, and the next. An API that another command upgraded is
left alone.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Mapping

from infembed_ray.config.retrieval import CompactSettings
from infembed_ray.config.serving import DEFAULT_COLLECTION
from infembed_ray.errors import InputError, in_one_line
from infembed_ray.progress import say
from infembed_ray.serving import startup
from infembed_ray.serving.address import served_fingerprint
from infembed_ray.serving.plan import Plan
from infembed_ray.storage.places import address, place_of
from infembed_ray.storage.steps import find_input

LOOK_S = 10.0
"""Seconds between two counts of the changed documents."""
RETRY_S = 600.0
"""Seconds until the next attempt after one that failed."""
KEPT_VERSIONS = 2


def compacted(settings: CompactSettings) -> str:
    """Compact an index; return the place of the next version."""
    from infembed_ray.retrieval.distributed import compact  # imports torch

    return compact(settings).address


class AutoCompaction:
    """Compacts the indexes of a plan, and of the plans that follow from it.

    Args:
        plan: what is served.
        changed: returns for each collection the mean number of documents per shard that differ from the served version.
        switch: switches the API to another plan.
        compact: publishes the next version and returns its place.

    Attributes:
        plan: what is served now.
    """

    def __init__(
        self,
        plan: Plan,
        changed: Callable[[], Mapping[str, float]],
        switch: Callable[[Plan], None],
        compact: Callable[[CompactSettings], str] = compacted,
    ) -> None:
        self.plan = plan
        self._changed = changed
        self._compact = compact
        self._switch = switch
        self._next_look = time.monotonic() + LOOK_S
        self._not_before: dict[str, float] = {}  # collection -> time of its next attempt, after one that failed
        self._collection: str | None = None  # that is being compacted
        self._running: threading.Thread | None = None
        self._published: str | None = None

    def look(self) -> None:
        """Start a compaction if one is due; switch the API once it has ended. Call this about every second."""
        try:
            if self._running is None:
                self._start_if_due()
            elif not self._running.is_alive():
                self._running = None
                self._switch_to_published()
        except Exception as error:  # any: the API goes on as it is
            self._failed("the API was not switched to a compacted version", error)

    def _start_if_due(self) -> None:
        limit, now = self.plan.settings.compact_at, time.monotonic()
        if limit is None or now < self._next_look:
            return
        self._next_look, self._collection = now + LOOK_S, None
        if not self._serves():
            return
        changed = self._changed()
        due = [name for name, n in changed.items() if n >= limit and now >= self._not_before.get(name, 0.0)]
        if not due:
            return
        self._collection = name = max(due, key=changed.__getitem__)
        base = self.plan.indexes[self.plan.release.by_name[name].index].index
        latest = find_input(address(place_of(base).parent), "index")
        if latest.name != place_of(base).name:  # publishing the next version would replace it
            raise InputError(f"index={base}: {latest.name} is the latest; run `infembed serve` to switch to it")
        say(
            f"serve: {changed[name]:.0f} documents per shard of {_named(name)} have changed: compacting it "
            f"(compact_at={limit})"
        )
        self._running = threading.Thread(target=self._run, args=(base,), name="compaction", daemon=True)
        self._running.start()

    def _run(self, base: str) -> None:
        startup.lower_priority()
        settings = self.plan.settings
        try:
            self._published = self._compact(
                CompactSettings(index=base, cpus_per_shard=settings.cpus_per_shard, keep_versions=KEPT_VERSIONS)
            )
        except Exception as error:
            self._failed("the compaction failed", error)

    def _switch_to_published(self) -> None:
        published, self._published = self._published, None
        if published is None or not self._serves():
            return
        settings = self.plan.settings
        indexes = {**settings.indexes, str(self._collection): published}
        settings = settings.model_copy(update={"index": indexes.pop(DEFAULT_COLLECTION), "collections": indexes})
        plan = startup.in_background(lambda: Plan.resolve(settings))
        self._switch(plan)
        self.plan = plan

    def _serves(self) -> bool:
        """Whether the API still serves the plan: another command may have replaced it."""
        return served_fingerprint(self.plan.url) == self.plan.release.fingerprint

    def _failed(self, what: str, error: Exception) -> None:
        if self._collection is None:
            self._next_look = time.monotonic() + RETRY_S
        else:
            self._not_before[self._collection] = time.monotonic() + RETRY_S
            what = f"{_named(self._collection)}: {what}" if self.plan.settings.collections else what
        reason = str(error) if isinstance(error, InputError) else in_one_line(error)
        say(f"serve: {what} ({reason}); the API goes on with the served version, next attempt in {RETRY_S:.0f} s")


def _named(collection: str) -> str:
    return "the index" if collection == DEFAULT_COLLECTION else f"the collection {collection}"


def wait_for_interrupt(each_second: Callable[[], None]) -> None:
    """Wait for SIGINT or SIGTERM; call a function about every second meanwhile."""
    interrupted = threading.Event()
    previous = {
        number: signal.signal(number, lambda *_: interrupted.set()) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        while not interrupted.wait(1):  # handlers run here, also for a signal that another thread received
            each_second()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
