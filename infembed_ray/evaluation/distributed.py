"""`infembed evaluate`: tasks x models on Ray, published as a table.

Texts are in files that all nodes map into memory. Actors write the embeddings of each chunk of texts to the store, from which
searches read them in blocks, so the driver and Ray's object store hold neither. A stored chunk is never computed again.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.data import ActorPoolStrategy

from infembed_ray import ray_compat
from infembed_ray.config.evaluation import EvaluateSettings, RetrieverSettings
from infembed_ray.errors import InputError
from infembed_ray.evaluation import chunks, differences, obedience
from infembed_ray.evaluation.chunks import TextChunk
from infembed_ray.evaluation.differences import Difference, Kept
from infembed_ray.evaluation.inputs import EvaluatedModel, EvaluationInputs, content_hash, resolve
from infembed_ray.evaluation.metrics import Run, ranks
from infembed_ray.evaluation.obedience import Controls
from infembed_ray.evaluation.paper import results_report
from infembed_ray.evaluation.results import Results, TaskSummary
from infembed_ray.evaluation.retrievers import baselines, runs
from infembed_ray.evaluation.retrievers.baselines import ENCODER_KINDS, RANKER_KINDS
from infembed_ray.evaluation.search import exact_search, rows_of
from infembed_ray.evaluation.tasks.task import CORPUS, Obedience, Scores, Task, score
from infembed_ray.progress import counted, say, track
from infembed_ray.ray_cluster import connect, errors_of_tasks
from infembed_ray.records.files import write_bad_rows
from infembed_ray.storage import steps
from infembed_ray.storage.places import Place, address, errors_at, place_of

_OUTSIDE_TRIALS = "DEFAULT"
"""Scheduling strategy. Without it, Ray puts tasks into the placement group of a sweep's trial, which has no free CPUs."""


def run(settings: EvaluateSettings) -> steps.Published:
    """Evaluate all models on all tasks and publish the figures, the rankings, `table.md` and `report.html`.

    Raises:
        InputError: data, a model or the output cannot be used, or a model's embeddings or scores are not finite.
    """
    inputs = resolve(settings)
    step = inputs.step(settings)
    if done := step.finished():
        return obedience.require_gates(settings, done)
    queries, passages = inputs.size
    models, tasks = counted(len(inputs.models), "model"), counted(len(inputs.tasks), "task")
    say(f"evaluate: {models}, {tasks}, {counted(queries, 'query', 'queries')}, {counted(passages, 'passage')}")
    with step.publish() as staging:
        write_bad_rows(staging.path, *inputs.bad)
        figures, differing = _evaluate(settings, inputs, staging.path / runs.RUNS)
        staging.counts = {"tasks": len(inputs.tasks), "queries": queries, "passages": passages}
        staging.facts = {"figures": figures.figures}
        report = results_report.write(staging.path, settings.output, figures, differing)
    say(report.as_text())
    return obedience.require_gates(settings, step.published())


def _evaluate(
    settings: EvaluateSettings, inputs: EvaluationInputs, directory: Path
) -> tuple[Results, list[Difference]]:
    """Rank and score all tasks by all models; the runs go to a directory."""
    scores: dict[str, dict[str, Scores]] = {model.label: {} for model in inputs.models}
    obeyed: dict[str, dict[str, Obedience]] = {}
    first: dict[str, dict[str, list[str]]] = {}
    covered: dict[str, dict[str, dict[str, dict[str, int]]]] = {}
    kept: dict[str, dict[str, Kept]] = {task.name: {} for task in inputs.tasks}
    made = {task.name: Controls.from_task(task) for task in inputs.tasks if settings.controls}
    controls = {name: of_task for name, of_task in made.items() if of_task is not None}
    asked = replace(inputs, tasks=[controls[t.name].ask(t) if t.name in controls else t for t in inputs.tasks])
    for model in sorted(inputs.models, key=lambda model: model.label != settings.first_stage):
        if model.retriever.kind in RANKER_KINDS:
            ranked = _rank_tasks(settings, asked, model)
        elif model.retriever.kind in ENCODER_KINDS:
            ranked = _encode_and_search(settings, asked, model)
        else:
            ranked = _rerank(settings, asked, model, first)
        for task, (asking, run) in zip(inputs.tasks, ranked, strict=True):
            if model.label == settings.first_stage:
                first[task.name] = {q.id: list(ranks(run[q.id]))[: settings.rerank] for q in asking.queries}
            scores[model.label][task.name] = score(task, run)
            if model.retriever.kind == "run":
                counts = runs.coverage(task, run, model.retriever.model)
                covered.setdefault(model.label, {"coverage": {}})["coverage"][task.name] = counts
                if counts["without_results"] or counts["unknown_documents"]:
                    missing = f"{counts['without_results']} of {counts['judged_queries']} judged queries of {task.name}"
                    unknown = f"{counts['unknown_documents']} documents are unknown"
                    say(f"{model.label}: warning: {missing} have no results, {unknown}")
            kept[task.name][model.label] = differences.keep(task, run)
            runs.write(directory, model.label, task.name, run)
            if task.name in controls:
                obeyed.setdefault(model.label, {})[task.name] = controls[task.name].measure(task, run)
    obeyed = {model.label: obeyed[model.label] for model in inputs.models if obeyed}
    for label, of_tasks in _references(settings, asked, controls).items():
        obeyed.setdefault(label, of_tasks)
    figures = Results(
        tasks={task.name: TaskSummary.from_task(task, content_hash(task)) for task in inputs.tasks},
        models={model.label: model.about | covered.get(model.label, {}) for model in inputs.models},
        scores=scores,
        depth=settings.depth,
        obedience=obeyed,
    )
    return figures, [d for task in inputs.tasks for d in differences.largest(task, figures, kept[task.name])]


