"""The tasks of a run: a file of numbered seeds, one record batch per task, which the coordinator hands out."""

from __future__ import annotations

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import fields
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from infembed_ray.config.llm import Limits
from infembed_ray.llm import budget
from infembed_ray.llm.ledger import Ledger
from infembed_ray.records.tables import Seed
from infembed_ray.storage.places import Place

_SEEDS = pa.schema([("index", pa.int64()), *((field.name, pa.string()) for field in fields(Seed))])


def write_tasks(file: Path, seeds: Iterable[Seed], rows: int, actors: int) -> dict[str, list[int]]:
    """Write the numbered seeds, one record batch of at most `rows` per task; return the tasks of each partition.

    The coordinator maps the file, so neither a process nor the object store grows with the seeds.
    """
    waiting: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    tasks: defaultdict[str, list[int]] = defaultdict(list)
    numbers = itertools.count()
    with pa.ipc.new_file(str(file), _SEEDS) as stream:

        def write(partition: str) -> None:
            stream.write_batch(pa.RecordBatch.from_pylist(waiting.pop(partition), _SEEDS))
            tasks[partition].append(next(numbers))

        for index, seed in enumerate(seeds):
            partition = partition_of(seed, actors)
            waiting[partition].append({"index": index, **vars(seed)})
            if len(waiting[partition]) == rows:
                write(partition)
        for partition in list(waiting):
            write(partition)
    return tasks


def partition_of(seed: Seed, actors: int) -> str:
    """Return the partition of a seed, for example `3of8`: a hash of its texts, since equal texts share answers."""
    digest = hashlib.blake2b(f"{seed.query}\0{seed.passage}".encode(), digest_size=4).hexdigest()
    return f"{int(digest, 16) % actors + 1}of{actors}"


class Coordinator(Ledger):
    """The ledger of a run. It also hands out the rows of tasks, because other nodes may share no directory.

    Args:
        tasks: file of `write_tasks`.
    """

    def __init__(self, limits: Limits, spent_usd: float, journal: Place, tasks: Path) -> None:
        super().__init__(limits, spent_usd, note=partial(budget.note_at_most, journal))
        self._file = tasks

    @cached_property
    def _tasks(self) -> pa.RecordBatchFileReader:
        return pa.ipc.open_file(pa.memory_map(str(self._file)))

    def rows(self, task: int) -> pa.RecordBatch:
        """Return the numbered seeds of a task."""
        return self._tasks.get_batch(task)
