"""`infembed index versions|use|verify`: administration of the versions of an index."""

from __future__ import annotations

from infembed_ray.errors import InputError
from infembed_ray.progress import aligned, counted, say
from infembed_ray.retrieval import versions
from infembed_ray.retrieval.index import IndexFacts, change_log
from infembed_ray.retrieval.stores.address import is_address
from infembed_ray.retrieval.stores.milvus import Milvus
from infembed_ray.retrieval.stores.store import Address
from infembed_ray.storage.steps import find_input


def run(action: str, directory: str, version: str | None = None) -> None:
    """Run one action and print its result.

    Args:
        action: versions, use or verify.
        directory: output of `infembed index`: a directory, an object-store URI, or the address of an external engine; for
            verify also one version of it.
        version: to use.

    Raises:
        InputError: there is no such version, or one of its files or changes is missing or corrupted.
    """
    if is_address(directory):
        return _run_in_engine(action, directory, version)
    if action == "versions":
        _list(directory)
    elif action == "use":
        versions.use(directory, version or "")
        say(f"index use: {find_input(directory, 'index')}")
        say("index use: run `infembed serve` on it to switch a running API to it")
    else:
        _verify(directory)


def _list(directory: str) -> None:
    rows = [("", "version", "created", "passages", "recall@10", "GiB", "changes folded in", "lineage")]
    for v in versions.versions(directory):
        recall, size = f"{v.facts.recall_at_10:.4f}", f"{v.facts.bytes / 2**30:.3g}"
        current = "latest" if v.current else ""
        rows.append(
            (current, v.id, v.created, f"{v.facts.passages}", recall, size, f"{v.facts.folded}", v.facts.lineage)
        )
    say("\n".join(aligned(rows)))


def _run_in_engine(action: str, address: str, version: str | None) -> None:
    engine = Milvus(Address.parse(address, "index"))
    known = engine.versions()
    if action == "use":
        meant = versions.chosen(version or "", [found.id for found in known], address)
        engine.use(meant)
        say(f"index use: {address} names version {meant}; run `infembed serve` on it to switch a running API to it")
    elif action == "versions":
        rows = [("", "version", "created", "passages")]
        for found in known:
            row = (found.id, str(found.manifest["created"]), str(found.manifest["index"]["passages"]))
            rows.append(("latest" if found.current else "", *row))
        say("\n".join(aligned(rows)))
    else:
        raise InputError(f"index={address}: an external engine verifies its own files; give a directory")


def _verify(directory: str) -> None:
    size = versions.verify(directory)
    root = find_input(directory, "index")
    facts = IndexFacts.read(root)
    log = change_log(root, facts)
    say(f"index verify: {root}: whole, {size} bytes in {counted(len(facts.shards), 'shard')}")
    say(f"index verify: {log.directory}: whole, {counted(log.last() - facts.folded, 'segment')} of changes since")
