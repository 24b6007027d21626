"""`infembed report`: the paper's tables and figures from published results, with the paper's own numbers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from infembed_ray.config.base import nearest
from infembed_ray.config.evaluation import ReportSettings
from infembed_ray.errors import InputError
from infembed_ray.evaluation import obedience, results, tables
from infembed_ray.evaluation.differences import Difference
from infembed_ray.evaluation.paper import sheets
from infembed_ray.evaluation.paper.collection import CombinedResults, ReportedModel, collect
from infembed_ray.evaluation.paper.sheets import MODELS, TABLES, plain, stands_for
from infembed_ray.evaluation.results import Results, conventions_of
from infembed_ray.evaluation.significance import LEVEL, Compared, IntervalEstimate
from infembed_ray.evaluation.tables import Column
from infembed_ray.evaluation.tasks import catalogue, infir
from infembed_ray.progress import say
from infembed_ray.reporting import page
from infembed_ray.reporting.charts import Scale
from infembed_ray.storage.places import Place
from infembed_ray.storage.steps import Published, Step, find_input, output_state

PAPER = [catalogue.BENCHMARKS[name].title for name in ("followir", f"followir{catalogue.AS_PAPER}")]
"""Titles of the benchmark whose models the paper compares in Figure 5."""


@dataclass(frozen=True)
class Bars:
    """A model of a chart: a bar of p-MRR, and in Figure 5 one of the score."""

    label: str
    ours: bool
    estimates: tuple[IntervalEstimate, ...]


@dataclass(frozen=True)
class Chart:
    """Bars by group."""

    title: str
    columns: tuple[str, ...]
    """Name of each bar of a model."""
    paper: bool
    """Whether models of the paper are among them."""
    groups: Mapping[str, Sequence[Bars]]
    """Heading -> models."""

    def scale(self, column: int) -> Scale:
        """Return the axis of a column, which holds 0 and all intervals."""
        shown = [bars.estimates[column] for group in self.groups.values() for bars in group]
        return Scale.enclosing([0.0, *(end for estimate in shown for end in (estimate.low, estimate.high))])


def figure_5(collection: CombinedResults, rows: Mapping[str, str]) -> list[Chart]:
    """Return a chart for each evaluated benchmark with a p-MRR, best p-MRR first; FollowIR's has the models of Table 5 too."""
    charts = []
    for benchmark, p_mrr, score in _obedience(collection):
        obeys, retrieves = collection.cells(p_mrr), collection.cells(score)
        paper = benchmark in PAPER and p_mrr.title.startswith("average")
        charted = list(_table_5()) if paper else []
        for key, model in collection.models.items():
            if key in obeys and key in retrieves:
                group = _size(model, rows) or "Ours" if paper else model.backbone or ""
                bars = Bars(key if paper else model.shown, True, (_x100(obeys[key]), _x100(retrieves[key])))
                charted.append((group, bars))
        if any(bars.ours for _, bars in charted):
            groups: dict[str, list[Bars]] = {group: [] for group, _ in charted}
            for group, bars in sorted(charted, key=lambda pair: -pair[1].estimates[0].value):
                groups[group].append(bars)
            columns = ("p-MRR", score.title.removeprefix("average "))
            charts.append(Chart(f"{'Figure 5: ' * paper}{benchmark}, {' and '.join(columns)}", columns, paper, groups))
    return charts


def figure_6(collection: CombinedResults, unfiltered: Sequence[str]) -> list[Chart]:
    """Return a chart by backbone for each training of a sweep, on filtered and on unfiltered records, equal otherwise.

    Args:
        unfiltered: labels of the outputs whose models were trained on records without the judge's filter.
    """
    charts = []
    for benchmark, p_mrr, _ in _obedience(collection):
        cells = collection.cells(p_mrr)
        trainings: dict[tuple[str, str], dict[str, dict[bool, ReportedModel]]] = {}
        for key, model in collection.models.items():
            if key in cells and (train := model.about.get("train")) is not None:
                backbones = trainings.setdefault((model.label, str(train)), {})
                backbones.setdefault(model.backbone or "", {})[model.output in unfiltered] = model
        for (label, _), backbones in trainings.items():
            groups = {
                backbone: [
                    Bars(f"with{'out' * raw} filter", True, (_x100(cells[both[raw].key]),)) for raw in (False, True)
                ]
                for backbone, both in backbones.items()
                if len(both) == 2
            }
            if groups:
                title = f"Figure 6: {label} with and without the quality filter, {benchmark}"
                charts.append(Chart(title, ("p-MRR",), False, groups))
    return charts


