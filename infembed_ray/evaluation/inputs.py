"""The models and tasks of an evaluation, resolved and checked before any work starts. Does not depend on Ray."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property, partial
from typing import Any

from infembed_ray.config.evaluation import EvaluateSettings, RetrieverSettings
from infembed_ray.errors import InputError, check_all
from infembed_ray.evaluation import obedience
from infembed_ray.evaluation.chunks import share, shared
from infembed_ray.evaluation.metrics import parse
from infembed_ray.evaluation.retrievers import baselines
from infembed_ray.evaluation.tasks import catalogue
from infembed_ray.evaluation.tasks.corpus import digest, name_of
from infembed_ray.evaluation.tasks.infir import instruction_following
from infembed_ray.evaluation.tasks.task import Task
from infembed_ray.progress import counted
from infembed_ray.records import tables
from infembed_ray.records.files import BadRows
from infembed_ray.storage import steps
from infembed_ray.storage.places import Place, address
from infembed_ray.storage.steps import output_state


@dataclass(frozen=True)
class EvaluatedModel:
    """A model of the settings, with its part of the step's identity: paths and names.

    They have its position, because the first model is the baseline.
    """

    label: str
    retriever: RetrieverSettings
    inputs: Mapping[str, Place]
    names: Mapping[str, str]

    @cached_property
    def identity(self) -> str:
        """Identity of its retriever. Computing it reads all weights, once."""
        return baselines.identity(self.retriever)

    @property
    def about(self) -> dict[str, Any]:
        """Its description in the published results."""
        return self.retriever.model_dump(mode="json", exclude_defaults=True) | {"identity": self.identity}


@dataclass(frozen=True)
class EvaluationInputs:
    """All that an evaluation reads; `store` has embeddings and scores, `data` the files of the settings' own records."""

    models: Sequence[EvaluatedModel]
    tasks: Sequence[Task]
    store: Place
    data: Mapping[str, Place]
    bad: Sequence[BadRows] = ()
    """Rows that are left out."""

    @property
    def size(self) -> tuple[int, int]:
        """Number of queries and passages."""
        return sum(len(task.queries) for task in self.tasks), sum(task.corpus.num_rows for task in self.tasks)

    def step(self, settings: EvaluateSettings) -> steps.Step:
        """Return the step that publishes the evaluation of these inputs."""
        paths, names = dict[str, Place](self.data), {f"tasks.{task.name}": content_hash(task) for task in self.tasks}
        for model in self.models:
            paths |= model.inputs
            names |= model.names
        return steps.Step("evaluate", settings, settings.output, paths, names)


def resolve(settings: EvaluateSettings, share_corpora: bool = True) -> EvaluationInputs:
    """Find models and tasks, and write the corpora to the store, from which actors read them. Reads no weights.

    Raises:
        InputError: data, a model or the store cannot be used, or models and tasks do not fit together.
    """
    models, store, (data, tasks, bad), *_ = check_all(
        lambda: _models(settings),
        lambda: steps.folder_of(settings, "embeddings"),
        lambda: _tasks(settings),
        lambda: obedience.check_gate(settings),
        lambda: steps.require_access(steps.folder_of(settings, "embeddings"), "embeddings"),
    )
    if share_corpora:
        steps.require_writable(store, "embeddings")
    for number, task in enumerate(tasks):
        place = store / "corpora"
        file = share(task.corpus, place) if share_corpora else place / name_of(task.corpus)
        tasks[number] = replace(task, corpus=shared(file) if share_corpora else task.corpus, corpus_file=file)
    _require_candidates(settings, models, tasks)
    if settings.gate is not None and not any(obedience.pairs_of(task.changes) for task in tasks):
        raise InputError.of("gate", settings.gate, *obedience.NO_CHANGES)
    return EvaluationInputs(models, tasks, store, data, bad)


def content_hash(task: Task) -> str:
    """Hash all contents of a task."""
    listed = [[astuple(item) for item in items] for items in (task.queries, task.figures, task.changes)]
    excluded = {query: sorted(documents) for query, documents in task.excluded.items()}
    content = [task.corpus_file.name or name_of(task.corpus), listed, task.qrels, task.candidates, excluded]
    return digest([json.dumps(content, sort_keys=True)])


