"""`infembed index versions|use|verify`: looking after what `infembed index` published."""

from __future__ import annotations

from infembed_ray.progress import say
from infembed_ray.retrieval import versions
from infembed_ray.retrieval.changes import ChangeLog
from infembed_ray.retrieval.index import IndexFacts, changes_of
from infembed_ray.storage import local_path, resolve


def run(action: str, directory: str, version: str | None = None) -> None:
    """Do one of them and say what came of it.

    Args:
        action: its name.
        directory: the output of `infembed index`; to verify, a version of it will do.
        version: which to use.

    Raises:
        InputError: there is no such version, or it or the changes made to it are not as they were written.
    """
    if action == "versions":
        _list(directory)
    elif action == "use":
        versions.use(directory, version or "")
        say(f"index use: {resolve(local_path(directory, 'index'))}")
        say("index use: `infembed serve` on it moves what is serving over")
    else:
        _verify(directory)


def _list(directory: str) -> None:
    rows = [("", "version", "created", "passages", "recall@10", "GiB", "changes folded in", "lineage")]
    for v in versions.versions(directory):
        size = f"{v.bytes / 2**30:.3g}"
        current = "latest" if v.current else ""
        rows.append(
            (current, v.id, v.created, f"{v.passages}", f"{v.recall_at_10:.4f}", size, f"{v.folded}", v.lineage)
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _verify(directory: str) -> None:
    size = versions.verify(directory)
    root = resolve(local_path(directory, "index"))
    facts = IndexFacts.read(root)
    log = ChangeLog(changes_of(root, facts), facts.metadata, facts.dimension)
    say(f"index verify: {root}: whole, {size} bytes in {len(facts.shards)} shards")
    say(f"index verify: {log.directory}: whole, {log.last() - facts.folded} segments of changes since")
