"""`infembed index versions|use|verify`: administration of the versions of an index."""

from infembed_ray.errors import InputError
from infembed_ray.progress import aligned, counted, say
from infembed_ray.retrieval import versions
from infembed_ray.retrieval.milvus import Milvus, MilvusAddress, is_address
from infembed_ray.retrieval.versions import IndexFacts, IndexVersion, change_log
from infembed_ray.storage.steps import find_input


def run(action: str, directory: str, version: str = "") -> None:
    """Run one action and print its result.

    Args:
        action: versions, use or verify.
        directory: output of `infembed index`: a directory, an object-store URI, or the address of an external engine; for
            verify also one version of it.
        version: to use.

    Raises:
        InputError: there is no such version, or one of its files or changes is missing or corrupted.
    """
    engine = Milvus(MilvusAddress.parse(directory, "index")) if is_address(directory) else None
    if action == "versions":
        rows = map(_row, engine.versions() if engine else versions.versions(directory))
        heading = ("", "version", "created", "passages", "recall@10", "GiB", "changes folded in", "lineage")
        say("\n".join(aligned([heading, *rows])))
    elif action == "use":
        if engine:
            engine.use(versions.chosen(version, [each.id for each in engine.versions()], directory))
        else:
            versions.use(directory, version)
        used = version if engine else find_input(directory, "index")
        say(f"index use: {used}; run `infembed serve` on {directory} to switch a running API to it")
    elif engine:
        raise InputError.of("index", directory, "an external engine verifies its own files", "give a directory")
    else:
        size, root = versions.verify(directory), find_input(directory, "index")
        facts = IndexFacts.read(root)
        log = change_log(root, facts)
        say(f"index verify: {root}: whole, {size} bytes in {counted(len(facts.shards), 'shard')}")
        say(f"index verify: {log.directory}: whole, {counted(log.last() - facts.folded, 'segment')} of changes since")


def _row(v: IndexVersion) -> tuple[str, ...]:
    measured = (f"{v.facts.recall_at_10:.4f}", f"{v.facts.bytes / 2**30:.3g}") if v.facts.shards else ("", "")
    latest = "latest" if v.current else ""
    return latest, v.id, v.created, f"{v.facts.passages}", *measured, f"{v.facts.folded}", v.facts.lineage
