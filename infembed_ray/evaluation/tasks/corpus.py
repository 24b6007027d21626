"""A task's corpus as a memory-mapped Arrow file, written once from the published files, however many rows they have."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from infembed_ray.errors import InputError
from infembed_ray.evaluation.tasks.task import CORPUS
from infembed_ray.object_store import scratch
from infembed_ray.progress import track

_FORMAT = 1
"""Of the files in the cache: raised when the same sources are to give another one."""
_ROWS = 4096


def mapped(task: str, files: Sequence[Path], documents: Callable[[], Iterator[tuple[str, str]]]) -> pa.Table:
    """The corpus that some files hold: (m) `CORPUS`, memory-mapped, in the order of the files.

    It is kept in the scratch directory of this machine (`object_store.scratch`) under the names, sizes and times of
    the files, and read from there the next time. Texts are without white space at either end, as mteb gives them. A
    document that stands in the files more than once, with the same text, stands in the corpus once.

    Args:
        task: name, for progress and error messages.
        files: from which `documents` reads.
        documents: gives ids and texts; not called when the corpus is there already.

    Raises:
        InputError: no documents, an empty id, or an id with two texts; and what `documents` raises.
    """
    stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    key = hashlib.sha256(json.dumps([_FORMAT, stats]).encode()).hexdigest()[:16]
    path = scratch() / "corpora" / f"{key}.arrow"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f"{key}.", dir=path.parent) as folder:  # another process may be at it
            partial = Path(folder, path.name)
            _write(partial, task, documents())
            _keep_one_copy(partial, task)
            partial.replace(path)
    return _open(path)


def _open(path: Path) -> pa.Table:
    with pa.memory_map(str(path)) as source:
        return pa.ipc.open_file(source).read_all()


def _write(path: Path, task: str, documents: Iterator[tuple[str, str]]) -> None:
    written = 0
    with (
        pa.OSFile(str(path), "wb") as sink,
        pa.ipc.new_file(sink, CORPUS) as writer,
        track(f"read {task}", None) as advance,
    ):
        while some := list(islice(documents, _ROWS)):
            ids, texts = zip(*some, strict=True)
            if "" in ids:
                raise InputError(f"tasks={task}: document {written + ids.index('') + 1} has an empty id; give it one")
            stripped = [text.strip() for text in texts]
            writer.write_batch(pa.record_batch([pa.array(ids, pa.string()), pa.array(stripped, pa.string())], CORPUS))
            written += len(some)
            advance(len(some))
    if not written:
        raise InputError(f"tasks={task}: the corpus is empty; give documents")


def _keep_one_copy(path: Path, task: str) -> None:
    """Leave out copies of documents, if there are any."""
    corpus = _open(path)
    ids = corpus["id"]
    if pc.count_distinct(ids).as_py() == len(ids):
        return
    counts = pc.value_counts(ids)
    repeated = counts.field("values").filter(pc.greater(counts.field("counts"), 1))
    texts: dict[str, str] = {}
    kept = np.ones(len(ids), dtype=bool)
    for row in pc.indices_nonzero(pc.is_in(ids, value_set=repeated)).to_pylist():
        document, text = ids[row].as_py(), corpus["text"][row].as_py()
        kept[row] = document not in texts
        if texts.setdefault(document, text) != text:
            raise InputError(
                f"tasks={task}: two documents have the id {document}; ids must be unique: rename one, or drop it"
            )
    once = path.with_name(f"{path.name}.once")
    start = 0
    with pa.OSFile(str(once), "wb") as sink, pa.ipc.new_file(sink, CORPUS) as writer:
        for batch in corpus.to_batches():
            writer.write_batch(batch.filter(pa.array(kept[start : start + len(batch)])))
            start += len(batch)
    once.replace(path)
