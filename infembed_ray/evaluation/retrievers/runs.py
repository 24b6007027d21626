"""Runs, the rankings of any system in TREC's format: written for every task, and ranked again as a retriever."""

import gzip
import math
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from infembed_ray.config.evaluation import RetrieverSettings
from infembed_ray.errors import InputError
from infembed_ray.evaluation.metrics import Run, ranks
from infembed_ray.evaluation.tasks.task import Task
from infembed_ray.records.files import open_text
from infembed_ray.storage.places import Place, errors_at, place_of

RUNS = "runs"
"""Folder of an evaluation's runs: a folder per model, a file per task."""
SUFFIX = ".run.gz"
_UNSAFE = re.compile(r"[\s%]")
_OURS = "infembed-"
"""First part of the names of runs that `write` made, whose ids are percent-encoded."""
_COLUMNS = "query Q0 document rank score name"


def rank(settings: RetrieverSettings, task: Task, depth: int) -> dict[str, dict[str, float]]:
    """Return the top `depth` documents of each query that a given run has: query id -> document id -> score.

    Raises:
        InputError: the run is missing or damaged, or has none of the task's queries.
    """
    path = file = place_of(settings.model)
    if not file.is_file():
        file = path / f"{file_name(task.name)}{SUFFIX}"
        if not file.is_file():
            fault = f"no {file.name} in this directory"
            raise InputError.of("model", path, fault, f"give a run, or {RUNS}/MODEL of an evaluation")
    rankings = read(file, "model")
    ids = {query.id for query in task.queries}
    if rankings.keys().isdisjoint(ids):
        asked, first = task.queries[0].id, next(iter(rankings))
        fault = f"has none of the queries of {task.name}, such as {asked}; its first is {first}"
        raise InputError.of("model", file, fault, "give the run of this task")
    ranked = {}
    for query in rankings.keys() & ids:
        excluded = task.excluded.get(query, frozenset())
        scores = {document: score for document, score in rankings[query].items() if document not in excluded}
        ranked[query] = {document: scores[document] for document in list(ranks(scores))[:depth]}
    return ranked


def coverage(task: Task, run: Run, model: str) -> dict[str, int]:
    """Count a task's judged queries, the judged queries without results, and the ranked documents that the corpus lacks.

    Raises:
        InputError: the corpus has no document of the run at `model`.
    """
    judged = [query.id for query in task.queries if query.id in task.qrels]
    documents = {document for ranking in run.values() for document in ranking}
    known = pc.sum(pc.is_in(task.corpus["id"], value_set=pa.array(documents, pa.string()))).as_py() or 0
    if documents and not known:
        fault = f"none of its documents is in the corpus of {task.name}, such as {min(documents)}"
        raise InputError.of("model", model, fault, "give the run of this task, with the ids of its corpus")
    missing = sum(not run.get(query) for query in judged)
    return {"judged_queries": len(judged), "without_results": missing, "unknown_documents": len(documents) - known}


def write(directory: Path, model: str, task: str, run: Run) -> None:
    """Write a run below `directory`, compressed; equal runs give equal files.

    Whitespace in ids is percent-encoded. Scores in single precision have nine digits, which keep their order and ties.
    """
    file = directory / file_name(model) / f"{file_name(task)}{SUFFIX}"
    file.parent.mkdir(parents=True, exist_ok=True)
    # Level 4 gives files a tenth larger than the default, in half the time.
    with file.open("wb") as raw, gzip.GzipFile("", "wb", 4, raw, mtime=0) as stream:
        for lines in _lines(run, f"{_OURS}{file_name(model)}"):
            stream.write(lines.encode())


def read(file: Place, name: str) -> dict[str, dict[str, float]]:
    """Read a run, which the setting `name` gives: query id -> document id -> score. Ranks follow from the scores.

    Raises:
        InputError: a line is malformed, a score is not finite, a document occurs twice, or the file is empty.
    """
    run: dict[str, dict[str, float]] = defaultdict(dict)
    try:
        with errors_at(file, name), open_text(file, "\n") as stream:
            text = stream.read()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise InputError.of(name, file, f"not readable ({error})", "copy it again") from error
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            tabbed = line.rstrip("\r").split("\t")
            query, _, document, _, score, tag = tabbed if len(tabbed) == 6 else line.split()
            value = float(score)
        except ValueError:
            raise InputError.of(name, file, f"line {number} is not `{_COLUMNS}`", "correct the line") from None
        if tag.startswith(_OURS):
            query, document = unquote(query), unquote(document)
        if not math.isfinite(value) or document in run[query]:
            fault = "occurs twice" if math.isfinite(value) else f"has the score {score}"
            where = f"line {number}: document {document} of query {query}"
            raise InputError.of(name, file, f"{where} {fault}", "correct it")
        run[query][document] = value
    if not run:
        raise InputError.of(name, file, "is empty", f"give a run with lines of `{_COLUMNS}`")
    return dict(run)


def file_name(name: str) -> str:
    """Return a model's or a task's name as a file name, without slashes and whitespace."""
    return re.sub(r"[^\w.,{}+-]+", "_", name).strip("._") or "_"


def _lines(run: Run, tag: str) -> Iterator[str]:
    """Yield the lines of each query."""
    for query, documents in run.items():
        scores = np.array(list(documents.values()), dtype=np.float64)
        with np.errstate(over="ignore"):
            single = bool((scores.astype(np.float32) == scores).all())
        first = f"{_escaped(query)} Q0"
        yield "".join(
            f"{first} {_escaped(d)} {rank} {f'{documents[d]:.9g}' if single else repr(float(documents[d]))} {tag}\n"
            for d, rank in ranks(documents).items()
        )


def _escaped(name: str) -> str:
    """Percent-encode whitespace, and the percent sign so that it can be undone."""
    return _UNSAFE.sub(lambda unsafe: quote(unsafe[0]), name)
