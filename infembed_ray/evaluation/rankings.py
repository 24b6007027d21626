"""The published rankings of an evaluation: what `infembed view` shows of each query.

Three files beside the results. They do not decide any figure, and results without them stay valid:

- `queries.parquet`: text, instruction and group of every query, and of a changed query the original one.
- `rankings.parquet`: per model and query the first passages, and at whatever rank the first relevant ones and those that
  decide p-MRR.
- `passages.parquet`: the beginning of every passage of the rankings.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from infembed_ray.evaluation.metrics import Run, ranks
from infembed_ray.evaluation.tasks.task import Task

QUERIES_FILE, RANKINGS_FILE, PASSAGES_FILE = "queries.parquet", "rankings.parquet", "passages.parquet"
DEPTH = 20
"""First passages, and first relevant passages, of a published ranking."""
PASSAGE_CHARACTERS = 2000
"""Characters of a published passage; longer ones are cut."""

_TEXT = pa.string()
QUERIES = pa.schema([(name, _TEXT) for name in ("task", "query", "text", "instruction", "kind", "group", "original")])
"""`original` is the query that this one is a changed version of, null without one."""
RANKINGS = pa.schema(
    [(name, _TEXT) for name in ("model", "task", "query", "passage")]
    + [("rank", pa.int32()), ("relevance", pa.int32()), ("changed", pa.bool_())]
)
"""`relevance` is the judgement, 0 without one. `changed` marks a passage that a change of the query's instruction is about:
its ranks under both queries of the change decide p-MRR."""
PASSAGES = pa.schema([(name, _TEXT) for name in ("task", "passage", "text")])

_ROW_GROUP = 10_000


class Rankings:
    """Takes the rankings of all models and writes the files; memory holds one ranked task, ids and a row group."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._writer = pq.ParquetWriter(directory / RANKINGS_FILE, RANKINGS)
        self._passages: dict[str, set[str]] = defaultdict(set)

    def __enter__(self) -> Rankings:
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()

    def add(self, model: str, task: Task, run: Run) -> None:
        """Write the rankings of one model for all queries of a task."""
        rows = list(_rows(model, task, run))
        self._passages[task.name].update(row["passage"] for row in rows)
        self._writer.write_table(pa.Table.from_pylist(rows, schema=RANKINGS), row_group_size=_ROW_GROUP)

    def finish(self, tasks: Sequence[Task]) -> None:
        """Write the queries of all tasks, and the passages of the rankings."""
        originals = {(task.name, change.changed): change.original for task in tasks for change in task.changes}
        queries = [
            {
                "task": task.name,
                "query": query.id,
                "text": query.query,
                "instruction": query.instruction,
                "kind": query.kind or None,
                "group": query.group,
                "original": originals.get((task.name, query.id)),
            }
            for task in tasks
            for query in task.queries
        ]
        pq.write_table(pa.Table.from_pylist(queries, schema=QUERIES), self.directory / QUERIES_FILE)
        with pq.ParquetWriter(self.directory / PASSAGES_FILE, PASSAGES) as writer:
            for task in tasks:
                ids = pa.array(sorted(self._passages[task.name]), pa.string())
                rows = pc.indices_nonzero(pc.is_in(task.corpus["id"], value_set=ids)).to_pylist()
                for start in range(0, len(rows), _ROW_GROUP):
                    passages = [
                        {
                            "task": task.name,
                            "passage": task.corpus["id"][row].as_py(),  # `take` copies the whole column
                            "text": task.corpus["text"][row].as_py()[:PASSAGE_CHARACTERS],
                        }
                        for row in rows[start : start + _ROW_GROUP]
                    ]
                    writer.write_table(pa.Table.from_pylist(passages, schema=PASSAGES))


def _rows(model: str, task: Task, run: Run) -> Iterator[dict[str, Any]]:
    changed: dict[str, set[str]] = defaultdict(set)
    for change in task.changes:
        changed[change.original].update(change.documents)
        changed[change.changed].update(change.documents)
    for query in task.queries:
        found, judged = ranks(run.get(query.id, {})), task.qrels.get(query.id, {})
        relevant = islice((passage for passage in found if judged.get(passage, 0) > 0), DEPTH)
        wanted = {*islice(found, DEPTH), *relevant, *(changed[query.id] & found.keys())}
        for passage in sorted(wanted, key=found.__getitem__):
            yield {
                "model": model,
                "task": task.name,
                "query": query.id,
                "passage": passage,
                "rank": found[passage],
                "relevance": judged.get(passage, 0),
                "changed": passage in changed[query.id],
            }
