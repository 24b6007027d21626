"""`infembed evaluate`: tasks x models on Ray, to a published table.

Texts lie in files that all nodes map into memory, and actors write the embeddings of a chunk of them to the store, a
directory that all nodes see, at once: the driver and Ray's object store hold neither. A search is a task that reads
them from there, in blocks. So a killed node costs the chunks it was at, a killed driver those that were under way, and
what another task or run has left in the store is not computed again.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import ray
from ray.data import ActorPoolStrategy
from ray.exceptions import RayTaskError

from infembed_ray import records, storage
from infembed_ray.config import EvaluateSettings, RetrieverSettings
from infembed_ray.distributed import connect
from infembed_ray.errors import InputError
from infembed_ray.evaluation import mteb_adapter, results, tables
from infembed_ray.evaluation.chunks import Chunk, Pairs, Passages, Queries, share, shared
from infembed_ray.evaluation.embeddings import Store, digest
from infembed_ray.evaluation.metrics import Run, ranks
from infembed_ray.evaluation.results import Asked, Results
from infembed_ray.evaluation.retrievers import baselines
from infembed_ray.evaluation.retrievers.retriever import Ranker
from infembed_ray.evaluation.scoring import Scores, score
from infembed_ray.evaluation.search import exact_search, rows_of
from infembed_ray.evaluation.tasks import catalogue
from infembed_ray.evaluation.tasks.infir import instruction_following
from infembed_ray.evaluation.tasks.task import CORPUS, Query, Task
from infembed_ray.progress import say, track

MTEB = "mteb"
"""Folder of the same figures in mteb's layout, where mteb has the task."""
EMBEDDINGS = "embeddings"
"""Folder of the store, in the output where settings name no other."""
_CORPORA = "corpora"
_ENCODERS = ("encoder", "sentence_transformers", "api")
_RANKERS = ("bm25",)
_WITHOUT_GPU = ("api", "random")
_SHOWN = 60
"""Characters of a text in a message."""
_ANYWHERE = "DEFAULT"
"""Said so, or Ray puts the tasks of a sweep's trial into the placement group of the trial, which has no room for them."""

T = TypeVar("T")


def run(settings: EvaluateSettings) -> storage.Published:
    """Evaluate all models on all tasks and publish `results.json`, `per_query.parquet` and `table.md`.

    Raises:
        InputError: data, a model or the output cannot be used; or a model gives embeddings or scores that are not finite.
    """
    models = _models(settings)
    store = storage.local_path(settings.embeddings or f"{settings.output}/{EMBEDDINGS}", "embeddings")
    storage.require_writable(store, "embeddings")
    data, tasks = _tasks(settings, store / _CORPORA)
    _require_candidates(settings, models, tasks)
    inputs = data | {name: path for model in models for name, path in model.inputs.items()}
    names = {f"tasks.{task.name}": task.identity for task in tasks}
    names |= {name: value for model in models for name, value in model.names.items()}
    step = storage.Step("evaluate", settings, settings.output, inputs, names)
    if done := step.finished():
        return done

    queries, passages = (sum(counts) for counts in zip(*(task.size for task in tasks), strict=True))
    say(f"evaluate: {len(models)} models, {len(tasks)} tasks, {queries} queries, {passages} passages")
    connect()
    with step.publish() as staging:
        found = _evaluate(settings, models, tasks, store)
        staging.counts = {"tasks": len(tasks), "queries": queries, "passages": passages}
        staging.facts = {"figures": found.figures}
        results.write(staging.path, found)
        mteb_adapter.write(staging.path / MTEB, found)
        (staging.path / tables.TABLE_FILE).write_text(tables.as_markdown(found), encoding="utf-8")
    say(tables.as_text(found))
    return step.published()


# ----------------------------------------------------------------------------------------- what is asked of whom