def _references(
    settings: EvaluateSettings, inputs: EvaluationInputs, controls: Mapping[str, Controls]
) -> dict[str, dict[str, Obedience]]:
    """Measure BM25, unless a model is, on the tasks with controls, which `inputs` asks."""
    given = [model.retriever for model in inputs.models if model.retriever.kind == "bm25"]
    if not controls or any("{instruction}" in (retriever.instructed_query or "") for retriever in given):
        return {}
    tasks = [task for task in inputs.tasks if task.name in controls]
    bm25 = EvaluatedModel(obedience.BM25, baselines.resolve(obedience.BM25, "bm25"), {}, {})
    ranked = _rank_tasks(settings, replace(inputs, tasks=tasks), bm25)
    return {bm25.label: {task.name: controls[task.name].measure(task, run) for task, run in ranked}}


def _encode_and_search(
    settings: EvaluateSettings, inputs: EvaluationInputs, model: EvaluatedModel
) -> Iterator[tuple[Task, Run]]:
    passages = {task.name: chunks.of_passages(task.corpus_file) for task in inputs.tasks}
    queries = {task.name: chunks.of_queries(task.queries) for task in inputs.tasks}
    files = _compute_chunks("encode", settings, model, chain(*passages.values(), *queries.values()), inputs.store)
    with track(f"search {model.label}", inputs.size[0]) as advance:
        for task in inputs.tasks:
            embeddings = [files[chunk] for chunk in passages[task.name]]
            search = _search.options(num_gpus=settings.gpus_per_actor)
            searches = []
            for chunk in queries[task.name]:
                ids = [query.id for query in chunk.queries]
                excluded = [task.excluded.get(query, ()) for query in ids]
                options = {
                    "candidates": None if task.candidates is None else [task.candidates[query] for query in ids],
                    "excluded": excluded if any(excluded) else None,
                    "device": "cuda" if settings.gpus_per_actor else "cpu",
                }
                asked = files[chunk], embeddings, task.corpus_file, settings.depth, options
                searches.append((ids, search.remote(*asked)))
            run: dict[str, Mapping[str, float]] = {}
            for ids, rankings in searches:
                run |= zip(ids, _result(rankings), strict=True)
                advance(len(ids))
            yield task, run


def _rerank(
    settings: EvaluateSettings,
    inputs: EvaluationInputs,
    model: EvaluatedModel,
    first: Mapping[str, Mapping[str, Sequence[str]]],
) -> Iterator[tuple[Task, Run]]:
    """Score every query's candidates, or `first`, the first stage's top documents, if the task has none to re-rank."""
    pairs: dict[str, list[TextChunk]] = {}
    for task in inputs.tasks:
        candidates = (task.candidates or {}) if task.has_candidates(settings.depth) else first[task.name]
        wanted = [set(candidates[query.id]) - task.excluded.get(query.id, frozenset()) for query in task.queries]
        rows = rows_of(task.corpus["id"], wanted)
        divided = zip(task.queries, rows, strict=True)
        pairs[task.name] = [c for query, own in divided for c in chunks.of_pairs(query, task.corpus_file, own.tolist())]
    files = _compute_chunks("rerank", settings, model, chain(*pairs.values()), inputs.store)
    for task in inputs.tasks:
        run: dict[str, dict[str, float]] = {query.id: {} for query in task.queries}
        ids = task.corpus["id"]
        stored = chunks.read_all(files[chunk] for chunk in pairs[task.name])
        for chunk, scores in zip(pairs[task.name], stored, strict=True):
            documents = [ids[row].as_py() for row in chunk.rows]  # `take` copies the whole column
            run[chunk.queries[0].id] |= zip(documents, scores.tolist(), strict=True)
        yield task, run


