"""Runs, the rankings of any system in TREC's format: written for every task, ranked again as a retriever, and fused."""

from __future__ import annotations

import gzip
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote, unquote

import numpy as np

from infembed_ray.config.evaluation import RetrieverSettings
from infembed_ray.errors import InputError
from infembed_ray.evaluation.metrics import Run, ranks
from infembed_ray.evaluation.tasks.layouts import words as words_of
from infembed_ray.evaluation.tasks.task import Task
from infembed_ray.storage.object_store import is_uri
from infembed_ray.storage.places import Place, place_of
from infembed_ray.storage.steps import resolve_input

RUNS = "runs"
"""Folder of an evaluation's runs: a folder per model, a file per task."""
SUFFIX = ".run.gz"
RRF_K = 60
"""Constant of reciprocal-rank fusion (Cormack et al., 2009)."""
_LEVEL = 4
"""Level of compression: a tenth larger than the default, in half the time."""
_UNSAFE = re.compile(r"[\s%]")
_OURS = "infembed-"
"""First part of the names of runs that `write` made, whose ids are percent-encoded."""
_COLUMNS = "query Q0 document rank score name"


class RunRanker:
    """Ranks a task as given runs do; several are fused.

    Args:
        settings: from `baselines.resolve`.
        identity: hash of the contents of the runs.
    """

    def __init__(self, settings: RetrieverSettings, identity: str) -> None:
        self.identity = identity
        self._paths = settings.runs

    def rank(self, task: Task, depth: int) -> dict[str, dict[str, float]]:
        """Return the top `depth` documents of each query that a run has: query id -> document id -> score.

        Raises:
            InputError: a run is missing or damaged, or has none of the task's queries.
        """
        ids = {query.id for query in task.queries}
        given: list[dict[str, dict[str, float]]] = []
        for path in self._paths:
            file = _file_of(place_of(path), task.name)
            every = read(file, "runs")
            own = {query: documents for query, documents in every.items() if query in ids}
            if not own:
                raise InputError(
                    f"runs={file}: has none of the queries of {task.name}, such as {task.queries[0].id}; its first is "
                    f"{next(iter(every))}; give the run of this task"
                )
            given.append({query: _allowed(task, query, documents) for query, documents in own.items()})
        fused = given[0] if len(given) == 1 else fuse(given)
        return {query: {d: s[d] for d in list(ranks(s))[:depth]} for query, s in fused.items()}


def fuse(runs: Sequence[Run], k: int = RRF_K) -> dict[str, dict[str, float]]:
    """Fuse runs by reciprocal ranks: a document's score is the sum of 1 / (k + rank) over the runs that rank it."""
    fused: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for run in runs:
        for query, documents in run.items():
            for document, rank in ranks(documents).items():
                fused[query][document] += 1 / (k + rank)
    return {query: dict(documents) for query, documents in fused.items()}


def write(directory: Path, model: str, task: str, run: Run) -> None:
    """Write a run below `directory`, compressed; equal runs give equal files.

    Whitespace in ids is percent-encoded. Scores in single precision have nine digits, which keep their order and ties.
    """
    file = directory / file_name(model) / f"{file_name(task)}{SUFFIX}"
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as raw, gzip.GzipFile("", "wb", _LEVEL, raw, mtime=0) as stream:
        for lines in _lines(run, f"{_OURS}{file_name(model)}"):
            stream.write(lines.encode())


def read(file: Place, name: str) -> dict[str, dict[str, float]]:
    """Read a run: query id -> document id -> score. The order of a ranking follows from the scores, as in trec_eval.

    Args:
        file: lines of query, anything, document, rank, score and name, perhaps compressed by gzip.
        name: the setting that gives it, for errors.

    Raises:
        InputError: a line is malformed, a score is not finite, a document occurs twice, or the file is empty.
    """
    run: dict[str, dict[str, float]] = defaultdict(dict)
    for number, words in words_of(file, name):
        try:
            query, _, document, _, score, tag = words
            value = float(score)
        except ValueError:
            raise InputError(f"{name}={file}: line {number} is not `{_COLUMNS}`; correct the line") from None
        if tag.startswith(_OURS):
            query, document = unquote(query), unquote(document)
        if not math.isfinite(value) or document in run[query]:
            fault = "occurs twice" if math.isfinite(value) else f"has the score {score}"
            raise InputError(f"{name}={file}: line {number}: document {document} of query {query} {fault}; correct it")
        run[query][document] = value
    if not run:
        raise InputError(f"{name}={file}: is empty; give a run with lines of `{_COLUMNS}`")
    return dict(run)


def file_name(name: str) -> str:
    """Return a model's or a task's name as a file name, without slashes and whitespace."""
    return re.sub(r"[^\w.,{}+-]+", "_", name).strip("._") or "_"


def _file_of(path: Place, task: str) -> Place:
    """Return the run of a task: the file itself, or the task's file of a directory that an evaluation wrote."""
    if path.is_file():
        return path
    file = path / f"{file_name(task)}{SUFFIX}"
    if not file.is_file():
        raise InputError(f"runs={path}: no {file.name} in this directory; give a run, or {RUNS}/MODEL of an evaluation")
    return file


def _allowed(task: Task, query: str, documents: Mapping[str, float]) -> dict[str, float]:
    excluded = task.excluded.get(query, frozenset())
    return {document: score for document, score in documents.items() if document not in excluded}


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


def absolute(paths: Iterable[str], where: str) -> tuple[str, ...]:
    """Return the addresses of existing runs; InputError if one does not exist."""
    return tuple(path if is_uri(path) else str(resolve_input(path, f"{where}.runs").absolute()) for path in paths)
