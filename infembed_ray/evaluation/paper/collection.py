"""The results of several outputs, combined for a report."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, stdev
from typing import Any

from infembed_ray.errors import InputError
from infembed_ray.evaluation.results import Results, TaskSummary
from infembed_ray.evaluation.significance import Compared
from infembed_ray.evaluation.tables import Column, cells
from infembed_ray.evaluation.tasks.task import Obedience, Scores, averaged

BASE = "base"
"""Row of a sweep's untrained backbones."""
PER_SEED = ("seed", "model")
"""Facts about a model that differ between seeds; a model has a list of each."""


@dataclass(frozen=True)
class ReportedModel:
    """A model of an evaluation, or a row of a sweep with all its seeds."""

    key: str
    """Unique name."""
    label: str
    """Label in its output, or row of a sweep."""
    backbone: str | None
    """Label of the backbone in a sweep; otherwise None."""
    baseline: str
    """Key of the model that it is compared with: in a sweep, its untrained backbone."""
    output: str
    """Label of its first output."""
    about: Mapping[str, Any]
    runs: tuple[Mapping[str, Mapping[str, float | None]], ...]
    """One per seed: task -> figure -> mean."""

    @property
    def shown(self) -> str:
        """Label with the output's suffix, if another model has the same label."""
        return self.key.removeprefix(f"{self.backbone}, ")

    def spread(self, column: Column) -> float | None:
        """Sample standard deviation over seeds; None for a single seed."""
        if len(self.runs) < 2:
            return None
        parts = [[run[task][figure] for task, figure in column.parts] for run in self.runs]
        return stdev(fmean(mean for mean in of_run if mean is not None) for of_run in parts)


@dataclass(frozen=True)
class CombinedResults:
    """All models and their values. A model need not have all tasks."""

    models: Mapping[str, ReportedModel]
    """By key."""
    results: Results
    """By key; a query's value is the mean over seeds."""
    _cells: dict[tuple[tuple[str, str], ...], dict[str, Compared]] = field(default_factory=dict, init=False)

    def cells(self, column: Column) -> dict[str, Compared]:
        """Return the cell of every model that has the column; differences are to the model's own baseline."""
        if column.parts not in self._cells:  # a page shows the same figures in several tables
            self._cells[column.parts] = self._compare(column)
        return self._cells[column.parts]

    def _compare(self, column: Column) -> dict[str, Compared]:
        present = [key for key in self.models if all(task in self.results.scores[key] for task, _ in column.parts)]
        cell_of: dict[str, Compared] = {}
        for baseline in dict.fromkeys(self.models[key].baseline for key in present):
            others = [key for key in present if self.models[key].baseline == baseline != key]
            compared = [[baseline, *others]] if baseline in present else [[key] for key in others]
            for models in compared:
                cell_of |= cells(self.results, column, models)
        return {key: cell_of[key] for key in present if key in cell_of}


def collect(outputs: Mapping[str, Results]) -> CombinedResults:
    """Combine the results of several outputs.

    Models of one label in two outputs are the same model if their descriptions are equal; otherwise the later one gets the
    output's label as a suffix. InputError: tasks of one name or the depths differ.
    """
    first = next(iter(outputs))
    tasks: dict[str, tuple[str, TaskSummary]] = {}
    models: dict[str, ReportedModel] = {}
    scores: dict[str, dict[str, Scores]] = {}
    obedience: dict[str, dict[str, Obedience]] = {}
    references: dict[str, dict[str, Obedience]] = {}
    for output, results in outputs.items():
        if results.depth != outputs[first].depth:
            fault = f"rankings hold {results.depth} documents, those of results.{first} {outputs[first].depth}"
            raise InputError.of(f"results.{output}", None, fault, "evaluate with one depth")
        for task, summary in results.tasks.items():
            where, same = tasks.setdefault(task, (output, summary))
            if same != summary:
                fault = f"its task {task!r} has other texts, judgements or figures than that of results.{where}"
                raise InputError.of(f"results.{output}", None, fault, "make separate reports")
        of_output = list(_models(output, results))
        suffixes = {m.key: f" ({output})" * (models.get(m.key, m).about != m.about) for m, *_ in of_output}
        for model, values, obeyed in of_output:
            key = model.key + suffixes[model.key]
            if key in models:
                runs = tuple({**old, **new} for old, new in zip(models[key].runs, model.runs, strict=True))
                models[key] = replace(models[key], runs=runs)
            else:
                models[key] = replace(model, key=key, baseline=model.baseline + suffixes[model.baseline])
            scores[key] = values | scores.get(key, {})
            obedience[key] = obeyed | obedience.get(key, {})
        for label in results.obedience.keys() - results.models.keys():
            references[label] = {**results.obedience[label], **references.get(label, {})}
    obedience = {label: of_tasks for label, of_tasks in {**references, **obedience}.items() if of_tasks}
    obedience = {label: obedience[label] for label in [*models, *references] if label in obedience}
    about = {key: model.about for key, model in models.items()}
    summaries = {task: summary for task, (_, summary) in tasks.items()}
    return CombinedResults(models, Results(summaries, about, scores, outputs[first].depth, obedience))


def _models(output: str, results: Results) -> Iterator[tuple[ReportedModel, dict[str, Scores], dict[str, Obedience]]]:
    """Yield the models of an output in its order, with their values and those of the controls; seeds are one model."""
    labels_of: dict[tuple[str, str | None], list[str]] = {}
    for label, about in results.models.items():
        labels_of.setdefault((about.get("row", label), about.get("backbone")), []).append(label)
    baselines: dict[str | None, str] = {}
    for row, backbone in labels_of:
        if row == BASE and backbone is not None:
            baselines[backbone] = _key(row, backbone)
        baselines.setdefault(backbone, _key(row, backbone))
    for (row, backbone), labels in labels_of.items():
        about = {name: value for name, value in results.models[labels[0]].items() if name not in PER_SEED}
        about |= {name: [results.models[label].get(name) for label in labels] for name in PER_SEED}
        runs = tuple(results.figures[label] for label in labels)
        controls = [results.obedience.get(label, {}) for label in labels]
        obeyed: dict[str, Obedience] = {task: _averaged([of_one[task] for of_one in controls]) for task in controls[0]}
        model = ReportedModel(_key(row, backbone), row, backbone, baselines[backbone], output, about, runs)
        yield model, _averaged([results.scores[label] for label in labels]), obeyed


def _key(row: str, backbone: str | None) -> str:
    return row if backbone is None else f"{backbone}, {row}"


def _averaged(runs: Sequence[Mapping[str, Scores]]) -> dict[str, Scores]:
    return {task: averaged([run[task] for run in runs]) for task in runs[0]}