@dataclass(frozen=True)
class Model:
    """A model of the settings.

    Attributes:
        inputs, names: what it contributes to the step's identity. Its position is part of it: the first is the baseline.
    """

    label: str
    retriever: RetrieverSettings
    inputs: Mapping[str, Path]
    names: Mapping[str, str]

    @cached_property
    def identity(self) -> str:
        """Of its retriever. It takes reading all weights, so it is found once."""
        return baselines.identity(self.retriever)

    @property
    def where(self) -> str:
        """How messages name it."""
        return f"models.{self.label}={self.retriever.model or self.retriever.kind}"


@dataclass(frozen=True)
class Shared:
    """A task whose corpus all nodes see: `task.corpus` is the mapped file."""

    task: Task
    corpus: Path

    @property
    def name(self) -> str:
        return self.task.name

    @property
    def size(self) -> tuple[int, int]:
        """How many queries and passages."""
        return len(self.task.queries), self.task.corpus.num_rows

    @property
    def identity(self) -> str:
        """Changes with anything that it is."""
        task = self.task
        queries = [astuple(query) for query in task.queries]
        figures = [astuple(figure) for figure in task.figures]
        changes = [astuple(change) for change in task.changes]
        excluded = {query: sorted(documents) for query, documents in task.excluded.items()}
        content = [self.corpus.stem, queries, task.qrels, figures, changes, task.candidates, excluded]
        return digest([json.dumps(content, sort_keys=True)])


def _models(settings: EvaluateSettings) -> list[Model]:
    if not settings.models:
        raise InputError("models is empty: set models.base=<checkpoint directory, hub name or name of a baseline>")
    found = []
    for position, (label, model) in enumerate(settings.models.items()):
        retriever = baselines.resolve(label, model, settings.template)
        paths, names = baselines.inputs(retriever, f"models.{label}")
        of_model = f"models.{label} ({position})"
        found.append(
            Model(
                label,
                # Actors have other working directories, and what `latest` names may change while they work.
                retriever.model_copy(update={part: str(path) for part, path in paths.items()}),
                {f"{of_model}.{part}": path for part, path in paths.items()},
                {f"{of_model}.{part}": name for part, name in names.items()},
            )
        )
    return found


def _tasks(settings: EvaluateSettings, corpora: Path) -> tuple[dict[str, Path], list[Shared]]:
    """The files of the settings' own records, and all tasks."""
    if not settings.tasks and settings.records is None:
        raise InputError(
            "tasks is empty: set tasks=[followir] or another of the catalogue, or records=<InF-IR records>"
        )
    if settings.distractors is not None and settings.records is None:
        raise InputError(
            f"distractors={settings.distractors}: they are for records, which is not set; set it or drop them"
        )
    tasks = [catalogue.load(name, settings.data) for name in catalogue.expand(settings.tasks)]
    data: dict[str, Path] = {}
    if settings.records is not None:
        data["records"] = storage.existing(settings.records, "records")
        rows = records.read(data["records"], records.Record, "records", split=settings.split)
        others: Sequence[records.Passage] = ()
        if settings.distractors is not None:
            data["distractors"] = storage.existing(settings.distractors, "distractors")
            others = records.read(data["distractors"], records.Passage, "distractors")
        tasks.append(instruction_following(rows, others, settings.max_distractors))
    for name, count in Counter(task.name for task in tasks).items():
        if count > 1:
            raise InputError(f"tasks={name}: another task is called so too; rename the directory, or leave one out")
    shared_tasks = []
    for task in tasks:
        file = share(task.corpus, corpora)
        shared_tasks.append(Shared(replace(task, corpus=shared(file)), file))
    return data, shared_tasks


