"""`infembed index versions|use|verify`: administration of the versions of an index."""

from __future__ import annotations

from infembed_ray.progress import counted, say
from infembed_ray.retrieval import versions
from infembed_ray.retrieval.index import IndexFacts, change_log
from infembed_ray.storage import find_input


def run(action: str, directory: str, version: str | None = None) -> None:
    """Run one action and print its result.

    Args:
        action: versions, use or verify.
        directory: output of `infembed index`; for verify also one version of it.
        version: to use.

    Raises:
        InputError: there is no such version, or one of its files or changes is missing or corrupted.
    """
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
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _verify(directory: str) -> None:
    size = versions.verify(directory)
    root = find_input(directory, "index")
    facts = IndexFacts.read(root)
    log = change_log(root, facts)
    say(f"index verify: {root}: whole, {size} bytes in {counted(len(facts.shards), 'shard')}")
    say(f"index verify: {log.directory}: whole, {counted(log.last() - facts.folded, 'segment')} of changes since")