def _obedience(collection: CombinedResults) -> Iterator[tuple[str, Column, Column]]:
    """Yield each benchmark with a p-MRR, its first p-MRR column and its first other column; averages come first."""
    for benchmark, columns in tables.columns(collection.results).items():
        p_mrr = next((column for column in columns if column.parts[0][1] == "p-MRR"), None)
        other = next((column for column in columns if column.parts[0][1] != "p-MRR"), None)
        if p_mrr is not None and other is not None:
            yield benchmark, p_mrr, other


def _table_5() -> Iterator[tuple[str, Bars]]:
    """Yield group and bars of the paper's models that have both numbers."""
    places = [TABLES["5"].columns.index(name) for name in ("FollowIR p-MRR", "FollowIR score")]
    for row in TABLES["5"].rows:
        values = [value for place in places if (value := row.numbers[place]) is not None]
        if len(values) == 2:
            yield row.section, Bars(row.name, False, tuple(IntervalEstimate(value, value, value) for value in values))


def _size(model: ReportedModel, rows: Mapping[str, str]) -> str | None:
    """Return the paper's heading for models of this size, from the model's own row or its backbone's."""
    for row in (row for number in reversed(MODELS) for row in TABLES[number].rows):
        if stands_for(model, row.name, rows) or plain(model.backbone or "") == plain(row.name):
            return row.section
    return None


def _x100(cell: Compared) -> IntervalEstimate:
    mean = cell.mean
    return IntervalEstimate(100 * mean.value, 100 * mean.low, 100 * mean.high)


# -------------------------------------------------------------------------------------------------------------- report


class Report:
    """The tables and figures of the results of some outputs.

    Args:
        outputs: label -> path of each output, for readers.
        evaluated: label -> results.
        rows: as `sheets.papers` takes them.
        unfiltered: as `figure_6` takes them.
        differences: queries on which the models differ most.
    """

    def __init__(
        self,
        outputs: Mapping[str, str],
        evaluated: Mapping[str, Results],
        rows: Mapping[str, str] | None = None,
        unfiltered: Sequence[str] = (),
        differences: Sequence[Difference] = (),
    ) -> None:
        self.outputs, self.differences = outputs, differences
        self.collection = combined = collect(evaluated)
        self.ours = [*sheets.ours(combined), *sheets.obedience(combined)]
        self.papers = sheets.papers(combined, rows or {})
        self.bar_charts = [*figure_5(combined, rows or {}), *figure_6(combined, unfiltered)]
        baselines = list(dict.fromkeys(m.baseline for key, m in combined.models.items() if m.baseline != key))
        self.baselines = repr(baselines[0]) if baselines else None
        """The baseline of the differences, in words; None without differences."""
        if len(baselines) > 1:
            self.baselines = "the first model of the same output, of a sweep its backbone as it is"
        controls = obedience.MEANINGS if combined.results.obedience else {}
        self.note = " ".join(filter(None, (tables.note(self.baselines), tables.few(combined.results))))
        """How intervals and differences are computed, and which tasks have few queries."""
        self.conventions = conventions_of(combined.results.measures) | controls
        """How each measure is computed, and what each control asks."""

    @property
    def summary(self) -> str:
        """One line: the size of the results, and the paper's tables that have a row of them."""
        ours = ", ".join(sheet.name for sheet in self.papers if sheet.ours) or "no row of the paper's tables"
        return f"models {len(self.collection.models)}, tasks {len(self.collection.results.tasks)}; ours in {ours}"

    def as_html(self) -> str:
        """Render the page; equal reports give equal HTML."""
        models, tasks = self.collection.models.values(), self.collection.results.tasks.values()
        shown = tuple(figure.name for task in tasks for figure in task.figures)
        return page.render(
            "infembed_ray.evaluation.paper",
            "page.html",
            **vars(self),
            runs=sum(len(model.runs) for model in models),
            spread=any(len(model.runs) > 1 for model in models),
            mark=tables.MARK,
            notation={mark: text for mark, text in infir.MEANINGS.items() if any(n.endswith(mark) for n in shown)},
            source=sheets.SOURCE,
            spans=lambda sheet: [(over, len(list(same))) for over, same in groupby(sheet.columns, key=lambda c: c[0])],
        )

    def as_text(self) -> str:
        """Format our means and differences for a terminal or a log, without the tables of controls."""
        about = f"Differences are to {self.baselines}; {tables.MARK}: significant at {LEVEL:.0%}. "
        files = f"{tables.REPORT_FILE} and {tables.TABLE_FILE} have the 95% intervals."
        shown = [sheet for sheet in self.ours if sheet.of != sheets.CONTROLLED]
        return "\n\n".join([*map(sheets.as_text, shown), (about if self.baselines else "") + files])

    def as_markdown(self) -> str:
        """Format our tables, and how the numbers are computed."""
        parts = ["# Evaluation report"]
        parts += ["\n\n".join(filter(None, (f"## {s.name}", s.note, sheets.as_markdown(s)))) for s in self.ours]
        listed = dict(self.conventions)
        for task, asked in self.collection.results.tasks.items():
            listed[task] = ", ".join(f"{fact.replace('_', ' ')} {value}" for fact, value in asked.about.items())
        parts += [self.note, "\n".join(f"- {name}: {text}" for name, text in listed.items())]
        return "\n\n".join(parts) + "\n"