def _models(settings: EvaluateSettings) -> list[EvaluatedModel]:
    if not settings.models:
        raise InputError("models is empty: set models.base=<checkpoint directory, hub name or name of a baseline>")
    return check_all(*(partial(_model, settings, n, label) for n, label in enumerate(settings.models)))


def _model(settings: EvaluateSettings, position: int, label: str) -> EvaluatedModel:
    retriever = baselines.resolve(label, settings.models[label])
    paths, names = baselines.inputs(retriever, f"models.{label}")
    prefix = f"models.{label} ({position})"
    return EvaluatedModel(
        label,
        # Actors have other working directories, and `latest` may point elsewhere while they work.
        retriever.model_copy(update={part: address(path) for part, path in paths.items()}),
        {f"{prefix}.{part}": path for part, path in paths.items()},
        {f"{prefix}.{part}": name for part, name in names.items()},
    )


def _tasks(settings: EvaluateSettings) -> tuple[dict[str, Place], list[Task], list[BadRows]]:
    """Return the files of the settings' own records, all tasks, and the rows that are left out."""
    if not settings.tasks and settings.records is None:
        raise InputError("tasks is empty: set tasks=[followir] or another benchmark, or records=<InF-IR records>")
    if settings.distractors is not None and settings.records is None:
        raise InputError.of("distractors", settings.distractors, "needs records", "set records or drop the distractors")
    for measure in settings.measures:
        parse(measure.replace("Robustness@", "nDCG@"))
    reject, identical, bad = settings.on_bad_row == "reject", settings.ignore_identical_ids, list[BadRows]()
    names = catalogue.expand(settings.tasks)
    load = partial(
        catalogue.load, data=settings.data, measures=settings.measures, identical=identical, reject=reject, bad=bad
    )
    tasks = check_all(*(partial(load, name) for name in names))
    given = {"records": settings.records, "distractors": settings.distractors}
    data = {name: steps.find_input(path, name) for name, path in given.items() if path is not None}
    if "records" in data:
        bad += (BadRows(name, reject) for name in ("records", "distractors"))
        rows = list(tables.stream(data["records"], tables.Record, "records", split=settings.split, bad=bad[-2]))
        distractors: Sequence[tables.Passage] = ()
        if "distractors" in data:
            distractors = list(tables.stream(data["distractors"], tables.Passage, "distractors", bad=bad[-1]))
        task = instruction_following(rows, distractors, settings.max_distractors)
        tasks.append(catalogue.with_measures(task, settings.measures))
    for name, count in Counter(task.name for task in tasks).items():
        if count > 1:
            raise InputError.of("tasks", name, "two tasks have this name", "rename the directory, or leave one out")
    return data, tasks, bad


def _require_candidates(settings: EvaluateSettings, models: Sequence[EvaluatedModel], tasks: Sequence[Task]) -> None:
    """Check that every reranker has documents to score."""
    first = settings.first_stage
    finders = (*baselines.ENCODER_KINDS, *baselines.RANKER_KINDS)
    rerankers = [model.label for model in models if model.retriever.kind not in finders]
    if first is not None and (first not in settings.models or first in rerankers):
        why = "is a reranker itself" if first in settings.models else "is not a label of models"
        raise InputError.of("first_stage", first, why, "give the label of a model that is no reranker")
    for task in tasks:
        if rerankers and first is None and not task.has_candidates(settings.depth):
            fault = f"is a reranker, but {task.name} has no lists of {settings.depth} candidates or fewer"
            remedy = "set first_stage=<label of the model whose top documents it scores>"
            raise InputError.of(f"models.{rerankers[0]}", None, fault, remedy)


def describe(settings: EvaluateSettings) -> Iterator[str]:
    """Yield what a run would do, line by line; InputError as `resolve`."""
    inputs = resolve(settings, share_corpora=False)
    if (yield from output_state(inputs.step(settings))):
        return
    yield from describe_tasks(inputs)
    for model in inputs.models:
        yield f"model {model.label}: {model.retriever.model or model.retriever.kind}"
    queries, passages = inputs.size
    pairs = f"{counted(len(inputs.tasks), 'task')} x {counted(len(inputs.models), 'model')}"
    yield f"{pairs}: {queries:,} queries and {passages:,} passages per model"


def describe_tasks(inputs: EvaluationInputs) -> Iterator[str]:
    """Yield a line for each task."""
    for task in inputs.tasks:
        yield f"task {task.name}: {counted(len(task.queries), 'query', 'queries')}"
