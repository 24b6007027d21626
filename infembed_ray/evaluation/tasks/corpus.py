"""Corpora as memory-mapped Arrow files, converted once from the published files in bounded memory."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from infembed_ray.errors import InputError
from infembed_ray.evaluation.tasks.task import CORPUS
from infembed_ray.progress import track
from infembed_ray.storage.object_store import Folder, scratch
from infembed_ray.storage.places import Place

_FORMAT = 1
"""Version of the cached files; raise it when the same sources must give another file."""
_ROWS = 4096
_NAME = b"file"
"""Key of the table's metadata with the name of its file."""


def mapped(task: str, files: Sequence[Place], documents: Callable[[], Iterator[tuple[str, str]]]) -> pa.Table:
    """Return the corpus of some files, memory-mapped: (m) `CORPUS`, in the order of the files.

    It is cached in `directory`, where a link named by the names, sizes and times of the files leads to it. Texts are
    stripped, as in mteb. Duplicate documents with equal texts are dropped.

    Args:
        task: name of the task, for progress and error messages.
        files: the files that `documents` reads.
        documents: yields ids and texts; not called if the corpus is cached.
    """
    stats = [(str(file), *_size_and_time(file)) for file in files]
    link = directory() / hashlib.sha256(json.dumps([_FORMAT, stats]).encode()).hexdigest()[:16]
    if not link.is_file():
        link.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f"{link.name}.", dir=link.parent) as folder:  # other processes may write it too
            partial = Path(folder, "corpus")
            _write(partial, task, documents())
            _drop_duplicates(partial, task)
            path = link.with_name(name_of(_open(partial)))
            partial.replace(path)
            partial.symlink_to(path.name)
            partial.replace(link)
    return _open(link).replace_schema_metadata({_NAME: link.readlink().name})


def directory() -> Path:
    """Return this machine's directory of corpora, each a file with the name of its contents."""
    return scratch() / "corpora"


def name_of(corpus: pa.Table) -> str:
    """Return the name of a corpus's file: a hash of its contents, which a corpus from `mapped` knows."""
    name = (corpus.schema.metadata or {}).get(_NAME)
    if name is not None:
        return str(name.decode())
    texts = (text for batch in batches(corpus) for column in batch.columns for text in column.to_pylist())
    return f"{digest(texts)}.arrow"


def digest(texts: Iterable[str | None]) -> str:
    """Hash texts with their order and boundaries: the first 32 hex digits of SHA-256. None differs from every text."""
    sha = hashlib.sha256()
    for text in texts:
        encoded = None if text is None else text.encode()
        sha.update(b"-" if encoded is None else b"%d:" % len(encoded) + encoded)
    return sha.hexdigest()[:32]


def batches(corpus: pa.Table) -> Iterator[pa.RecordBatch]:
    """Yield the rows in batches that do not depend on the table's own chunks."""
    for start in range(0, corpus.num_rows, _ROWS):
        (batch,) = corpus.slice(start, _ROWS).combine_chunks().to_batches()
        yield batch


def _size_and_time(file: Place) -> tuple[int, int]:
    if isinstance(file, Folder):
        entry = file.entries()[""]
        return entry.size, entry.written
    return file.stat().st_size, file.stat().st_mtime_ns


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
        while rows := list(islice(documents, _ROWS)):
            ids, texts = zip(*rows, strict=True)
            if "" in ids:
                fault = f"document {written + ids.index('') + 1} has an empty id"
                raise InputError.of("tasks", task, fault, "give it one")
            stripped = [text.strip() for text in texts]
            writer.write_batch(pa.record_batch([pa.array(ids, pa.string()), pa.array(stripped, pa.string())], CORPUS))
            written += len(rows)
            advance(len(rows))
    if not written:
        raise InputError.of("tasks", task, "the corpus is empty", "give documents")


def _drop_duplicates(path: Path, task: str) -> None:
    """Drop duplicate documents, if there are any."""
    corpus = _open(path)
    ids, texts = corpus["id"], corpus["text"]
    if pc.count_distinct(ids).as_py() == len(ids):
        return
    first: dict[str, int] = {}
    kept = np.ones(len(ids), dtype=bool)
    for row, document in enumerate(ids.to_pylist()):
        kept[row] = first.setdefault(document, row) == row
        if not kept[row] and texts[row] != texts[first[document]]:
            fault = f"two documents have the id {document}"
            raise InputError.of("tasks", task, fault, "ids must be unique: rename one, or drop it")
    once = path.with_name(f"{path.name}.once")
    with pa.OSFile(str(once), "wb") as sink, pa.ipc.new_file(sink, CORPUS) as writer:
        for start, batch in zip(range(0, len(ids), _ROWS), batches(corpus), strict=True):
            writer.write_batch(batch.filter(pa.array(kept[start : start + len(batch)])))
    once.replace(path)
