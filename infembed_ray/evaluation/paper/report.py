"""`infembed report`: the paper's tables and figures from published results, beside the paper's own numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from infembed_ray.config.base import nearest
from infembed_ray.config.evaluation import ReportSettings
from infembed_ray.errors import InputError
from infembed_ray.evaluation import results, tables
from infembed_ray.evaluation.paper import figures, formats, page, published, sheets
from infembed_ray.evaluation.paper.collection import Collection, collect
from infembed_ray.evaluation.paper.sheets import Sheet
from infembed_ray.evaluation.results import Results, conventions_of
from infembed_ray.places import Place
from infembed_ray.progress import say
from infembed_ray.storage import Published, Step, find_input

PAGE, MARKDOWN, CSV, LATEX = tables.REPORT_FILE, "report.md", "tables.csv", "tables.tex"


def run(settings: ReportSettings) -> Published:
    """Publish `report.html`, `report.md`, `tables.csv` and `tables.tex`.

    Raises:
        InputError: an output is not of `infembed evaluate` or `infembed sweep`, has other conventions, or cannot be combined
            with another; or a name in the settings is unknown.
    """
    paths, step = prepare(settings)
    if done := step.finished():
        return done
    collection, own, papers, charts, panels = compose(settings, paths)
    with step.publish() as staging:
        html = page.render(settings.results, collection, own, papers, charts, panels)
        (staging.path / PAGE).write_text(html, encoding="utf-8")
        markdown = _markdown(collection, own, papers)
        (staging.path / MARKDOWN).write_text(markdown, encoding="utf-8")
        (staging.path / CSV).write_text(formats.as_csv([*own, *papers]), encoding="utf-8")
        latex = formats.as_latex([*own, *papers], tables.note(page.baselines(collection)))
        (staging.path / LATEX).write_text(latex, encoding="utf-8")
        staging.counts = {"models": len(collection.models), "tasks": len(collection.results.tasks)}
        staging.facts = {"tables_with_ours": [sheet.name for sheet in papers if sheet.ours]}
    say(f"report: {summary(collection, papers)}")
    return step.published()


def prepare(settings: ReportSettings) -> tuple[dict[str, Place], Step]:
    """Locate the results by their labels, and identify the report.

    Raises:
        InputError: an output does not exist, or a label in the settings is unknown.
    """
    if not settings.results:
        raise InputError("results is empty: set results.LABEL=<output of infembed evaluate or infembed sweep>")
    for label in settings.unfiltered:
        if label not in settings.results:
            raise InputError(f"unfiltered={label}: no output has this label; {nearest(label, settings.results)}")
    paths = {label: find_input(value, f"results.{label}") for label, value in settings.results.items()}
    # The position is part of the identity, because it decides the order of the models.
    inputs = {f"results.{label} ({position})": path for position, (label, path) in enumerate(paths.items())}
    return paths, Step("report", settings, settings.output, inputs)


def compose(
    settings: ReportSettings, paths: Mapping[str, Place]
) -> tuple[Collection, list[Sheet], list[Sheet], list[figures.Chart], list[figures.Panel]]:
    """Read and combine the results, and make their tables, the paper's tables, and Figures 5 and 6.

    Raises:
        InputError: as `run`.
    """
    collection = collect({label: results.read(path, f"results.{label}") for label, path in paths.items()})
    if settings.baseline is not None:
        collection = collection.against(settings.baseline)
    charts, panels = figures.figure_5(collection, settings.rows), figures.figure_6(collection, settings.unfiltered)
    return collection, sheets.ours(collection), sheets.papers(collection, settings.rows), charts, panels


def summary(collection: Collection, papers: Sequence[Sheet]) -> str:
    """Return one line: the size of the results, and the paper's tables that have a row of them."""
    ours = ", ".join(sheet.name for sheet in papers if sheet.ours) or "no row of the paper's tables"
    return f"models {len(collection.models)}, tasks {len(collection.results.tasks)}; ours in {ours}"


def of_evaluation(output: str, found: Results) -> dict[str, str]:
    """Return file -> content: the page and the tables in Markdown of a single evaluation, whose output is at this path."""
    collection = collect({"results": found})
    own, papers = sheets.ours(collection), sheets.papers(collection, {})
    html = page.render({"results": output}, collection, own, papers, figures.figure_5(collection, {}), [])
    return {PAGE: html, tables.TABLE_FILE: _markdown(collection, own, [])}


def _markdown(collection: Collection, own: list[Sheet], papers: list[Sheet]) -> str:
    parts = ["# Evaluation report"]
    parts += [f"## {sheet.name}\n\n{formats.as_markdown(sheet)}" for sheet in own]
    for sheet in sorted(papers, key=lambda sheet: not sheet.ours):
        mine = "the paper's numbers, ours in bold; x100" if sheet.ours else "the paper's numbers only; x100"
        parts.append(f"## {sheet.name}: {sheet.title}\n\n{mine}\n\n{formats.as_markdown(sheet)}")
    found = collection.results
    facts = {
        task: ", ".join(f"{n.replace('_', ' ')} {v}" for n, v in s.about.items()) for task, s in found.tasks.items()
    }
    listed = [*facts.items(), *conventions_of(found.measures).items()]
    parts += [tables.note(page.baselines(collection)), "\n".join(f"- {name}: {text}" for name, text in listed)]
    return "\n\n".join([*parts, *([f"The paper: {published.SOURCE}."] if papers else [])]) + "\n"
