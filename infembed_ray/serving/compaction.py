"""Automatic compaction: when many documents of an index differ from its version, the API folds them into the next version. No Ray.

One collection is compacted at a time, the one with the most changes first, and then the API switches to the next version
(blue/green). A release that another command has switched to meanwhile is left alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping

from infembed_ray.config.retrieval import CompactSettings
from infembed_ray.config.serving import DEFAULT_COLLECTION
from infembed_ray.errors import InputError, in_one_line
from infembed_ray.retrieval.index import Index
from infembed_ray.serving.release import ReleaseSpec
from infembed_ray.storage.places import address, place_of
from infembed_ray.storage.steps import find_input

RETRY_S = 600.0
"""Seconds until the next attempt for a collection after one that failed."""
KEPT_VERSIONS = 2
"""The version that was served until then, and the next."""

log = logging.getLogger(__name__)


class AutoCompaction:
    """Compacts the indexes of the served release.

    Args:
        compact_at: documents per shard that differ from the index version; None: never.
        served: returns the release that the API answers from; None: there is none.
        changed: returns for each collection the mean number of documents per shard that differ from its version.
        compact: publishes the next version and returns its place.
        switch: replaces the served release by another one.
    """

    def __init__(
        self,
        compact_at: int | None,
        served: Callable[[], Awaitable[ReleaseSpec | None]],
        changed: Callable[[], Awaitable[Mapping[str, float]]],
        compact: Callable[[CompactSettings], Awaitable[str]],
        switch: Callable[[ReleaseSpec, ReleaseSpec], Awaitable[None]],
    ) -> None:
        self._compact_at = compact_at
        self._served = served
        self._changed = changed
        self._compact = compact
        self._switch = switch
        self._not_before: dict[str, float] = {}  # collection -> time of its next attempt, after one that failed

    async def look(self) -> None:
        """Compact the collection with the most changes, if one is due; log a failure. The API goes on meanwhile."""
        if self._compact_at is None or (release := await self._served()) is None:
            return
        now = time.monotonic()
        counts = await self._changed()
        due = [name for name, n in counts.items() if n >= self._compact_at and now >= self._not_before.get(name, 0.0)]
        if not due:
            return
        name = max(due, key=counts.__getitem__)
        label = "the index" if name == DEFAULT_COLLECTION else f"the collection {name}"
        log.warning("%.0f documents per shard of %s have changed: compacting it", counts[name], label)
        try:
            await self._compact_collection(release, name)
        except Exception as error:  # any: the API goes on as it is
            self._not_before[name] = time.monotonic() + RETRY_S
            reason = str(error) if isinstance(error, InputError) else in_one_line(error)
            log.error("%s is not compacted (%s); next attempt in %.0f s", label, reason, RETRY_S)

    async def _compact_collection(self, release: ReleaseSpec, name: str) -> None:
        index = release.collections[name].index
        place = place_of(index.index)
        latest = find_input(address(place.parent), "index")
        if latest.name != place.name:  # publishing the next version would replace it
            raise InputError(f"index={index.index}: {latest.name} is the latest; run `infembed serve` to switch to it")
        kept = KEPT_VERSIONS if release.command else None
        cpus = index.settings.cpus_per_shard
        settings = CompactSettings(index=index.index, cpus_per_shard=cpus, keep_versions=kept)
        published = await self._compact(settings)
        served = await self._served()
        if served is None or served.fingerprint != release.fingerprint:
            raise InputError(f"index={index.index}: another release is served meanwhile")
        await self._switch(release, successor(release, name, published))


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