def _rank_tasks(
    settings: EvaluateSettings, inputs: EvaluationInputs, model: EvaluatedModel
) -> Iterator[tuple[Task, Run]]:
    if model.retriever.kind == "run":  # its files need not be visible to the workers
        yield from ((task, baselines.rank(model.retriever, task, settings.depth)) for task in inputs.tasks)
        return
    connect()
    with track(f"rank {model.label}", len(inputs.tasks)) as advance:
        small = (replace(task, corpus=CORPUS.empty_table()) for task in inputs.tasks)
        rankings = [_rank.remote(model.retriever, task, settings.depth) for task in small]
        for task, ranking in zip(inputs.tasks, rankings, strict=True):
            yield task, _result(ranking)
            advance()


# ----------------------------------------------------------------------------------------------- on the workers


class ComputeChunk:
    """Ray Data actor that computes chunks missing from the store. It loads the model at the first missing chunk.

    Rows of the data set are the numbers of the chunks that `given` refers to.
    """

    def __init__(
        self, model: EvaluatedModel, store: Place, given: ray.ObjectRef, device: str, batch_tokens: int | None
    ) -> None:
        self._model = model
        self._store = store
        self._chunks: Sequence[TextChunk] = ray.get(given)
        self._load = cache(partial(baselines.load, model.retriever, device, batch_tokens))

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """Map `id` to `file`, where its array is, and `fault`, the error, or empty."""
        try:
            return {"id": row["id"], "file": address(self._ensure(self._chunks[row["id"]])), "fault": ""}
        except InputError as error:
            return {"id": row["id"], "file": "", "fault": str(error)}

    def _ensure(self, chunk: TextChunk) -> Place:
        texts = chunk.texts()
        file = chunks.file_of(self._store, (part for text in texts for part in text))
        with errors_at(file, "embeddings"):
            if file.is_file():
                return file
        array = chunk.compute(self._load())
        broken = np.flatnonzero(~np.isfinite(array.reshape(chunk.size, -1)).all(axis=1))
        if broken.size:
            kind, *parts = texts[broken[0]]
            text, asked = " ".join(part for part in reversed(parts) if part), self._model.retriever
            fault = f"its {'score' if kind == 'pair' else 'embedding'} of {kind} {text[:60]!r} is not finite"
            remedy = "the weights are damaged or training diverged: give another checkpoint"
            raise InputError.of(f"models.{self._model.label}", asked.model or asked.kind, fault, remedy)
        chunks.write(file, array)
        return file


def _compute_chunks(
    title: str, settings: EvaluateSettings, model: EvaluatedModel, needed: Iterable[TextChunk], store: Place
) -> dict[TextChunk, Place]:
    """Compute the chunks that are missing from the store; return the file of each chunk."""
    distinct = list(dict.fromkeys(needed))
    if not distinct:
        return {}
    connect()
    remote = model.retriever.kind == "api"  # one process of it, which bounds its requests in flight
    gpus = 0 if remote else settings.gpus_per_actor
    device, place = "cuda" if gpus else "cpu", chunks.store_of(store, model.identity)
    computed = ray.data.range(len(distinct), override_num_blocks=len(distinct)).map(
        ComputeChunk,
        fn_constructor_args=(model, place, ray.put(distinct), device, settings.batch_tokens),
        compute=ActorPoolStrategy(size=1 if remote else min(settings.actors, len(distinct))),
        num_gpus=gpus,
        ray_remote_args_fn=ray_compat.retries,
    )
    files: dict[TextChunk, Place] = {}
    with track(f"{title} {model.label}", sum(chunk.size for chunk in distinct)) as advance:
        for row in computed.iter_rows():
            if row["fault"]:
                raise InputError(row["fault"])
            chunk = distinct[row["id"]]
            files[chunk] = place_of(row["file"])
            advance(chunk.size)
    return files


@ray.remote(scheduling_strategy=_OUTSIDE_TRIALS)
def _search(
    queries: Place, passages: Sequence[Place], corpus: Place, depth: int, options: Mapping[str, Any]
) -> list[dict[str, float]]:
    """Rank queries, given the files of embeddings; `options` as of `exact_search`."""
    embeddings, ids = next(chunks.read_all([queries])), chunks.shared(corpus)["id"]
    return exact_search(embeddings, chunks.read_all(passages), ids, depth, **options)


@ray.remote(scheduling_strategy=_OUTSIDE_TRIALS)
def _rank(retriever: RetrieverSettings, task: Task, depth: int) -> Run:
    """Rank a whole task, whose corpus is in its file, in one process."""
    return baselines.rank(retriever, replace(task, corpus=chunks.shared(task.corpus_file)), depth)


def _result(task: ray.ObjectRef) -> Any:
    """Return a Ray task's result; raise its InputError without Ray's wrapper."""
    with errors_of_tasks():
        return ray.get(task)