def _require_candidates(settings: EvaluateSettings, models: Sequence[Model], tasks: Sequence[Shared]) -> None:
    """There is something to rank for every reranker."""
    kinds = {model.label: model.retriever.kind for model in models}
    first = settings.first_stage
    if settings.rerank > settings.depth:
        raise InputError(f"rerank={settings.rerank}: rankings end at depth={settings.depth}; set rerank to it or less")
    if first is not None and (first not in kinds or kinds[first] not in (*_ENCODERS, *_RANKERS)):
        why = "a reranker itself" if first in kinds else "no label of models"
        raise InputError(f"first_stage={first}: {why}; give the label of an encoder or of bm25")
    for label, kind in kinds.items():
        for task in tasks:
            if (
                kind not in (*_ENCODERS, *_RANKERS)
                and first is None
                and not _says_what_to_rank(task.task, settings.depth)
            ):
                raise InputError(
                    f"models.{label}: a reranker, and {task.name} does not say which {settings.depth} documents or fewer "
                    "it ranks; set first_stage=<label of the model whose best documents it ranks>"
                )


def _says_what_to_rank(task: Task, depth: int) -> bool:
    """Are its candidates a ranking to be improved? Longer ones are the part of the corpus that a query is about."""
    return task.candidates is not None and max(map(len, task.candidates.values())) <= depth


# ---------------------------------------------------------------------------------------------------- rankings


def _evaluate(settings: EvaluateSettings, models: Sequence[Model], tasks: Sequence[Shared], store: Path) -> Results:
    scores: dict[str, dict[str, Scores]] = {}
    first: dict[str, dict[str, list[str]]] = {}  # task -> query -> the documents that rerankers rank
    for model in sorted(models, key=lambda model: model.label != settings.first_stage):
        scores[model.label] = {}
        for task, found in _rankings(settings, model, tasks, store, first):
            if model.label == settings.first_stage:
                first[task.name] = {q.id: list(ranks(found[q.id]))[: settings.rerank] for q in task.task.queries}
            scores[model.label][task.name] = score(task.task, found)
    return Results(
        tasks={task.name: Asked.of(task.task, task.identity) for task in tasks},
        models={
            model.label: model.retriever.model_dump(mode="json", exclude_defaults=True) | {"identity": model.identity}
            for model in models
        },
        scores={model.label: scores[model.label] for model in models},
        depth=settings.depth,
    )


def _rankings(
    settings: EvaluateSettings,
    model: Model,
    tasks: Sequence[Shared],
    store: Path,
    first: Mapping[str, Mapping[str, Sequence[str]]],
) -> Iterator[tuple[Shared, Run]]:
    """A model's rankings of all queries, task by task."""
    if model.retriever.kind in _RANKERS:
        return _ranked(settings, model, tasks)
    if model.retriever.kind in _ENCODERS:
        return _searched(settings, model, tasks, store)
    return _reranked(settings, model, tasks, store, first)


def _searched(
    settings: EvaluateSettings, model: Model, tasks: Sequence[Shared], store: Path
) -> Iterator[tuple[Shared, Run]]:
    passages = {task.name: Passages.of(task.corpus) for task in tasks}
    queries = {task.name: Queries.of(task.task.queries) for task in tasks}
    chunks: list[Chunk] = [*_flat(passages.values()), *_flat(queries.values())]
    files = _computed("encode", settings, model, chunks, store)
    with track(f"search {model.label}", sum(len(task.task.queries) for task in tasks)) as advance:
        for task in tasks:
            encoded = [(files[chunk], chunk.size) for chunk in passages[task.name]]
            searches = [
                _search.options(num_gpus=settings.gpus_per_actor).remote(
                    _only(task.task, chunk.queries),
                    (files[chunk], chunk.size),
                    task.corpus,
                    encoded,
                    _depth(settings, task.task),
                    "cuda" if settings.gpus_per_actor else "cpu",
                )
                for chunk in queries[task.name]
            ]
            found: dict[str, Mapping[str, float]] = {}
            for search in searches:
                rankings = _result(search)
                found |= rankings
                advance(len(rankings))
            yield task, found


