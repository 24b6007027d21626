"""Your own data set in BEIR's layout: `corpus.jsonl`, `queries.jsonl`, `qrels/<split>.tsv`."""

from __future__ import annotations

from pathlib import Path

from infembed_ray.errors import InputError
from infembed_ray.evaluation.tasks.checks import judgements
from infembed_ray.evaluation.tasks.corpus import mapped
from infembed_ray.evaluation.tasks.mteb_layout import with_title
from infembed_ray.evaluation.tasks.repository import rows
from infembed_ray.evaluation.tasks.task import Figure, Query, Task
from infembed_ray.object_store import is_uri
from infembed_ray.places import Place
from infembed_ray.storage import open_input

FIGURES = tuple(Figure(measure, measure) for measure in ("nDCG@10", "recall@100", "MAP@1000", "MRR@10"))
_SPLIT = "qrels/test.tsv"


def read(name: str) -> Task:
    """Read the task of one split.

    - `corpus.jsonl`: `_id`, `title` (may be empty or missing), `text`.
    - `queries.jsonl`: `_id`, `text`, and an optional `instruction`. Queries without a judgement in the split are left out.
    - the split: a header and lines of `query-id`, `corpus-id`, `score`.

    Args:
        name: the directory, or its URI in an object store, for the split `qrels/test.tsv`; or the file of another split.

    Raises:
        InputError: a file or a column is missing, a value is a list, or a score is not a whole number.
    """
    corpus, queries, split = files(name)
    judged = rows([split], name, ("query-id", "corpus-id", "score"))
    qrels = judgements(name, ((row["query-id"], row["corpus-id"], row["score"]) for row in judged))
    return Task(
        name=name,
        corpus=mapped(
            name,
            [corpus],
            lambda: ((str(row["_id"]), with_title(row)) for row in rows([corpus], name, ("_id", "text"))),
        ),
        queries=tuple(
            Query(str(row["_id"]), str(row["text"]), row.get("instruction") or None)
            for row in rows([queries], name, ("_id", "text"))
            if str(row["_id"]) in qrels
        ),
        qrels=qrels,
        figures=FIGURES,
    )


def files(name: str) -> list[Place]:
    """Return the files of the corpus, the queries and the split's judgements.

    Raises:
        InputError: one of them is missing.
    """
    given = open_input(name, "tasks") if is_uri(name) else Path(name).expanduser().absolute()
    split = given if given.suffix == ".tsv" else given / _SPLIT
    root = split.parent.parent
    found = [root / "corpus.jsonl", root / "queries.jsonl", split]
    for file in found:
        if not file.is_file():
            raise InputError(
                f"tasks={name}: no {str(file).removeprefix(f'{root}/')} in {root}; give a task of the catalogue, or a directory "
                f"with corpus.jsonl, queries.jsonl and {_SPLIT}"
            )
    return found
