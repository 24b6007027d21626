"""`infembed report`: the paper's tables and figures from published results, with the paper's own numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from infembed_ray.config.base import nearest
from infembed_ray.config.evaluation import ReportSettings
from infembed_ray.errors import InputError
from infembed_ray.evaluation import obedience, results, tables
from infembed_ray.evaluation.differences import Difference
from infembed_ray.evaluation.paper import figures, published, sheets
from infembed_ray.evaluation.paper.collection import CombinedResults, collect
from infembed_ray.evaluation.paper.sheets import Sheet
from infembed_ray.evaluation.results import Results, conventions_of
from infembed_ray.evaluation.significance import LEVEL
from infembed_ray.evaluation.tasks import infir
from infembed_ray.progress import say
from infembed_ray.reporting import page
from infembed_ray.storage.dry_run import state
from infembed_ray.storage.places import Place
from infembed_ray.storage.steps import Published, Step, find_input

PAGE, MARKDOWN = tables.REPORT_FILE, "report.md"


@dataclass(frozen=True)
class Report:
    """The tables and figures of combined results."""

    outputs: Mapping[str, str]
    """Label -> path of each evaluated output."""
    collection: CombinedResults
    ours: Sequence[Sheet]
    papers: Sequence[Sheet]
    """The paper's tables, with our rows."""
    bar_charts: Sequence[figures.Chart]
    """Figures 5 and 6."""
    differences: Sequence[Difference] = ()

    @classmethod
    def from_collection(
        cls,
        outputs: Mapping[str, str],
        collection: CombinedResults,
        rows: Mapping[str, str] | None = None,
        unfiltered: Sequence[str] = (),
        differences: Sequence[Difference] = (),
    ) -> Report:
        """Make the tables and figures; see `sheets.papers` for `rows`, `figures.figure_6` for `unfiltered`."""
        own = [*sheets.ours(collection), *sheets.obedience(collection)]
        papers, charts = sheets.papers(collection, rows or {}), figures.figure_5(collection, rows or {})
        return cls(outputs, collection, own, papers, [*charts, *figures.figure_6(collection, unfiltered)], differences)

    @property
    def baselines(self) -> str | None:
        """The baseline of the differences, in words; None without differences."""
        compared = [model for key, model in self.collection.models.items() if model.baseline != key]
        baselines = list(dict.fromkeys(model.baseline for model in compared))
        if len(baselines) > 1:
            return "the first model of the same output, of a sweep its backbone as it is"
        return repr(baselines[0]) if baselines else None

    @property
    def conventions(self) -> Mapping[str, str]:
        """How each measure is computed, and what each control asks."""
        results = self.collection.results
        return conventions_of(results.measures) | (obedience.MEANINGS if results.obedience else {})

    @property
    def summary(self) -> str:
        """One line: the size of the results, and the paper's tables that have a row of them."""
        ours = ", ".join(sheet.name for sheet in self.papers if sheet.ours) or "no row of the paper's tables"
        return f"models {len(self.collection.models)}, tasks {len(self.collection.results.tasks)}; ours in {ours}"

    def as_html(self) -> str:
        """Render the page; equal reports give equal HTML."""
        models, tasks = self.collection.models.values(), self.collection.results.tasks.values()
        shown = [figure.name for task in tasks for figure in task.figures]
        return page.render(
            "infembed_ray.evaluation.paper",
            "page.html",
            **vars(self),
            runs=sum(len(model.runs) for model in models),
            spread=any(len(model.runs) > 1 for model in models),
            baselines=self.baselines,
            mark=tables.MARK,
            note=tables.note(self.baselines),
            conventions=self.conventions,
            notation={
                mark: text for mark, text in infir.MEANINGS.items() if any(name.endswith(mark) for name in shown)
            },
            source=published.SOURCE,
            spans=lambda sheet: [(over, len(list(same))) for over, same in groupby(sheet.columns, key=lambda c: c[0])],
        )

    def as_text(self) -> str:
        """Format our means and differences for a terminal or a log, without the tables of controls."""
        about = f"Differences are to {self.baselines}; {tables.MARK}: significant at {LEVEL:.0%}. "
        files = f"{PAGE} and {tables.TABLE_FILE} have the 95% intervals."
        shown = [sheet for sheet in self.ours if sheet.of != sheets.CONTROLLED]
        return "\n\n".join([*map(sheets.as_text, shown), (about if self.baselines else "") + files])

    def as_markdown(self, with_paper: bool = True) -> str:
        """Format our tables, perhaps the paper's, and how the numbers are computed."""
        parts = ["# Evaluation report"]
        parts += ["\n\n".join(filter(None, (f"## {s.name}", s.note, sheets.as_markdown(s)))) for s in self.ours]
        for sheet in sorted(self.papers if with_paper else (), key=lambda sheet: not sheet.ours):
            mine = "the paper's numbers, ours in bold; x100" if sheet.ours else "the paper's numbers only; x100"
            parts.append(f"## {sheet.name}: {sheet.title}\n\n{mine}\n\n{sheets.as_markdown(sheet)}")
        listed = dict(self.conventions)
        for task, asked in self.collection.results.tasks.items():
            listed[task] = ", ".join(f"{fact.replace('_', ' ')} {value}" for fact, value in asked.about.items())
        parts += [tables.note(self.baselines), "\n".join(f"- {name}: {text}" for name, text in listed.items())]
        return "\n\n".join([*parts, *([f"The paper: {published.SOURCE}."] if with_paper else [])]) + "\n"


def run(settings: ReportSettings) -> Published:
    """Publish `report.html` and `report.md`.

    Raises:
        InputError: an output cannot be read, or not be combined with another, or a name in the settings is unknown.
    """
    paths, step = prepare(settings)
    if done := step.finished():
        return done
    report = _compose(settings, paths)
    with step.publish() as staging:
        (staging.path / PAGE).write_text(report.as_html(), encoding="utf-8")
        (staging.path / MARKDOWN).write_text(report.as_markdown(), encoding="utf-8")
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
    collection = collect({label: results.read(path, f"results.{label}") for label, path in paths.items()})
    return Report.from_collection(settings.results, collection, settings.rows, settings.unfiltered)


def of_evaluation(output: str, evaluated: Results, differences: Sequence[Difference] = ()) -> Report:
    """Make the report of a single evaluation, whose output is at this path."""
    return Report.from_collection({"results": output}, collect({"results": evaluated}), differences=differences)


def write(directory: Path, output: str, evaluated: Results, differences: Sequence[Difference] = ()) -> Report:
    """Write the results of an evaluation or a sweep into a directory, with their report; return the report."""
    results.write(directory, evaluated)
    report = of_evaluation(output, evaluated, differences)
    (directory / tables.TABLE_FILE).write_text(report.as_markdown(with_paper=False), encoding="utf-8")
    (directory / PAGE).write_text(report.as_html(), encoding="utf-8")
    return report


def describe(settings: ReportSettings) -> Iterator[str]:
    """Yield what a run would do, line by line; InputError as `run`."""
    paths, step = prepare(settings)
    if not (yield from state(step)):
        yield f"results: {_compose(settings, paths).summary}"