def _reranked(
    settings: EvaluateSettings,
    model: Model,
    tasks: Sequence[Shared],
    store: Path,
    first: Mapping[str, Mapping[str, Sequence[str]]],
) -> Iterator[tuple[Shared, Run]]:
    pairs = {
        task.name: _pairs(task, None if _says_what_to_rank(task.task, settings.depth) else first[task.name])
        for task in tasks
    }
    files = _computed("rerank", settings, model, _flat(pairs.values()), store)
    for task in tasks:
        found: dict[str, dict[str, float]] = {query.id: {} for query in task.task.queries}
        ids = task.task.corpus["id"]
        for chunk in pairs[task.name]:
            documents = [ids[row].as_py() for row in chunk.rows]  # `take` copies the whole column
            scores = _stored(files[chunk], chunk.size).tolist()
            found[chunk.query.id] |= zip(documents, scores, strict=True)
        yield task, found


def _pairs(task: Shared, first: Mapping[str, Sequence[str]] | None) -> list[Pairs]:
    """Every query beside the best documents of the first stage, or else its candidates."""
    among, without = task.task.candidates or {} if first is None else first, task.task.excluded
    queries = task.task.queries
    wanted = [set(among[query.id]) - without.get(query.id, frozenset()) for query in queries]
    rows = rows_of(task.task.corpus["id"], wanted)
    return [
        pairs for query, own in zip(queries, rows, strict=True) for pairs in Pairs.of(query, task.corpus, own.tolist())
    ]


def _ranked(settings: EvaluateSettings, model: Model, tasks: Sequence[Shared]) -> Iterator[tuple[Shared, Run]]:
    with track(f"rank {model.label}", len(tasks)) as advance:
        ranking = [
            _rank.remote(model.retriever, model.identity, _only(task.task), task.corpus, _depth(settings, task.task))
            for task in tasks
        ]
        for task, found in zip(tasks, ranking, strict=True):
            yield task, _result(found)
            advance()


def _only(task: Task, queries: Sequence[Query] | None = None) -> Task:
    """The task without its corpus, and with some of its queries: what a search needs of it, to be sent there."""
    if queries is None:
        return replace(task, corpus=CORPUS.empty_table())
    names = {query.id for query in queries}
    return replace(
        task,
        corpus=CORPUS.empty_table(),
        queries=tuple(queries),
        qrels={},
        changes=(),
        candidates=None if task.candidates is None else {q: d for q, d in task.candidates.items() if q in names},
        excluded={query: documents for query, documents in task.excluded.items() if query in names},
    )


def _depth(settings: EvaluateSettings, task: Task) -> int:
    """As deep as some figure of the task, or a reranker, looks. p-MRR looks at whole rankings."""
    cuts = [int(figure.measure.partition("@")[2] or settings.depth) for figure in task.figures]
    return max(min(settings.depth, max(cuts)), 0 if settings.first_stage is None else settings.rerank)


def _flat(lists: Iterable[Sequence[T]]) -> list[T]:
    return [item for items in lists for item in items]


# ------------------------------------------------------------------------------------------- in other processes


class Compute:
    """A Ray Data actor: sees to it that chunks are in the store. It loads the model when the first is not.

    Args:
        model: what computes them.
        identity: of its retriever.
        store: directory.
        chunks: reference to all chunks; rows are numbers of them.
        device, batch_tokens: of the retriever.
    """

    def __init__(
        self, model: Model, identity: str, store: Path, chunks: ray.ObjectRef, device: str, batch_tokens: int
    ) -> None:
        self._model = model
        self._store = Store(store, identity)
        self._chunks: Sequence[Chunk] = ray.get(chunks)
        self._load = cache(partial(baselines.load, model.retriever, device, batch_tokens, identity))

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """Column `id` -> `id`; `file`, where the array is; `computed`: it was not there; `fault`: there is none."""
        try:
            file, computed = self._see_to(self._chunks[row["id"]])
        except InputError as error:
            return {"id": row["id"], "file": "", "computed": False, "fault": str(error)}
        return {"id": row["id"], "file": str(file), "computed": computed, "fault": ""}

    def _see_to(self, chunk: Chunk) -> tuple[Path, bool]:
        texts = chunk.texts()
        file = self._store.file(part for text in texts for part in text)
        if self._store.read(file, chunk.size) is not None:
            return file, False
        array = chunk.compute(self._load())
        broken = np.flatnonzero(~np.isfinite(array.reshape(chunk.size, -1)).all(axis=1))
        if broken.size:
            kind, *parts = texts[broken[0]]
            text = " ".join(part for part in reversed(parts) if part)
            raise InputError(
                f"{self._model.where}: its {'score' if kind == 'pair' else 'embedding'} of {kind} {text[:_SHOWN]!r} is not "
                f"finite, and {broken.size} of the {chunk.size} of this chunk are not; the weights are damaged or training "
                "diverged: give another checkpoint"
            )
        self._store.write(file, array)
        return file, True


