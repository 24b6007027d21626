"""The results of several outputs as one set: what a report is made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any

from infembed_ray.config import nearest
from infembed_ray.errors import InputError
from infembed_ray.evaluation.results import Asked, Results
from infembed_ray.evaluation.scoring import Scores
from infembed_ray.evaluation.tables import Cell, Column, cells

BASE = "base"
"""Row of a sweep's backbones as they are."""

Figures = Mapping[str, Mapping[str, float | None]]
"""Task -> figure -> mean."""


@dataclass(frozen=True)
class Model:
    """One model of the report: a model of an evaluation, or a row of a sweep with all its seeds."""

    key: str
    """Its name, unlike any other's."""
    label: str
    """As it is called in its output: a model of an evaluation, or a row of a sweep."""
    shown: str
    """The same, and the output's label if there is another one."""
    backbone: str | None
    """Label of the backbone; None where it is of no sweep."""
    baseline: str
    """Key of the model that it is compared with: of a sweep, its backbone as it is."""
    output: str
    """Label of the output it was first found in."""
    about: Mapping[str, Any]
    runs: tuple[Figures, ...]
    """One a seed."""

    def spread(self, column: Column) -> float | None:
        """Sample standard deviation over seeds; None of a single one."""
        if len(self.runs) < 2:
            return None
        parts = [[run[task][figure] for task, figure in column.parts] for run in self.runs]
        return stdev(fmean(mean for mean in of_run if mean is not None) for of_run in parts)


@dataclass(frozen=True)
class Collection:
    """All models, and all that is known of them. A model need not have all tasks."""

    models: Mapping[str, Model]
    """By key."""
    results: Results
    """By key; of several seeds, the value of a query is the mean over them."""

    def against(self, baseline: str) -> Collection:
        """The same, with all models compared with one.

        Raises:
            InputError: no model has this key.
        """
        if baseline not in self.models:
            raise InputError(f"baseline={baseline}: no model is called so; {nearest(baseline, self.models)}")
        return replace(self, models={key: replace(model, baseline=baseline) for key, model in self.models.items()})

    def cells(self, column: Column) -> dict[str, Cell]:
        """The column's cell of every model that has it; differences are to the model's own baseline."""
        there = [key for key in self.models if all(task in self.results.scores[key] for task, _ in column.parts)]
        found: dict[str, Cell] = {}
        for baseline in dict.fromkeys(self.models[key].baseline for key in there):
            others = [key for key in there if self.models[key].baseline == baseline != key]
            if baseline in there:
                found |= cells(self.results, column, [baseline, *others])
            else:
                for key in others:
                    found |= cells(self.results, column, [key])
        return {key: found[key] for key in there if key in found}


def collect(outputs: Mapping[str, Results]) -> Collection:
    """Put results together.

    Models of one label in two outputs are one model if what they are and all values they share are equal; otherwise the
    later one is called after its output.

    Raises:
        InputError: two outputs have a task of one name that is not the same, or rankings of different depths.
    """
    first = next(iter(outputs))
    tasks: dict[str, tuple[str, Asked, dict[str, set[str]]]] = {}
    models: dict[str, Model] = {}
    scores: dict[str, dict[str, Scores]] = {}
    for output, results in outputs.items():
        if results.depth != outputs[first].depth:
            raise InputError(
                f"results.{output}: rankings hold {results.depth} documents, those of results.{first} "
                f"{outputs[first].depth}: the figures cannot be compared; evaluate with one depth"
            )
        for task, asked in results.tasks.items():
            of_any_model = next(iter(results.scores.values()))[task]
            units = {figure: set(values) for figure, values in of_any_model.items()}
            where, same, same_units = tasks.setdefault(task, (output, asked, units))
            if (same, same_units) != (asked, units):
                raise InputError(
                    f"results.{output}: its task {task!r} is not that of results.{where} ({_difference(same, asked)}); "
                    "report on them one by one"
                )
        found = list(_models(results))
        suffixes = {m.key: "" if _fits(m, models, scores) else f" ({output})" for m in found}
        for model in found:
            key = model.key + suffixes[model.key]
            if key not in models:
                baseline = model.baseline + suffixes[model.baseline]
                shown = model.label + suffixes[model.key]
                models[key] = Model(key, model.label, shown, model.backbone, baseline, output, model.about, model.runs)
                scores[key] = model.scores
            else:
                runs = tuple({**old, **new} for old, new in zip(models[key].runs, model.runs, strict=True))
                models[key] = replace(models[key], runs=runs)
                scores[key] |= model.scores
    asked_of = {task: asked for task, (_, asked, _) in tasks.items()}
    about = {key: model.about for key, model in models.items()}
    return Collection(models, Results(asked_of, about, scores, outputs[first].depth))


@dataclass(frozen=True)
class _Found:
    """A model, as one output has it; attributes as of `Model`, but within the output."""

    key: str
    label: str
    backbone: str | None
    baseline: str
    about: Mapping[str, Any]
    runs: tuple[Figures, ...]
    scores: dict[str, Scores]


def _models(results: Results) -> Iterator[_Found]:
    """Those of an output, in its order: the seeds of a sweep's row are one."""
    cells: dict[tuple[str, str | None], list[str]] = {}
    for label, about in results.models.items():
        cells.setdefault((about.get("row", label), about.get("backbone")), []).append(label)
    baselines: dict[str | None, str] = {}
    for row, backbone in cells:
        if row == BASE and backbone is not None:
            baselines[backbone] = _key(row, backbone)
        baselines.setdefault(backbone, _key(row, backbone))
    for (row, backbone), labels in cells.items():
        about = {name: value for name, value in results.models[labels[0]].items() if name not in ("seed", "model")}
        about |= {name: [results.models[label].get(name) for label in labels] for name in ("seed", "model")}
        runs = tuple(results.figures[label] for label in labels)
        averaged = _averaged([results.scores[label] for label in labels])
        yield _Found(_key(row, backbone), row, backbone, baselines[backbone], about, runs, averaged)


def _fits(found: _Found, models: Mapping[str, Model], scores: Mapping[str, Mapping[str, Scores]]) -> bool:
    """Is there no model of this key yet, or is it the same?"""
    if found.key not in models:
        return True
    known = scores[found.key]
    return models[found.key].about == found.about and all(
        known[task] == found.scores[task] for task in known.keys() & found.scores.keys()
    )


def _key(row: str, backbone: str | None) -> str:
    return row if backbone is None else f"{backbone}, {row}"


def _averaged(runs: Sequence[Mapping[str, Scores]]) -> dict[str, Scores]:
    if len(runs) == 1:
        return dict(runs[0])
    return {
        task: {
            figure: {query: fmean(run[task][figure][query] for run in runs) for query in values}
            for figure, values in figures.items()
        }
        for task, figures in runs[0].items()
    }


def _difference(one: Asked, other: Asked) -> str:
    if one.figures != other.figures:
        return f"figures {', '.join(f.name for f in other.figures)} and {', '.join(f.name for f in one.figures)}"
    for name in [*one.about, *other.about]:
        if one.about.get(name) != other.about.get(name):
            return f"{name} {other.about.get(name)!r} and {one.about.get(name)!r}"
    return "other texts or judgements" if one.content != other.content else "other queries"