def run(settings: ReportSettings) -> Published:
    """Publish `report.html`.

    Raises:
        InputError: an output cannot be read, or not be combined with another, or a name in the settings is unknown.
    """
    paths, step = prepare(settings)
    if done := step.finished():
        return done
    report = _compose(settings, paths)
    with step.publish() as staging:
        (staging.path / tables.REPORT_FILE).write_text(report.as_html(), encoding="utf-8")
        staging.counts = {"models": len(report.collection.models), "tasks": len(report.collection.results.tasks)}
        staging.facts = {"tables_with_ours": [sheet.name for sheet in report.papers if sheet.ours]}
    say(f"report: {report.summary}")
    return step.published()


def prepare(settings: ReportSettings) -> tuple[dict[str, Place], Step]:
    """Locate the results by their labels, and identify the report; InputError if one does not exist."""
    if not settings.results:
        raise InputError("results is empty: set results.LABEL=<output of infembed evaluate or infembed sweep>")
    for label in settings.unfiltered:
        if label not in settings.results:
            raise InputError.of("unfiltered", label, "no results have this label", nearest(label, settings.results))
    paths = {label: find_input(value, f"results.{label}") for label, value in settings.results.items()}
    # The position is part of the identity, because it decides the order of the models.
    inputs = {f"results.{label} ({position})": path for position, (label, path) in enumerate(paths.items())}
    return paths, Step("report", settings, settings.output, inputs)


def _compose(settings: ReportSettings, paths: Mapping[str, Place]) -> Report:
    evaluated = {label: results.read(path, f"results.{label}") for label, path in paths.items()}
    return Report(settings.results, evaluated, settings.rows, settings.unfiltered)


def of_evaluation(output: str, evaluated: Results, differences: Sequence[Difference] = ()) -> Report:
    """Make the report of a single evaluation, whose output is at this path."""
    return Report({"results": output}, {"results": evaluated}, differences=differences)


def write(directory: Path, output: str, evaluated: Results, differences: Sequence[Difference] = ()) -> Report:
    """Write the results of an evaluation or a sweep into a directory, with their report; return the report."""
    results.write(directory, evaluated)
    report = of_evaluation(output, evaluated, differences)
    (directory / tables.TABLE_FILE).write_text(report.as_markdown(), encoding="utf-8")
    (directory / tables.REPORT_FILE).write_text(report.as_html(), encoding="utf-8")
    return report


def describe(settings: ReportSettings) -> Iterator[str]:
    """Yield what a run would do, line by line; InputError as `run`."""
    paths, step = prepare(settings)
    if not (yield from output_state(step)):
        yield f"results: {_compose(settings, paths).summary}"