def _computed(
    title: str, settings: EvaluateSettings, model: Model, chunks: Sequence[Chunk], store: Path
) -> dict[Chunk, Path]:
    """Where the array of each chunk is, once all of them are there."""
    distinct = list(dict.fromkeys(chunks))
    if not distinct:
        return {}
    kind = model.retriever.kind
    gpus = 0 if kind in _WITHOUT_GPU else settings.gpus_per_actor
    computed = ray.data.range(len(distinct), override_num_blocks=len(distinct)).map(
        Compute,
        fn_constructor_args=(
            model,
            model.identity,
            store,
            ray.put(distinct),
            "cuda" if gpus else "cpu",
            settings.batch_tokens,
        ),
        compute=ActorPoolStrategy(size=1 if kind in baselines.ALONE else min(settings.actors, len(distinct))),
        num_gpus=gpus,
    )
    files: dict[Chunk, Path] = {}
    there = 0
    with track(f"{title} {model.label}", sum(chunk.size for chunk in distinct)) as advance:
        for row in computed.iter_rows():
            if row["fault"]:
                raise InputError(row["fault"])
            chunk = distinct[row["id"]]
            files[chunk] = Path(row["file"])
            there += 0 if row["computed"] else chunk.size
            advance(chunk.size, note=f"{there} were there" if there else "")
    if len(files) < len(distinct):
        raise RuntimeError(f"Ray Data lost {len(distinct) - len(files)} of {len(distinct)} chunks")
    return files


@ray.remote(scheduling_strategy=_ANYWHERE)
def _search(
    task: Task, queries: tuple[Path, int], corpus: Path, passages: Sequence[tuple[Path, int]], depth: int, device: str
) -> dict[str, dict[str, float]]:
    """Rankings of a task's queries, whose embeddings and those of the passages are in these files of so many rows."""
    restricted = any(task.excluded.values())
    rankings = exact_search(
        _stored(*queries),
        (_stored(*file) for file in passages),
        shared(corpus)["id"],
        depth,
        candidates=None if task.candidates is None else [task.candidates[query.id] for query in task.queries],
        excluded=[task.excluded.get(query.id, ()) for query in task.queries] if restricted else None,
        device=device,
    )
    return {query.id: ranking for query, ranking in zip(task.queries, rankings, strict=True)}


@ray.remote(scheduling_strategy=_ANYWHERE)
def _rank(retriever: RetrieverSettings, identity: str, task: Task, corpus: Path, depth: int) -> Run:
    """The rankings of a retriever that ranks a whole task by itself."""
    ranker = baselines.load(retriever, known=identity)
    assert isinstance(ranker, Ranker)
    return ranker.rank(replace(task, corpus=shared(corpus)), depth)


def _result(task: ray.ObjectRef) -> Any:
    """What a Ray task returns; what it says of bad input, as if it were said here."""
    try:
        return ray.get(task)
    except RayTaskError as error:
        if isinstance(error.cause, InputError):
            raise error.cause from None
        raise


def _stored(file: Path, rows: int) -> np.ndarray:
    array = Store.read(file, rows)
    if array is None:
        raise InputError(f"embeddings={file}: gone or damaged since it was written; run again: it is made anew")
    return array
